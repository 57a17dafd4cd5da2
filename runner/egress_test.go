package runner

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/failpoint"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testegress"
	"github.com/coppice-dev/coppice/internal/test/testhalt"
	"github.com/coppice-dev/coppice/internal/test/testmetrics"
	"github.com/coppice-dev/coppice/runner/egress"
	"github.com/coppice-dev/coppice/runner/journal"
)

// newEgressRig is a runner on fake machines with a real egress process.
func newEgressRig(t *testing.T, change func(*Config)) *fakeRig {
	t.Helper()
	return newFakeRig(t, func(c *Config) {
		c.Egress = testegress.Process(t, testegress.Settings{})
		change(c)
	})
}

func rulesOf(version int64, allow ...string) runnerapi.EgressRules {
	return runnerapi.EgressRules{Version: version, Allow: allow}
}

// forkWith is a child with rules.
func (r *fakeRig) forkWith(from core.CheckpointID, rules runnerapi.EgressRules) core.SandboxID {
	r.t.Helper()
	child := r.child()
	child.Rules = rules
	f, err := r.Fork(r.t.Context(), runnerapi.Fork{CheckpointID: from, Children: []runnerapi.Child{child}})
	if err != nil {
		r.t.Fatal(err)
	}
	if p := f.Children[0].Problem; p != nil {
		r.t.Fatalf("fork: %+v", p)
	}
	return child.SandboxID
}

// gateway is where the guest of a sandbox finds the proxy.
func (r *fakeRig) gateway(id core.SandboxID) string {
	r.t.Helper()
	s, err := r.find(id)
	if err != nil {
		r.t.Fatal(err)
	}
	return s.ns.(*fakeNamespace).sockets.Proxy()
}

// egressClient is a client of the egress process, once that runs.
func (r *fakeRig) egressClient() *egress.Client {
	r.t.Helper()
	return testegress.Client(r.t, r.cfg.Egress)
}

const (
	allowed = testegress.Allowed
	denied  = testegress.Denied
)

// TestEgress follows a sandbox from its fork to its end.
func TestEgress(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	r := newEgressRig(t, func(c *Config) { c.Metrics = reg })
	base := r.boot()
	id, other := r.forkWith(base, rulesOf(3, "a.test")), r.forkWith(base, rulesOf(1))
	at, otherAt := r.gateway(id), r.gateway(other)
	testegress.Want(t, at, "a.test", allowed)
	testegress.Want(t, at, "b.test", denied)
	testegress.Want(t, otherAt, "a.test", denied)

	// Rules: newer ones at once, older ones never.
	set := func(rules runnerapi.EgressRules) {
		t.Helper()
		if err := r.SetEgressRules(t.Context(), id, rules); err != nil {
			t.Fatal(err)
		}
	}
	set(rulesOf(5, "b.test"))
	testegress.Want(t, at, "b.test", allowed)
	testegress.Want(t, at, "a.test", denied)
	set(rulesOf(4, "a.test"))
	testegress.Want(t, at, "a.test", denied)
	if err := r.SetEgressRules(t.Context(), id, rulesOf(6, "not a host")); core.CategoryOf(err) != core.Invalid {
		t.Errorf("rules that are none: %v", err)
	}

	// What they sent is told, and told again until it was acknowledged.
	first, last, err := r.Flows(t.Context(), 0)
	if err != nil || len(first) < 7 || first[0].SandboxID != id || first[0].Epoch != 1 || first[0].Host != "a.test" {
		t.Errorf("flows %+v, %v", first, err)
	}
	if again, _, err := r.Flows(t.Context(), 0); err != nil || cmp.Diff(first, again) != "" {
		t.Errorf("what was not acknowledged is %+v, %v", again, err)
	}
	testegress.Want(t, otherAt, "c.test", denied)
	if next, _, err := r.Flows(t.Context(), last); err != nil || len(next) != 1 || next[0].Host != "c.test" || next[0].SandboxID != other {
		t.Errorf("what came later is %+v, %v", next, err)
	}
	metrics := testmetrics.Of(t, reg)
	for name, want := range map[string]float64{"up": 1, "sandboxes": 2, "flows_open": 0, "flows_total denied": 5, "flows_total failed": 2, "flows_total allowed": 0} {
		if got, there := metrics["coppice_egress_"+name]; !there || got != want {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}

	if err := r.Destroy(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	testegress.Want(t, at, "b.test", 0)
	testegress.Want(t, otherAt, "a.test", denied)
	r.wantOnly(other)
}

// TestEgressKilled: with the process nothing passes; its successor has every sandbox, by the rules that were set meanwhile.
func TestEgressKilled(t *testing.T) {
	t.Parallel()
	r := newEgressRig(t, func(*Config) {})
	base := r.boot()
	ids := []core.SandboxID{r.forkWith(base, rulesOf(1, "a.test")), r.forkWith(base, rulesOf(1, "a.test"))}
	at := []string{r.gateway(ids[0]), r.gateway(ids[1])}
	client := r.egressClient()
	for round := range 3 {
		idle, err := net.Dial("tcp4", at[0]) // a connection that is under way
		if err != nil {
			t.Fatal(err)
		}
		hello, err := client.Hello(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(hello.PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		_ = idle.SetReadDeadline(time.Now().Add(5 * time.Minute))
		if _, err := idle.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("a connection of before: %v", err)
		}
		_ = idle.Close()
		rules := rulesOf(int64(round)+2, fmt.Sprintf("n%d.test", round))
		if err := r.SetEgressRules(t.Context(), ids[1], rules); err != nil { // while it is unreachable, or just back
			t.Fatal(err)
		}
		for i, name := range []string{"a.test", rules.Allow[0]} {
			eventually.True(t, "the sandbox is served again", func() bool { return testegress.Ask(t, at[i], name) == allowed })
		}
		testegress.Want(t, at[1], "a.test", denied)
		if again, err := client.Hello(t.Context()); err != nil || again.Instance == hello.Instance {
			t.Errorf("the process is %+v, %v", again, err)
		}
	}
	r.wantOnly(ids...)
}

// TestEgressComesBesideAFork: an egress process that comes while a sandbox is listed and has no journal yet gets the other sandboxes. The one in
// the making gets there by itself, and takes no rules before.
func TestEgressComesBesideAFork(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	r := newEgressRig(t, func(*Config) {})
	base := r.boot()
	id := r.forkWith(base, rulesOf(1, "a.test"))
	at := r.gateway(id)
	client := r.egressClient()
	child := r.child()
	child.Rules = rulesOf(1, "b.test")
	done := make(chan runnerapi.ForkResult, 1)
	armed := hang(t, "fork.listed", func() {
		out, err := r.Fork(context.WithoutCancel(t.Context()), runnerapi.Fork{CheckpointID: base, Children: []runnerapi.Child{child}})
		if err != nil {
			t.Error(err)
		}
		done <- out
	})
	for range 5 { // which sandbox is offered first is chance
		hello, err := client.Hello(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(hello.PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		eventually.True(t, "another process has come", func() bool {
			again, err := client.Hello(t.Context())
			return err == nil && again.Instance != hello.Instance
		})
		eventually.True(t, "the sandbox is served again", func() bool { return testegress.Ask(t, at, "a.test") == allowed })
	}
	if err := r.SetEgressRules(t.Context(), child.SandboxID, rulesOf(2, "c.test")); core.CodeOf(err) != core.CodeWorkspaceNotReady {
		t.Errorf("rules for a sandbox in the making: %v", err)
	}
	if err := r.ClosePort(child.SandboxID, core.NewID[core.PortID]()); err != nil {
		t.Errorf("a port of a sandbox in the making: %v", err)
	}
	armed.Release()
	if out := <-done; out.Children[0].Problem != nil {
		t.Fatalf("fork: %+v", out.Children[0].Problem)
	}
	testegress.Want(t, r.gateway(child.SandboxID), "b.test", allowed)
	testegress.Want(t, r.gateway(child.SandboxID), "a.test", denied)
	r.wantOnly(id, child.SandboxID)
}

// TestEgressHung: a process that stands still is killed, and its successor has every sandbox.
func TestEgressHung(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	r := newEgressRig(t, func(c *Config) {
		c.Metrics = reg
		c.Egress.Pulse = egress.Pulse{Every: 20 * time.Millisecond, Limit: time.Second} // one that works must not be taken for one that hangs
	})
	base := r.boot()
	id := r.forkWith(base, rulesOf(1, "a.test"))
	at := r.gateway(id)
	client := r.egressClient()
	hello, err := client.Hello(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	testegress.Want(t, at, "a.test", allowed)
	testhalt.Halt(t, hello.PID)
	eventually.True(t, "it was killed", func() bool { s := testhalt.State(t, hello.PID); return s == "" || s == "Z" })
	eventually.True(t, "the sandbox is served again", func() bool { return testegress.Ask(t, at, "a.test") == allowed })
	testegress.Want(t, at, "b.test", denied)
	metrics := testmetrics.Of(t, reg)
	if hung, ended := metrics["coppice_egress_restarts_total hung"], metrics["coppice_egress_restarts_total ended"]; hung != 1 || ended != 0 {
		t.Errorf("restarts of one that hung: %v, of one that ended: %v", hung, ended)
	}
	r.wantOnly(id)
}

// TestEgressOutlivesTheRunner: connections through the process go on, and the next runner goes on with it.
func TestEgressOutlivesTheRunner(t *testing.T) {
	t.Parallel()
	r := newEgressRig(t, func(*Config) {})
	base := r.boot()
	id, gone := r.forkWith(base, rulesOf(1, "a.test")), r.forkWith(base, rulesOf(1, "a.test"))
	at, goneAt := r.gateway(id), r.gateway(gone)
	if err := r.SetEgressRules(t.Context(), id, rulesOf(7, "b.test")); err != nil {
		t.Fatal(err)
	}
	open, err := net.Dial("tcp4", at)
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	s, err := r.find(gone)
	if err != nil {
		t.Fatal(err)
	}
	cleanup := r.crash()
	defer cleanup()
	if err := s.machine.Kill(t.Context()); err != nil { // meanwhile
		t.Fatal(err)
	}
	testegress.Want(t, at, "b.test", allowed)
	r.start()
	testegress.Want(t, at, "b.test", allowed)
	testegress.Want(t, at, "a.test", denied)
	_ = open.SetDeadline(time.Now().Add(5 * time.Minute))
	fmt.Fprintf(open, "GET http://b.test/ HTTP/1.1\r\nHost: b.test\r\n\r\n")
	resp, err := http.ReadResponse(bufio.NewReader(open), nil)
	if err != nil || resp.StatusCode != allowed {
		t.Errorf("a connection of before: %+v, %v", resp, err)
	} else {
		_ = resp.Body.Close()
	}
	eventually.True(t, "the sandbox that has ended is served no more", func() bool { return testegress.Ask(t, goneAt, "a.test") == 0 })
	if err := r.SetEgressRules(t.Context(), id, rulesOf(6, "a.test")); err != nil { // older than what the first runner was told
		t.Fatal(err)
	}
	testegress.Want(t, at, "a.test", denied)

	// Killed with the runner: the next one has both again.
	client := r.egressClient()
	cleanup = r.crash()
	defer cleanup()
	if err := client.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	testegress.Want(t, at, "b.test", 0)
	r.start()
	eventually.True(t, "the sandbox is served again", func() bool { return testegress.Ask(t, at, "b.test") == allowed })
	testegress.Want(t, at, "a.test", denied)
	r.wantOnly(id)
}

// TestEgressIsLeft: a runner that leaves its sandboxes leaves the process to them, and ends it when there are none.
func TestEgressIsLeft(t *testing.T) {
	t.Parallel()
	r := newEgressRig(t, func(c *Config) { c.Leave = true })
	id := r.forkWith(r.boot(), rulesOf(1, "a.test"))
	at := r.gateway(id)
	client := r.egressClient()
	r.stop()
	testegress.Want(t, at, "a.test", allowed)
	r.start()
	testegress.Want(t, at, "a.test", allowed)
	if err := r.Destroy(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	r.stop()
	if _, err := client.Hello(t.Context()); !errors.Is(err, egress.ErrGone) {
		t.Errorf("the process of a runner that has left nothing: %v", err)
	}
}

// TestEgressIsLeftUnseen: a runner that stops before it has got to the process of an earlier runner ends that process too.
func TestEgressIsLeftUnseen(t *testing.T) {
	t.Parallel()
	r := newEgressRig(t, func(c *Config) { c.Leave = true })
	id := r.forkWith(r.boot(), rulesOf(1, "a.test"))
	client := r.egressClient()
	r.stop()
	next, err := New(t.Context(), r.cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := next.Destroy(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(next.egress.Stop(t.Context()), unlockDir(next.lock)); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Hello(t.Context()); !errors.Is(err, egress.ErrGone) {
		t.Errorf("the process of a runner that has left nothing: %v", err)
	}
}

// TestEgressFailsClosed: a sandbox that the process does not have is not made.
func TestEgressFailsClosed(t *testing.T) {
	r := newEgressRig(t, func(*Config) {}) // not parallel: others would come by the failpoint
	base := r.boot()
	armed, err := failpoint.Arm("fork.served", failpoint.Action{Kind: failpoint.Fail})
	if err != nil {
		t.Fatal(err)
	}
	f, err := r.Fork(t.Context(), runnerapi.Fork{CheckpointID: base, Children: []runnerapi.Child{r.child()}})
	if err != nil || f.Children[0].Problem == nil {
		t.Fatalf("%+v, %v", f, err)
	}
	armed.Disarm()
	client := r.egressClient()
	if list, err := client.List(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("served are %+v, %v", list, err)
	}
	for _, rules := range []runnerapi.EgressRules{rulesOf(1, "not a host"), rulesOf(1, "127.1")} {
		child := r.child()
		child.Rules = rules
		f, err := r.Fork(t.Context(), runnerapi.Fork{CheckpointID: base, Children: []runnerapi.Child{child}})
		if err != nil || f.Children[0].Problem == nil || f.Children[0].Problem.Category != core.Invalid {
			t.Errorf("%v: %+v, %v", rules, f, err)
		}
	}
	r.wantOnly()
}

// TestNoEgress: without the process a sandbox has no way out, and a request for one fails before anything is started.
func TestNoEgress(t *testing.T) {
	t.Parallel()
	r := newFakeRig(t, func(*Config) {})
	base := r.boot()
	child := r.child()
	child.Rules = rulesOf(1, "a.test")
	f, err := r.Fork(t.Context(), runnerapi.Fork{CheckpointID: base, Children: []runnerapi.Child{child}})
	if err != nil || f.Children[0].Problem == nil || f.Children[0].Problem.Code != core.CodeUnsupported {
		t.Fatalf("%+v, %v", f, err)
	}
	r.wantOnly()
	id := r.forkWith(base, rulesOf(1))
	if err := r.SetEgressRules(t.Context(), id, rulesOf(2, "a.test")); core.CodeOf(err) != core.CodeUnsupported {
		t.Errorf("rules for a sandbox without a way out: %v", err)
	}
	if err := r.SetEgressRules(t.Context(), id, rulesOf(2)); err != nil {
		t.Errorf("no rules: %v", err)
	}
	r.wantOnly(id)
}

// TestRulesNotWritten: rules that the journal does not have are in force as far as they can be, and are written when they are said again.
func TestRulesNotWritten(t *testing.T) {
	t.Parallel()
	r := newEgressRig(t, func(*Config) {})
	id := r.forkWith(r.boot(), rulesOf(1, "a.test", "b.test"))
	at := r.gateway(id)
	s, err := r.find(id)
	if err != nil {
		t.Fatal(err)
	}
	obstacle := filepath.Join(s.runDir, journal.File+".new")
	if err := os.Mkdir(obstacle, 0o700); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := r.SetEgressRules(t.Context(), id, rulesOf(2, "b.test")); !errors.Is(err, syscall.EISDIR) || core.CodeOf(err) != core.CodeRulesNotWritten || core.CategoryOf(err) != core.Unavailable {
			t.Errorf("rules that were not written: %v (%s, %s)", err, core.CodeOf(err), core.CategoryOf(err))
		}
	}
	testegress.Want(t, at, "a.test", denied)
	if err := os.Remove(obstacle); err != nil {
		t.Fatal(err)
	}
	if err := r.SetEgressRules(t.Context(), id, rulesOf(2, "b.test")); err != nil {
		t.Fatal(err)
	}
	var j journal.Journal
	b, err := os.ReadFile(filepath.Join(s.runDir, journal.File))
	if err == nil {
		err = json.Unmarshal(b, &j)
	}
	if err != nil || j.Sandbox.Rules.Version != 2 {
		t.Errorf("the file of the journal has %+v, %v", j.Sandbox, err)
	}
	// The next runner, with another process, goes on with them.
	c := r.egressClient()
	cleanup := r.crash()
	defer cleanup()
	if err := c.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.start()
	eventually.True(t, "the sandbox is served again", func() bool { return testegress.Ask(t, at, "b.test") == allowed })
	testegress.Want(t, at, "a.test", denied)
	r.wantOnly(id)
}

// TestRunnerRechecks: a sandbox whose network rules were changed is cut off, and connected again later.
func TestRunnerRechecks(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	r := newEgressRig(t, func(c *Config) { c.Recheck, c.Metrics = 20*time.Millisecond, reg })
	id := r.forkWith(r.boot(), rulesOf(1, "a.test"))
	s, err := r.find(id)
	if err != nil {
		t.Fatal(err)
	}
	ns := s.ns.(*fakeNamespace)
	r.net.mu.Lock()
	ns.spoiled = true
	r.net.mu.Unlock()
	eventually.True(t, "it was cut off", func() bool { return testmetrics.One(t, reg, "coppice_runner_network_cuts_total") == 1 })
	eventually.True(t, "it is connected again", func() bool {
		r.net.mu.Lock()
		defer r.net.mu.Unlock()
		return ns.open == core.EgressProxied
	})
	testegress.Want(t, r.gateway(id), "a.test", allowed)
	r.wantOnly(id)
}
