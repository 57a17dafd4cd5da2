package fakevmm

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"net/http"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// boot makes the state of a machine that was switched on. A restored machine has a state already.
func (a *agent) boot(s *agentState) error {
	if s.BootNonce != "" {
		return nil
	}
	s.Random = make([]byte, sha256.Size)
	_, _ = rand.Read(s.Random) // never fails
	s.BootNonce = hex.EncodeToString(s.draw()[:8])
	s.State, s.Generation = guestapi.StateReleased, "boot-"+s.BootNonce
	s.Identity = core.Identity{Hostname: "localhost", MachineID: hex.EncodeToString(s.draw()[:16])}
	s.Files, s.NextPID = map[string]file{}, 100
	a.c.Print([]byte("fake guest " + s.BootNonce + " is up\n"))
	return nil
}

// draw is the guest's random generator. Its output depends on RAM alone, so clones draw the same until one is reseeded.
func (s *agentState) draw() []byte {
	s.Drawn++
	sum := sha256.Sum256(binary.BigEndian.AppendUint64(slices.Clone(s.Random), s.Drawn))
	return sum[:]
}

func (s *agentState) reseedRandom(entropy []byte) {
	sum := sha256.Sum256(append(s.draw(), entropy...))
	s.Random, s.Drawn = sum[:], 0
}

func (a *agent) health(w http.ResponseWriter, _ *http.Request) error {
	var out guestapi.Health
	if err := a.view(func(s *agentState) error {
		out = guestapi.Health{
			Version: guestapi.Version, BootNonce: s.BootNonce, Generation: s.Generation, CaptureID: s.CaptureID, State: s.State,
			UptimeS: a.c.Uptime().Seconds(), PID: 1, Sessions: len(s.workload()), Kernel: "fake",
		}
		return nil
	}); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

func (a *agent) quiesce(w http.ResponseWriter, r *http.Request) error {
	var req guestapi.QuiesceRequest
	if err := readJSON(r, &req); err != nil {
		return err
	}
	if req.CaptureID == "" {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "a quiesce needs a capture_id")
	}
	var out guestapi.QuiesceResponse
	if err := a.update(func(s *agentState) error {
		switch {
		case s.State == guestapi.StateFrozen && s.CaptureID == req.CaptureID && !s.Reseeded:
			out = s.Quiesced
			return nil
		case s.State != guestapi.StateReleased:
			return s.wrongState("quiesced")
		}
		out = guestapi.QuiesceResponse{
			CaptureID: req.CaptureID, Generation: s.Generation, Processes: len(s.workload()), StaleProcesses: []core.StaleProcess{},
			Flushed: req.FlushMS > 0, Workload: s.workload(),
		}
		s.State, s.CaptureID, s.Reseeded, s.Quiesced = guestapi.StateFrozen, req.CaptureID, false, out
		return nil
	}); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

// flush does nothing: the files of a fake guest are in its memory.
func (a *agent) flush(w http.ResponseWriter, r *http.Request) error {
	var req guestapi.FlushRequest
	if err := readJSON(r, &req); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, guestapi.FlushResponse{Flushed: true})
	return nil
}

func (a *agent) reseed(w http.ResponseWriter, r *http.Request) error {
	var req guestapi.ReseedRequest
	if err := readJSON(r, &req); err != nil {
		return err
	}
	if len(req.Entropy) != guestapi.EntropySize {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "entropy has %d bytes; it must have %d", len(req.Entropy), guestapi.EntropySize)
	}
	fault, err := a.stepFault(r, guestapi.StepEntropy)
	if err != nil {
		return err
	}
	var out guestapi.ReseedResponse
	if err := a.update(func(s *agentState) error {
		switch {
		case s.State != guestapi.StateFrozen:
			return s.wrongState("reseeded")
		case req.Generation != s.Generation:
			return s.wrongGeneration()
		}
		step := s.entropyStep(req.Entropy, fault)
		s.Reseeded = step.Status == core.ResealOK
		out.Steps = []core.ResealStep{step}
		return nil
	}); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

func (a *agent) reseal(w http.ResponseWriter, r *http.Request) error {
	received := time.Now()
	var req guestapi.ResealRequest
	if err := readJSON(r, &req); err != nil {
		return err
	}
	if len(req.Entropy) != guestapi.EntropySize || req.Identity.Generation == "" {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "a reseal needs a generation and %d bytes of entropy", guestapi.EntropySize)
	}
	faults := make(map[string]Kind)
	for _, name := range resealSteps {
		fault, err := a.stepFault(r, name)
		if err != nil {
			return err
		}
		faults[name] = fault
	}
	var report core.ResealReport
	if err := a.update(func(s *agentState) error {
		switch {
		case req.Identity.Generation == s.Generation || slices.Contains(s.Used, req.Identity.Generation):
			return core.Errorf(core.Conflict, guestapi.CodeAlreadySealed, "this guest has the generation %s, or had it before", core.Clip(req.Identity.Generation))
		case s.State != guestapi.StateFrozen || s.Reseeded:
			return s.wrongState("resealed")
		}
		s.Used = append(s.Used, s.Generation)
		s.State, s.Generation = guestapi.StateQuarantined, req.Identity.Generation
		report = s.resealed(req, faults, received)
		s.Sealed = report.Complete
		return nil
	}); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, report)
	return nil
}

func (a *agent) release(w http.ResponseWriter, r *http.Request) error {
	var req guestapi.ReleaseRequest
	if err := readJSON(r, &req); err != nil {
		return err
	}
	if err := a.update(func(s *agentState) error {
		switch {
		case req.Generation != s.Generation:
			return s.wrongGeneration()
		case s.State == guestapi.StateFrozen && !s.Reseeded, s.State == guestapi.StateQuarantined && !s.Sealed:
			return s.wrongState("released")
		}
		s.State, s.CaptureID, s.Sealed, s.Reseeded, s.Quiesced = guestapi.StateReleased, "", false, false, guestapi.QuiesceResponse{}
		return nil
	}); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, guestapi.ReleaseResponse{State: guestapi.StateReleased, Generation: req.Generation})
	return nil
}

func (s *agentState) wrongState(done string) error {
	return core.Errorf(core.FailedPrecondition, guestapi.CodeWrongState, "the guest is %s (capture %q): it cannot be %s", s.State, core.Clip(s.CaptureID), done)
}

func (s *agentState) wrongGeneration() error {
	return core.Errorf(core.Conflict, guestapi.CodeWrongGeneration, "the guest's generation is %s, not the requested one", core.Clip(s.Generation))
}
