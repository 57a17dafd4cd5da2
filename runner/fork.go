package runner

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/egresslink"
	"github.com/coppice-dev/coppice/runner/guest"
	"github.com/coppice-dev/coppice/runner/hostlimit"
	"github.com/coppice-dev/coppice/runner/lease"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// Fork makes sandboxes from a checkpoint, as many at the same time as the host's CPUs allow. Each succeeds or fails by itself: Fork
// returns an error only if the checkpoint cannot be forked at all. A fork that has begun is finished even if ctx ends.
func (r *Runner) Fork(ctx context.Context, req runnerapi.Fork) (runnerapi.ForkResult, error) {
	leave, err := r.enter()
	if err != nil {
		return runnerapi.ForkResult{}, err
	}
	defer leave()
	if len(req.Keys) > 0 {
		r.keys.Add(req.Keys)
		r.lazy.Wake()
	}
	if req.Verify {
		if err := r.fetches.ReplaceCaptured(ctx, req.CheckpointID, req.Sources, req.Expected); err != nil {
			return runnerapi.ForkResult{}, err
		}
	}
	ckpt, err := r.fetches.EnsureLocal(r.withPeers(ctx, req.Peers), req.CheckpointID, req.Sources, req.Expected)
	if err != nil {
		return runnerapi.ForkResult{}, err
	}
	defer func() {
		if err := ckpt.Close(); err != nil {
			r.cfg.Log.WarnContext(ctx, "checkpoint was not closed", "checkpoint_id", req.CheckpointID, "err", err)
		}
	}()
	if err := r.compatible(ckpt.Checkpoint); err != nil {
		return runnerapi.ForkResult{}, err
	}
	ckpt.Manifest = verifiedAs(ckpt, req.Sources)
	ctx = context.WithoutCancel(ctx)
	out := runnerapi.ForkResult{Children: make([]runnerapi.ChildResult, len(req.Children))}
	var wg sync.WaitGroup
	for i, child := range req.Children {
		wg.Go(func() { out.Children[i] = r.forkOne(ctx, ckpt, child) })
	}
	wg.Wait()
	r.forked(ckpt, req.Children)
	return out, nil
}

// compatible refuses a checkpoint of another class. The error names the field.
func (r *Runner) compatible(c runnerapi.Checkpoint) error {
	if field := c.Class.Difference(r.class); field != "" {
		return core.Errorf(core.FailedPrecondition, core.CodeIncompatibleHost, "checkpoint %s cannot be forked on this runner: %s", c.ID, field)
	}
	return nil
}

func (r *Runner) forkOne(ctx context.Context, ckpt *checkpoints.Opened, child runnerapi.Child) (out runnerapi.ChildResult) {
	ctx, end := traceChild(ctx, child.SandboxID)
	defer func() {
		r.metrics.forked(out)
		end(out)
	}()
	out.SandboxID = child.SandboxID
	watch := core.NewStopwatch()
	if err := egresslink.CheckRules(r.egress.OpenedWith(child.Egress), child.Rules); err != nil {
		out.Problem = runnerapi.ProblemOf(forkError(child, ckpt, err))
		return out
	}
	r.starting <- struct{}{}
	defer func() { <-r.starting }()
	watch.Lap("queue")
	s, report, err := r.forkSandbox(ctx, ckpt, child, watch)
	out.Reseal = report
	out.Timings = watch.Timings()
	if err != nil {
		r.cfg.Log.WarnContext(ctx, "fork failed", "sandbox_id", child.SandboxID, "checkpoint_id", ckpt.ID, "err", err)
		out.Problem = runnerapi.ProblemOf(forkError(child, ckpt, err))
		return out
	}
	info := s.snapshot()
	out.Sandbox, out.Attestation = &info, s.attestation
	return out
}

// forkError keeps the code of an error and says which sandbox it concerns.
func forkError(child runnerapi.Child, ckpt *checkpoints.Opened, err error) error {
	what := fmt.Sprintf("sandbox %s could not be forked from checkpoint %s and was destroyed", child.SandboxID, ckpt.ID)
	if code, _ := hostlimit.Met(err); code != "" {
		return hostlimit.Explain(err, what)
	}
	code, category := core.CodeOf(err), core.CategoryOf(err)
	if category == core.Internal {
		code = core.CodeForkFailed
	}
	return core.Wrapf(err, category, code, "%s: %s", what, core.MessageOf(err))
}

// forkSandbox makes one sandbox and makes it ready. After an error nothing of it is left. If a prepared machine cannot be claimed, the sandbox is
// made of another machine. Meanwhile the first one keeps the id, so that whoever ends the sandbox finds it.
func (r *Runner) forkSandbox(ctx context.Context, ckpt *checkpoints.Opened, child runnerapi.Child, watch *core.Stopwatch) (*sandbox, *core.ResealReport, error) {
	if s, err := r.find(child.SandboxID); err == nil { // the request is repeated
		return s.forkedBefore(ctx)
	}
	if r.runCtx.Err() != nil { // the runner was stopped while the child waited for a CPU
		return nil, nil, errStopping
	}
	var former *sandbox
	if m, outcome := r.takePrepared(ckpt, child); m != nil {
		s, report, err := r.forkInto(ctx, ckpt, child, m.shell, m.agent, nil, watch)
		outcome(report != nil)
		if !errors.Is(err, errClaimFailed) {
			return s, report, err
		}
		r.cfg.Log.WarnContext(ctx, "prepared machine was not claimed", "sandbox_id", child.SandboxID, "checkpoint_id", ckpt.ID, "err", err)
		watch.Lap("claim_failed")
		former = s
		defer former.unlock()
		defer r.forget(former)
		if former.doomed() {
			return nil, nil, errDestroyed(child.SandboxID)
		}
	}
	sh, err := r.takeShell(ctx, ckpt)
	if err != nil {
		return nil, nil, err
	}
	for _, t := range sh.timings {
		watch.Add("shell."+t.Stage, time.Duration(t.DurationMS*float64(time.Millisecond)))
	}
	watch.Lap("shell")
	return r.forkInto(ctx, ckpt, child, sh, nil, former, watch)
}

// forkInto makes a shell the sandbox of a child. agent is the connection of a prepared machine. If that machine cannot be claimed, the error is
// errClaimFailed; then the sandbox, which has no machine any more, stays registered with its work lock held, and the next call replaces it (former).
func (r *Runner) forkInto(ctx context.Context, ckpt *checkpoints.Opened, child runnerapi.Child, sh *shell, agent *guest.Client, former *sandbox, watch *core.Stopwatch) (*sandbox, *core.ResealReport, error) {
	s := newSandbox(r, sh, child.SandboxID, runnerapi.Sandbox{
		WorkspaceID: child.WorkspaceID, Epoch: child.Epoch, State: runnerapi.SandboxStarting,
		Checkpoint: ckpt.ID, Identity: child.Identity, Resources: ckpt.Resources,
	}, nil)
	s.authority, s.guest = child.CA, agent
	s.silent.Store(agent != nil)
	if err := r.register(s, former); err != nil {
		if gone := errors.Join(s.hangUp(), r.dismantle(ctx, sh)); gone != nil {
			return nil, nil, errors.Join(err, gone)
		}
		if other, notThere := r.find(child.SandboxID); notThere == nil && former == nil { // the request was repeated while this child or that one waited for a CPU
			return other.forkedBefore(ctx)
		}
		return nil, nil, err
	}
	unlock := s.unlock
	defer func() { unlock() }()
	report, err := r.restoreAndReseal(ctx, s, ckpt, child, agent != nil, watch)
	if err == nil {
		err = forkReady.Hit(ctx)
	}
	if errors.Is(err, errClaimFailed) {
		if gone := r.endMachine(ctx, s); gone != nil {
			return nil, nil, fmt.Errorf("%w (%v)", gone, err) //nolint:errorlint // no other machine is made beside it
		}
		unlock = func() {} // the caller does
		return s, nil, err
	}
	if err != nil {
		return nil, report, errors.Join(r.lazy.Explain(s.lazyMachine(), err), r.destroyLocked(ctx, s))
	}
	r.wg.Add(1)
	go r.watch(s)
	if !ckpt.HasDelta() && ckpt.WorkingSet == nil && r.lazy.WorkingSets.Claim(s.base.ID) {
		r.wg.Go(func() { r.lazy.WorkingSets.Observe(r.runCtx, s.base.ID, s.machine, s.gone) })
	}
	return s, report, nil
}

// forkedBefore is the answer to a repeated request for a sandbox. It waits for the first request and gives the same answer.
func (s *sandbox) forkedBefore(ctx context.Context) (*sandbox, *core.ResealReport, error) {
	if err := s.lock(ctx); err != nil {
		return nil, nil, err
	}
	defer s.unlock()
	select {
	case <-s.gone:
		if s.next != nil {
			return s.next.forkedBefore(ctx)
		}
		return nil, nil, errDestroyed(s.info.ID)
	default:
		return s, s.reseal, nil
	}
}

func errDestroyed(id core.SandboxID) error {
	return core.Errorf(core.Conflict, core.CodeStateConflict, "sandbox %s was destroyed meanwhile", id)
}

// register makes a sandbox known, with its work lock held. It replaces former, whose machine could not be claimed, unless that was to be ended
// meanwhile.
func (r *Runner) register(s, former *sandbox) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	id := s.info.ID
	if other := r.sandboxes[id]; other != former {
		return core.Errorf(core.Conflict, core.CodeStateConflict, "sandbox %s is being made by another request", id)
	}
	if r.runCtx.Err() != nil {
		return errStopping
	}
	if r.lease.Fenced() {
		return lease.ErrFenced
	}
	if former != nil {
		if former.doomed() {
			return errDestroyed(id)
		}
		former.next = s
	}
	s.work <- struct{}{}
	r.sandboxes[id] = s
	return nil
}

// restore gives a shell memory and devices of a checkpoint.
func (s *shell) restore(ctx context.Context, ckpt *checkpoints.Opened) error {
	state, err := memory.FileOf("device-state", ckpt.State)
	if err != nil {
		return err
	}
	defer state.Close()
	spec := vmm.RestoreSpec{State: state}
	if ckpt.Delta != nil {
		spec.Inject = func(_ context.Context, region memory.Region) error { return ckpt.Delta.Inject(region) }
	}
	return s.machine.Restore(ctx, spec)
}

// grow makes the disk as large as the child wants it.
func (s *sandbox) grow(ctx context.Context, child runnerapi.Child) error {
	if size := int64(child.DiskGiB) << 30; size > s.shape.diskBytes {
		if err := s.machine.ResizeDisk(ctx, overlayDisk, size); err != nil {
			return err
		}
		s.shape.diskBytes = size
		s.mu.Lock()
		s.info.Resources.DiskGiB = child.DiskGiB
		s.mu.Unlock()
	}
	return nil
}

// overlayDisk is the index of the overlay in vmm.Spec.Disks.
const overlayDisk = 1

// reseal makes the clone another machine and checks the evidence. It fails if a step is not proven. diskBytes is the size of the
// clone's disk; the guest may learn of it a little later than the host.
func (r *Runner) reseal(ctx context.Context, agent *guest.Client, diskBytes int64, ckpt *checkpoints.Opened, child runnerapi.Child) (*core.ResealReport, error) {
	gateway, gatewayMAC := r.cfg.Network.Gateway()
	want := guestapi.ResealRequest{
		CheckpointID: ckpt.ID, Identity: child.Identity, Entropy: entropy(guestapi.EntropySize),
		Network: guestapi.Network{Prefix: 32, Gateway: gateway, GatewayMAC: gatewayMAC, DNS: r.cfg.Network.Resolvers(child.Egress)},
		Token:   hex.EncodeToString(entropy(32)), Env: egresslink.SessionEnv(child.Env, child.Egress, gateway, child.CA != ""), CA: child.CA, GrowDisk: child.DiskGiB > 0,
		HostTimeNS: time.Now().UnixNano(),
	}
	if want.GrowDisk {
		want.DiskBytes = diskBytes
	}
	report, err := agent.Reseal(ctx, want)
	if err != nil {
		return nil, err
	}
	if err = guest.Verify(report, want); err == nil {
		err = r.draws.Add(report.Steps)
	}
	report.Complete = false // the host sets this after the release
	if len(report.StaleProcesses) == 0 {
		report.StaleProcesses = ckpt.Processes
	}
	return &report, err
}
