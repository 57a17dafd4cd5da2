//go:build linux

package guestagent

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/procfs"
	"github.com/coppice-dev/coppice/guestagent/smallfile"
	"github.com/coppice-dev/coppice/guestagent/workload"
)

// evidence is the proof of a step.
type evidence = map[string]string

// skipError says that a step has nothing to do in this guest, and why.
type skipError string

func (e skipError) Error() string { return string(e) }

// resealer gives a clone a new identity, step by step.
type resealer struct {
	work   work
	stale  staleScanner
	survey *survey // of the last quiesce; nil in an agent that started later
	steps  []step
	sys    system
	look   func() (*survey, error)
}

// survey has facts that a reseal needs and a quiesce can collect. In the captured machine this is cheap, because its
// code has run there before; in a clone, all code must first be translated.
type survey struct {
	nic  nicState
	dbus bool              // the machine id is kept a second time
	idle map[string]string // steps that have nothing to do, and why
}

// lookAround inspects the guest for the survey.
func (r *resealer) lookAround() (err error) {
	r.survey, err = r.look()
	return err
}

func (r *resealer) surveyGuest() (*survey, error) {
	nic, err := surveyNIC()
	if err != nil {
		return nil, err
	}
	found := &survey{nic: nic, idle: map[string]string{}}
	err = r.work.Inside(func() error {
		found.dbus = smallfile.IsRegular(dbusID)
		for _, s := range r.steps {
			if s.nothing == nil {
				continue
			}
			if reason := s.nothing(); reason != "" {
				found.idle[s.name] = reason
			}
		}
		return nil
	})
	return found, err
}

// idle returns why a step has nothing to do, or "" when it has something to do.
func (r *resealer) idle(s step) string {
	switch {
	case s.nothing == nil:
		return ""
	case r.survey != nil:
		return r.survey.idle[s.name]
	}
	return s.nothing()
}

// step renews one thing. It runs on a thread that sees the workload's file system.
type step struct {
	name string
	do   func(ctx context.Context, r *resealRun) (evidence, error)

	// nothing says why there is nothing to do. It is called when the workload has just been frozen. nil: there is
	// always something to do.
	nothing func() string
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

// resealRun is one reseal.
type resealRun struct {
	*resealer
	req      guestapi.ResealRequest
	received time.Time
}

func newResealer(a *Agent) *resealer {
	r := &resealer{work: a.work}
	r.look = r.surveyGuest
	r.sys = system{
		random: "/dev/urandom", diskMount: workload.DiskMount, hooksDir: hooksDir, hookTimeout: hookTimeout, reseed: reseedKernel, oom: procfs.NormalOOM,
	}
	r.steps = []step{
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
	return r
}

// run executes the steps in order and stops at the first failure. A guest whose reseal failed is destroyed, not
// repaired.
func (r *resealer) run(ctx context.Context, req guestapi.ResealRequest, received time.Time) core.ResealReport {
	start := time.Now()
	report := core.ResealReport{Generation: req.Identity.Generation, Complete: true, Steps: make([]core.ResealStep, 0, len(r.steps))}
	run := &resealRun{resealer: r, req: req, received: received}
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
func (r *resealRun) one(ctx context.Context, s step) core.ResealStep {
	start := time.Now()
	if reason := r.idle(s); reason != "" {
		return core.ResealStep{Name: s.name, Status: core.ResealSkipped, Evidence: evidence{guestapi.EvidenceReason: reason}}
	}
	ev, err := s.do(ctx, r)
	if err == nil {
		err = context.Cause(ctx) // the host is gone, or has given up
	}
	out := core.ResealStep{Name: s.name, Status: core.ResealOK, Evidence: ev, DurationMS: core.Milliseconds(time.Since(start))}
	var skip skipError
	switch {
	case errors.As(err, &skip):
		out.Status, out.Evidence = core.ResealSkipped, evidence{guestapi.EvidenceReason: string(skip)}
	case err != nil:
		out.Status, out.Error = core.ResealFailed, core.Clip(err.Error())
	}
	return out
}

// reseedOnly does the only step that the captured machine itself needs before it goes on.
func (r *resealer) reseedOnly(entropy []byte) core.ResealStep {
	run := &resealRun{resealer: r, req: guestapi.ResealRequest{Entropy: entropy}, received: time.Now()}
	return run.one(context.Background(), step{guestapi.StepEntropy, stepEntropy, nil})
}

// only reports whether every byte of s passes.
func only(s string, pass func(c byte) bool) bool {
	for i := range len(s) {
		if !pass(s[i]) {
			return false
		}
	}
	return true
}

func isHex(c byte) bool   { return c >= '0' && c <= '9' || c >= 'a' && c <= 'f' }
func isGraph(c byte) bool { return c > ' ' && c <= '~' }
func isLabel(c byte) bool { return c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c == '-' }

// isHostname reports whether s is one label of a host name.
func isHostname(s string) bool {
	return s != "" && len(s) <= 63 && only(s, isLabel) && s[0] != '-' && s[len(s)-1] != '-'
}

// checkReseal refuses an invalid request before anything is changed.
func checkReseal(req guestapi.ResealRequest) error {
	if err := checkEntropy(req.Entropy); err != nil {
		return err
	}
	bad := func(format string, a ...any) error {
		return core.Errorf(core.Invalid, core.CodeInvalidField, format, a...)
	}
	id := req.Identity
	switch {
	case id.Generation == "" || id.Generation != core.Clip(id.Generation):
		return bad("identity.generation is missing, too long or not printable")
	case len(id.MachineID) != 32 || !only(id.MachineID, isHex):
		return bad("identity.machine_id must be 32 hex digits")
	case !isHostname(id.Hostname):
		return bad("identity.hostname is not a host name")
	case req.HostTimeNS <= 0:
		return bad("host_time_ns is missing")
	case len(req.Token) > 4096 || !only(req.Token, isGraph):
		return bad("token is not printable or too long")
	}
	for k, v := range req.Env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return bad("env has the invalid name or value %q", core.Clip(k))
		}
	}
	if id.MAC == "" && !id.IP.IsValid() {
		return nil
	}
	n := req.Network
	mac, err := net.ParseMAC(id.MAC)
	switch {
	case err != nil || len(mac) != 6 || mac[0]&1 != 0:
		return bad("identity.mac is not a unicast Ethernet address")
	case !id.IP.Is4():
		return bad("identity.ip must be an IPv4 address")
	case n.Prefix < 1 || n.Prefix > 32:
		return bad("network.prefix must be between 1 and 32")
	case n.Gateway.IsValid() && !n.Gateway.Is4():
		return bad("network.gateway must be an IPv4 address")
	case n.MTU != 0 && (n.MTU < 576 || n.MTU > 65535):
		return bad("network.mtu must be between 576 and 65535")
	}
	if n.GatewayMAC != "" {
		if mac, err := net.ParseMAC(n.GatewayMAC); err != nil || len(mac) != 6 {
			return bad("network.gateway_mac is not an Ethernet address")
		}
	}
	return nil
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
