package egresslink

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/egressapi"
	"github.com/coppice-dev/coppice/internal/sidecar"
	"github.com/coppice-dev/coppice/internal/test/testegress"
	"github.com/coppice-dev/coppice/runner/egress"
)

// inTheWay is a client of what listens in the place of an egress process and hears what it is told; answer says what it answers, nil for
// nothing at all, in which case hang says whether the connection stays.
func inTheWay(t *testing.T, answer *egressapi.Response, hang bool) *egress.Client {
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
			_ = conn.SetDeadline(time.Now().Add(time.Minute))
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
	r := newRig(t)
	g := r.serve(rulesOf(1, "a.test", "b.test"))
	at := g.sockets.Proxy()
	c := r.process()
	r.halt() // or the supervisor may attend to what stands in the place of the process, and keep its only connection
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
		r.set(inTheWay(t, way.answer, way.hang), nil)
		r.patience = 300 * time.Millisecond
		for range 2 {
			if err := g.SetRules(t.Context(), rules); err == nil {
				t.Errorf("a process that %s has taken rules", what)
			}
			if err := g.SetRules(t.Context(), rulesOf(1, "a.test")); err == nil {
				t.Errorf("a process that %s: older rules that are newer where nobody has them", what)
			}
		}
		r.patience = callTime
		r.set(c, nil)
		if err := g.SetRules(t.Context(), rules); err != nil {
			t.Fatal(err)
		}
		testegress.Want(t, at, "a.test", denied)
		testegress.Want(t, at, "b.test", allowed)
		version++
		if err := g.SetRules(t.Context(), rulesOf(version, "a.test", "b.test")); err != nil {
			t.Fatal(err)
		}
		testegress.Want(t, at, "a.test", allowed)
	}
	// Nobody is there: nothing passes, and the next process begins with the present rules.
	version++
	r.set(egress.NewClient(filepath.Join(t.TempDir(), "gone")), nil)
	if err := g.SetRules(t.Context(), rulesOf(version, "b.test")); err != nil {
		t.Error(err)
	}
}

// TestHangUp: rules come into force although who gives them does not wait for that.
func TestHangUp(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	g := r.serve(rulesOf(1, "a.test", "b.test"))
	at := g.sockets.Proxy()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := g.SetRules(ctx, rulesOf(2, "b.test")); err != nil {
		t.Error(err)
	}
	testegress.Want(t, at, "a.test", denied)
	testegress.Want(t, at, "b.test", allowed)
}
