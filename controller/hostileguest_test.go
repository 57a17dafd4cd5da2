package controller_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// These guests mean harm. Each answers over the real way: a runner's HTTP and the controller's client.

// says answers one route with a text, and all others as the honest agent does.
func says(route string, body func(w http.ResponseWriter, q *http.Request)) func(http.Handler) http.Handler {
	return func(honest http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
			if strings.HasPrefix(route, q.Method+" ") && strings.HasSuffix(q.URL.Path, strings.TrimPrefix(route, q.Method+" ")) {
				w.Header().Set("Content-Type", "application/json")
				body(w, q)
				return
			}
			honest.ServeHTTP(w, q)
		})
	}
}

func text(s string) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, s) } // the reader may have gone
}

// other makes a workspace of another project.
func (w *world) other() (core.ProjectID, core.WorkspaceID) {
	w.t.Helper()
	p, err := w.Tenancy.CreateProject(w.t.Context(), w.admin(), "other", controller.QuotasPatch{}, controller.EncryptionPatch{})
	if err != nil {
		w.t.Fatal(err)
	}
	a, err := w.CreateWorkspace(w.t.Context(), p.ID, controller.CreateRequest{Name: "theirs", Resources: core.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 1}}, wait)
	if err != nil || a.Result.Workspace == nil {
		w.t.Fatalf("create in the other project: %v", err)
	}
	return p.ID, a.Result.Workspace.ID
}

// allocated says how many bytes were allocated meanwhile.
func allocated(do func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	do()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// TestAnswersOfManyElements sends small answers that decode into large heaps.
func TestAnswersOfManyElements(t *testing.T) { //nolint:paralleltest // it measures the heap of the process
	w := newWorld(t)
	ws := w.create("hostile")
	project, theirs := w.other()
	if _, err := w.StartSession(t.Context(), project, theirs, controller.ExecRequest{Command: []string{"sleep", "100"}}); err != nil {
		t.Fatal(err)
	}
	const size = 4 << 20 // the audit used 31 MiB and saw 8.5 GiB; this much shows the same on a small machine
	many := func(open, each, end string) string {
		return open + strings.Repeat(each+",", size/(len(each)+1)) + each + end
	}
	list := func() error {
		_, err := w.Sessions(t.Context(), w.project, ws.ID, controller.Page{Limit: 10})
		return err
	}
	processes := func() error {
		_, err := w.Processes(t.Context(), w.project, ws.ID)
		return err
	}
	for name, c := range map[string]struct {
		route, body string
		call        func() error
	}{
		"sessions":           {"GET /v1/sessions", many(`{"sessions":[`, "{}", "]}"), list},
		"sessions again":     {"GET /v1/sessions", many(`{`, `"sessions":[{}]`, "}"), list},
		"arguments":          {"GET /v1/sessions", many(`{"sessions":[{"command":[`, `""`, "]}]}"), list},
		"levels":             {"GET /v1/sessions", strings.Repeat(`{"a":[`, size/6), list},
		"one long string":    {"GET /v1/sessions", `{"sessions":[{"id":"` + strings.Repeat("a", size) + `"}]}`, list},
		"many strings":       {"GET /v1/sessions", many(`{"sessions":[{"command":[`, `"`+strings.Repeat("b", 900)+`"`, "]}]}"), list},
		"unknown fields":     {"GET /v1/sessions", many(`{"x":[`, `{"y":1}`, "]}"), list},
		"many names":         {"GET /v1/sessions", many(`{`, `"`+strings.Repeat("n", 20)+`":1`, "}"), list},
		"processes":          {"GET /v1/processes", many(`{"processes":[`, "{}", "]}"), processes},
		"a long number":      {"GET /v1/processes", `{"processes":[{"pid":` + strings.Repeat("1", size) + `}]}`, processes},
		"blanks":             {"GET /v1/processes", `{"processes":[` + strings.Repeat(" ", size) + `]}`, processes},
		"one process's text": {"GET /v1/processes", `{"processes":[{"cmdline":"` + strings.Repeat(`\u0000`, size/6) + `"}]}`, processes},
	} {
		w.runner.Corrupt(ws.Sandbox.ID, says(c.route, text(c.body)))
		grown := allocated(func() { _ = c.call() }) // refused or clipped, both are fine
		t.Logf("%s: %d KiB were allocated", name, grown>>10)
		if grown > 16<<20 {
			t.Errorf("%s: an answer of %d MiB made %d MiB", name, size>>20, grown>>20)
		}
		if views, err := w.Sessions(t.Context(), project, theirs, controller.Page{Limit: 10}); err != nil || len(views) != 1 {
			t.Errorf("%s: the other project's workspace has %d sessions, %v", name, len(views), err)
		}
	}
}

// rows counts the session rows of a workspace.
func (w *world) rows(id core.WorkspaceID) int {
	w.t.Helper()
	conn, err := pgx.Connect(w.t.Context(), w.dsn)
	if err != nil {
		w.t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(w.t.Context())) }()
	var n int
	if err := conn.QueryRow(w.t.Context(), `SELECT count(*) FROM sessions WHERE workspace_id = $1`, id).Scan(&n); err != nil {
		w.t.Fatal(err)
	}
	return n
}

func inventedSessions(n int) string {
	list := make([]string, n)
	for i := range list {
		list[i] = fmt.Sprintf(`{"id":%q,"command":["x"],"state":"running"}`, core.NewID[core.SessionID]())
	}
	return `{"sessions":[` + strings.Join(list, ",") + `]}`
}

// TestInventedSessions has a guest list sessions that nobody started, new ones each time.
func TestInventedSessions(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("hostile")
	view, err := w.StartSession(t.Context(), w.project, ws.ID, controller.ExecRequest{Command: []string{"sleep", "100"}})
	if err != nil {
		t.Fatal(err)
	}
	w.runner.Corrupt(ws.Sandbox.ID, says("GET /v1/sessions", func(rw http.ResponseWriter, q *http.Request) { text(inventedSessions(400))(rw, q) }))
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			for range 5 {
				if _, err := w.Sessions(t.Context(), w.project, ws.ID, controller.Page{Limit: 1000}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	if n := w.rows(ws.ID); n > controller.MaxInherited+1 {
		t.Errorf("the guest has made %d rows", n)
	}
	if _, err := w.Session(t.Context(), w.project, view.ID, 0); err != nil {
		t.Errorf("the session that was started: %v", err)
	}
}

// TestWaitsArePaced has an agent that answers each wait at once, and one that says nothing useful of the time.
func TestWaitsArePaced(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("hostile")
	var asked atomic.Int64
	w.runner.Corrupt(ws.Sandbox.ID, says("GET /wait", func(rw http.ResponseWriter, q *http.Request) {
		asked.Add(1)
		text(`{"state":"running"}`)(rw, q)
	}))
	view, err := w.StartSession(t.Context(), w.project, ws.ID, controller.ExecRequest{Command: []string{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if _, err := w.Session(t.Context(), w.project, view.ID, 2*time.Second); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took < 1900*time.Millisecond || took > wait {
		t.Errorf("a wait of 2 s took %s", took)
	}
	if n := asked.Load(); n > 12 {
		t.Errorf("the agent was asked %d times in 2 s", n)
	}
	asked.Store(0)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if _, err := w.Exec(ctx, w.project, ws.ID, controller.ExecRequest{Command: []string{"sleep", "1000"}}); err == nil {
		t.Error("an exec ended that runs on")
	}
	if n := asked.Load(); n > 12 {
		t.Errorf("exec asked the agent %d times in 2 s", n)
	}
	// A program that should have ended long ago is not waited for, whatever the agent says.
	began = time.Now()
	_, err = w.Exec(t.Context(), w.project, ws.ID, controller.ExecRequest{Command: []string{"sleep", "1000"}, TimeoutMS: 100})
	if took := time.Since(began); core.CodeOf(err) != core.CodeGuestProtocol || took > wait {
		t.Errorf("an exec of 100 ms ended after %s: %v", took, err)
	}
}

// TestOutputOffsets has an agent claim offsets that no stream has.
func TestOutputOffsets(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("hostile")
	for _, c := range []struct{ first, end, at string }{
		{"0", "9223372036854775807", "9223372036854775807"},
		{"-9223372036854775808", "9223372036854775807", "-1"},
		{"9223372036854775807", "5", "x"},
		{"10", "5", "0"},
		{"-5", "-9223372036854775808", "-9223372036854775808"},
	} {
		w.runner.Corrupt(ws.Sandbox.ID, func(honest http.Handler) http.Handler {
			return http.HandlerFunc(func(rw http.ResponseWriter, q *http.Request) {
				switch {
				case q.Method == http.MethodPost:
					text(fmt.Sprintf(`{"state":"exited","exit_code":0,"stdout_first":%s,"stdout_bytes":%s,"stderr_first":%s,"stderr_bytes":%s}`, c.first, c.end, c.first, c.end))(rw, q)
				case strings.HasSuffix(q.URL.Path, "/output"):
					if strings.Contains(q.URL.RawQuery, "offset=-") {
						t.Errorf("asked with %s", q.URL.RawQuery)
					}
					rw.Header().Set("Coppice-Offset", c.at)
					for range 100 {
						if _, err := rw.Write(make([]byte, 64<<10)); err != nil {
							return
						}
					}
				default:
					honest.ServeHTTP(rw, q)
				}
			})
		})
		out, err := w.Exec(t.Context(), w.project, ws.ID, controller.ExecRequest{Command: []string{"true"}})
		if err != nil && core.CodeOf(err) != core.CodeGuestProtocol {
			t.Errorf("%+v: %v", c, err)
		}
		if len(out.Stdout) > controller.MaxOutput || len(out.Stderr) > controller.MaxOutput {
			t.Errorf("%+v: %d and %d bytes", c, len(out.Stdout), len(out.Stderr))
		}
	}
}

// TestSlowGuests holds many answers open at once, half sent. They have a deadline and, together, a bound in bytes.
func TestSlowGuests(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) { c.GuestCall = 10 * time.Second }) // the other project answers within it on a busy machine, too
	ws := w.create("hostile")
	project, theirs := w.other()
	half := `{"sessions":[` + strings.TrimSuffix(strings.Repeat(`{"cwd":"`+strings.Repeat("c", 3000)+`"},`, 300), ",")
	w.runner.Corrupt(ws.Sandbox.ID, says("GET /v1/sessions", func(rw http.ResponseWriter, q *http.Request) {
		text(half)(rw, q)
		_ = http.NewResponseController(rw).Flush() // the reader may have gone
		<-q.Context().Done()
	}))
	began := time.Now()
	var full, late atomic.Int64
	var group sync.WaitGroup
	for range 200 {
		group.Go(func() {
			switch _, err := w.Sessions(t.Context(), w.project, ws.ID, controller.Page{Limit: 10}); core.CodeOf(err) {
			case core.CodeGuestBusy:
				full.Add(1)
			case core.CodeGuestUnreachable, core.CodeTimedOut:
				late.Add(1)
			case core.CodeRunnerUnreachable, core.CodeDatabaseUnavailable: // a busy machine: 200 calls wait for a connection each
			default:
				t.Errorf("%v (%s)", err, core.CodeOf(err))
			}
		})
	}
	for range 20 {
		_, err := w.Sessions(t.Context(), project, theirs, controller.Page{Limit: 10})
		for (core.CodeOf(err) == core.CodeRunnerUnreachable || core.CodeOf(err) == core.CodeDatabaseUnavailable) && time.Since(began) < wait {
			_, err = w.Sessions(t.Context(), project, theirs, controller.Page{Limit: 10})
		}
		if err != nil {
			t.Errorf("the other project: %v", err)
		}
	}
	group.Wait()
	if took := time.Since(began); took > wait { // a call that has no deadline never ends
		t.Errorf("it took %s", took)
	}
	if full.Load() == 0 || late.Load() == 0 {
		t.Errorf("%d found no room, %d were late", full.Load(), late.Load())
	}
	if used := w.GuestBytes(); used != 0 {
		t.Errorf("%d bytes are held afterwards", used)
	}
}

// TestManyOutputs ends more programs at once than there is room for their outputs: each waits for it.
func TestManyOutputs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	var group sync.WaitGroup
	for range 24 {
		group.Go(func() {
			out, err := w.Exec(t.Context(), w.project, ws.ID, controller.ExecRequest{Command: []string{"fill", "1048576"}})
			if err != nil || len(out.Stdout) != controller.MaxOutput {
				t.Errorf("%d bytes, %v", len(out.Stdout), err)
			}
		})
	}
	group.Wait()
	if used := w.GuestBytes(); used != 0 {
		t.Errorf("%d bytes are held afterwards", used)
	}
}

// TestSessionRowsEnd gives a workspace more sessions than it may have rows, and then ends it.
func TestSessionRowsEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) {
		c.SessionQuota, c.SessionsKept = controller.SessionQuota{Workspace: 20, Project: 1000}, time.Millisecond
	})
	ws := w.create("main")
	first, err := w.StartSession(t.Context(), w.project, ws.ID, controller.ExecRequest{Command: []string{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	for range 60 { // each is deleted in the guest, as an agent forgets the oldest
		v, err := w.StartSession(t.Context(), w.project, ws.ID, controller.ExecRequest{Command: []string{"true"}})
		if err != nil {
			t.Fatal(err)
		}
		if err := w.DeleteSession(t.Context(), w.project, v.ID); err != nil {
			t.Fatal(err)
		}
	}
	if n := w.rows(ws.ID); n > 20 {
		t.Errorf("the workspace has %d rows", n)
	}
	if _, err := w.Session(t.Context(), w.project, first.ID, 0); err != nil {
		t.Errorf("the session that still runs: %v", err)
	}
	var refused bool
	for range 40 { // these are all there, so nothing can be forgotten
		_, err := w.StartSession(t.Context(), w.project, ws.ID, controller.ExecRequest{Command: []string{"sleep", "1000"}})
		if refused = core.CodeOf(err) == core.CodeQuotaExceeded; refused {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if n := w.rows(ws.ID); n > 20 || !refused {
		t.Errorf("%d rows, refused: %v", n, refused)
	}
	if _, err := w.Terminate(t.Context(), w.project, ws.ID, wait); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the rows go with the workspace", func() bool { // the periodic job does this once a minute
		if err := w.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
		return w.rows(ws.ID) == 0
	})
}
