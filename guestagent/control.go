//go:build linux

package guestagent

import (
	"context"
	"errors"
	"net/http"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/answer"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/procfs"
	"github.com/coppice-dev/coppice/guestagent/reseal"
	"github.com/coppice-dev/coppice/guestagent/workload"
)

const (
	defaultQuiesce = 2 * time.Second
	maxQuiesce     = 30 * time.Second
)

func (a *Agent) health(w http.ResponseWriter, _ *http.Request) error {
	s := a.gate.get()
	answer.WriteJSON(w, http.StatusOK, guestapi.Health{
		Version: guestapi.Version, BootNonce: a.bootNonce, Generation: s.Generation, CaptureID: s.CaptureID, State: s.State,
		UptimeS: uptime().Seconds(), PID: os.Getpid(), Sessions: a.sessions.Running(), Kernel: kernelRelease(), RSSBytes: ownRSS(),
		Features: guestapi.Features(),
	})
	return nil
}

// quiesce freezes the workload. It also collects what a clone needs to know about the processes, before the VM is
// paused.
func (a *Agent) quiesce(w http.ResponseWriter, r *http.Request) error {
	var req guestapi.QuiesceRequest
	if err := answer.ReadJSON(w, r, answer.MaxControlBody, &req); err != nil {
		return err
	}
	flush, err := flushLimit(req.FlushMS)
	if err != nil {
		return err
	}
	if req.CaptureID == "" || len(req.CaptureID) > 120 || req.TimeoutMS < 0 || time.Duration(req.TimeoutMS)*time.Millisecond > maxQuiesce {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "a quiesce needs a capture_id and a timeout_ms of at most %d", maxQuiesce.Milliseconds())
	}
	timeout := time.Duration(req.TimeoutMS) * time.Millisecond
	if timeout == 0 {
		timeout = defaultQuiesce
	}
	a.gate.control.Lock()
	defer a.gate.control.Unlock()
	s := a.gate.get()
	switch {
	case s.State == guestapi.StateFrozen && s.CaptureID == req.CaptureID && !s.Reseeded && !s.Rehearsed:
		answer.WriteJSON(w, http.StatusOK, s.quiesced)
		return nil
	case s.State != guestapi.StateReleased:
		return wrongState(s, "quiesced")
	}
	out, err := a.freeze(r.Context(), req.CaptureID, timeout, flush)
	if err != nil {
		return err
	}
	s.State, s.CaptureID, s.Reseeded = guestapi.StateFrozen, req.CaptureID, false
	out.Generation = s.Generation
	s.quiesced = out
	a.idle.sleepNow()
	if err := a.gate.set(s); err != nil {
		_ = a.work.Thaw(context.WithoutCancel(r.Context()))
		return err
	}
	answer.WriteJSON(w, http.StatusOK, out)
	return nil
}

func (a *Agent) freeze(ctx context.Context, captureID string, timeout, flush time.Duration) (guestapi.QuiesceResponse, error) {
	out := guestapi.QuiesceResponse{CaptureID: captureID}
	start := time.Now()
	found, err := a.reseal.Scan()
	if err != nil {
		return out, core.Wrapf(err, core.Internal, core.CodeInternal, "the workload's processes cannot be listed: %v", err)
	}
	out.StaleProcesses, out.ScanMS = found.Stale, core.Milliseconds(time.Since(start))
	out.Workload, out.WorkloadTruncated = found.All, found.Truncated

	// A running start ends first: a child that is frozen before it executes its program would block the agent's thread.
	resume := a.sessions.PauseStarts()
	defer resume()
	start = time.Now()
	if out.Processes, err = a.work.Freeze(ctx, timeout); err != nil {
		return out, err
	}
	out.FreezeMS = core.Milliseconds(time.Since(start))
	if flush > 0 {
		start = time.Now()
		out.Flushed = a.disk.flush(flush)
		out.FlushMS = core.Milliseconds(time.Since(start))
	}
	// From here on, the workload cannot change what a clone will find.
	if err := a.reseal.Inspect(); err != nil {
		_ = a.work.Thaw(context.WithoutCancel(ctx))
		return out, core.Wrapf(err, core.Internal, core.CodeInternal, "the frozen guest cannot be inspected: %v", err)
	}
	out.IdentityFiles = a.reseal.IdentityFiles()
	return out, nil
}

func (a *Agent) reseed(w http.ResponseWriter, r *http.Request) error {
	var req guestapi.ReseedRequest
	if err := answer.ReadJSON(w, r, answer.MaxControlBody, &req); err != nil {
		return err
	}
	if err := reseal.CheckEntropy(req.Entropy); err != nil {
		return err
	}
	a.gate.control.Lock()
	defer a.gate.control.Unlock()
	s := a.gate.get()
	switch {
	case s.State != guestapi.StateFrozen || s.Rehearsed: // after a provisional reseal it is not the captured machine
		return wrongState(s, "reseeded")
	case req.Generation != s.Generation:
		return wrongGeneration(s)
	}
	step := a.reseal.Reseed(req.Entropy)
	if s.Reseeded = step.Status == core.ResealOK; s.Reseeded {
		if err := a.gate.set(s); err != nil {
			return err
		}
	}
	answer.WriteJSON(w, http.StatusOK, guestapi.ReseedResponse{Steps: []core.ResealStep{step}})
	return nil
}

// resealGuest gives this guest a new identity. From its beginning on the guest is quarantined, and there is no second
// try: a guest whose reseal failed is useless. A provisional reseal that succeeds leaves the guest frozen.
func (a *Agent) resealGuest(w http.ResponseWriter, r *http.Request) error {
	received := time.Now()
	var req guestapi.ResealRequest
	if err := answer.ReadJSON(w, r, answer.MaxControlBody, &req); err != nil {
		return err
	}
	if err := reseal.CheckRequest(req); err != nil {
		return err
	}
	a.gate.control.Lock()
	defer a.gate.control.Unlock()
	s := a.gate.get()
	switch {
	case s.used(req.Identity.Generation):
		return core.Errorf(core.Conflict, guestapi.CodeAlreadySealed, "this guest has the generation %s, or had it before", core.Clip(req.Identity.Generation))
	case s.State != guestapi.StateFrozen || s.Reseeded:
		return wrongState(s, "resealed")
	}
	stale := s.quiesced.StaleProcesses
	s.Used = append(s.Used, s.Generation)
	s.State, s.Generation, s.Resealed, s.Rehearsed = guestapi.StateQuarantined, req.Identity.Generation, false, false
	if err := a.gate.set(s); err != nil {
		return err
	}
	report := a.reseal.Run(r.Context(), req, received)
	report.StaleProcesses = stale
	switch {
	case report.Complete && req.Provisional:
		report.Steps = append(report.Steps, a.practise(r.Context()))
		if err := a.rehearsed(s); err != nil {
			return err
		}
	case report.Complete:
		s.Resealed = true
		if err := a.gate.set(s); err != nil {
			return err
		}
		if req.Env != nil {
			a.sessions.SetEnv(req.Env)
		}
	}
	answer.WriteJSON(w, http.StatusOK, report)
	return nil
}

// practise starts a program that does nothing, in the way a user's command is started. So the code that starts the clone's first command has run
// once before.
// If that fails, the guest is as good as before.
func (a *Agent) practise(ctx context.Context) core.ResealStep {
	start := time.Now()
	step := core.ResealStep{Name: guestapi.StepPractice, Status: core.ResealOK, Evidence: reseal.Evidence{}}
	if err := a.sessions.Rehearse(ctx, a.work.StartHook, a.nothing, workload.NothingMode); err != nil {
		step.Status, step.Evidence[guestapi.EvidenceReason] = core.ResealSkipped, core.Clip(err.Error())
	}
	step.DurationMS = core.Milliseconds(time.Since(start))
	return step
}

// rehearsed is called when a provisional reseal has succeeded. What a reseal needs to know about the guest has changed, so it is collected
// again.
func (a *Agent) rehearsed(s gateState) error {
	if err := errors.Join(a.work.EndHooks(), a.reseal.Inspect()); err != nil {
		return core.Wrapf(err, core.Internal, core.CodeInternal, "the guest cannot be inspected after a provisional reseal: %v", err)
	}
	s.State, s.Rehearsed = guestapi.StateFrozen, true
	return a.gate.set(s)
}

func (a *Agent) release(w http.ResponseWriter, r *http.Request) error {
	var req guestapi.ReleaseRequest
	if err := answer.ReadJSON(w, r, answer.MaxControlBody, &req); err != nil {
		return err
	}
	a.gate.control.Lock()
	defer a.gate.control.Unlock()
	s := a.gate.get()
	out := guestapi.ReleaseResponse{State: guestapi.StateReleased, Generation: s.Generation}
	switch {
	case req.Generation != s.Generation:
		return wrongGeneration(s)
	case s.State == guestapi.StateReleased:
		answer.WriteJSON(w, http.StatusOK, out) // the first answer was lost
		return nil
	case s.State == guestapi.StateFrozen && !s.Reseeded, s.State == guestapi.StateQuarantined && !s.Resealed:
		return wrongState(s, "released")
	}
	start := time.Now()
	s.State, s.CaptureID, s.Resealed, s.Reseeded, s.quiesced = guestapi.StateReleased, "", false, false, guestapi.QuiesceResponse{}
	if err := a.work.Thaw(r.Context()); err != nil {
		return core.Wrapf(err, core.Internal, core.CodeInternal, "the workload cannot be thawed: %v", err)
	}
	if err := a.gate.set(s); err != nil {
		return err
	}
	out.ThawMS = core.Milliseconds(time.Since(start))
	answer.WriteJSON(w, http.StatusOK, out)
	return nil
}

func wrongState(s gateState, done string) error {
	is := string(s.State)
	switch {
	case s.State == guestapi.StateFrozen && s.Reseeded:
		is += " and reseeded"
	case s.State == guestapi.StateFrozen && s.Rehearsed:
		is += " and resealed provisionally"
	case s.State == guestapi.StateFrozen:
		is += " and not reseeded"
	case s.State == guestapi.StateQuarantined && !s.Resealed:
		is += " and not resealed"
	}
	return core.Errorf(core.FailedPrecondition, guestapi.CodeWrongState, "the guest is %s (capture %q): it cannot be %s", is, core.Clip(s.CaptureID), done)
}

func wrongGeneration(s gateState) error {
	return core.Errorf(core.Conflict, guestapi.CodeWrongGeneration, "the guest's generation is %s, not the requested one", core.Clip(s.Generation))
}

// uptime returns how long the guest's kernel has run.
func uptime() time.Duration {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

func kernelRelease() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}

func ownRSS() int64 {
	st, err := procfs.ReadStat("/proc", os.Getpid())
	if err != nil {
		return 0
	}
	return st.RSSPages * int64(os.Getpagesize())
}
