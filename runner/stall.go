package runner

import (
	"context"
	"errors"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/lazy"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// A machine waits in a page fault when it touches memory that the store does not give, or that the disk has no room for. Its VMM cannot
// pause it then: QEMU waits for the vCPU and answers nothing (docs/adr/0028-a-process-that-brings-memory.md has the measurements). So
// after a while the runner stops the whole process with a signal, reports that, and lets the process go on when it waits for nothing.
// Package lazy knows who waits and since when.

// updateStalls stops the machines that have waited for too long, and lets those go on that do not wait any more. It reports whether it
// has to be called again soon.
func (r *Runner) updateStalls(ctx context.Context, images lazy.Awaited) (again bool) {
	for _, s := range r.all() {
		if s.Pager == "" {
			continue
		}
		since, why := s.waits.Since(images, s.lazyMachine(), s.machine.Handle().PID)
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
	r.lazy.CheckStalls()
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
