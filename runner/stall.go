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

// A machine waits in a page fault when it touches memory that the store does not deliver, or for which the disk has no room. Then its VMM
// cannot pause it: QEMU waits for the vCPU and answers nothing (docs/adr/0028-a-process-that-brings-memory.md has the measurements). So
// after a while the runner stops the whole process with a signal and reports this. It continues the process when the machine no longer has
// to wait. Package lazy knows which machines wait and since when.

// updateStalls stops the machines that have waited for too long, and continues those that no longer wait. It reports whether it must be
// called again soon.
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
		// A sandbox that is being started has a time limit of its own.
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

// stall stops a machine and logs this. Callers that wait for its guest get an answer.
func (r *Runner) stall(ctx context.Context, s *sandbox, since time.Time, why *runnerapi.Problem) {
	if err := s.machine.Stop(); err != nil {
		if !errors.Is(err, vmm.ErrGone) {
			r.cfg.Log.ErrorContext(ctx, "sandbox that waits for the store was not stopped", "sandbox_id", s.info.ID, "err", err)
		}
		return
	}
	s.mu.Lock()
	s.info.Stalled = &runnerapi.Stall{Since: since, Problem: *why}
	s.mu.Unlock()
	s.dropGuest()
	r.metrics.stalls.Inc()
	r.cfg.Log.WarnContext(ctx, "sandbox waits for the store and is stopped", "sandbox_id", s.info.ID, "workspace_id", s.info.WorkspaceID, "problem", why.Message)
	r.wake()
}

// unstall continues a machine.
func (r *Runner) unstall(ctx context.Context, s *sandbox) {
	if err := s.machine.Continue(); err != nil && !errors.Is(err, vmm.ErrGone) {
		r.cfg.Log.ErrorContext(ctx, "sandbox that no longer waits for the store was not continued", "sandbox_id", s.info.ID, "err", err)
		return
	}
	s.mu.Lock()
	after := time.Since(s.info.Stalled.Since)
	s.info.Stalled = nil
	s.mu.Unlock()
	r.cfg.Log.InfoContext(ctx, "sandbox no longer waits for the store and continues", "sandbox_id", s.info.ID, "workspace_id", s.info.WorkspaceID, "after_ms", core.Milliseconds(after))
	r.wake()
}

// stalled is the error for callers that need the guest of a stopped machine; nil if the machine is not stopped.
func (s *sandbox) stalled() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.info.Stalled == nil {
		return nil
	}
	return s.info.Stalled.Problem.Err()
}

// dropGuest ends the connection to the guest. The next caller that needs the guest makes a new one.
func (s *sandbox) dropGuest() {
	s.mu.Lock()
	c := s.guest
	s.guest = nil
	s.mu.Unlock()
	if c != nil {
		_ = c.Close() // sessions go on in the guest
	}
}

// leaveFrozen reports whether a capture failed, and could not be undone, because the machine waits for the store. begun is when the capture
// began. The machine is thawed when it no longer waits. Ending it instead would lose its state, although the store still has its memory.
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
