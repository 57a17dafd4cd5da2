package runner

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/egressapi"
	"github.com/coppice-dev/coppice/internal/eventually"
	"github.com/coppice-dev/coppice/internal/sidecar"
	"github.com/coppice-dev/coppice/runner/egress"
)

// inTheWay is a client of what listens in the place of an egress process and hears what it is told; answer says what it answers, nil for
// nothing at all, in which case hang says whether the connection stays.
func inTheWay(t *testing.T, answer *egressapi.Response, hang bool) *egress.Client {
	t.Helper()
	dir, err := os.MkdirTemp("", "way") //nolint:usetesting // the path of a socket must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
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
			var r egressapi.Request
			files, err := sidecar.Receive(conn, &r)
			sidecar.CloseAll(files)
			if err == nil && answer != nil {
				err = sidecar.Send(conn, answer)
			}
			if hang && err == nil {
				_, _ = sidecar.Receive(conn, &r) // until it hangs up
			}
			_ = conn.Close()
		}
	}()
	t.Cleanup(func() {
		_ = listen.Close()
		<-ended
	})
	return egress.NewClient(filepath.Join(dir, "sock"))
}

// TestRulesNotTaken: rules that the process has not acknowledged are not in force, and are given again when they are said again.
func TestRulesNotTaken(t *testing.T) {
	t.Parallel()
	r := newEgressRig(t, func(*Config) {})
	id := r.forkWith(r.boot(), rulesOf(1, "a.test", "b.test"))
	at := r.gateway(id)
	c, err := r.egress.await(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	version := int64(1)
	for what, way := range map[string]struct {
		answer *egressapi.Response
		hang   bool
	}{
		"fails":    {&egressapi.Response{Problem: runnerapi.ProblemOf(core.Errorf(core.Internal, core.CodeInternal, "it has failed"))}, false},
		"hangs":    {nil, true},
		"hangs up": {nil, false},
	} {
		version++
		rules := rulesOf(version, "b.test")
		r.egress.set(inTheWay(t, way.answer, way.hang), nil)
		r.egress.patience = 300 * time.Millisecond
		for range 2 {
			if err := r.SetEgressRules(t.Context(), id, rules); err == nil {
				t.Errorf("a process that %s has taken rules", what)
			}
			if err := r.SetEgressRules(t.Context(), id, rulesOf(1, "a.test")); err == nil {
				t.Errorf("a process that %s: older rules that are newer where nobody has them", what)
			}
		}
		r.egress.patience = egressCallTime
		r.egress.set(c, nil)
		if err := r.SetEgressRules(t.Context(), id, rules); err != nil {
			t.Fatal(err)
		}
		want(t, at, "a.test", denied)
		want(t, at, "b.test", allowed)
		version++
		if err := r.SetEgressRules(t.Context(), id, rulesOf(version, "a.test", "b.test")); err != nil {
			t.Fatal(err)
		}
		want(t, at, "a.test", allowed)
	}
	// Nobody is there: nothing passes, and whoever comes begins with the rules of now.
	version++
	r.egress.set(egress.NewClient(filepath.Join(t.TempDir(), "gone")), nil)
	if err := r.SetEgressRules(t.Context(), id, rulesOf(version, "b.test")); err != nil {
		t.Error(err)
	}
}

// TestHangUp: rules come into force although who gives them does not wait for that.
func TestHangUp(t *testing.T) {
	t.Parallel()
	r := newEgressRig(t, func(*Config) {})
	id := r.forkWith(r.boot(), rulesOf(1, "a.test", "b.test"))
	at := r.gateway(id)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.SetEgressRules(ctx, id, rulesOf(2, "b.test")); err != nil {
		t.Error(err)
	}
	want(t, at, "a.test", denied)
	want(t, at, "b.test", allowed)
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
	obstacle := filepath.Join(s.runDir, journalFile+".new")
	if err := os.Mkdir(obstacle, 0o700); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := r.SetEgressRules(t.Context(), id, rulesOf(2, "b.test")); !errors.Is(err, syscall.EISDIR) || core.CodeOf(err) != core.CodeRulesNotWritten || core.CategoryOf(err) != core.Unavailable {
			t.Errorf("rules that were not written: %v (%s, %s)", err, core.CodeOf(err), core.CategoryOf(err))
		}
	}
	want(t, at, "a.test", denied)
	if err := os.Remove(obstacle); err != nil {
		t.Fatal(err)
	}
	if err := r.SetEgressRules(t.Context(), id, rulesOf(2, "b.test")); err != nil {
		t.Fatal(err)
	}
	var j journal
	b, err := os.ReadFile(filepath.Join(s.runDir, journalFile))
	if err == nil {
		err = json.Unmarshal(b, &j)
	}
	if err != nil || j.Sandbox.Rules.Version != 2 {
		t.Errorf("the file of the journal has %+v, %v", j.Sandbox, err)
	}
	// The next runner, with another process, goes on with them.
	c, err := r.egress.await(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	bury := r.crash()
	defer bury()
	if err := c.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.start()
	eventually.True(t, "the sandbox is served again", func() bool { return ask(t, at, "b.test") == allowed })
	want(t, at, "a.test", denied)
	r.wantOnly(id)
}
