package egresslink

import (
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/egressapi"
	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/egress/policy"
	"github.com/coppice-dev/coppice/internal/sidecar"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testegress"
	"github.com/coppice-dev/coppice/runner/egress"
)

// TestTakenAwayFirst: a host that was taken out is not reached any more, whatever keeps the rules without it from being delivered; and the
// sandbox has its rules again when they can be.
func TestTakenAwayFirst(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		spoil func(rules *runnerapi.EgressRules)
		kept  int // what the host that is still allowed is answered
	}{
		"grants too long for a message": {func(rules *runnerapi.EgressRules) { rules.Grants = make([]byte, 160<<10) }, allowed},
		"grants that cannot be opened":  {func(rules *runnerapi.EgressRules) { rules.Grants = []byte("not sealed") }, allowed},
		"rules too long for a message": {func(rules *runnerapi.EgressRules) {
			for i := range 1 << 13 {
				rules.Held = append(rules.Held, fmt.Sprintf("h%d.test:443%s", i, strings.Repeat("0", 8)))
			}
		}, denied},
		"hosts that cannot be read": {func(rules *runnerapi.EgressRules) { rules.Held = []string{"not a host"} }, denied},
		"rules that cannot be read": {func(rules *runnerapi.EgressRules) { rules.Allow = []string{"b.test", "not a host"} }, denied},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			g := r.serve(rulesOf(1, "a.test", "b.test"))
			at := g.sockets.Proxy()
			client := r.process()
			hello := testegress.Hello(t, client)
			testegress.Want(t, at, "a.test", allowed)
			rules := rulesOf(2, "b.test")
			rules.Key = hello.Key
			c.spoil(&rules)
			for range 2 {
				if err := g.SetRules(t.Context(), rules); err == nil {
					t.Error("rules that cannot be delivered are in force")
				}
				testegress.Want(t, at, "a.test", denied)
				testegress.Want(t, at, "b.test", c.kept)
			}
			// Another process, which begins with the journal.
			if err := client.Stop(t.Context()); err != nil {
				t.Fatal(err)
			}
			eventually.True(t, "the sandbox is served again", func() bool { return testegress.Ask(t, at, "b.test") == c.kept })
			testegress.Want(t, at, "a.test", denied)
			if err := g.SetRules(t.Context(), rulesOf(3, "b.test", "a.test")); err != nil {
				t.Fatal(err)
			}
			testegress.Want(t, at, "a.test", allowed)
		})
	}
}

// TestCutOff: where a process takes neither rules nor less, it loses the sandbox, and gets it again with the next rules that it takes.
func TestCutOff(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	g := r.serve(rulesOf(1, "a.test", "b.test"))
	at := g.sockets.Proxy()
	process := r.process()
	r.halt() // its first offer may still be under way, and would give the process the sandbox again
	var refuse atomic.Bool
	refuse.Store(true)
	r.set(refusing(t, process, &refuse), nil)
	began := time.Now()
	if err := g.SetRules(t.Context(), rulesOf(2, "b.test")); core.CodeOf(err) != core.CodeEgressReduced {
		t.Errorf("a process that takes no rules: %v", err)
	}
	for _, host := range []string{"a.test", "b.test"} {
		testegress.Want(t, at, host, 0)
	}
	if took := time.Since(began); took > 2*lessPatience+time.Minute { // a proxy that is asked without end takes its own time
		t.Errorf("the sandbox was cut off after %s", took)
	}
	refuse.Store(false)
	if err := g.SetRules(t.Context(), rulesOf(2, "b.test")); err != nil {
		t.Fatal(err)
	}
	testegress.Want(t, at, "b.test", allowed)
	testegress.Want(t, at, "a.test", denied)
}

// TestRestored: rules that a process has not taken are given to it again after a while, and not before.
func TestRestored(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	g := r.serve(rulesOf(1, "a.test"))
	at := g.sockets.Proxy()
	c := r.process()
	g.Sandbox.mu.Lock()
	err := g.reduce(t.Context(), c, errors.New("it has failed"))
	g.Sandbox.mu.Unlock()
	if core.CodeOf(err) != core.CodeEgressReduced {
		t.Errorf("a sandbox is reduced with %v", err)
	}
	r.restore(t.Context(), c)
	testegress.Want(t, at, "a.test", denied)
	g.Sandbox.mu.Lock()
	g.acked.tried = g.acked.tried.Add(-lessPause)
	g.Sandbox.mu.Unlock()
	r.restore(t.Context(), c)
	testegress.Want(t, at, "a.test", allowed)
	g.Sandbox.mu.Lock()
	defer g.Sandbox.mu.Unlock()
	if !g.acked.has(c, g.rules) {
		t.Errorf("the process has acknowledged %+v", g.acked)
	}
}

// refusing is a client of what passes on to an egress process what concerns its sandboxes, and may refuse all rules.
func refusing(t *testing.T, process *egress.Client, refuse *atomic.Bool) *egress.Client {
	t.Helper()
	dir := testegress.ShortDir(t)
	listen, err := sidecar.Listen(filepath.Join(dir, "sock"))
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			conn, err := listen.AcceptUnix()
			if err != nil {
				return
			}
			var in egressapi.Request
			files, err := sidecar.Receive(conn, &in)
			if err == nil {
				switch {
				case in.Op == egressapi.OpRules && refuse.Load():
					err = core.Errorf(core.Internal, core.CodeInternal, "it has failed")
				case in.Op == egressapi.OpRules:
					err = process.SetRules(t.Context(), in.Sandbox.ID, in.Sandbox.Rules)
				case in.Op == egressapi.OpPut:
					err = process.Put(t.Context(), *in.Sandbox, files)
				case in.Op == egressapi.OpRemove:
					err = process.Remove(t.Context(), in.Sandbox.ID)
				default:
					err = errors.New("this is not passed on")
				}
				var out egressapi.Response
				if err != nil {
					out.Problem = runnerapi.ProblemOf(err)
				}
				_ = sidecar.Send(conn, out)
			}
			sidecar.CloseAll(files)
			_ = conn.Close()
		}
	}()
	t.Cleanup(func() {
		_ = listen.Close()
		<-ended
	})
	return egress.NewClient(filepath.Join(dir, "sock"))
}

// TestRevoked: a grant that was revoked is with no process any more, also when the grants that are left cannot be delivered.
func TestRevoked(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	g := r.serve(rulesOf(1, "a.test"))
	client := r.process()
	hello := testegress.Hello(t, client)
	base := "http://" + g.sockets.Proxy() + grant.BasePath + "a/"
	one := grant.Grant{
		ID: "a", Mode: grant.ModeBaseURL, Placeholder: grant.NewPlaceholder(), Secret: grant.NewSecret("a secret of this test"), Header: "Authorization",
		Targets: []grant.Target{target(t, "a.test:443")},
	}
	rules := rulesOf(2, "a.test")
	rules.Key = hello.Key
	var err error
	if rules.Grants, err = grant.Encrypt(hello.Key, g.id, 2, grant.Bundle{Grants: []grant.Grant{one}}); err != nil {
		t.Fatal(err)
	}
	if err := g.SetRules(t.Context(), rules); err != nil {
		t.Fatal(err)
	}
	if got := get(t, base); got != allowed {
		t.Fatalf("the base URL of a grant: %d, want %d", got, allowed)
	}
	rules = rulesOf(3, "a.test")
	rules.Key, rules.Grants = hello.Key, make([]byte, 160<<10)
	if err := g.SetRules(t.Context(), rules); err == nil {
		t.Error("grants that cannot be delivered are in force")
	}
	if got := get(t, base); got == allowed {
		t.Errorf("the base URL of a grant that was revoked: %d", got)
	}
}

func get(t *testing.T, url string) int {
	t.Helper()
	c := &http.Client{Timeout: time.Minute, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	return resp.StatusCode
}

func target(t *testing.T, text string) grant.Target {
	t.Helper()
	h, port, err := policy.ParseHostPort(text)
	if err != nil {
		t.Fatal(err)
	}
	return grant.Target{Host: h, Port: port}
}
