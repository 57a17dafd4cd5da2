package runner

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/internal/sparse"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/guest"
	"github.com/coppice-dev/coppice/runner/hostlimit"
	"github.com/coppice-dev/coppice/runner/journal"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/sequence"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// Capture makes a checkpoint of a running sandbox. The sandbox continues also if the checkpoint fails. From then on it is a clone like
// its forks, so it gets fresh entropy before its workload thaws. A capture that has begun is finished even if ctx ends. With Stop the
// sandbox ends as soon as the checkpoint is durable, and does not run again before that; it continues only if the capture fails.
func (r *Runner) Capture(ctx context.Context, id core.SandboxID, req runnerapi.Capture) (runnerapi.Checkpoint, error) {
	out, err := r.checkpoints.Once(ctx, req.CheckpointID, r.counted(func() (*checkpoints.Record, error) {
		s, err := r.find(id)
		if err != nil {
			return nil, err
		}
		if err := s.lock(ctx); err != nil {
			return nil, err
		}
		defer s.unlock()
		if err := s.refused.of(req.CheckpointID); err != nil {
			return nil, err
		}
		rec, err := r.captureLocked(context.WithoutCancel(ctx), s, req)
		if err != nil {
			err = hostlimit.Explain(fmt.Errorf("capture sandbox %s: %w", id, err), fmt.Sprintf("sandbox %s was not captured and goes on", id))
			s.refused.add(req.CheckpointID, err)
			return nil, err
		}
		return rec, nil
	}))
	if err == nil {
		r.expectForks(id, out)
	}
	if err == nil && req.Stop { // an earlier request may have made the checkpoint and ended before the stop
		err = r.Destroy(ctx, id)
	}
	return out, err
}

// refusals are the last captures of a sandbox that failed. A request for one of them gets the same answer again. The request may be a copy
// that was delayed on its way. If it were carried out, it would stop a machine whose suspension has failed, and the workspace would be lost. The
// journal has those that had begun, for the next runner.
type refusals []refusal

type refusal struct {
	checkpoint core.CheckpointID
	err        error
}

// maxRefusals bounds them. A copy that is older than so many failed captures is carried out.
const maxRefusals = 32

func (l refusals) of(id core.CheckpointID) error {
	for _, r := range l {
		if r.checkpoint == id {
			return r.err
		}
	}
	return nil
}

func (l *refusals) add(id core.CheckpointID, err error) {
	if len(*l) == maxRefusals {
		*l = slices.Delete(*l, 0, 1)
	}
	*l = append(*l, refusal{id, err})
}

// capture is one capture under way.
type capture struct {
	dir     string
	state   *os.File
	overlay *os.File
	memory  *memory.Capture
	flushed bool // the guest's disk, before the freeze
	survey  checkpoints.Survey
	watch   *core.Stopwatch
}

func (r *Runner) captureLocked(ctx context.Context, s *sandbox, req runnerapi.Capture) (*checkpoints.Record, error) {
	info := s.snapshot()
	if req.Parent != "" {
		info.Checkpoint = req.Parent
	}
	select {
	case <-s.gone:
		return nil, core.Errorf(core.NotFound, core.CodeSandboxNotFound, "sandbox %s ended before it was captured", info.ID)
	default:
	}
	if err := s.stalled(); err != nil {
		return nil, err
	}
	if info.State != runnerapi.SandboxReady {
		return nil, core.Errorf(core.FailedPrecondition, core.CodeWorkspaceNotReady, "sandbox %s is %s and cannot be captured", info.ID, info.State)
	}
	if field := s.Class.Difference(r.class); field != "" && (req.Stop || req.Fork) {
		return nil, core.Errorf(core.FailedPrecondition, core.CodeIncompatibleHost,
			"sandbox %s runs on a VMM that an earlier runner has started: %s. This runner cannot start VMs from its checkpoints, so it neither suspends nor forks it; "+
				"take a checkpoint, and start the runner with that VMM again to use it", info.ID, field)
	}
	if err := s.announce(ctx, req); err != nil {
		return nil, err
	}
	rec, err := r.captureAnnounced(ctx, s, info, req)
	select {
	case <-s.gone: // its journal is gone too
		return rec, err
	default:
	}
	s.mu.Lock()
	frozen := s.frozen
	s.mu.Unlock()
	if frozen { // the code that thaws it notes the end of the capture
		return rec, err
	}
	if recordErr := s.notes.Change(func(j *journal.Sandbox) {
		if err != nil {
			noteFailed(j, req.CheckpointID)
		}
		j.Capture, j.Stop, j.Info.Checkpoint = "", false, s.snapshot().Checkpoint
	}); recordErr != nil {
		// A successor will believe that the capture was under way. This does no harm.
		r.cfg.Log.WarnContext(ctx, "end of a capture was not noted in the journal", "sandbox_id", info.ID, "err", recordErr)
	}
	return rec, err
}

// noteFailed notes that a capture has failed.
func noteFailed(j *journal.Sandbox, id core.CheckpointID) {
	if len(j.CutShort) >= maxRefusals {
		j.CutShort = slices.Delete(j.CutShort, 0, len(j.CutShort)-maxRefusals+1)
	}
	j.CutShort = append(j.CutShort, id)
}

// announce notes a capture in the journal, so that a successor of the runner knows that the machine may be paused or frozen. It refuses a
// capture that has failed under an earlier runner, or that was cut short by its end.
func (s *sandbox) announce(ctx context.Context, req runnerapi.Capture) error {
	if noted, _ := s.notes.Read(); slices.Contains(noted.CutShort, req.CheckpointID) {
		return core.Errorf(core.Unavailable, core.CodeRunnerLost, "the capture failed under an earlier runner, or was cut short by its end; the sandbox goes on")
	}
	return errors.Join(s.notes.Change(func(j *journal.Sandbox) { j.Capture, j.Stop = req.CheckpointID, req.Stop }), captureJournaled.Hit(ctx))
}

func (r *Runner) captureAnnounced(ctx context.Context, s *sandbox, info runnerapi.Sandbox, req runnerapi.Capture) (*checkpoints.Record, error) {
	agent, err := s.agent(ctx)
	if err != nil {
		return nil, fmt.Errorf("connect to the agent: %w", err)
	}
	c, err := r.prepareCapture(ctx, s.shell, agent, req.CheckpointID)
	if err != nil {
		return nil, fmt.Errorf("prepare: %w", err)
	}
	defer c.close()
	rec, err := r.captureNow(ctx, s, agent, c, info, req)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(c.dir)) // if it was published, the directory has another name
	}
	return rec, nil
}

// captureNow freezes and pauses the machine, captures it, lets it go on or ends it, and publishes the checkpoint.
func (r *Runner) captureNow(ctx context.Context, s *sandbox, agent *guest.Client, c *capture, info runnerapi.Sandbox, req runnerapi.Capture) (*checkpoints.Record, error) {
	if err := capturePrepared.Hit(ctx); err != nil {
		return nil, fmt.Errorf("prepare: %w", err)
	}
	s.setState(runnerapi.SandboxPaused)
	paused := time.Now()
	var frozen guestapi.QuiesceResponse
	isFrozen := false
	err := sequence.Run(ctx, c.watch, []sequence.Step{
		{Does: "freeze the workload", Lap: "freeze", Then: captureFrozen, Do: func(ctx context.Context) (err error) {
			frozen, err = agent.Quiesce(ctx, r.quiesceRequest(req.CheckpointID, c))
			paused = beginOfPause(paused, time.Now(), frozen.FreezeMS+frozen.FlushMS)
			c.survey, isFrozen = checkpoints.SurveyOf(frozen), err == nil
			return err
		}},
		{Does: "capture the machine", Do: func(ctx context.Context) error { return c.take(ctx, s.shell) }},
	})
	taken := time.Now().UTC() // the checkpoint has nothing that the workload does later; what it sent before may still be in transit
	record := func(steps []core.ResealStep) *checkpoints.Record {
		return &checkpoints.Record{Checkpoint: runnerapi.Checkpoint{
			ID: req.CheckpointID, Parent: info.Checkpoint, Image: s.shape.image, Class: s.Class, Resources: info.Resources,
			Base: s.base.ID, PauseMS: core.Milliseconds(time.Since(paused)), ParentReseal: steps, Processes: frozen.StaleProcesses, CreatedAt: taken,
		}, Root: s.shape.root, WorkingSet: r.workingSetOn(s.base.ID, info.Checkpoint)}
	}
	if err == nil && req.Stop {
		rec := record(nil)
		if err = c.publish(ctx, r.checkpoints, rec); err == nil {
			return rec, errors.Join(capturePublished.Hit(ctx), r.stopCaptured(ctx, s))
		}
	}
	reseeded, waits, thawErr := r.thawAfter(ctx, s, agent, c, paused, isFrozen, err != nil)
	if waits != nil {
		return nil, errors.Join(waits, err, thawErr)
	}
	rec := record(reseeded)
	if thawErr != nil {
		r.abandon(s, thawErr)
	} else {
		s.setState(runnerapi.SandboxReady)
	}
	if err != nil {
		return nil, errors.Join(err, thawErr)
	}
	return rec, sequence.Run(ctx, c.watch, []sequence.Step{
		{Does: "let the workload run", Then: captureThawed},
		{Does: "publish the checkpoint", Then: capturePublished, Do: func(ctx context.Context) error {
			if err := c.publish(ctx, r.checkpoints, rec); err != nil {
				return err
			}
			s.mu.Lock()
			s.info.Checkpoint = rec.ID
			s.mu.Unlock()
			return nil
		}},
	})
}

// thawAfter lets a machine go on after its capture, which may have failed. waits says that the machine waits for the store; it is thawed later
// then. Any other error means that the machine must not go on.
func (r *Runner) thawAfter(
	ctx context.Context, s *sandbox, agent *guest.Client, c *capture, paused time.Time, frozen, failed bool,
) (reseeded []core.ResealStep, waits, err error) {
	if failed {
		if waits = r.leaveFrozen(s, paused); waits != nil {
			return nil, waits, nil
		}
	}
	if reseeded, err = r.thaw(ctx, s, agent, s.snapshot().Identity.Generation, frozen, c.watch); err != nil {
		waits = r.leaveFrozen(s, paused)
	}
	return reseeded, waits, err
}

// beginOfPause is when the workload stopped. The agent first looks at its processes while they run, and then reports how long the
// freeze itself took. The host believes this only within the times that it measured itself.
func beginOfPause(asked, answered time.Time, freezeMS float64) time.Time {
	began := answered.Add(-time.Duration(freezeMS * float64(time.Millisecond)))
	if freezeMS < 0 || began.Before(asked) {
		return asked
	}
	return began
}

// quiesceRequest asks for the freeze. If the guest has flushed its disk before, the request also asks for another flush in the freeze, of
// what the workload wrote since then. This is little data, but its flush is part of the pause.
func (r *Runner) quiesceRequest(id core.CheckpointID, c *capture) guestapi.QuiesceRequest {
	req := guestapi.QuiesceRequest{CaptureID: string(id), TimeoutMS: int(r.cfg.FreezeTimeout.Milliseconds())}
	if c.flushed {
		req.FlushMS = int((r.cfg.FlushTimeout / 4).Milliseconds())
	}
	return req
}

// prepareCapture does what can be done while the machine runs. It asks the guest to write its dirty data to its disk, so that the overlay
// can be read without the guest. Meanwhile it faults in the memory that RAM will be copied to. Then it writes out the overlay's dirty page
// cache; otherwise the clone would do so in the pause.
func (r *Runner) prepareCapture(ctx context.Context, sh *shell, agent *guest.Client, id core.CheckpointID) (_ *capture, err error) {
	c := &capture{watch: core.NewStopwatch()}
	if c.dir, err = r.checkpoints.Begin(id); err != nil {
		return nil, err
	}
	var flush sync.WaitGroup
	defer func() {
		if err != nil {
			flush.Wait()
			c.close()
			err = errors.Join(err, os.RemoveAll(c.dir))
		}
	}()
	flush.Go(func() {
		// If the agent cannot do this in time, the checkpoint loses nothing: the data is still in the memory of the guest.
		done, err := agent.Flush(ctx, guestapi.FlushRequest{TimeoutMS: int(r.cfg.FlushTimeout.Milliseconds())})
		c.flushed = err == nil && done.Flushed
	})
	if c.state, err = os.OpenFile(filepath.Join(c.dir, checkpoints.StateFile), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return nil, err
	}
	if c.overlay, err = os.OpenFile(filepath.Join(c.dir, checkpoints.OverlayFile), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return nil, err
	}
	region, err := sh.machine.Memory()
	if err != nil {
		return nil, err
	}
	if c.memory, err = memory.Prepare(region); err != nil {
		return nil, err
	}
	c.watch.Lap("prepare")
	flush.Wait()
	c.watch.Lap("guest_flush")
	if err := unix.Fdatasync(int(sh.overlay.Fd())); err != nil {
		return nil, fmt.Errorf("flush the overlay: %w", err)
	}
	c.watch.Lap("flush")
	return c, nil
}

// take captures device state, private pages and overlay in the pause. It does not wait for the disk if the overlay was flushed before.
func (c *capture) take(ctx context.Context, sh *shell) error {
	return sequence.Run(ctx, c.watch, []sequence.Step{
		{Does: "pause the machine", Lap: "stop", Then: capturePaused, Do: sh.machine.Pause},
		{Does: "save the device state", Lap: "state", Then: captureSaved, Do: func(ctx context.Context) error { return sh.machine.SaveState(ctx, c.state) }},
		{Does: "copy the memory", Lap: "memory", Then: captureCopied, Do: func(context.Context) error { return c.memory.Copy() }},
		{Does: "clone the disk", Lap: "disk", Then: captureCloned, Do: func(context.Context) error {
			_, err := sparse.Clone(c.overlay, sh.overlay)
			return err
		}},
	})
}

// thaw lets the captured sandbox continue: it is resumed, reseeded, then released. An error means that the sandbox must not continue.
// frozen says that the agent confirmed the freeze; if it did not, it may have undone the freeze itself.
func (r *Runner) thaw(ctx context.Context, s *sandbox, agent *guest.Client, generation string, frozen bool, watch *core.Stopwatch) (reseeded []core.ResealStep, err error) {
	if err := sequence.Run(ctx, watch, []sequence.Step{{Does: "resume the machine", Lap: "resume", Then: captureResumed, Do: s.machine.Resume}}); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, r.cfg.GuestTimeout)
	defer cancel()
	if !frozen {
		health, err := agent.Health(ctx)
		if err != nil {
			return nil, fmt.Errorf("ask the agent whether the workload is frozen: %w", err)
		}
		if health.State == guestapi.StateReleased {
			return nil, nil
		}
	}
	err = sequence.Run(ctx, watch, []sequence.Step{
		{Does: "reseed the guest", Lap: "reseed", Then: captureReseeded, Do: func(ctx context.Context) error {
			res, err := agent.Reseed(ctx, guestapi.ReseedRequest{Entropy: entropy(guestapi.EntropySize), Generation: generation})
			if err != nil {
				return err
			}
			reseeded = res.Steps
			if err := guest.VerifyReseed(res); err != nil {
				return err
			}
			return r.draws.Add(res.Steps)
		}},
		{Does: "release the workload", Lap: "thaw", Do: func(ctx context.Context) error {
			_, err := agent.Release(ctx, guestapi.ReleaseRequest{Generation: generation})
			return err
		}},
	})
	return reseeded, err
}

// stopCaptured ends a sandbox whose machine is paused and captured for the last time. If the sandbox cannot be taken down now, its machine
// is killed, so that it never runs beside a sandbox that was resumed from its checkpoint; the watcher takes it down later.
func (r *Runner) stopCaptured(ctx context.Context, s *sandbox) error {
	err := r.destroyLocked(ctx, s)
	if err != nil {
		r.cfg.Log.WarnContext(ctx, "suspended sandbox was not taken down at once", "sandbox_id", s.info.ID, "err", err)
		return s.machine.Kill(ctx)
	}
	return nil
}

// abandon ends a sandbox that could not be thawed with fresh entropy: its VMM is killed, and the watcher reports it dead.
func (r *Runner) abandon(s *sandbox, cause error) {
	r.cfg.Log.Error("captured sandbox could not be thawed and is destroyed", "sandbox_id", s.info.ID, "err", cause)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.runCtx), time.Minute)
	defer cancel()
	if errors.Is(cause, vmm.ErrGone) { // it ended by itself; the report of how it ended says more
		const soon = 5 * time.Second
		timer := time.NewTimer(soon)
		defer timer.Stop()
		select {
		case <-s.machine.Done():
			return
		case <-timer.C:
		}
	}
	if err := s.end(ctx, "it was captured and could not be thawed: "+core.MessageOf(cause)); err != nil {
		r.cfg.Log.Error("vmm was not killed", "sandbox_id", s.info.ID, "err", err)
	}
}

// publish writes the data that was copied in the pause. Meanwhile it makes the other files durable. Then it publishes the checkpoint.
func (c *capture) publish(ctx context.Context, store *checkpoints.Store, rec *checkpoints.Record) error {
	delta := c.memory.Delta()
	if err := c.durable(func() error {
		if rec.Base == "" {
			return nil // a template's memory becomes a base
		}
		return delta.WriteFile(filepath.Join(c.dir, checkpoints.DeltaFile))
	}); err != nil {
		return err
	}
	if rec.Base != "" {
		rec.DeltaBytes = delta.Bytes()
	}
	if err := captureWritten.Hit(ctx); err != nil {
		return err
	}
	return c.describe(store, rec)
}

// durable runs write. At the same time it syncs device state and overlay and writes the survey.
func (c *capture) durable(write func() error) error {
	var (
		wg   sync.WaitGroup
		errs [4]error
	)
	for i, fn := range []func() error{write, c.state.Sync, c.overlay.Sync, func() error { return c.survey.Write(c.dir) }} {
		wg.Go(func() { errs[i] = fn() })
	}
	wg.Wait()
	c.watch.Lap("write")
	return errors.Join(errs[:]...)
}

// describe sets the fields of the record that follow from the files, and publishes the checkpoint.
func (c *capture) describe(store *checkpoints.Store, rec *checkpoints.Record) error {
	info, err := c.state.Stat()
	if err != nil {
		return err
	}
	rec.DeviceStateBytes = info.Size()
	if rec.DiskBytes, err = sparse.Allocated(c.overlay); err != nil {
		return err
	}
	if rec.CreatedAt.IsZero() {
		rec.CreatedAt = time.Now().UTC()
	}
	rec.Timings = c.watch.Timings()
	return store.Publish(c.dir, rec)
}

func (c *capture) close() {
	for _, f := range []*os.File{c.state, c.overlay} {
		if f != nil {
			_ = f.Close() // synced, or thrown away
		}
	}
	if c.memory != nil {
		c.memory.Close()
	}
}
