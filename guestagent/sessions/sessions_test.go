//go:build linux

package sessions

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coder/websocket"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/answer"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/guesttest"
	"github.com/coppice-dev/coppice/internal/test/testleak"
)

func TestMain(m *testing.M) { testleak.Main(m) }

// testServer is a server of sessions behind plain HTTP.
type testServer struct {
	*guesttest.Client
	sessions *Server
}

func newTestServer(t *testing.T) *testServer {
	t.Helper()
	s := New(&guesttest.Workload{}, func(context.Context) error { return nil })
	s.oom = func(int) {}
	mux := http.NewServeMux()
	s.Routes(func(pattern string, h answer.Handler) { mux.Handle(pattern, h) })
	c := guesttest.NewClient(t, mux)
	t.Cleanup(func() { _ = s.Close(context.WithoutCancel(t.Context())) })
	return &testServer{Client: c, sessions: s}
}

func TestSessionStreamsAndEnd(t *testing.T) {
	t.Parallel()
	a := newTestServer(t)
	s := a.StartSession(guestapi.SessionSpec{Command: []string{"sh", "-c", "echo out; echo err >&2; exit 7"}, TimeoutMS: 60_000})
	if out, res := a.ReadOutput(s.ID, "follow=1"); out != "out\n" || res.Header.Get(guestapi.HeaderOffset) != "0" || //nolint:bodyclose // ReadOutput has read and closed it
		res.Trailer.Get(guestapi.HeaderEndOffset) != "4" || res.Trailer.Get(guestapi.HeaderEOF) != "true" || res.Trailer.Get(guestapi.HeaderTruncated) != "false" {
		t.Errorf("stdout %q, header %v, trailer %v", out, res.Header, res.Trailer)
	}
	if out, _ := a.ReadOutput(s.ID, "follow=1&stream=stderr&offset=1"); out != "rr\n" { //nolint:bodyclose // ReadOutput has read and closed it
		t.Errorf("stderr from 1: %q", out)
	}
	end := a.AwaitEnd(s.ID)
	if end.ExitCode == nil || *end.ExitCode != 7 || end.TimedOut || end.StdoutBytes != 4 || end.StderrBytes != 4 || end.EndedAt.Before(end.StartedAt) {
		t.Errorf("unexpected end %+v", end)
	}
	for path, in := range map[string]any{
		guestapi.PathSessionSignal: guestapi.Signal{Signal: "TERM"}, guestapi.PathSessionStdin: "x",
	} {
		if _, err := guesttest.Ask[struct{}](a, http.MethodPost, guesttest.Route(path, s.ID), in); core.CodeOf(err) != guestapi.CodeSessionEnded {
			t.Errorf("%s of an ended session: %v", path, err)
		}
	}
}

func TestSessionRefusals(t *testing.T) {
	t.Parallel()
	a := newTestServer(t)
	id := core.NewID[core.SessionID]()
	for name, tc := range map[string]struct {
		spec guestapi.SessionSpec
		want core.Code
	}{
		"no command":       {guestapi.SessionSpec{}, core.CodeInvalidField},
		"empty program":    {guestapi.SessionSpec{Command: []string{""}}, core.CodeInvalidField},
		"NUL":              {guestapi.SessionSpec{Command: []string{"echo", "a\x00b"}}, core.CodeInvalidField},
		"bad id":           {guestapi.SessionSpec{ID: "x", Command: []string{"true"}}, core.CodeInvalidID},
		"bad env":          {guestapi.SessionSpec{Command: []string{"true"}, Env: map[string]string{"A=B": ""}}, core.CodeInvalidField},
		"negative timeout": {guestapi.SessionSpec{Command: []string{"true"}, TimeoutMS: -1}, core.CodeInvalidField},
		"unknown user":     {guestapi.SessionSpec{Command: []string{"true"}, User: "no-such-user"}, core.CodeInvalidField},
		"unknown group":    {guestapi.SessionSpec{Command: []string{"true"}, User: "root:no-such-group"}, core.CodeInvalidField},
		"no directory":     {guestapi.SessionSpec{Command: []string{"true"}, Cwd: "/no/such/dir"}, core.CodeInvalidField},
		"not found":        {guestapi.SessionSpec{Command: []string{"no-such-program"}, Cwd: "/"}, guestapi.CodeCommandNotFound},
		"a directory":      {guestapi.SessionSpec{Command: []string{"/"}, Cwd: "/"}, guestapi.CodeCommandFailed},
	} {
		if _, err := guesttest.Ask[guestapi.Session](a, http.MethodPost, guestapi.PathSessions, tc.spec); core.CodeOf(err) != tc.want {
			t.Errorf("%s: %v, want %s", name, err, tc.want)
		}
	}
	if list := guesttest.Must[guestapi.Sessions](t)(guesttest.Ask[guestapi.Sessions](a, http.MethodGet, guestapi.PathSessions, nil)); len(list.Sessions) != 0 {
		t.Errorf("refused sessions are listed: %+v", list)
	}
	a.StartSession(guestapi.SessionSpec{ID: id, Command: []string{"true"}})
	if _, err := guesttest.Ask[guestapi.Session](a, http.MethodPost, guestapi.PathSessions, guestapi.SessionSpec{ID: id, Command: []string{"true"}}); core.CodeOf(err) != guestapi.CodeSessionExists {
		t.Errorf("a repeated id: %v", err)
	}
	for path, want := range map[string]core.Code{
		guesttest.Route(guestapi.PathSession, "sess_x"):                  core.CodeSessionNotFound,
		guesttest.Route(guestapi.PathSessionOutput, id) + "?offset=-1":   core.CodeInvalidField,
		guesttest.Route(guestapi.PathSessionOutput, id) + "?stream=both": core.CodeInvalidField,
	} {
		if _, _, err := a.Do(http.MethodGet, path, nil); core.CodeOf(err) != want { //nolint:bodyclose // Do has read and closed it
			t.Errorf("%s: %v, want %s", path, err, want)
		}
	}
	if _, _, err := a.Do(http.MethodPost, guestapi.PathSessions, strings.NewReader("{")); core.CodeOf(err) != core.CodeMalformedBody { //nolint:bodyclose // Do has read and closed it
		t.Errorf("half a body: %v", err)
	}
	if _, _, err := a.Do(http.MethodPost, guesttest.Route(guestapi.PathSessionSignal, id), bytes.NewReader(make([]byte, answer.MaxControlBody+1))); core.CodeOf(err) != core.CodeBodyTooLarge { //nolint:bodyclose // Do has read and closed it
		t.Errorf("a large body: %v", err)
	}
}

func TestSessionTimeoutKillsTheWholeSession(t *testing.T) {
	t.Parallel()
	a := newTestServer(t)
	s := a.StartSession(guestapi.SessionSpec{Command: []string{"sh", "-c", "trap '' TERM; sleep 1000 & sleep 1001"}, TimeoutMS: 100})
	end := a.AwaitEnd(s.ID)
	if !end.TimedOut || end.Signal != "SIGKILL" || *end.ExitCode != 137 {
		t.Errorf("unexpected end %+v", end)
	}
	// The pipe closes only when the last process is dead.
	if _, res := a.ReadOutput(s.ID, "follow=1"); res.Trailer.Get(guestapi.HeaderEOF) != "true" { //nolint:bodyclose // ReadOutput has read and closed it
		t.Error("the output has not ended")
	}
}

func TestSessionLimit(t *testing.T) {
	t.Parallel()
	a := newTestServer(t)
	for range maxEnded + 20 {
		a.AwaitEnd(a.StartSession(guestapi.SessionSpec{Command: []string{"true"}}).ID)
	}
	if n := len(a.sessions.all()); n > maxEnded+1 {
		t.Errorf("%d ended sessions are kept, want at most %d", n, maxEnded)
	}
}

func TestLargeOutputIsWhole(t *testing.T) {
	t.Parallel()
	a := newTestServer(t)
	const mib = 40
	s := a.StartSession(guestapi.SessionSpec{Command: []string{"sh", "-c", fmt.Sprintf("yes 0123456789abcde | head -c %d", mib<<20)}})
	sum := sha256.New()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, a.URL+guesttest.Route(guestapi.PathSessionOutput, s.ID)+"?follow=1", nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	n, err := io.Copy(sum, res.Body)
	if err != nil || n != mib<<20 || res.Trailer.Get(guestapi.HeaderTruncated) != "false" {
		t.Fatalf("got %d bytes (%v), trailer %v", n, err, res.Trailer)
	}
	want := sha256.Sum256(bytes.Repeat([]byte("0123456789abcde\n"), mib<<16))
	if got := hex.EncodeToString(sum.Sum(nil)); got != hex.EncodeToString(want[:]) {
		t.Error("the output is not what was written")
	}
	if used := a.sessions.budget.used.Load(); used > 2*(outputLimit+4*chunkSize) {
		t.Errorf("%d bytes are kept of one session", used)
	}
}

func TestStdinBlocksAndIsGivenUp(t *testing.T) {
	t.Parallel()
	a := newTestServer(t)
	s := a.StartSession(guestapi.SessionSpec{Command: []string{"sleep", "1000"}, StdinOpen: true})
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, a.URL+guesttest.Route(guestapi.PathSessionStdin, s.ID), bytes.NewReader(make([]byte, 1<<20)))
	if err != nil {
		t.Fatal(err)
	}
	if res, err := http.DefaultTransport.RoundTrip(req); err == nil {
		_ = res.Body.Close()
		t.Fatal("a megabyte went to a process that does not read")
	}
	// The session then accepts the next input as usual, up to its end.
	done := make(chan error, 1)
	go func() {
		_, _, err := a.Do(http.MethodPost, guesttest.Route(guestapi.PathSessionStdin, s.ID), bytes.NewReader(make([]byte, 1<<20))) //nolint:bodyclose // Do has read and closed it
		done <- err
	}()
	if _, err := guesttest.Ask[struct{}](a, http.MethodDelete, guesttest.Route(guestapi.PathSession, s.ID), nil); err != nil {
		t.Fatal(err)
	}
	if err := <-done; core.CodeOf(err) != guestapi.CodeSessionEnded && core.CodeOf(err) != core.CodeSessionNotFound {
		t.Errorf("stdin of a session that was deleted meanwhile: %v", err)
	}
}

func TestAttach(t *testing.T) {
	t.Parallel()
	a := newTestServer(t)
	s := a.StartSession(guestapi.SessionSpec{Command: []string{"sh", "-c", "read x; echo got $x; echo e >&2; cat; exit 3"}, StdinOpen: true})
	conn, _, err := websocket.Dial(t.Context(), a.URL+guesttest.Route(guestapi.PathSessionAttach, s.ID), nil) //nolint:bodyclose // websocket.Dial leaves nothing to close
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.CloseNow() }()
	send := func(kind websocket.MessageType, text string) {
		t.Helper()
		if err := conn.Write(t.Context(), kind, []byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	send(websocket.MessageText, `{"type":"resize","cols":1,"rows":1}`)
	send(websocket.MessageText, `{"type":"nonsense"}`)
	send(websocket.MessageBinary, "hello\nmore")
	send(websocket.MessageText, `{"type":"close_stdin"}`)
	var texts, out, stderr []string
	for {
		kind, b, err := conn.Read(t.Context())
		if err != nil {
			if websocket.CloseStatus(err) != websocket.StatusNormalClosure {
				t.Errorf("the connection ended with %v", err)
			}
			break
		}
		switch {
		case kind == websocket.MessageText:
			texts = append(texts, string(b))
		case b[0] == guestapi.AttachStdout:
			out = append(out, string(b[guestapi.AttachHeadLen:]))
		default:
			stderr = append(stderr, string(b[guestapi.AttachHeadLen:]))
		}
	}
	if got := strings.Join(out, ""); got != "got hello\nmore" || strings.Join(stderr, "") != "e\n" {
		t.Errorf("stdout %q, stderr %q", got, stderr)
	}
	if len(texts) != 3 || !strings.Contains(texts[0], "no terminal") || !strings.Contains(texts[1], "nonsense") || !strings.Contains(texts[2], `"exit_code":3`) {
		t.Errorf("messages %q", texts)
	}
}

// feed puts bytes into an output like a process.
func feed(o *output, b []byte) {
	o.readMu.Lock()
	defer o.readMu.Unlock()
	o.mu.Lock()
	defer o.mu.Unlock()
	for len(b) > 0 {
		if len(o.chunks) == 0 || len(o.chunks[len(o.chunks)-1]) == chunkSize {
			o.chunks = append(o.chunks, make([]byte, 0, chunkSize))
			o.budget.used.Add(chunkSize)
		}
		last := &o.chunks[len(o.chunks)-1]
		n := min(len(b), chunkSize-len(*last))
		*last = append(*last, b[:n]...)
		b, o.next = b[n:], o.next+int64(n)
		o.trim()
	}
	o.changed()
}

func TestOutputDropsTheOldestWithoutFollowers(t *testing.T) {
	t.Parallel()
	b := &outputBudget{limit: 64 << 20}
	o := newOutput(b, time.Time{})
	block := bytes.Repeat([]byte{7}, 100_000)
	for range 50 {
		feed(o, block)
	}
	first, next := o.numbers()
	if next != 5_000_000 || next-first < outputLimit || next-first > outputLimit+2*chunkSize {
		t.Fatalf("kept %d to %d", first, next)
	}
	f := o.peek(10)
	p := make([]byte, 100)
	got, err := f.read(t.Context(), p, false)
	if err != nil || got.n != 100 || got.at != first || got.dropped != first-10 {
		t.Errorf("a read of what was dropped: %+v %v", got, err)
	}
	o.close()
	o.forget()
	if b.used.Load() != 0 {
		t.Errorf("%d bytes are still counted", b.used.Load())
	}
}

func TestOutputBudget(t *testing.T) {
	t.Parallel()
	b := &outputBudget{limit: 1 << 20}
	var all []*output
	for range 40 {
		o := newOutput(b, time.Time{})
		feed(o, make([]byte, 1<<20))
		all = append(all, o)
	}
	feed(all[0], make([]byte, chunkSize)) // gives memory back at the next write
	if first, next := all[0].numbers(); next-first > outputFloor+3*chunkSize {
		t.Errorf("a stream keeps %d bytes though all are over the budget", next-first)
	}
}

// TestOutputWaitsForItsFollower checks for which readers a process waits, and how long, with a fake clock.
func TestOutputWaitsForItsFollower(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		o := newOutput(&outputBudget{limit: 64 << 20}, time.Now().Add(startGrace))
		begin := time.Now()
		fill := func(from int64) {
			for o.next-from < outputLimit {
				feed(o, make([]byte, chunkSize))
			}
		}
		fill(0)
		o.waitRoom() // no follower yet: waits for the grace time
		if waited := time.Since(begin); waited != startGrace {
			t.Errorf("waited %s for a first follower, want %s", waited, startGrace)
		}
		f := o.follow(0)
		begin = time.Now()
		o.waitRoom() // the follower does not read
		if waited := time.Since(begin); waited != stallTimeout {
			t.Errorf("waited %s for a follower that does not move, want %s", waited, stallTimeout)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			time.Sleep(time.Second) // the clock is synctest's
			if _, err := f.read(t.Context(), make([]byte, 2*chunkSize), true); err != nil {
				t.Error(err)
			}
		})
		f.moved = time.Now()
		begin = time.Now()
		o.waitRoom()
		if waited := time.Since(begin); waited != time.Second {
			t.Errorf("waited %s for a follower that reads after 1 s", waited)
		}
		wg.Wait()
		fill(f.at)
		wg.Go(func() {
			time.Sleep(time.Second) // the clock is synctest's
			f.close()
		})
		begin = time.Now()
		o.waitRoom()
		if waited := time.Since(begin); waited != time.Second {
			t.Errorf("waited %s for a follower that left after 1 s", waited)
		}
		wg.Wait()
	})
}
