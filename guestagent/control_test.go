//go:build linux

package guestagent

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/answer"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/guesttest"
	"github.com/coppice-dev/coppice/guestagent/reseal"
)

// withSteps replaces the steps of a reseal with steps that only record that they ran.
func (a *testAgent) withSteps(steps ...reseal.Step) *[]string {
	ran := &[]string{}
	for i, s := range steps {
		steps[i].Do = func(ctx context.Context, r *reseal.Run) (reseal.Evidence, error) {
			*ran = append(*ran, s.Name)
			if s.Do == nil {
				return reseal.Evidence{"k": "v"}, nil
			}
			return s.Do(ctx, r)
		}
	}
	a.reseal = reseal.New(a.work, steps)
	return ran
}

func (a *testAgent) call(path string, in any) error {
	a.T.Helper()
	_, err := guesttest.Ask[map[string]any](a, http.MethodPost, path, in)
	return err
}

func (a *testAgent) state() guestapi.Health {
	a.T.Helper()
	return guesttest.Must[guestapi.Health](a.T)(guesttest.Ask[guestapi.Health](a, http.MethodGet, guestapi.PathHealth, nil))
}

// TestStates walks every edge of the agent's state machine, and tries every other call.
func TestStates(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	a.withSteps(reseal.Step{Name: guestapi.StepEntropy})
	boot := a.state().Generation
	quiesce := func(id string) func() error {
		return func() error { return a.call(guestapi.PathQuiesce, guestapi.QuiesceRequest{CaptureID: id}) }
	}
	reseed := func(g string) func() error {
		return func() error {
			return a.call(guestapi.PathReseed, guestapi.ReseedRequest{Entropy: guesttest.Entropy(), Generation: g})
		}
	}
	resealAs := func(g string) func() error {
		return func() error { return a.call(guestapi.PathReseal, guesttest.ResealRequest(g)) }
	}
	provisional := func(g string) func() error {
		return func() error { return a.call(guestapi.PathReseal, provisionalRequest(g)) }
	}
	release := func(g string) func() error {
		return func() error { return a.call(guestapi.PathRelease, guestapi.ReleaseRequest{Generation: g}) }
	}
	for i, step := range []struct {
		do   func() error
		want core.Code
		now  guestapi.State
	}{
		{reseed(boot), guestapi.CodeWrongState, guestapi.StateReleased},
		{resealAs("g1"), guestapi.CodeWrongState, guestapi.StateReleased},
		{resealAs(boot), guestapi.CodeAlreadySealed, guestapi.StateReleased},
		{release(boot), "", guestapi.StateReleased}, // a repetition: the first answer may have been lost
		{release("g1"), guestapi.CodeWrongGeneration, guestapi.StateReleased},
		{quiesce(""), core.CodeInvalidField, guestapi.StateReleased},
		{quiesce("c1"), "", guestapi.StateFrozen},
		{quiesce("c1"), "", guestapi.StateFrozen},
		{quiesce("c2"), guestapi.CodeWrongState, guestapi.StateFrozen},
		{release(boot), guestapi.CodeWrongState, guestapi.StateFrozen},
		{reseed("g1"), guestapi.CodeWrongGeneration, guestapi.StateFrozen},
		{reseed(boot), "", guestapi.StateFrozen},
		{resealAs("g1"), guestapi.CodeWrongState, guestapi.StateFrozen}, // after a reseed it is the captured machine itself
		{quiesce("c1"), guestapi.CodeWrongState, guestapi.StateFrozen},
		{release("g1"), guestapi.CodeWrongGeneration, guestapi.StateFrozen},
		{release(boot), "", guestapi.StateReleased},
		{quiesce("c2"), "", guestapi.StateFrozen},
		{resealAs("g1"), "", guestapi.StateQuarantined},
		{resealAs("g1"), guestapi.CodeAlreadySealed, guestapi.StateQuarantined},
		{resealAs("g2"), guestapi.CodeWrongState, guestapi.StateQuarantined},
		{reseed("g1"), guestapi.CodeWrongState, guestapi.StateQuarantined},
		{quiesce("c3"), guestapi.CodeWrongState, guestapi.StateQuarantined},
		{release(boot), guestapi.CodeWrongGeneration, guestapi.StateQuarantined},
		{release("g1"), "", guestapi.StateReleased},
		{quiesce("c3"), "", guestapi.StateFrozen},
		{resealAs(boot), guestapi.CodeAlreadySealed, guestapi.StateFrozen},
		{resealAs("g1"), guestapi.CodeAlreadySealed, guestapi.StateFrozen},
		{resealAs("g3"), "", guestapi.StateQuarantined},
		{release("g3"), "", guestapi.StateReleased},
		{provisional("p1"), guestapi.CodeWrongState, guestapi.StateReleased},
		{quiesce("c4"), "", guestapi.StateFrozen},
		{provisional("g3"), guestapi.CodeAlreadySealed, guestapi.StateFrozen},
		{provisional("p1"), "", guestapi.StateFrozen},
		{release("p1"), guestapi.CodeWrongState, guestapi.StateFrozen},
		{release("g3"), guestapi.CodeWrongGeneration, guestapi.StateFrozen},
		{reseed("p1"), guestapi.CodeWrongState, guestapi.StateFrozen}, // it is not the captured machine any more
		{reseed("g3"), guestapi.CodeWrongState, guestapi.StateFrozen},
		{quiesce("c4"), guestapi.CodeWrongState, guestapi.StateFrozen},
		{provisional("p1"), guestapi.CodeAlreadySealed, guestapi.StateFrozen},
		{resealAs("p1"), guestapi.CodeAlreadySealed, guestapi.StateFrozen},
		{resealAs("g3"), guestapi.CodeAlreadySealed, guestapi.StateFrozen},
		{resealAs("g4"), "", guestapi.StateQuarantined},
		{provisional("p2"), guestapi.CodeWrongState, guestapi.StateQuarantined},
		{resealAs("p1"), guestapi.CodeAlreadySealed, guestapi.StateQuarantined},
		{release("p1"), guestapi.CodeWrongGeneration, guestapi.StateQuarantined},
		{release("g4"), "", guestapi.StateReleased},
		{quiesce("c5"), "", guestapi.StateFrozen},
		{resealAs("p1"), guestapi.CodeAlreadySealed, guestapi.StateFrozen},
		{resealAs("g5"), "", guestapi.StateQuarantined},
		{release("g5"), "", guestapi.StateReleased},
	} {
		if err := step.do(); core.CodeOf(err) != step.want {
			t.Fatalf("step %d: %v, want %q", i, err, step.want)
		}
		if got := a.state().State; got != step.now {
			t.Fatalf("step %d: the state is %s, want %s", i, got, step.now)
		}
		if frozen := a.work.Frozen(); frozen != (step.now != guestapi.StateReleased) {
			t.Fatalf("step %d: frozen is %t while the state is %s", i, frozen, step.now)
		}
	}
	s := a.StartSession(guestapi.SessionSpec{Command: []string{"sh", "-c", "echo $FORK"}})
	if out, _ := a.ReadOutput(s.ID, "follow=1"); out != "1\n" { //nolint:bodyclose // ReadOutput has read and closed it
		t.Errorf("the sandbox's environment is not that of the fork: %q", out)
	}
}

func provisionalRequest(generation string) guestapi.ResealRequest {
	req := guesttest.ResealRequest(generation)
	req.Env, req.Provisional = nil, true
	return req
}

// TestProvisionalReseal: hooks and journal learn nothing of a provisional reseal, the next reseal reports the same processes, and what the
// next reseal might leave is refused. An agent that fails in a provisional reseal, or starts after one, lets nothing run.
func TestProvisionalReseal(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	inspected := 0
	count := func() string { inspected++; return "" }
	ran := a.withSteps(reseal.Step{Name: guestapi.StepEntropy, Nothing: count}, reseal.Step{Name: guestapi.StepJournal}, reseal.Step{Name: guestapi.StepHooks})
	if err := a.call(guestapi.PathQuiesce, guestapi.QuiesceRequest{CaptureID: "c"}); err != nil {
		t.Fatal(err)
	}
	stale := []core.StaleProcess{{PID: 7, Command: "x", Runtime: "python"}}
	s := a.gate.get()
	s.quiesced.StaleProcesses = stale
	if err := a.gate.set(s); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*guestapi.ResealRequest){
		"env":       func(r *guestapi.ResealRequest) { r.Env = map[string]string{} },
		"resolvers": func(r *guestapi.ResealRequest) { r.Network.DNS = []netip.Addr{netip.MustParseAddr("10.0.0.9")} },
		"disk":      func(r *guestapi.ResealRequest) { r.GrowDisk = true },
	} {
		req := provisionalRequest("p")
		change(&req)
		if err := a.call(guestapi.PathReseal, req); core.CodeOf(err) != core.CodeInvalidField {
			t.Errorf("%s: %v", name, err)
		}
	}
	before := inspected
	for _, req := range []guestapi.ResealRequest{provisionalRequest("p"), guesttest.ResealRequest("g")} {
		report := guesttest.Must[core.ResealReport](t)(guesttest.Ask[core.ResealReport](a, http.MethodPost, guestapi.PathReseal, req))
		if !report.Complete || report.Generation != req.Identity.Generation || len(report.Steps) < 3 || !slices.Equal(report.StaleProcesses, stale) {
			t.Errorf("report %+v", report)
		}
		if skipped := report.Steps[1].Status == core.ResealSkipped && report.Steps[2].Status == core.ResealSkipped; skipped != req.Provisional {
			t.Errorf("journal and hooks in %+v", report.Steps)
		}
		if last := report.Steps[len(report.Steps)-1]; (last.Name == guestapi.StepPractice && last.Status == core.ResealOK) != req.Provisional {
			t.Errorf("the last step is %+v", last)
		}
	}
	if want := []string{guestapi.StepEntropy, guestapi.StepEntropy, guestapi.StepJournal, guestapi.StepHooks}; !slices.Equal(*ran, want) {
		t.Errorf("the steps that ran are %v", *ran)
	}
	if inspected != before+1 {
		t.Errorf("the guest was inspected %d times after a provisional reseal", inspected-before)
	}
	if len(a.work.Started) > 0 {
		t.Errorf("started in the workload: %v", a.work.Started)
	}

	failed := newTestAgent(t)
	failed.withSteps(reseal.Step{Name: "one", Do: func(context.Context, *reseal.Run) (reseal.Evidence, error) { return nil, os.ErrPermission }})
	if err := failed.call(guestapi.PathQuiesce, guestapi.QuiesceRequest{CaptureID: "c"}); err != nil {
		t.Fatal(err)
	}
	report := guesttest.Must[core.ResealReport](t)(guesttest.Ask[core.ResealReport](failed, http.MethodPost, guestapi.PathReseal, provisionalRequest("p")))
	if report.Complete || failed.state().State != guestapi.StateQuarantined {
		t.Errorf("after a failed provisional reseal: %+v, %+v", report, failed.state())
	}
	if err := failed.call(guestapi.PathReseal, guesttest.ResealRequest("g")); core.CodeOf(err) != guestapi.CodeWrongState {
		t.Errorf("a guest whose provisional reseal failed is resealed: %v", err)
	}
}

func TestFailedQuiesceLeavesTheGuestReleased(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	a.work.FreezeErr = core.Errorf(core.FailedPrecondition, core.CodeNotQuiesced, "process 5 (x) cannot be stopped")
	if err := a.call(guestapi.PathQuiesce, guestapi.QuiesceRequest{CaptureID: "c"}); core.CodeOf(err) != core.CodeNotQuiesced || !strings.Contains(err.Error(), "process 5") {
		t.Errorf("got %v", err)
	}
	if h := a.state(); h.State != guestapi.StateReleased || h.CaptureID != "" {
		t.Errorf("state %+v", h)
	}
}

func TestPublicRequestsWaitWhileFrozen(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	a.withSteps(reseal.Step{Name: guestapi.StepEntropy})
	boot := a.state().Generation
	if err := a.call(guestapi.PathQuiesce, guestapi.QuiesceRequest{CaptureID: "c"}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := a.gate.pass(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a frozen guest lets through: %v", err)
	}
	started := make(chan error, 1)
	go func() {
		_, err := guesttest.Ask[guestapi.Session](a, http.MethodPost, guestapi.PathSessions, guestapi.SessionSpec{Command: []string{"true"}, Cwd: "/"})
		started <- err
	}()
	for _, err := range []error{
		a.call(guestapi.PathReseed, guestapi.ReseedRequest{Entropy: guesttest.Entropy(), Generation: boot}),
		a.call(guestapi.PathRelease, guestapi.ReleaseRequest{Generation: boot}),
		<-started,
	} {
		if err != nil {
			t.Error(err)
		}
	}
}

// TestResealFailsClosed: whichever step fails, the report names it and the guest cannot be released.
func TestResealFailsClosed(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]func(ctx context.Context, r *reseal.Run) (reseal.Evidence, error){
		"an error":  func(context.Context, *reseal.Run) (reseal.Evidence, error) { return nil, os.ErrPermission },
		"a timeout": func(context.Context, *reseal.Run) (reseal.Evidence, error) { return nil, context.DeadlineExceeded },
	} {
		a := newTestAgent(t)
		ran := a.withSteps(reseal.Step{Name: "one"}, reseal.Step{Name: "two", Do: fault}, reseal.Step{Name: "three"})
		if err := a.call(guestapi.PathQuiesce, guestapi.QuiesceRequest{CaptureID: "c"}); err != nil {
			t.Fatal(err)
		}
		report := guesttest.Must[core.ResealReport](t)(guesttest.Ask[core.ResealReport](a, http.MethodPost, guestapi.PathReseal, guesttest.ResealRequest("g1")))
		if report.Complete || len(report.Steps) != 2 || report.Steps[1].Name != "two" || report.Steps[1].Status != core.ResealFailed || report.Steps[1].Error == "" {
			t.Errorf("%s: report %+v", name, report)
		}
		if !slices.Equal(*ran, []string{"one", "two"}) {
			t.Errorf("%s: the steps that ran are %v", name, *ran)
		}
		if err := a.call(guestapi.PathRelease, guestapi.ReleaseRequest{Generation: "g1"}); core.CodeOf(err) != guestapi.CodeWrongState {
			t.Errorf("%s: released: %v", name, err)
		}
		if _, err := guesttest.Ask[guestapi.Session](a, http.MethodPost, guestapi.PathSessions, guestapi.SessionSpec{Command: []string{"true"}}); core.CodeOf(err) != guestapi.CodeQuarantined {
			t.Errorf("%s: a session: %v", name, err)
		}
	}
}

func TestStateIsKept(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "state")
	g := loadGate(path, "nonce")
	if s := g.get(); s.State != guestapi.StateReleased || s.Generation != "boot-nonce" {
		t.Fatalf("at first %+v", s)
	}
	for _, want := range []gateState{
		{State: guestapi.StateFrozen, Generation: "a-long-generation", CaptureID: "c1"},
		{State: guestapi.StateQuarantined, Generation: "g", Used: []string{"a-long-generation", "b"}, Resealed: true},
		{State: guestapi.StateFrozen, Generation: "g", CaptureID: "c", Reseeded: true},
		{State: guestapi.StateFrozen, Generation: "p", CaptureID: "c", Rehearsed: true, Used: []string{"g"}},
		{State: guestapi.StateReleased, Generation: "h"},
	} {
		if err := g.set(want); err != nil {
			t.Fatal(err)
		}
		got := loadGate(path, "other").get()
		if diff := cmp.Diff(want.String(), got.String()); diff != "" {
			t.Error(diff)
		}
	}
	long := gateState{State: guestapi.StateReleased, Generation: "g", Used: make([]string, maxGenerations+5)}
	for i := range long.Used {
		long.Used[i] = "u"
	}
	if err := g.set(long); err != nil || len(g.get().Used) != maxGenerations {
		t.Errorf("%d generations are remembered (%v)", len(g.get().Used), err)
	}
	for _, broken := range []string{"", "released\n", "released\ng\n\nno\nno\nno\n", "strange\ng\n\nno\nno\nno\nend\n", "released\n\n\nno\nno\nno\nend\n", "released\ng\n\nno\nno\nend\n"} {
		if err := os.WriteFile(path, []byte(broken), 0o600); err != nil {
			t.Fatal(err)
		}
		if s := loadGate(path, "n").get(); s.State != guestapi.StateQuarantined {
			t.Errorf("a state of %q lets the guest be %s", broken, s.State)
		}
	}
}

// TestSettle: a restarted agent brings the workload into the recorded state.
func TestSettle(t *testing.T) {
	t.Parallel()
	for state, frozen := range map[guestapi.State]bool{guestapi.StateFrozen: true, guestapi.StateQuarantined: true} {
		a := newTestAgent(t)
		if err := a.gate.set(gateState{State: state, Generation: "g"}); err != nil {
			t.Fatal(err)
		}
		if err := a.settle(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := a.work.Frozen(); got != frozen {
			t.Errorf("%s: frozen is %t", state, got)
		}
	}
}

// TestControlRequestsAreBounded: the body of a control request is bounded, and a path without a route is refused.
func TestControlRequestsAreBounded(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	if _, _, err := a.Do(http.MethodPost, guestapi.PathReseed, bytes.NewReader(make([]byte, answer.MaxControlBody+1))); core.CodeOf(err) != core.CodeBodyTooLarge { //nolint:bodyclose // Do has read and closed it
		t.Errorf("a large body: %v", err)
	}
	if _, _, err := a.Do(http.MethodGet, "/v1/nothing", nil); core.CodeOf(err) != core.CodeRouteNotFound { //nolint:bodyclose // Do has read and closed it
		t.Errorf("no route: %v", err)
	}
}
