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
)

func someEntropy() []byte { return bytes.Repeat([]byte("entropy!"), guestapi.EntropySize/8) }

func resealRequest(generation string) guestapi.ResealRequest {
	return guestapi.ResealRequest{
		Identity: core.Identity{
			Generation: generation, Hostname: "fork", MachineID: strings.Repeat("a", 32), MAC: "02:00:00:00:00:01", IP: netip.MustParseAddr("10.0.0.1"),
		},
		HostTimeNS: 1, Entropy: someEntropy(), Network: guestapi.Network{Prefix: 32}, Env: map[string]string{"FORK": "1"},
	}
}

// withSteps replaces the steps of a reseal with steps that only record that they ran.
func (a *testAgent) withSteps(steps ...step) *[]string {
	ran := &[]string{}
	a.reseal.steps = nil
	for _, s := range steps {
		do := s.do
		s.do = func(ctx context.Context, r *resealRun) (evidence, error) {
			*ran = append(*ran, s.name)
			if do == nil {
				return evidence{"k": "v"}, nil
			}
			return do(ctx, r)
		}
		a.reseal.steps = append(a.reseal.steps, s)
	}
	a.reseal.sys.reseed = func(string, []byte) error { return nil }
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
	a.withSteps(step{name: "one"})
	boot := a.state().Generation
	quiesce := func(id string) func() error {
		return func() error { return a.call(guestapi.PathQuiesce, guestapi.QuiesceRequest{CaptureID: id}) }
	}
	reseed := func(g string) func() error {
		return func() error {
			return a.call(guestapi.PathReseed, guestapi.ReseedRequest{Entropy: someEntropy(), Generation: g})
		}
	}
	reseal := func(g string) func() error {
		return func() error { return a.call(guestapi.PathReseal, resealRequest(g)) }
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
		{reseal("g1"), guestapi.CodeWrongState, guestapi.StateReleased},
		{reseal(boot), guestapi.CodeAlreadySealed, guestapi.StateReleased},
		{release(boot), "", guestapi.StateReleased}, // a repetition: the first answer may have been lost
		{release("g1"), guestapi.CodeWrongGeneration, guestapi.StateReleased},
		{quiesce(""), core.CodeInvalidField, guestapi.StateReleased},
		{quiesce("c1"), "", guestapi.StateFrozen},
		{quiesce("c1"), "", guestapi.StateFrozen},
		{quiesce("c2"), guestapi.CodeWrongState, guestapi.StateFrozen},
		{release(boot), guestapi.CodeWrongState, guestapi.StateFrozen},
		{reseed("g1"), guestapi.CodeWrongGeneration, guestapi.StateFrozen},
		{reseed(boot), "", guestapi.StateFrozen},
		{reseal("g1"), guestapi.CodeWrongState, guestapi.StateFrozen}, // after a reseed it is the captured machine itself
		{quiesce("c1"), guestapi.CodeWrongState, guestapi.StateFrozen},
		{release("g1"), guestapi.CodeWrongGeneration, guestapi.StateFrozen},
		{release(boot), "", guestapi.StateReleased},
		{quiesce("c2"), "", guestapi.StateFrozen},
		{reseal("g1"), "", guestapi.StateQuarantined},
		{reseal("g1"), guestapi.CodeAlreadySealed, guestapi.StateQuarantined},
		{reseal("g2"), guestapi.CodeWrongState, guestapi.StateQuarantined},
		{reseed("g1"), guestapi.CodeWrongState, guestapi.StateQuarantined},
		{quiesce("c3"), guestapi.CodeWrongState, guestapi.StateQuarantined},
		{release(boot), guestapi.CodeWrongGeneration, guestapi.StateQuarantined},
		{release("g1"), "", guestapi.StateReleased},
		{quiesce("c3"), "", guestapi.StateFrozen},
		{reseal(boot), guestapi.CodeAlreadySealed, guestapi.StateFrozen},
		{reseal("g1"), guestapi.CodeAlreadySealed, guestapi.StateFrozen},
		{reseal("g3"), "", guestapi.StateQuarantined},
		{release("g3"), "", guestapi.StateReleased},
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
	a.withSteps(step{name: "one"})
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
		a.call(guestapi.PathReseed, guestapi.ReseedRequest{Entropy: someEntropy(), Generation: boot}),
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
	for name, fault := range map[string]func(ctx context.Context, r *resealRun) (evidence, error){
		"an error":  func(context.Context, *resealRun) (evidence, error) { return nil, os.ErrPermission },
		"a timeout": func(context.Context, *resealRun) (evidence, error) { return nil, context.DeadlineExceeded },
	} {
		a := newTestAgent(t)
		ran := a.withSteps(step{name: "one"}, step{name: "two", do: fault}, step{name: "three"})
		if err := a.call(guestapi.PathQuiesce, guestapi.QuiesceRequest{CaptureID: "c"}); err != nil {
			t.Fatal(err)
		}
		report := guesttest.Must[core.ResealReport](t)(guesttest.Ask[core.ResealReport](a, http.MethodPost, guestapi.PathReseal, resealRequest("g1")))
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

func TestResealSkips(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	ran := a.withSteps(
		step{name: "idle", nothing: func() string { return "not here" }}, step{name: "busy", nothing: func() string { return "" }},
		step{name: "skips", do: func(context.Context, *resealRun) (evidence, error) { return nil, skipError("no need") }},
	)
	a.reseal.look = a.reseal.surveyGuest
	a.reseal.survey = nil
	report := a.reseal.run(t.Context(), resealRequest("g"), time.Now())
	want := []core.ResealStep{
		{Name: "idle", Status: core.ResealSkipped, Evidence: evidence{guestapi.EvidenceReason: "not here"}},
		{Name: "busy", Status: core.ResealOK, Evidence: evidence{"k": "v"}},
		{Name: "skips", Status: core.ResealSkipped, Evidence: evidence{guestapi.EvidenceReason: "no need"}},
	}
	for i := range report.Steps {
		report.Steps[i].DurationMS = 0
	}
	if diff := cmp.Diff(want, report.Steps); diff != "" || !report.Complete || len(*ran) != 2 {
		t.Errorf("complete %t, ran %v\n%s", report.Complete, *ran, diff)
	}
}

func TestCheckReseal(t *testing.T) {
	t.Parallel()
	if err := checkReseal(resealRequest("g")); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*guestapi.ResealRequest){
		"no entropy":       func(r *guestapi.ResealRequest) { r.Entropy = nil },
		"zero entropy":     func(r *guestapi.ResealRequest) { r.Entropy = make([]byte, guestapi.EntropySize) },
		"no generation":    func(r *guestapi.ResealRequest) { r.Identity.Generation = "" },
		"a line feed":      func(r *guestapi.ResealRequest) { r.Identity.Generation = "a\nb" },
		"machine id":       func(r *guestapi.ResealRequest) { r.Identity.MachineID = "../../etc" },
		"upper case":       func(r *guestapi.ResealRequest) { r.Identity.MachineID = strings.Repeat("A", 32) },
		"hostname":         func(r *guestapi.ResealRequest) { r.Identity.Hostname = "a b" },
		"hyphen":           func(r *guestapi.ResealRequest) { r.Identity.Hostname = "-a" },
		"no time":          func(r *guestapi.ResealRequest) { r.HostTimeNS = 0 },
		"multicast MAC":    func(r *guestapi.ResealRequest) { r.Identity.MAC = "01:00:00:00:00:01" },
		"no MAC":           func(r *guestapi.ResealRequest) { r.Identity.MAC = "" },
		"IPv6":             func(r *guestapi.ResealRequest) { r.Identity.IP = netip.MustParseAddr("fe80::1") },
		"no prefix":        func(r *guestapi.ResealRequest) { r.Network.Prefix = 0 },
		"IPv6 gateway":     func(r *guestapi.ResealRequest) { r.Network.Gateway = netip.MustParseAddr("::1") },
		"gateway's MAC":    func(r *guestapi.ResealRequest) { r.Network.GatewayMAC = "x" },
		"MTU":              func(r *guestapi.ResealRequest) { r.Network.MTU = 1 },
		"token":            func(r *guestapi.ResealRequest) { r.Token = "a b" },
		"long token":       func(r *guestapi.ResealRequest) { r.Token = strings.Repeat("a", 5000) },
		"environment name": func(r *guestapi.ResealRequest) { r.Env = map[string]string{"": "x"} },
	} {
		r := resealRequest("g")
		spoil(&r)
		if err := checkReseal(r); core.CategoryOf(err) != core.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	r := resealRequest("g")
	r.Identity.MAC, r.Identity.IP, r.Network = "", netip.Addr{}, guestapi.Network{}
	if err := checkReseal(r); err != nil {
		t.Errorf("without a network: %v", err)
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
		{State: guestapi.StateQuarantined, Generation: "g", Used: []string{"a-long-generation", "b"}, Sealed: true},
		{State: guestapi.StateFrozen, Generation: "g", CaptureID: "c", Reseeded: true},
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
	for _, broken := range []string{"", "released\n", "released\ng\n\nno\nno\n", "strange\ng\n\nno\nno\nend\n", "released\n\n\nno\nno\nend\n"} {
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
