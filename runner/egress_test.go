package runner

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/host"
	"github.com/coppice-dev/coppice/internal/eventually"
	"github.com/coppice-dev/coppice/internal/failpoint"
	"github.com/coppice-dev/coppice/internal/sidecar"
	"github.com/coppice-dev/coppice/internal/testhalt"
	"github.com/coppice-dev/coppice/internal/testmetrics"
	"github.com/coppice-dev/coppice/runner/egress"
)

const beAnEgressProcess = "be-an-egress-process"

// egressSettings are what the egress process of a test is told.
type egressSettings struct {
	Dir, Spool string
	Names      string         // host:port of a name server; without one no name is anywhere
	Private    []netip.Prefix // see host.Config
}

// carry is an egress process.
func carry(config io.Reader) error {
	var cfg egressSettings
	if err := json.NewDecoder(config).Decode(&cfg); err != nil {
		return err
	}
	if err := os.MkdirAll(cfg.Spool, 0o700); err != nil {
		return err
	}
	spool, err := os.OpenRoot(cfg.Spool)
	if err != nil {
		return err
	}
	listen, err := sidecar.Listen(egress.SocketPath(cfg.Dir))
	if err != nil {
		return err
	}
	s, err := host.New(context.Background(), host.Config{
		Listen: listen, Spool: spool, UID: uint32(os.Geteuid()), Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
		Private: cfg.Private,
		Resolver: &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			if cfg.Names == "" {
				return nil, syscall.ECONNREFUSED
			}
			var d net.Dialer
			return d.DialContext(ctx, network, cfg.Names)
		}},
	})
	if err != nil {
		return err
	}
	return s.Run(context.Background())
}

// egressOf is a real egress process for a runner of a test.
func egressOf(t *testing.T, cfg egressSettings) *egress.Process {
	t.Helper()
	dir, err := os.MkdirTemp("", "egress") //nolint:usetesting // the path of a socket must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = egress.NewClient(egress.SocketPath(dir)).Stop(context.WithoutCancel(t.Context())) // one that outlives its runner
		_ = os.RemoveAll(dir)
	})
	cfg.Dir, cfg.Spool = dir, filepath.Join(dir, "spool")
	config, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return &egress.Process{Dir: dir, Command: []string{os.Args[0], beAnEgressProcess}, Config: config}
}

// newEgressRig is a runner on fake machines with a real egress process.
func newEgressRig(t *testing.T, change func(*Config)) *fakeRig {
	t.Helper()
	return newFakeRig(t, func(c *Config) {
		c.Egress = egressOf(t, egressSettings{})
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
	r.net.mu.Lock()
	defer r.net.mu.Unlock()
	return s.ns.(*fakeNamespace).at[0]
}

// What a guest is answered when it asks the proxy for a host: nobody is at any.
const (
	allowed = http.StatusBadGateway
	denied  = http.StatusForbidden
)

// ask asks through a proxy; 0 when nobody answers.
func ask(t *testing.T, proxy, name string) int {
	t.Helper()
	c := &http.Client{Timeout: time.Minute, Transport: &http.Transport{Proxy: http.ProxyURL(&url.URL{Scheme: "http", Host: proxy}), DisableKeepAlives: true}}
	resp, err := c.Get("http://" + name + "/")
	if err != nil {
		return 0
	}
	_ = resp.Body.Close()
	return resp.StatusCode
}

func want(t *testing.T, proxy, name string, status int) {
	t.Helper()
	if got := ask(t, proxy, name); got != status {
		t.Errorf("%s: %d, want %d", name, got, status)
	}
}

// TestEgress follows a sandbox from its fork to its end.
func TestEgress(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	r := newEgressRig(t, func(c *Config) { c.Metrics = reg })
	base := r.boot()
	id, other := r.forkWith(base, rulesOf(3, "a.test")), r.forkWith(base, rulesOf(1))
	at, otherAt := r.gateway(id), r.gateway(other)
	want(t, at, "a.test", allowed)
	want(t, at, "b.test", denied)
	want(t, otherAt, "a.test", denied)

	// Rules: newer ones at once, older ones never.
	set := func(rules runnerapi.EgressRules) {
		t.Helper()
		if err := r.SetEgressRules(t.Context(), id, rules); err != nil {
			t.Fatal(err)
		}
	}
	set(rulesOf(5, "b.test"))
	want(t, at, "b.test", allowed)
	want(t, at, "a.test", denied)
	set(rulesOf(4, "a.test"))
	want(t, at, "a.test", denied)
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
	want(t, otherAt, "c.test", denied)
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
	want(t, at, "b.test", 0)
	want(t, otherAt, "a.test", denied)
	r.wantOnly(other)
}

// TestEgressKilled: with the process nothing passes; its successor has every sandbox, by the rules that were set meanwhile.
func TestEgressKilled(t *testing.T) {
	t.Parallel()
	r := newEgressRig(t, func(*Config) {})
	base := r.boot()
	ids := []core.SandboxID{r.forkWith(base, rulesOf(1, "a.test")), r.forkWith(base, rulesOf(1, "a.test"))}
	at := []string{r.gateway(ids[0]), r.gateway(ids[1])}
	client, err := r.egress.await(t.Context())
	if err != nil {
		t.Fatal(err)
	}
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
		if err := r.SetEgressRules(t.Context(), ids[1], rules); err != nil { // while it is away, or just back
			t.Fatal(err)
		}
		for i, name := range []string{"a.test", rules.Allow[0]} {
			eventually.True(t, "the sandbox is served again", func() bool { return ask(t, at[i], name) == allowed })
		}
		want(t, at[1], "a.test", denied)
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
	client, err := r.egress.await(t.Context())
	if err != nil {
		t.Fatal(err)
	}
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
		eventually.True(t, "the sandbox is served again", func() bool { return ask(t, at, "a.test") == allowed })
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
	want(t, r.gateway(child.SandboxID), "b.test", allowed)
	want(t, r.gateway(child.SandboxID), "a.test", denied)
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
	client, err := r.egress.await(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	hello, err := client.Hello(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want(t, at, "a.test", allowed)
	testhalt.Halt(t, hello.PID)
	eventually.True(t, "it was killed", func() bool { s := testhalt.State(t, hello.PID); return s == "" || s == "Z" })
	eventually.True(t, "the sandbox is served again", func() bool { return ask(t, at, "a.test") == allowed })
	want(t, at, "b.test", denied)
	metrics := testmetrics.Of(t, reg)
	if hung, ended := metrics["coppice_egress_restarts_total hung"], metrics["coppice_egress_restarts_total ended"]; hung != 1 || ended != 0 {
		t.Errorf("restarts of one that hung: %v, of one that ended: %v", hung, ended)
	}
	r.wantOnly(id)
}

// TestForksOutliveEgress: a fork that comes when the process has just ended waits for its successor.
func TestForksOutliveEgress(t *testing.T) {
	t.Parallel()
	r := newEgressRig(t, func(*Config) {})
	base := r.boot()
	client, err := r.egress.await(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	r.egress.set(egress.NewClient(filepath.Join(t.TempDir(), "gone")), nil)
	time.AfterFunc(100*time.Millisecond, func() { r.egress.set(client, nil) })
	id := r.forkWith(base, rulesOf(1, "a.test"))
	want(t, r.gateway(id), "a.test", allowed)
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
	bury := r.crash()
	defer bury()
	if err := s.machine.Kill(t.Context()); err != nil { // meanwhile
		t.Fatal(err)
	}
	want(t, at, "b.test", allowed)
	r.start()
	want(t, at, "b.test", allowed)
	want(t, at, "a.test", denied)
	_ = open.SetDeadline(time.Now().Add(5 * time.Minute))
	fmt.Fprintf(open, "GET http://b.test/ HTTP/1.1\r\nHost: b.test\r\n\r\n")
	resp, err := http.ReadResponse(bufio.NewReader(open), nil)
	if err != nil || resp.StatusCode != allowed {
		t.Errorf("a connection of before: %+v, %v", resp, err)
	} else {
		_ = resp.Body.Close()
	}
	eventually.True(t, "the sandbox that has ended is served no more", func() bool { return ask(t, goneAt, "a.test") == 0 })
	if err := r.SetEgressRules(t.Context(), id, rulesOf(6, "a.test")); err != nil { // older than what the first runner was told
		t.Fatal(err)
	}
	want(t, at, "a.test", denied)

	// Killed with the runner: the next one has both again.
	client, err := r.egress.await(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	bury = r.crash()
	defer bury()
	if err := client.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	want(t, at, "b.test", 0)
	r.start()
	eventually.True(t, "the sandbox is served again", func() bool { return ask(t, at, "b.test") == allowed })
	want(t, at, "a.test", denied)
	r.wantOnly(id)
}

// TestEgressIsLeft: a runner that leaves its sandboxes leaves the process to them, and ends it when there are none.
func TestEgressIsLeft(t *testing.T) {
	t.Parallel()
	r := newEgressRig(t, func(c *Config) { c.Leave = true })
	id := r.forkWith(r.boot(), rulesOf(1, "a.test"))
	at := r.gateway(id)
	client, err := r.egress.await(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	r.stop()
	want(t, at, "a.test", allowed)
	r.start()
	want(t, at, "a.test", allowed)
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
	client, err := r.egress.await(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	r.stop()
	next, err := New(t.Context(), r.cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := next.Destroy(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(next.egress.stop(t.Context()), unlockDir(next.lock)); err != nil {
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
	client, err := r.egress.await(t.Context())
	if err != nil {
		t.Fatal(err)
	}
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

// TestNoEgress: without the process a sandbox has no way out, and whoever wants one is told before anything is started.
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

func TestSessionEnv(t *testing.T) {
	t.Parallel()
	gateway := netip.MustParseAddr("10.83.0.1")
	const proxy = "http://10.83.0.1:3128"
	all := map[string]string{
		"http_proxy": proxy, "HTTP_PROXY": proxy, "https_proxy": proxy, "HTTPS_PROXY": proxy,
		"no_proxy": "localhost,127.0.0.1,::1,10.83.0.1", "NO_PROXY": "localhost,127.0.0.1,::1,10.83.0.1",
	}
	const bundle = "/etc/ssl/certs/ca-certificates.crt"
	for _, c := range []struct {
		opened    core.EgressPolicy
		trusts    bool
		own, want map[string]string
	}{
		{core.EgressProxied, false, nil, all},
		{core.EgressDenyAll, true, nil, map[string]string{}},
		{core.EgressAllowAll, true, map[string]string{"A": "1"}, map[string]string{"A": "1"}},
		{
			core.EgressProxied, true,
			map[string]string{"http_proxy": "", "https_proxy": "", "no_proxy": "", "REQUESTS_CA_BUNDLE": "mine"},
			map[string]string{"http_proxy": "", "https_proxy": "", "no_proxy": "", "REQUESTS_CA_BUNDLE": "mine", "NODE_EXTRA_CA_CERTS": bundle},
		},
		{
			core.EgressProxied, false,
			map[string]string{"A": "1", "https_proxy": "", "NO_PROXY": "x"},
			map[string]string{"A": "1", "https_proxy": "", "NO_PROXY": "x", "http_proxy": proxy, "HTTP_PROXY": proxy},
		},
	} {
		if diff := cmp.Diff(c.want, sessionEnv(c.own, c.opened, gateway, c.trusts)); diff != "" {
			t.Errorf("%s with %v: %s", c.opened, c.own, diff)
		}
	}
}
