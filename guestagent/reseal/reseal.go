//go:build linux

package reseal

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/identity"
	"github.com/coppice-dev/coppice/guestagent/procfs"
	"github.com/coppice-dev/coppice/guestagent/smallfile"
	"github.com/coppice-dev/coppice/guestagent/workload"
)

// Evidence is the proof of a step.
type Evidence = map[string]string

// skipError says that a step has nothing to do in this guest, and why.
type skipError string

func (e skipError) Error() string { return string(e) }

// Resealer gives a clone a new identity, step by step.
type Resealer struct {
	work      Workload
	processes scanner
	found     *findings         // by the last Inspect; nil in an agent that started later
	wrote     map[string]string // what the last reseal wrote to the files with the identity; nil in an agent that started later
	trust     *trust            // the CA that was installed last; nil if there is none
	steps     []Step
	sys       system
}

// findings are facts that a reseal needs and a quiesce can collect. In the captured machine this is cheap, because its
// code has run there before; in a clone, all code must first be translated.
type findings struct {
	nic  nicState
	dbus bool              // the machine id is kept a second time
	idle map[string]string // steps that have nothing to do, and why

	identity []guestapi.IdentityFile
}

// IdentityFiles are the files with the machine's identity, as the last Inspect has found them.
func (r *Resealer) IdentityFiles() []guestapi.IdentityFile {
	if r.found == nil {
		return nil
	}
	return r.found.identity
}

// writeIdentity writes a file with the machine's identity, and remembers what it wrote.
func (r *Run) writeIdentity(path, content string, mode uint32) error {
	if err := identity.WriteFile(path, []byte(content), mode); err != nil {
		return err
	}
	if r.wrote == nil {
		r.wrote = map[string]string{}
	}
	r.wrote[path] = content
	return nil
}

// Inspect collects the facts that a reseal needs. It is called when the workload has just been frozen.
func (r *Resealer) Inspect() (err error) {
	r.found, err = r.inspect()
	return err
}

func (r *Resealer) inspect() (*findings, error) {
	nic, err := inspectNIC()
	if err != nil {
		return nil, err
	}
	found := &findings{nic: nic, idle: map[string]string{}}
	err = r.work.Inside(func() (err error) {
		if found.identity, err = identity.Report(r.wrote); err != nil {
			return err
		}
		found.dbus = smallfile.IsRegular(dbusID)
		for _, s := range r.steps {
			if s.Nothing == nil {
				continue
			}
			if reason := s.Nothing(); reason != "" {
				found.idle[s.Name] = reason
			}
		}
		return nil
	})
	return found, err
}

// idle returns why a step has nothing to do, or "" when it has something to do.
func (r *Resealer) idle(s Step) string {
	switch {
	case s.Nothing == nil:
		return ""
	case r.found != nil:
		return r.found.idle[s.Name]
	}
	return s.Nothing()
}

// Step renews one thing. It runs on a thread that sees the workload's file system.
type Step struct {
	Name string
	Do   func(ctx context.Context, r *Run) (Evidence, error)

	// Nothing says why there is nothing to do. It is called when the workload has just been frozen. nil: there is
	// always something to do.
	Nothing func() string
}

// system contains the places where a reseal touches the kernel as a whole. Tests replace them.
type system struct {
	random      string // the device that takes entropy
	diskMount   string
	hooksDir    string
	hookTimeout time.Duration
	reseed      func(path string, entropy []byte) error
	oom         func(pid int)
}

// Run is one reseal. Only steps look into it.
type Run struct {
	*Resealer
	req      guestapi.ResealRequest
	received time.Time
}

// Workload is what a reseal needs of the workload.
type Workload interface {
	// Inside runs fn on a thread that sees the workload's file system.
	Inside(fn func() error) error
	// PIDs lists the workload's processes with the numbers that the agent sees.
	PIDs() ([]int, error)
	// InnerPID returns the number of a process within the workload, or 0 when it is gone.
	InnerPID(pid int) int
	// StartHook starts a process outside of the workload, where the freeze does not reach it. It must be called from
	// within Inside.
	StartHook(cmd *exec.Cmd) error
	// EndHooks kills the processes that hooks have left running.
	EndHooks() error
}

// New makes a resealer with the given steps.
func New(w Workload, steps []Step) *Resealer {
	return &Resealer{work: w, steps: steps, sys: system{
		random: "/dev/urandom", diskMount: workload.DiskMount, hooksDir: hooksDir, hookTimeout: hookTimeout, reseed: reseedKernel, oom: procfs.NormalOOM,
	}}
}

// Steps are the steps of a guest, in their order.
func Steps() []Step {
	return []Step{
		// Randomness comes first, because later steps use it. The old addresses are removed before the sockets that use
		// them: then not even the reset of an old connection leaves the guest.
		{guestapi.StepEntropy, stepEntropy, nil},
		{guestapi.StepClock, stepClock, nil},
		{guestapi.StepBootID, stepBootID, nil},
		{guestapi.StepMachineID, stepMachineID, nil},
		{guestapi.StepHostname, stepHostname, nil},
		{guestapi.StepNetwork, stepNetwork, nil},
		{guestapi.StepSockets, stepSockets, nil},
		{guestapi.StepTCPMetrics, stepTCPMetrics, nil},
		{guestapi.StepConntrack, stepConntrack, noConntrack},
		{guestapi.StepTFOKey, stepTFOKey, nil},
		{guestapi.StepWireGuard, stepWireGuard, nil},
		{guestapi.StepSSHKeys, stepSSHKeys, noSSH},
		{guestapi.StepDHCP, removal(dhcpFiles), nothing(dhcpFiles, "no leases and no identifiers of a DHCP client")},
		{guestapi.StepRandomSeed, removal(seedFiles), nothing(seedFiles, "no saved seed")},
		{guestapi.StepCA, stepCA, nil},
		{guestapi.StepDisk, stepDisk, nil},
		{guestapi.StepTimers, stepTimers, nil},
		{guestapi.StepJournal, stepJournal, noJournal},
		{guestapi.StepState, stepState, nil},
		{guestapi.StepGeneration, stepGeneration, nil},
		{guestapi.StepHooks, stepHooks, noHooks},
	}
}

// Run executes the steps in order and stops at the first failure. A guest whose reseal failed is destroyed, not
// repaired.
func (r *Resealer) Run(ctx context.Context, req guestapi.ResealRequest, received time.Time) core.ResealReport {
	start := time.Now()
	report := core.ResealReport{Generation: req.Identity.Generation, Complete: true, Steps: make([]core.ResealStep, 0, len(r.steps))}
	run := &Run{Resealer: r, req: req, received: received}
	err := r.work.Inside(func() error {
		for _, s := range r.steps {
			done := run.one(ctx, s)
			report.Steps = append(report.Steps, done)
			if done.Status == core.ResealFailed {
				report.Complete = false
				return nil
			}
		}
		return nil
	})
	if err != nil {
		report.Complete = false
		report.Steps = append(report.Steps, core.ResealStep{Name: guestapi.StepEntropy, Status: core.ResealFailed, Error: core.Clip(err.Error())})
	}
	report.DurationMS = core.Milliseconds(time.Since(start))
	return report
}

// one executes and times one step.
func (r *Run) one(ctx context.Context, s Step) core.ResealStep {
	start := time.Now()
	reason := r.idle(s)
	if r.req.Provisional && (s.Name == guestapi.StepHooks || s.Name == guestapi.StepJournal) {
		reason = "the reseal is provisional" // programs of the user would learn of it
	}
	if reason != "" {
		return core.ResealStep{Name: s.Name, Status: core.ResealSkipped, Evidence: Evidence{guestapi.EvidenceReason: reason}}
	}
	ev, err := s.Do(ctx, r)
	if err == nil {
		err = context.Cause(ctx) // the host is gone, or has given up
	}
	out := core.ResealStep{Name: s.Name, Status: core.ResealOK, Evidence: ev, DurationMS: core.Milliseconds(time.Since(start))}
	var skip skipError
	switch {
	case errors.As(err, &skip):
		out.Status, out.Evidence = core.ResealSkipped, Evidence{guestapi.EvidenceReason: string(skip)}
	case err != nil:
		out.Status, out.Error = core.ResealFailed, core.Clip(err.Error())
	}
	return out
}

// Reseed does the only step that the captured machine itself needs before it goes on.
func (r *Resealer) Reseed(entropy []byte) core.ResealStep {
	run := &Run{Resealer: r, req: guestapi.ResealRequest{Entropy: entropy}, received: time.Now()}
	for _, s := range r.steps {
		if s.Name == guestapi.StepEntropy {
			return run.one(context.Background(), s)
		}
	}
	return core.ResealStep{Name: guestapi.StepEntropy, Status: core.ResealFailed, Error: "there is no such step"}
}

// readBack returns the evidence of a file: what the workload reads there now.
func readBack(path string) (string, error) {
	b, err := smallfile.Read(path)
	if err != nil {
		return "", err
	}
	return core.Clip(strings.TrimSpace(string(b))), nil
}

// short names a secret without showing it.
func short(sum []byte) string { return hex.EncodeToString(sum[:8]) }

// wrap adds to an error which part of a step failed.
func wrap(err error, what string) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}
