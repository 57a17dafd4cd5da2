package runner

import (
	"context"
	"errors"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/pager"
	"github.com/coppice-dev/coppice/runner/threads"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// A machine that touches memory which the store does not give, or for which the disk has no room, waits in a page fault. Its VMM can't pause it then: QEMU waits for the vCPU and
// answers nothing any more (docs/adr/0028-a-process-that-brings-memory.md has what was measured). So after a while the kernel is told to stop
// the whole process, which is reported, and let it go on once nothing is waited for.

// stallTick is how often the machines are looked at while somebody waits.
const stallTick = time.Second

// mind looks after machines that wait for the store, until ctx ends.
func (l *lazyImages) mind(ctx context.Context) {
	tick := time.NewTicker(stallTick)
	defer tick.Stop()
	for {
		l.mu.Lock()
		news := l.news
		l.mu.Unlock()
		var again <-chan time.Time
		if l.r.judgeStalls(ctx) {
			again = tick.C
		}
		select {
		case <-news:
		case <-again:
		case <-ctx.Done():
			return
		}
	}
}

// awaited are the images that somebody waits for.
func (l *lazyImages) awaited() map[string]pager.Status {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make(map[string]pager.Status)
	for id, im := range l.images {
		if len(im.status.Waiters) > 0 {
			out[id] = im.status
		}
	}
	return out
}

// judgeStalls holds the machines that have waited for too long, and lets go those that do not wait any more. It reports whether it has to look
// again soon.
func (r *Runner) judgeStalls(ctx context.Context) (again bool) {
	images := r.lazy.awaited()
	for _, s := range r.all() {
		if s.Pager == "" {
			continue
		}
		since, why := s.awaits(images)
		s.mu.Lock()
		state, stalled, wake := s.info.State, s.info.Stalled != nil, false
		if !since.IsZero() {
			s.waited = time.Now()
		} else if s.frozen && !s.waking {
			s.waking, wake = true, true
		}
		s.mu.Unlock()
		switch {
		case since.IsZero() && stalled:
			r.unstall(ctx, s)
		// What is being started has a time of its own to be ready in.
		case !stalled && (state == runnerapi.SandboxReady || state == runnerapi.SandboxPaused) && !since.IsZero() && time.Since(since) >= r.cfg.StallAfter:
			r.stall(ctx, s, since, why)
		}
		if wake {
			r.wg.Go(func() { r.thawLate(s) })
		}
		again = again || stalled || wake
	}
	return again || len(images) > 0
}

// awaits says since when the machine waits for a page of one of the images, and why; zero: it does not.
func (s *sandbox) awaits(images map[string]pager.Status) (since time.Time, why *runnerapi.Problem) {
	pid := s.machine.Handle().PID
	for id, st := range images {
		if !s.uses(id) {
			continue
		}
		from, object := time.Time{}, st.Waiters[0].Object
		for _, w := range st.Waiters { // the oldest first
			// Under KVM a thread of the kernel may ask on behalf of a vCPU, of whichever machine.
			if threads.Of(pid, w.Thread) || threads.Kernel(w.Thread) {
				from, object = w.Since, w.Object
				break
			}
		}
		if from.IsZero() { // another machine may have asked for the page that this one waits for
			from = s.blockedSince(pid)
		}
		if !from.IsZero() && (since.IsZero() || from.Before(since)) {
			since, why = from, stallProblem(s.info.ID, from, object, st.Problem)
		}
	}
	return since, why
}

func stallProblem(id core.SandboxID, since time.Time, object string, cause *runnerapi.Problem) *runnerapi.Problem {
	because := "it does not answer"
	if cause != nil {
		because = cause.Message
	}
	if cause != nil && (cause.Code == core.CodeDiskFull || cause.Category == core.Internal) { // the store gives it, and this host cannot keep it
		return runnerapi.ProblemOf(core.Errorf(cause.Category, cause.Code, "sandbox %s has waited since %s for memory that cannot be kept on its runner: %s; it goes on by itself when it can be",
			id, since.UTC().Format(time.RFC3339), because))
	}
	return runnerapi.ProblemOf(core.Errorf(core.Unavailable, core.CodeStoreUnavailable,
		"sandbox %s has waited since %s for memory in object %s of the store: %s; it goes on by itself when the store gives it", id, since.UTC().Format(time.RFC3339), object, because))
}

// blockedSince is since when a thread of the VMM was seen to wait in the kernel without a break.
func (s *sandbox) blockedSince(pid int) time.Time {
	thread := threads.Blocked(pid)
	s.mu.Lock()
	defer s.mu.Unlock()
	if thread == 0 || thread != s.blocked {
		s.blocked, s.blockedFrom = thread, time.Now()
	}
	if thread == 0 {
		return time.Time{}
	}
	return s.blockedFrom
}

// stall holds a machine and says so. Whoever waits for its guest is answered.
func (r *Runner) stall(ctx context.Context, s *sandbox, since time.Time, why *runnerapi.Problem) {
	if err := s.machine.Hold(); err != nil {
		if !errors.Is(err, vmm.ErrGone) {
			r.cfg.Log.ErrorContext(ctx, "sandbox that waits for the store was not held", "sandbox_id", s.info.ID, "err", err)
		}
		return
	}
	s.mu.Lock()
	s.info.Stalled = &runnerapi.Stall{Since: since, Problem: *why}
	s.mu.Unlock()
	s.dropGuest()
	r.metrics.stalls.Inc()
	r.cfg.Log.WarnContext(ctx, "sandbox waits for the store and is held", "sandbox_id", s.info.ID, "workspace_id", s.info.WorkspaceID, "problem", why.Message)
	r.wake()
}

// unstall lets a machine go on.
func (r *Runner) unstall(ctx context.Context, s *sandbox) {
	if err := s.machine.LetGo(); err != nil && !errors.Is(err, vmm.ErrGone) {
		r.cfg.Log.ErrorContext(ctx, "sandbox that has what it waited for was not let go", "sandbox_id", s.info.ID, "err", err)
		return
	}
	s.mu.Lock()
	after := time.Since(s.info.Stalled.Since)
	s.info.Stalled = nil
	s.mu.Unlock()
	r.cfg.Log.InfoContext(ctx, "sandbox has what it waited for and goes on", "sandbox_id", s.info.ID, "workspace_id", s.info.WorkspaceID, "after_ms", core.Milliseconds(after))
	r.wake()
}

// stalled is the error of whoever needs the guest of a machine that is held; nil while it is not.
func (s *sandbox) stalled() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.info.Stalled == nil {
		return nil
	}
	return s.info.Stalled.Problem.Err()
}

// dropGuest ends the connection to the guest, which is made anew by whoever needs it.
func (s *sandbox) dropGuest() {
	s.mu.Lock()
	c := s.guest
	s.guest = nil
	s.mu.Unlock()
	if c != nil {
		_ = c.Close() // sessions go on in the guest
	}
}

// leaveFrozen reports whether it was for the store that a capture that began at a time failed and could not be taken back. Its machine is thawed
// once it waits no more: to end it would lose what the store still has.
func (r *Runner) leaveFrozen(s *sandbox, begun time.Time) error {
	s.mu.Lock()
	waited := s.waited.After(begun) || s.info.Stalled != nil
	s.frozen = s.frozen || waited
	s.mu.Unlock()
	if !waited {
		return nil
	}
	s.dropGuest()
	r.lazy.mu.Lock()
	r.lazy.changed() // see mind
	r.lazy.mu.Unlock()
	if err := s.stalled(); err != nil {
		return err
	}
	return core.Errorf(core.Unavailable, core.CodeStoreUnavailable, "sandbox %s was not captured: it had to wait for memory that comes from the store, and goes on", s.info.ID)
}

// thawLate thaws a machine that a capture left frozen.
func (r *Runner) thawLate(s *sandbox) {
	defer func() {
		s.mu.Lock()
		s.waking = false
		s.mu.Unlock()
	}()
	if s.lock(r.runCtx) != nil {
		return // the runner stops
	}
	defer s.unlock()
	select {
	case <-s.gone:
		return
	default:
	}
	ctx, begun := context.WithoutCancel(r.runCtx), time.Now()
	if err := r.wakeUp(ctx, s); err != nil {
		if r.leaveFrozen(s, begun) == nil {
			r.abandon(s, err)
		}
		return
	}
	if err := r.noteCutShort(s); err != nil {
		r.cfg.Log.WarnContext(ctx, "end of a capture was not noted in the journal", "sandbox_id", s.info.ID, "err", err)
	}
	r.cfg.Log.InfoContext(ctx, "sandbox was thawed after a capture that had to wait for the store", "sandbox_id", s.info.ID)
}
