package runner

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/internal/procfs"
	"github.com/coppice-dev/coppice/internal/sparse"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/guest"
	"github.com/coppice-dev/coppice/runner/lease"
	"github.com/coppice-dev/coppice/runner/prepared"
	"github.com/coppice-dev/coppice/runner/prepared/forecast"
	"github.com/coppice-dev/coppice/runner/sequence"
	"github.com/coppice-dev/coppice/runner/usage"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// preparedMachine is a shell into which a checkpoint was restored. It is in quarantine: its namespace drops everything, and its workload is frozen
// since the capture. Its journal has no sandbox, so a successor of the runner takes it down.
type preparedMachine struct {
	*shell
	record *checkpoints.Record // the very bytes that it has
	agent  *guest.Client
	// resealed says that the guest was provisionally resealed, with this authority. A child without one would keep it.
	resealed  bool
	authority string
}

func newPreparedPool(r *Runner) *prepared.Pool[*preparedMachine] {
	return prepared.New(prepared.Config[*preparedMachine]{
		Max: r.cfg.Prepare.Max, Make: r.prepare, TakeDown: r.dismantlePrepared, Used: (*preparedMachine).used, Memory: (*preparedMachine).memory, Dead: (*preparedMachine).ended,
		Bound: func(m *preparedMachine) bool { return m.resealed }, Busy: func() bool { return r.busy() || r.lease.Fenced() || r.runCtx.Err() != nil },
		Room: r.roomForPrepared, Now: time.Now, Log: r.cfg.Log,
	})
}

// ended reports whether the machine has ended, or the connection to its agent.
func (m *preparedMachine) ended() bool {
	select {
	case <-m.agent.Done():
		return true
	default:
		return m.dead()
	}
}

func (m *preparedMachine) used() float64 {
	seconds, _ := usage.CPUSeconds(m.machine.Handle()) // it may have ended
	return max(seconds, 0)
}

func (m *preparedMachine) memory() int64 {
	bytes, _ := usage.PrivateBytes(m.machine.Handle()) // it may have ended
	return bytes
}

func (r *Runner) dismantlePrepared(ctx context.Context, m *preparedMachine) error {
	_ = m.agent.Close() // the guest is about to end anyway
	return r.dismantle(ctx, m.shell)
}

// Drain says whether forks are placed on other runners. Then no machine is prepared, and those that are end.
func (r *Runner) Drain(on bool) { r.prepared.Pause(on) }

// Prepare begins, renews and ends asks for prepared machines.
func (r *Runner) Prepare(in runnerapi.Prepare) (runnerapi.Prepared, error) {
	return r.prepared.Serve(in)
}

// roomForPrepared says what the host has left.
func (r *Runner) roomForPrepared() (left prepared.Room, err error) {
	available, err := procfs.KiB("/proc/meminfo", "MemAvailable")
	if err != nil {
		return left, err
	}
	left.Memory = available << 10
	left.FreeSlots, left.Slots = r.slots.Free()
	left.Disk, err = r.room.Free()
	return left, err
}

// expectForks notes that a checkpoint was captured in a sandbox.
func (r *Runner) expectForks(id core.SandboxID, c runnerapi.Checkpoint) {
	s, err := r.find(id)
	if err != nil {
		return // it has ended with the capture
	}
	parent := c.Parent
	if rec, err := r.checkpoints.Get(parent); err == nil && rec.Parent == "" { // a template, which trees of all projects begin with
		parent = ""
	}
	r.prepared.Captured(c.ID, parent, s.authority)
}

// prepare restores a checkpoint into a shell, connects to the agent and gives the guest a throwaway identity, so that its code has
// run once when a fork is asked for. Then the machine is paused until a fork takes it. While it is prepared, it has the lowest share of the
// processors. Memory that the pager serves is left alone. An agent that knows of no provisional reseal is only connected to.
func (r *Runner) prepare(ctx context.Context, want forecast.Want) (_ *preparedMachine, err error) {
	ckpt, err := r.checkpoints.Open(want.Checkpoint)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err := ckpt.Close(); err != nil {
			r.cfg.Log.WarnContext(ctx, "checkpoint was not closed", "checkpoint_id", ckpt.ID, "err", err)
		}
	}()
	sh, err := shapeOf(ckpt)
	if err = errors.Join(err, r.compatible(ckpt.Checkpoint)); err != nil {
		return nil, err
	}
	if ckpt.Memory.Arriving() {
		return nil, errArriving
	}
	if left, err := r.roomForPrepared(); err != nil || !left.Holds(2*ckpt.DeltaBytes) {
		return nil, core.Errorf(core.Exhausted, core.CodeCapacity, "the host has too little memory for the %d bytes that differ from the base", ckpt.DeltaBytes)
	}
	s, err := r.newShell(ctx, sh, ckpt.Memory, nil)
	if err != nil {
		return nil, err
	}
	m := &preparedMachine{shell: s, record: ckpt.Record, authority: want.Authority}
	err = sequence.Run(ctx, core.NewStopwatch(), []sequence.Step{
		{Does: "lower its weight", Then: prepareWeighed, Do: m.lower},
		{Does: "clone the disk", Do: func(context.Context) error { _, err := sparse.Clone(s.overlay, ckpt.Overlay); return err }},
		{Does: "restore memory and devices", Then: prepareRestored, Do: func(ctx context.Context) error { return s.restore(ctx, ckpt) }},
		{Does: "resume the machine", Then: prepareResumed, Do: s.machine.Resume},
		{Does: "connect to the agent", Then: prepareConnected, Do: func(ctx context.Context) error { return m.connect(ctx, r.cfg.GuestTimeout) }},
		{Does: "reseal it provisionally", Then: prepareResealed, Do: func(ctx context.Context) error { return m.practise(ctx, r) }},
		// Its clock stops, so that timers of the workload and deadlines of sessions go on from the capture.
		{Does: "pause the machine", Do: s.machine.Pause},
	})
	if err == nil && r.lease.Fenced() {
		err = lease.ErrFenced
	}
	if err != nil {
		if m.agent != nil {
			_ = m.agent.Close()
		}
		return nil, fmt.Errorf("prepare a machine of checkpoint %s: %w", ckpt.ID, errors.Join(err, r.dismantle(context.WithoutCancel(ctx), s)))
	}
	return m, nil
}

var errArriving = core.Errorf(core.FailedPrecondition, core.CodeCapacity, "memory or root file system of the checkpoint is still arriving")

func (m *preparedMachine) lower(context.Context) error {
	if m.Pager != "" {
		return errArriving
	}
	return m.group.SetWeight(1)
}

func (m *preparedMachine) connect(ctx context.Context, limit time.Duration) (err error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if m.agent, err = guest.Dial(ctx, m.machine.DialAgent); err != nil {
		return vmm.WithConsole(err, m.machine)
	}
	return nil
}

// practise reseals the guest provisionally. What it draws counts as drawn: no other guest may draw it.
func (m *preparedMachine) practise(ctx context.Context, r *Runner) error {
	has, err := m.agent.Has(ctx, guestapi.FeatureProvisional)
	if err != nil || !has {
		return err
	}
	gateway, gatewayMAC := r.cfg.Network.Gateway()
	want := guestapi.ResealRequest{
		CheckpointID: m.record.ID, Identity: r.throwaway(), Entropy: entropy(guestapi.EntropySize), Token: hex.EncodeToString(entropy(32)),
		Network: guestapi.Network{Prefix: 32, Gateway: gateway, GatewayMAC: gatewayMAC}, CA: m.authority, HostTimeNS: time.Now().UnixNano(), Provisional: true,
	}
	report, err := m.agent.Reseal(ctx, want)
	if err == nil {
		err = guest.Verify(report, want)
	}
	if err == nil {
		err = r.draws.Add(report.Steps)
	}
	m.resealed = err == nil
	return err
}

// takePrepared returns a machine that was prepared for a child of a checkpoint, or nil. What was prepared is what is asked for: the same bytes,
// which a record stands for, and the same authority, which the guest trusts already. outcome must be told whether the guest has answered the fork.
func (r *Runner) takePrepared(ckpt *checkpoints.Opened, child runnerapi.Child) (_ *preparedMachine, outcome func(claimed bool)) {
	m, outcome, ok := r.prepared.Take(ckpt.ID, child.CA, func(m *preparedMachine) bool { return m.record == ckpt.Record && m.Class == r.class })
	if !ok {
		return nil, nil
	}
	m.timings = nil // this time had passed before the fork was requested
	return m, outcome
}
