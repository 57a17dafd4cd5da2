//go:build linux

package sessions

import (
	"bytes"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/coder/websocket"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/guesttest"
)

// TestRunningSessionsAreBounded starts more sessions at once than may run.
func TestRunningSessionsAreBounded(t *testing.T) {
	t.Parallel()
	const beyond = 20
	a := newTestServer(t)
	var refused, started atomic.Int64
	var wg sync.WaitGroup
	for range maxRunning + beyond {
		wg.Go(func() {
			_, err := a.sessions.start(guestapi.SessionSpec{Command: []string{"cat"}, Cwd: "/", StdinOpen: true})
			switch {
			case err == nil:
				started.Add(1)
			case core.CodeOf(err) == guestapi.CodeSessionLimit:
				refused.Add(1)
			default:
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if started.Load() != maxRunning || refused.Load() != beyond || len(a.sessions.all()) != maxRunning {
		t.Fatalf("%d were started and %d refused, and %d are listed; want %d, %d, %d",
			started.Load(), refused.Load(), len(a.sessions.all()), maxRunning, beyond, maxRunning)
	}
	spec := guestapi.SessionSpec{Command: []string{"cat"}, Cwd: "/", StdinOpen: true}
	if _, err := guesttest.Ask[guestapi.Session](a, http.MethodPost, guestapi.PathSessions, spec); core.CodeOf(err) != guestapi.CodeSessionLimit {
		t.Errorf("one more: %v", err)
	}
	// Those that run go on, and one that ends makes room for one.
	one := a.sessions.all()[0].info.ID
	if _, _, err := a.Do(http.MethodPost, guesttest.Route(guestapi.PathSessionStdin, one)+"?close=1", strings.NewReader("hello")); err != nil { //nolint:bodyclose // Do has read and closed it
		t.Fatal(err)
	}
	a.AwaitEnd(one)
	if out, _ := a.ReadOutput(one, "follow=1"); out != "hello" { //nolint:bodyclose // ReadOutput has read and closed it
		t.Errorf("a session that ran meanwhile said %q", out)
	}
	a.StartSession(spec)
	if _, err := guesttest.Ask[guestapi.Session](a, http.MethodPost, guestapi.PathSessions, spec); core.CodeOf(err) != guestapi.CodeSessionLimit {
		t.Errorf("one more again: %v", err)
	}
}

// TestAdmittedTogether: no two sessions are counted before both are on the list, however many are about to start.
func TestAdmittedTogether(t *testing.T) {
	t.Parallel()
	for range 20 {
		m := New(&guesttest.Workload{}, nil)
		var admitted atomic.Int64
		var wg sync.WaitGroup
		for range 2 * maxRunning {
			wg.Go(func() {
				if _, err := m.admit(&session{info: guestapi.Session{ID: core.NewID[core.SessionID]()}, done: make(chan struct{})}); err == nil {
					admitted.Add(1)
				}
			})
		}
		wg.Wait()
		if n := admitted.Load(); n != maxRunning || len(m.list) != maxRunning {
			t.Fatalf("%d sessions were admitted, want %d", n, maxRunning)
		}
	}
}

// TestSpecificationsAreBounded: in bytes, with what the session is to read, and in arguments.
func TestSpecificationsAreBounded(t *testing.T) {
	t.Parallel()
	a := newTestServer(t)
	count := func(s guestapi.Session) string {
		t.Helper()
		a.AwaitEnd(s.ID)
		out, _ := a.ReadOutput(s.ID, "follow=1") //nolint:bodyclose // ReadOutput has read and closed it
		return strings.TrimSpace(out)
	}
	args := func(n int) guestapi.SessionSpec {
		return guestapi.SessionSpec{Command: append([]string{"sh", "-c", `echo $#`, "sh"}, strings.Split(strings.Repeat("x", n-4), "")...), Cwd: "/"}
	}
	if got := count(a.StartSession(args(maxArgs))); got != fmt.Sprint(maxArgs-4) {
		t.Errorf("the program got %s arguments, want %d", got, maxArgs-4)
	}
	if _, err := guesttest.Ask[guestapi.Session](a, http.MethodPost, guestapi.PathSessions, args(maxArgs+1)); core.CodeOf(err) != core.CodeInvalidField || !strings.Contains(err.Error(), fmt.Sprint(maxArgs+1)) {
		t.Errorf("%d arguments: %v", maxArgs+1, err)
	}

	// A body of exactly so many bytes: what the session is to read is base64, and spaces fill it up.
	body := func(size int) *bytes.Buffer {
		const head, tail, input = `{"command":["wc","-c"],"cwd":"/","stdin":"`, `"}`, maxSpecBody - 4096
		b := bytes.NewBufferString(head + strings.Repeat("AAAA", input/4) + tail)
		b.WriteString(strings.Repeat(" ", size-b.Len()))
		return b
	}
	before := len(a.sessions.all())
	if _, _, err := a.Do(http.MethodPost, guestapi.PathSessions, body(maxSpecBody+1)); core.CodeOf(err) != core.CodeBodyTooLarge { //nolint:bodyclose // Do has read and closed it
		t.Errorf("a specification of %d bytes: %v", maxSpecBody+1, err)
	}
	if n := len(a.sessions.all()); n != before {
		t.Errorf("%d sessions were started by refused requests", n-before)
	}
	if _, _, err := a.Do(http.MethodPost, guestapi.PathSessions, body(maxSpecBody)); err != nil { //nolint:bodyclose // Do has read and closed it
		t.Fatal(err)
	}
	all := a.sessions.all()
	if got, want := count(all[len(all)-1].snapshot()), fmt.Sprint((maxSpecBody-4096)/4*3); got != want {
		t.Errorf("the program read %s bytes, want %s", got, want)
	}
}

// TestAttachedFramesAreBounded: a longer frame ends the attachment, and not the session.
func TestAttachedFramesAreBounded(t *testing.T) {
	t.Parallel()
	a := newTestServer(t)
	s := a.StartSession(guestapi.SessionSpec{Command: []string{"wc", "-c"}, StdinOpen: true})
	attach := func() *websocket.Conn {
		t.Helper()
		conn, _, err := websocket.Dial(t.Context(), a.URL+guesttest.Route(guestapi.PathSessionAttach, s.ID), nil) //nolint:bodyclose // websocket.Dial leaves nothing to close
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.CloseNow() })
		return conn
	}
	for i, kind := range []websocket.MessageType{websocket.MessageBinary, websocket.MessageText} {
		conn := attach()
		if err := conn.Write(t.Context(), websocket.MessageBinary, make([]byte, maxFrame)); err != nil {
			t.Fatal(err)
		}
		// The other end may close before all of it was sent. If it did not, it would answer the second one.
		_ = conn.Write(t.Context(), kind, make([]byte, maxFrame+1))
		_ = conn.Write(t.Context(), websocket.MessageText, []byte(`{"type":"nonsense"}`))
		_, b, err := conn.Read(t.Context())
		if status := websocket.CloseStatus(err); err == nil || status != -1 && status != websocket.StatusMessageTooBig {
			t.Errorf("%d: after a frame of %d bytes the connection goes on with %q, or ends with %v", i, maxFrame+1, b, err)
		}
	}
	conn := attach()
	if err := conn.Write(t.Context(), websocket.MessageText, []byte(`{"type":"close_stdin"}`)); err != nil {
		t.Fatal(err)
	}
	a.AwaitEnd(s.ID)
	if out, _ := a.ReadOutput(s.ID, "follow=1"); strings.TrimSpace(out) != fmt.Sprint(2*maxFrame) { //nolint:bodyclose // ReadOutput has read and closed it
		t.Errorf("the session read %q bytes, want two frames of %d", out, maxFrame)
	}
}
