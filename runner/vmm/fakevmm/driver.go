// Package fakevmm is a VMM within the process, for tests of the code above the contract of package vmm. It executes no
// instructions of a guest; everything else is as with a real VMM. RAM is a private mapping of the base in this process,
// so the memory engine works on it unchanged. Disks are the files. Device state is a file in its own form. The guest is
// a Go program that keeps all its state in that RAM. It stands still while the machine is paused, and continues from a
// copy of the RAM as if nothing had happened. The package passes the suite in package vmmtest.
package fakevmm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// DriverName is the driver's name in fingerprints and handles.
const DriverName = "fake"

// Step names a place where a fault can be armed: one of the constants, or the AgentStep or ResealStep of a name.
type Step string

// The steps of the contract.
const (
	StepFingerprint Step = "fingerprint"
	StepSpawn       Step = "spawn"
	StepBoot        Step = "boot"
	StepInject      Step = "inject" // within a restore, before the memory is injected
	StepRestore     Step = "restore"
	StepPause       Step = "pause"
	StepResume      Step = "resume"
	StepSave        Step = "save"
	StepResize      Step = "resize"
	StepDial        Step = "dial"
	StepKill        Step = "kill"
	StepRecover     Step = "recover"
)

// AgentStep is the step at which the Agent guest answers a request: for a control route, its last element ("health",
// "quiesce", "reseed", "reseal", "release"); for any public route, "public"; for a new connection, "handshake".
func AgentStep(name string) Step { return Step("agent." + name) }

// ResealStep is one step of the reseal that the Agent guest reports, by its name in guestapi.
func ResealStep(name string) Step { return Step("reseal." + name) }

// Kind is the kind of a fault.
type Kind string

// The kinds of faults.
const (
	Fail Kind = "fail" // the step returns an error
	Die  Kind = "die"  // the VMM ends
	Hang Kind = "hang" // the step lasts until its context or the machine ends
	Lie  Kind = "lie"  // of a ResealStep: it is reported as done, with wrong evidence
)

// Fault is a fault at a step.
type Fault struct {
	Step    Step
	Kind    Kind
	Err     error          // what Fail returns; nil for an error that names the step
	Sandbox core.SandboxID // of vmm.Spec; empty for any
	Skip    int            // how many times the step succeeds before
	Times   int            // how many times it fails; 0: always
}

// Config describes the machines.
type Config struct {
	// Guest runs in every machine; nil is Agent.
	Guest Guest
	// Fingerprint is what the driver reports about itself; zero fields take the defaults. Its VMM is in the handles.
	Fingerprint vmm.Fingerprint
}

// Driver makes fake machines. Only the Driver that made a machine knows it and can recover it.
type Driver struct {
	cfg Config

	mu       sync.Mutex // guards the fields below
	faults   []*Fault
	computer map[uint64]*computer // by the start time of their handles
	started  uint64               // the last start time
}

var _ vmm.Driver = (*Driver)(nil)

// New makes a driver.
func New(cfg Config) *Driver {
	if cfg.Guest == nil {
		cfg.Guest = Agent
	}
	cfg.Fingerprint = withDefaults(cfg.Fingerprint)
	return &Driver{cfg: cfg, computer: make(map[uint64]*computer)}
}

func withDefaults(fp vmm.Fingerprint) vmm.Fingerprint {
	for field, value := range map[*string]string{
		&fp.VMM: DriverName, &fp.Version: "1", &fp.MachineType: "fake-1", &fp.Accelerator: "none", &fp.CPUModel: "none", &fp.Detail: "nothing is executed",
	} {
		*field = cmp.Or(*field, value)
	}
	return fp
}

// Become changes what the driver reports about itself, like an upgrade of its VMM. Its machines go on.
func (d *Driver) Become(fp vmm.Fingerprint) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.cfg.Fingerprint = withDefaults(fp)
}

func (d *Driver) fingerprint() vmm.Fingerprint {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.cfg.Fingerprint
}

// Arm makes a step fail from now on. The returned function removes the fault.
func (d *Driver) Arm(f Fault) (disarm func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	armed := &f
	d.faults = append(d.faults, armed)
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.faults = slices.DeleteFunc(d.faults, func(o *Fault) bool { return o == armed })
	}
}

// strike returns the fault that is due at a step, if there is one.
func (d *Driver) strike(step Step, id core.SandboxID) (Fault, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i, f := range d.faults {
		if f.Step != step || f.Sandbox != "" && f.Sandbox != id {
			continue
		}
		if f.Skip > 0 {
			f.Skip--
			continue
		}
		out := *f
		if f.Times == 1 {
			d.faults = slices.Delete(d.faults, i, i+1)
		} else if f.Times > 1 {
			f.Times--
		}
		return out, true
	}
	return Fault{}, false
}

// reach applies the fault that is armed at a step. c is nil before there is a machine.
func (d *Driver) reach(ctx context.Context, step Step, id core.SandboxID, c *computer) error {
	var ended <-chan struct{}
	if c != nil {
		ended = c.done
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	f, ok := d.strike(step, id)
	if !ok {
		return nil
	}
	switch f.Kind {
	case Hang:
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-ended:
			return vmm.ErrGone
		}
	case Die:
		if c != nil {
			c.end(vmm.Exit{Status: "signal: killed", Log: "fault injected at " + string(step)})
			<-c.done
		}
		return vmm.ErrGone
	case Fail, Lie:
	}
	if f.Err != nil {
		return f.Err
	}
	return core.Errorf(core.Unavailable, core.CodeVMMFailed, "fault injected at %s", step)
}

// Fingerprint implements vmm.Driver.
func (d *Driver) Fingerprint(ctx context.Context) (vmm.Fingerprint, error) {
	if err := d.reach(ctx, StepFingerprint, "", nil); err != nil {
		return vmm.Fingerprint{}, err
	}
	return d.fingerprint(), nil
}

// Capabilities implements vmm.Driver.
func (d *Driver) Capabilities() vmm.Capabilities {
	return vmm.Capabilities{ReadOnlyBase: true, ResizeDisk: true}
}

// Spawn implements vmm.Driver.
func (d *Driver) Spawn(ctx context.Context, spec vmm.Spec) (vmm.Machine, error) {
	c, err := d.spawn(ctx, spec)
	if err != nil {
		return nil, fmt.Errorf("spawn fake machine for %s: %w", spec.ID, err)
	}
	return &machine{computer: c}, nil
}

func (d *Driver) spawn(ctx context.Context, spec vmm.Spec) (*computer, error) {
	if err := d.reach(ctx, StepSpawn, spec.ID, nil); err != nil {
		return nil, err
	}
	c, err := newComputer(d, spec)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.started = max(d.started+1, uint64(time.Now().UnixNano()))
	c.handle = vmm.Handle{
		Driver: d.cfg.Fingerprint.VMM, PID: os.Getpid(), StartTime: d.started, Dir: spec.Dir, MemoryMiB: spec.MemoryMiB, BaseInode: c.inode,
	}
	d.computer[c.handle.StartTime] = c
	return c, nil
}

func (d *Driver) forget(c *computer) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.computer, c.handle.StartTime)
}

// Recover implements vmm.Driver.
func (d *Driver) Recover(ctx context.Context, h vmm.Handle) (vmm.Machine, error) {
	if name := d.fingerprint().VMM; h.Driver != name {
		return nil, core.Errorf(core.Internal, core.CodeInternal, "recover: the machine is one of %q, not of %q", h.Driver, name)
	}
	d.mu.Lock()
	c := d.computer[h.StartTime]
	d.mu.Unlock()
	if c == nil || c.handle.PID != h.PID {
		return nil, fmt.Errorf("recover fake machine %d: %w", h.StartTime, vmm.ErrGone)
	}
	if err := d.reach(ctx, StepRecover, c.id, c); err != nil {
		return nil, fmt.Errorf("recover fake machine %d: %w", h.StartTime, err)
	}
	m := &machine{computer: c}
	if err := m.Continue(); err != nil {
		return nil, fmt.Errorf("recover fake machine %d: %w", h.StartTime, err)
	}
	return m, nil
}

// End implements vmm.Driver.
func (d *Driver) End(ctx context.Context, h vmm.Handle) error {
	d.mu.Lock()
	c := d.computer[h.StartTime]
	d.mu.Unlock()
	if c == nil || c.handle.PID != h.PID {
		return nil
	}
	return (&machine{computer: c}).Kill(ctx)
}

// Reap implements vmm.Driver.
func (d *Driver) Reap(ctx context.Context, cluster string, keep []vmm.Handle) (int, error) {
	var found []*computer
	d.mu.Lock()
	for _, c := range d.computer {
		if c.cluster == cluster && !slices.ContainsFunc(keep, func(h vmm.Handle) bool { return h.StartTime == c.handle.StartTime }) {
			found = append(found, c)
		}
	}
	d.mu.Unlock()
	var errs []error
	for _, c := range found {
		errs = append(errs, (&machine{computer: c}).Kill(ctx))
	}
	return len(found), errors.Join(errs...)
}

// Crash ends the machine as if its VMM had been killed from outside.
func (d *Driver) Crash(h vmm.Handle) {
	d.mu.Lock()
	c := d.computer[h.StartTime]
	d.mu.Unlock()
	if c != nil {
		c.end(vmm.Exit{Status: "signal: killed"})
		<-c.done
	}
}

// Machines returns the number of machines.
func (d *Driver) Machines() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.computer)
}
