package runner

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/internal/undo"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/journal"
	"github.com/coppice-dev/coppice/runner/lease"
	"github.com/coppice-dev/coppice/runner/leftovers"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// takeOver adopts the sandboxes that an earlier runner left running, and takes down everything else that this runner left. It is
// called before anything is started. A sandbox that cannot be adopted is remembered as dead, with the cause: it is never replaced.
func (r *Runner) takeOver(ctx context.Context, list []leftovers.Leftover) error {
	expired := r.lease.Expired()
	var mu sync.Mutex // guards doomed, adopted and kept
	var doomed []leftovers.Leftover
	var adopted []*sandbox
	var kept []leftovers.Kept
	var wg sync.WaitGroup
	places := make(chan struct{}, r.cfg.Parallel)
	for _, l := range list {
		if !l.Adoptable() || r.suspended(l.Journal.Sandbox) {
			doomed = append(doomed, l)
			continue
		}
		wg.Go(func() {
			places <- struct{}{}
			defer func() { <-places }()
			var s *sandbox
			var err error = lease.ErrExpired
			if !expired {
				s, err = r.adopt(ctx, l.Journal)
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				r.markDead(l.Journal.Sandbox.Info, err)
				doomed = append(doomed, l)
				return
			}
			adopted = append(adopted, s)
			kept = append(kept, leftovers.Kept{ID: s.ID, Namespace: s.Namespace, Handle: *s.Handle})
		})
	}
	wg.Wait()
	for _, s := range adopted {
		r.sandboxes[s.info.ID] = s
		s.egress.Adopt()
		r.cfg.Log.InfoContext(ctx, "sandbox taken over", "sandbox_id", s.info.ID, "workspace_id", s.info.WorkspaceID, "pid", s.Handle.PID)
	}
	r.adopted = adopted
	err := r.leftovers.TakeDown(ctx, doomed, kept)
	for _, l := range doomed {
		if l.Adoptable() { // its base was retained in case the sandbox is adopted
			err = errors.Join(err, r.checkpoints.ReleaseBase(l.Journal.Shape.Base))
		}
	}
	return err
}

// suspended reports whether a sandbox should end with a capture, and the checkpoint of this capture exists: a resume uses the checkpoint.
func (r *Runner) suspended(j *journal.Sandbox) bool {
	_, err := r.checkpoints.Get(j.Capture)
	return j.Stop && err == nil
}

// markDead remembers a sandbox that was running and cannot be adopted.
func (r *Runner) markDead(info runnerapi.Sandbox, cause error) {
	info.State = runnerapi.SandboxDead
	info.Exit = "it was not taken over when its runner was started again: " + core.MessageOf(cause)
	r.mu.Lock()
	r.dead[info.ID] = info
	r.mu.Unlock()
	r.cfg.Log.Warn("sandbox was not taken over", "sandbox_id", info.ID, "workspace_id", info.WorkspaceID, "err", cause)
}

// adopt takes over one sandbox. After an error, its VMM and everything that the VMM uses are unchanged, and TakeDown takes them down.
func (r *Runner) adopt(ctx context.Context, j *journal.Journal) (_ *sandbox, err error) {
	driver, known := r.leftovers.Drivers.Of(*j.Handle)
	if !known {
		return nil, core.Errorf(core.FailedPrecondition, core.CodeUnsupported, "its VMM is %q, which this runner does not know", core.Clip(j.Handle.Driver))
	}
	sh := &shell{
		Shell: j.Shell, dir: filepath.Join(r.shellsDir(), string(j.ID)), runDir: filepath.Join(r.cfg.RunDir, string(j.ID)), made: time.Now(),
		shape: shape{base: j.Shape.Base, image: j.Shape.Image, root: j.Shape.Root, resources: j.Shape.Resources, diskBytes: j.Shape.DiskBytes},
	}
	if sh.Class == (runnerapi.RunnerClass{}) {
		sh.Class = r.class
	}
	var steps undo.Stack
	defer func() { err = steps.Settle(ctx, err) }()
	if !r.slots.Reserve(j.Slot) {
		return nil, core.Errorf(core.Exhausted, core.CodeCapacity, "its place, number %d, is taken or beyond the limit of this runner", j.Slot)
	}
	steps.Push("slot", func(context.Context) error { r.slots.Give(j.Slot); return nil })
	if j.Pager != "" && j.Pager != r.lazy.Instance() {
		return nil, core.Errorf(core.Unavailable, core.CodePagerGone, "the pager that it had memory from has ended")
	}
	sh.machine, err = driver.Recover(ctx, *j.Handle)
	if errors.Is(err, vmm.ErrGone) {
		return nil, core.Wrapf(err, core.Unavailable, core.CodeVMMFailed, "its VMM had ended meanwhile")
	}
	if err != nil {
		return nil, err
	}
	steps.Push("vmm", func(context.Context) error { sh.machine.Release(); return nil })
	if sh.overlay, err = os.OpenFile(filepath.Join(sh.dir, checkpoints.OverlayFile), os.O_RDWR, 0); err != nil {
		return nil, err
	}
	steps.Push("overlay", func(context.Context) error { return sh.overlay.Close() })
	if sh.base, err = r.bases.Adopt(j.Shape.Base, j.Handle.PID, j.Handle.BaseInode); err != nil {
		return nil, err
	}
	steps.Push("base", func(context.Context) error { return sh.base.Close() })
	if sh.group, err = r.cfg.Cgroups.Adopt(string(j.ID)); err != nil {
		return nil, err
	}
	steps.Push("cgroup", func(context.Context) error { sh.group.Close(); return nil })
	info := j.Sandbox.Info
	if sh.ns, err = r.cfg.Network.Adopt(ctx, j.Namespace, info.Identity, j.Sandbox.Egress); err != nil {
		return nil, err
	}
	// The pool counts the namespace from here on: after an error it must be given back, once the VMM has ended.
	steps.Push("namespace", func(ctx context.Context) error { return errors.Join(sh.machine.Kill(ctx), sh.ns.Release(ctx)) })
	s := newSandbox(r, sh, info.ID, info, j.Sandbox)
	s.info, s.reseal, s.attestation = info, j.Sandbox.Reseal, j.Sandbox.Attestation
	s.egress.SetFirst(j.Sandbox.Egress, j.Sandbox.Rules)
	if s.reseal != nil {
		if err := r.draws.Add(s.reseal.Steps); err != nil {
			return nil, err
		}
	}
	return s, r.goOn(ctx, s)
}

// goOn makes sure that an adopted sandbox runs, with fresh entropy if it was captured: its last runner may have died between any two
// steps of a capture.
func (r *Runner) goOn(ctx context.Context, s *sandbox) error {
	noted, _ := s.notes.Read()
	capture := noted.Capture
	running, err := s.machine.Running(ctx)
	for begun := time.Now(); errors.Is(err, vmm.ErrWaits) && s.Pager == "" && time.Since(begun) < r.cfg.GuestTimeout; { // its disk is slow
		running, err = s.machine.Running(ctx)
	}
	if errors.Is(err, vmm.ErrWaits) && s.Pager != "" {
		// The machine waits for memory from the store, so it is stopped like every such machine; see updateStalls. Only a capture would have paused it.
		running, err = capture == "", nil
	}
	if err != nil {
		return err
	}
	if running && capture == "" {
		return nil
	}
	if s.Pager != "" { // the machine may have to wait for the store first; see updateStalls
		s.frozen, s.waited, s.info.State = true, time.Now(), runnerapi.SandboxPaused
		return nil
	}
	if err := r.wakeUp(ctx, s); err != nil {
		return fmt.Errorf("let it go on after an interrupted capture: %w", err)
	}
	return r.noteCutShort(s)
}

// noteCutShort notes that a capture is no longer under way, because it was cut short, and that its machine is ready.
func (r *Runner) noteCutShort(s *sandbox) error {
	return s.notes.Change(func(j *journal.Sandbox) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.frozen, s.info.State = false, runnerapi.SandboxReady
		if _, err := r.checkpoints.Get(j.Capture); err == nil {
			s.info.Checkpoint = j.Capture // the checkpoint was published, so a repeated request gets it
		} else if j.Capture != "" {
			noteFailed(j, j.Capture)
		}
		j.Capture, j.Stop, j.Info = "", false, s.info
		j.Info.Stalled = nil
	})
}

// wakeUp resumes, reseeds and thaws a machine, whatever step of a capture it has reached. It connects to the agent first: the last
// connection may have ended while the machine was paused.
func (r *Runner) wakeUp(ctx context.Context, s *sandbox) error {
	dial, cancel := context.WithTimeout(ctx, r.cfg.GuestTimeout)
	defer cancel()
	first, err := s.machine.DialAgent(dial)
	if err != nil {
		return err
	}
	if err := s.machine.Resume(ctx); err != nil {
		return errors.Join(err, first.Close())
	}
	agent, err := s.agentOn(dial, first)
	if err != nil {
		return err
	}
	// A freeze that the last runner requested may still be in transit. After a freeze of our own, it arrives too late. If the guest is
	// frozen already, the agent refuses our freeze.
	_, err = agent.Quiesce(ctx, guestapi.QuiesceRequest{
		CaptureID: "restart-" + string(s.info.ID), TimeoutMS: int(r.cfg.FreezeTimeout.Milliseconds()),
	})
	frozen := err == nil || core.CodeOf(err) == guestapi.CodeWrongState
	_, err = r.thaw(ctx, s, agent, s.info.Identity.Generation, frozen, core.NewStopwatch())
	return err
}
