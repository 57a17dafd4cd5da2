package fakeguest

import (
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/answer"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

func (s *State) health(*http.Request) (guestapi.Health, error) {
	return guestapi.Health{
		Version: guestapi.Version, BootNonce: s.BootNonce, Generation: s.Generation, CaptureID: s.CaptureID, State: s.State,
		UptimeS: s.Uptime.Seconds(), PID: 1, Sessions: len(s.Workload()), Kernel: "fake", Features: slices.DeleteFunc(guestapi.Features(), func(f string) bool { return slices.Contains(s.Lacks, f) }),
	}, nil
}

func (s *State) quiesce(_ *http.Request, req guestapi.QuiesceRequest) (guestapi.QuiesceResponse, error) {
	switch {
	case req.CaptureID == "":
		return s.Quiesced, core.Errorf(core.Invalid, core.CodeInvalidField, "a quiesce needs a capture_id")
	case s.State == guestapi.StateFrozen && s.CaptureID == req.CaptureID && !s.Reseeded && !s.Rehearsed:
		return s.Quiesced, nil
	case s.State != guestapi.StateReleased:
		return s.Quiesced, s.wrongState("quiesced")
	}
	s.Quiesced = guestapi.QuiesceResponse{
		CaptureID: req.CaptureID, Generation: s.Generation, Processes: len(s.Workload()), StaleProcesses: []core.StaleProcess{},
		Flushed: req.FlushMS > 0, Workload: s.Workload(), IdentityFiles: s.identityFiles(),
	}
	s.State, s.CaptureID, s.Reseeded = guestapi.StateFrozen, req.CaptureID, false
	return s.Quiesced, nil
}

// flush does nothing: there is no disk.
func (s *State) flush(*http.Request, guestapi.FlushRequest) (guestapi.FlushResponse, error) {
	return guestapi.FlushResponse{Flushed: true}, nil
}

func (g *Guest) reseed(w http.ResponseWriter, r *http.Request) error {
	var req guestapi.ReseedRequest
	if err := answer.ReadJSON(w, r, answer.MaxControlBody, &req); err != nil {
		return err
	}
	if len(req.Entropy) != guestapi.EntropySize {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "entropy has %d bytes; it must have %d", len(req.Entropy), guestapi.EntropySize)
	}
	faults := g.faults(r.Context(), guestapi.StepEntropy)
	return respond(g, w, http.StatusOK, func(s *State) (guestapi.ReseedResponse, error) {
		switch {
		case s.State != guestapi.StateFrozen || s.Rehearsed:
			return guestapi.ReseedResponse{}, s.wrongState("reseeded")
		case req.Generation != s.Generation:
			return guestapi.ReseedResponse{}, s.wrongGeneration()
		}
		step := s.step(guestapi.StepEntropy, guestapi.ResealRequest{Entropy: req.Entropy}, faults[guestapi.StepEntropy])
		s.Reseeded = step.Status == core.ResealOK
		return guestapi.ReseedResponse{Steps: []core.ResealStep{step}}, nil
	})
}

func (g *Guest) reseal(w http.ResponseWriter, r *http.Request) error {
	received := time.Now()
	var req guestapi.ResealRequest
	if err := answer.ReadJSON(w, r, answer.MaxControlBody, &req); err != nil {
		return err
	}
	if req.Provisional && (req.Env != nil || len(req.Network.DNS) > 0 || req.GrowDisk) {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "a provisional reseal takes no env, no resolvers and no growth of the disk")
	}
	if len(req.Entropy) != guestapi.EntropySize || req.Identity.Generation == "" {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "a reseal needs a generation and %d bytes of entropy", guestapi.EntropySize)
	}
	faults := g.faults(r.Context(), resealSteps...)
	return respond(g, w, http.StatusOK, func(s *State) (core.ResealReport, error) {
		switch {
		case req.Identity.Generation == s.Generation || slices.Contains(s.Used, req.Identity.Generation):
			return core.ResealReport{}, core.Errorf(core.Conflict, guestapi.CodeAlreadySealed, "this guest has the generation %s, or had it before", core.Clip(req.Identity.Generation))
		case s.State != guestapi.StateFrozen || s.Reseeded:
			return core.ResealReport{}, s.wrongState("resealed")
		}
		s.Used = append(s.Used, s.Generation)
		s.State, s.Generation, s.Rehearsed = guestapi.StateQuarantined, req.Identity.Generation, false
		report := s.resealed(req, faults)
		if report.Complete && req.Provisional {
			s.State, s.Rehearsed = guestapi.StateFrozen, true
			report.Steps = append(report.Steps, core.ResealStep{Name: guestapi.StepPractice, Status: core.ResealOK, Evidence: map[string]string{}})
		}
		s.Sealed, report.DurationMS = report.Complete && !req.Provisional, core.Milliseconds(time.Since(received))
		return report, nil
	})
}

// faults returns what the hook says about steps.
func (g *Guest) faults(ctx context.Context, steps ...string) map[string]error {
	out := make(map[string]error)
	for _, name := range steps {
		if err := g.reach(ctx, "reseal."+name); err != nil {
			out[name] = err
		}
	}
	return out
}

func (s *State) release(_ *http.Request, req guestapi.ReleaseRequest) (guestapi.ReleaseResponse, error) {
	switch {
	case req.Generation != s.Generation:
		return guestapi.ReleaseResponse{}, s.wrongGeneration()
	case s.State == guestapi.StateFrozen && !s.Reseeded, s.State == guestapi.StateQuarantined && !s.Sealed:
		return guestapi.ReleaseResponse{}, s.wrongState("released")
	}
	s.State, s.CaptureID, s.Sealed, s.Reseeded, s.Quiesced = guestapi.StateReleased, "", false, false, guestapi.QuiesceResponse{}
	return guestapi.ReleaseResponse{State: s.State, Generation: s.Generation}, nil
}

func (s *State) wrongState(done string) error {
	return core.Errorf(core.FailedPrecondition, guestapi.CodeWrongState, "the guest is %s (capture %q): it cannot be %s", s.State, core.Clip(s.CaptureID), done)
}

func (s *State) wrongGeneration() error {
	return core.Errorf(core.Conflict, guestapi.CodeWrongGeneration, "the guest's generation is %s, not the requested one", core.Clip(s.Generation))
}
