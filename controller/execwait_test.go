package controller_test

import (
	"context"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

type execEnd struct {
	controller.ExecResult
	err error
}

// execLater starts an exec and does not wait for its end.
func (w *world) execLater(id core.WorkspaceID, req controller.ExecRequest) <-chan execEnd {
	done := make(chan execEnd, 1)
	go func() {
		got, err := w.Exec(w.t.Context(), w.project, id, req)
		done <- execEnd{got, err}
	}()
	return done
}

func wantExit(t *testing.T, done <-chan execEnd, code int) controller.ExecResult {
	t.Helper()
	got := <-done
	if got.err != nil || got.View.Guest.ExitCode == nil || *got.View.Guest.ExitCode != code {
		t.Fatalf("the exec ended with %+v, %v", got.View.Guest, got.err)
	}
	return got.ExecResult
}

// TestExecThroughAStall: a machine waits for the store while an exec waits for its program. The program lives, so the exec
// waits until the machine goes on, and reads the output then.
func TestExecThroughAStall(t *testing.T) {
	t.Parallel()
	for name, stallAt := range map[string]int64{"while it runs": 2, "before its output is read": 3} { // calls of the guest; 1 starts it
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			ws := w.create("main")
			stall := runnerapi.Stall{Since: time.Now(), Problem: runnerapi.Problem{Category: core.Unavailable, Code: core.CodeStoreUnavailable, Message: "it waits"}}
			var calls atomic.Int64
			var stalled atomic.Bool
			begun, again := make(chan struct{}), make(chan struct{})
			var once, twice sync.Once
			w.runner.Hook(func(_ context.Context, point, _ string) error {
				if point != runnertest.PointGuest {
					return nil
				}
				n := calls.Add(1)
				if n == stallAt {
					stalled.Store(true)
					once.Do(func() { close(begun) })
				} else if n > stallAt+3 {
					twice.Do(func() { close(again) })
				}
				if stalled.Load() {
					return stall.Problem.Err()
				}
				return nil
			})
			done := w.execLater(ws.ID, controller.ExecRequest{Command: []string{"sh", "-c", "sleep 0.2; echo alive"}, TimeoutMS: 60_000}) // its start does not say yet how it ended
			select {
			case <-begun:
			case got := <-done:
				t.Fatalf("the exec ended before the stall: %v", got.err)
			}
			w.runner.Stall(ws.Sandbox.ID, &stall)
			w.beat()
			select {
			case <-again:
			case got := <-done:
				t.Fatalf("the exec ended during the stall: %v", got.err)
			}
			stalled.Store(false)
			w.runner.Stall(ws.Sandbox.ID, nil)
			w.beat()
			if got := wantExit(t, done, 0); string(got.Stdout) != "alive\n" {
				t.Errorf("its output is %q", got.Stdout)
			}
		})
	}
}

// TestForgedStall: a guest that says that it waits for the store, while the runner says nothing of it, keeps nobody waiting.
func TestForgedStall(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("hostile")
	w.runner.Corrupt(ws.Sandbox.ID, says("GET /wait", func(rw http.ResponseWriter, q *http.Request) {
		rw.WriteHeader(http.StatusServiceUnavailable)
		text(`{"category":"unavailable","code":"STORE_UNAVAILABLE","message":"it waits"}`)(rw, q)
	}))
	ctx, cancel := context.WithTimeout(t.Context(), wait) // a stall that is believed is waited for without end
	defer cancel()
	_, err := w.Exec(ctx, w.project, ws.ID, controller.ExecRequest{Command: []string{"sleep", "1000"}})
	wantCode(t, err, core.CodeStoreUnavailable)
}

// TestExecTimeoutAndStalls: the agent measures a timeout by the clock of its machine. A machine that stood still answers
// later, and the program may still end in time.
func TestExecTimeoutAndStalls(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) { c.ExecGrace = time.Second })
	ws := w.create("main")
	var calls atomic.Int64
	w.runner.Corrupt(ws.Sandbox.ID, func(honest http.Handler) http.Handler {
		return says("GET /wait", func(rw http.ResponseWriter, q *http.Request) {
			switch calls.Add(1) {
			case 1: // its machine stood still for three seconds
				ms, _ := strconv.Atoi(q.URL.Query().Get("timeout_ms"))
				timer := time.NewTimer(time.Duration(ms)*time.Millisecond + 3*time.Second)
				defer timer.Stop()
				<-timer.C
				text(`{"state":"running"}`)(rw, q)
			default:
				text(`{"state":"exited","exit_code":0}`)(rw, q)
			}
		})(honest)
	})
	wantExit(t, w.execLater(ws.ID, controller.ExecRequest{Command: []string{"sleep", "1000"}, TimeoutMS: 20_000}), 0) // 20 s are asked for, and 1 s of grace is left
	if n := calls.Load(); n != 2 {
		t.Errorf("the agent was asked %d times", n)
	}
}

// cutWait has a machine answer no wait, and cut the connection when it is gone, as a real one does.
func (w *world) cutWait(id core.SandboxID) (started, cut chan struct{}) {
	started, cut = make(chan struct{}), make(chan struct{})
	var once sync.Once
	w.runner.Corrupt(id, says("GET /wait", func(_ http.ResponseWriter, q *http.Request) {
		once.Do(func() { close(started) })
		select {
		case <-cut:
		case <-q.Context().Done():
		}
		panic(http.ErrAbortHandler)
	}))
	return started, cut
}

// TestExecThroughASuspend: a workspace is suspended and resumed while an exec waits. The program goes on under its name in
// the next sandbox, and the exec ends with it.
func TestExecThroughASuspend(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	started, cut := w.cutWait(ws.Sandbox.ID)
	done := w.execLater(ws.ID, controller.ExecRequest{Command: []string{"sleep", "1000"}, TimeoutMS: 600_000})
	<-started
	var id core.SessionID
	eventually(t, "the session is listed", func() bool {
		list, err := w.Sessions(t.Context(), w.project, ws.ID, controller.Page{Limit: 10})
		if err != nil {
			t.Fatal(err)
		}
		if len(list) == 1 {
			id = list[0].ID
		}
		return id != ""
	})
	w.suspend(ws.ID)
	close(cut)
	w.resume(ws.ID)
	select {
	case got := <-done:
		t.Fatalf("the exec ended with the suspend: %v", got.err)
	default:
	}
	if err := w.SignalSession(t.Context(), w.project, id, "TERM"); err != nil {
		t.Fatal(err)
	}
	wantExit(t, done, 143)
}

// TestExecAndRestore: a restore in place ends the epoch of a session, and so an exec of it.
func TestExecAndRestore(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	started, cut := w.cutWait(ws.Sandbox.ID)
	done := w.execLater(ws.ID, controller.ExecRequest{Command: []string{"sleep", "1000"}})
	<-started
	if _, err := w.RestoreWorkspace(t.Context(), w.project, ws.ID, cp.ID, wait); err != nil {
		t.Fatal(err)
	}
	close(cut)
	got := <-done
	wantCode(t, got.err, core.CodeSessionNotFound)
}

// TestSessionWithLittleTime: however short the wait is, the answer has the session as it is.
func TestSessionWithLittleTime(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	view, err := w.StartSession(t.Context(), w.project, ws.ID, controller.ExecRequest{Command: []string{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, little := range []time.Duration{1, time.Microsecond, time.Millisecond} {
		got, err := w.Session(t.Context(), w.project, view.ID, little)
		if err != nil || got.Guest.State != "running" || got.Guest.PID == 0 {
			t.Errorf("wait of %s: %+v, %v", little, got.Guest, err)
		}
	}
}
