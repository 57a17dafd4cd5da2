package qemu

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// monitor is a scripted QEMU monitor.
type monitor struct {
	t    *testing.T
	conn *net.UnixConn
	in   *bufio.Reader
}

const greetingLine = `{"QMP": {"version": {"qemu": {"micro": 0, "minor": 2, "major": 7}}, "capabilities": ["oob"]}}`

// dialMonitor connects to a monitor that runs script. negotiate says that the negotiation is done before the script.
func dialMonitor(t *testing.T, negotiate bool, script func(m *monitor)) (*qmp, error) {
	t.Helper()
	dir, err := os.MkdirTemp("", "qmp") //nolint:usetesting // t.TempDir is too long for the path of a unix socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: dir + "/s", Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	running.Go(func() {
		defer l.Close()
		conn, err := l.AcceptUnix()
		if err != nil {
			return
		}
		defer conn.Close()
		m := &monitor{t, conn, bufio.NewReader(conn)}
		if negotiate {
			m.say(greetingLine)
			m.answer(m.command("qmp_capabilities"), "{}")
		}
		script(m)
		_, _ = io.Copy(io.Discard, m.in) // until the client closes
	})
	t.Cleanup(running.Wait)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	q, err := dialQMP(ctx, dir+"/s")
	if err != nil {
		_ = l.Close()
		return nil, err
	}
	t.Cleanup(q.close)
	return q, nil
}

func connected(t *testing.T, script func(m *monitor)) *qmp {
	t.Helper()
	q, err := dialMonitor(t, true, script)
	if err != nil {
		t.Fatal(err)
	}
	return q
}

func (m *monitor) say(format string, a ...any) {
	_, _ = fmt.Fprintf(m.conn, format+"\r\n", a...) // a client that is gone is the point of some tests
}

type request struct {
	Execute   string          `json:"execute"`
	ID        uint64          `json:"id"`
	Arguments json.RawMessage `json:"arguments"`
}

// next reads a command; false when the client is gone.
func (m *monitor) next() (request, bool) {
	l, err := m.in.ReadString('\n')
	if err != nil {
		return request{}, false
	}
	var r request
	if err := json.Unmarshal([]byte(l), &r); err != nil {
		m.t.Errorf("the client sent %q", l)
	}
	return r, true
}

func (m *monitor) command(name string) request {
	r, ok := m.next()
	if !ok || r.Execute != name {
		m.t.Errorf("the client sent %q, want %q", r.Execute, name)
	}
	return r
}

func (m *monitor) answer(r request, value string) {
	m.say(`{"return": %s, "id": %d}`, value, r.ID)
}

// echo answers every command by its name.
func (m *monitor) echo() {
	for {
		r, ok := m.next()
		if !ok {
			return
		}
		m.answer(r, fmt.Sprintf("%q", r.Execute))
	}
}

func execute(t *testing.T, q *qmp, command, want string) {
	t.Helper()
	v, err := q.execute(t.Context(), command, nil)
	if err != nil || string(v) != fmt.Sprintf("%q", want) {
		t.Errorf("%s: got %s, %v, want %q", command, v, err, want)
	}
}

func TestQMPNegotiation(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		script func(m *monitor)
		want   string
	}{
		"closes at once": {func(m *monitor) { _ = m.conn.Close() }, "closed the connection"},
		"speaks no JSON": {func(m *monitor) { m.say("220 mail.example.org ESMTP") }, "cannot be read"},
		"says too much":  {func(m *monitor) { m.say("%s", strings.Repeat("x", maxQMPLine+10)) }, "connection broke"},
		"refuses": {func(m *monitor) {
			m.say(greetingLine)
			m.say(`{"error": {"class": "GenericError", "desc": "no\u001b"}, "id": %d}`, m.command("qmp_capabilities").ID)
		}, "refused: no? (GenericError)"},
		"ends in the middle":   {func(m *monitor) { m.say(greetingLine); m.command("qmp_capabilities"); _ = m.conn.Close() }, "closed the connection"},
		"sends the wrong type": {func(m *monitor) { m.say(`{"QMP": {}, "id": "three"}`) }, "cannot be read"},
	} {
		if _, err := dialMonitor(t, false, c.script); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("a monitor that %s: got %v, want %q", name, err, c.want)
		}
	}
}

func TestQMPSilentMonitor(t *testing.T) {
	t.Parallel()
	cause := errors.New("cause")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: "@coppice-qmp-" + core.Short(core.NewID[core.SandboxID]()), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeoutCause(t.Context(), 50*time.Millisecond, cause)
	defer cancel()
	if _, err := dialQMP(ctx, l.Addr().String()); !errors.Is(err, cause) {
		t.Errorf("got %v, want the cause", err)
	}
}

func TestQMPFlood(t *testing.T) {
	t.Parallel()
	q := connected(t, func(m *monitor) {
		r := m.command("stop")
		for i := range 4000 { // no caller waits for these
			m.say(`{"event": "RTC_CHANGE", "data": {"offset": %d}, "timestamp": {"seconds": 1, "microseconds": 2}}`, i)
			m.say(`{"event": "MIGRATION", "data": {"status": "setup"}}`)
			m.say(`{"return": "of nothing"}`)
			m.say(`{"return": "of another", "id": %d}`, r.ID+uint64(i)+1)
			m.say(`{"error": {"class": "GenericError", "desc": "of nothing"}}`)
			m.say(`{}`)
		}
		m.answer(r, `"stop"`)
		m.answer(r, `"twice"`)
		m.echo()
	})
	execute(t, q, "stop", "stop")
	execute(t, q, "cont", "cont")
	if n := len(q.events); n > eventBacklog {
		t.Errorf("%d events are kept", n)
	}
}

// TestQMPGivenUp abandons a command; its answer must not be taken for the answer to the next one.
func TestQMPGivenUp(t *testing.T) {
	t.Parallel()
	late := make(chan struct{})
	q := connected(t, func(m *monitor) {
		r := m.command("slow")
		<-late
		m.answer(r, `"slow"`)
		m.echo()
	})
	cause := errors.New("cause")
	ctx, cancel := context.WithCancelCause(t.Context())
	time.AfterFunc(20*time.Millisecond, func() { cancel(cause) })
	if _, err := q.execute(ctx, "slow", nil); !errors.Is(err, cause) {
		t.Errorf("got %v, want the cause", err)
	}
	if _, err := q.execute(ctx, "never sent", nil); !errors.Is(err, cause) {
		t.Errorf("got %v, want the cause", err)
	}
	time.AfterFunc(20*time.Millisecond, func() { close(late) })
	for _, name := range []string{"one", "two", "three"} {
		execute(t, q, name, name)
	}
}

// TestQMPTurns has several callers at once: each gets the answer to its own command, and a caller that waits for its
// turn can give up.
func TestQMPTurns(t *testing.T) {
	t.Parallel()
	q := connected(t, func(m *monitor) { m.echo() })
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for j := range 50 {
				name := fmt.Sprintf("c%d-%d", i, j)
				execute(t, q, name, name)
			}
		})
	}
	wg.Wait()

	began := make(chan struct{})
	stuck := connected(t, func(m *monitor) { m.command("stuck"); close(began) })
	first, cancelFirst := context.WithCancel(t.Context())
	wg.Go(func() { _, _ = stuck.execute(first, "stuck", nil) })
	<-began
	cause := errors.New("cause")
	ctx, cancel := context.WithTimeoutCause(t.Context(), 50*time.Millisecond, cause)
	defer cancel()
	if _, err := stuck.execute(ctx, "another", nil); !errors.Is(err, cause) {
		t.Errorf("got %v, want the cause", err)
	}
	cancelFirst()
	wg.Wait()
}

func TestQMPEnds(t *testing.T) {
	t.Parallel()
	for name, script := range map[string]func(m *monitor){
		"closes":         func(m *monitor) { m.command("stop"); _ = m.conn.Close() },
		"sends rubbish":  func(m *monitor) { m.command("stop"); m.say("\x00\xff{{{") },
		"sends too much": func(m *monitor) { m.command("stop"); m.say("%s", strings.Repeat("[", 2*maxQMPLine)) },
	} {
		q := connected(t, script)
		for _, command := range []string{"stop", "cont"} {
			if _, err := q.execute(t.Context(), command, nil); !errors.Is(err, vmm.ErrGone) {
				t.Errorf("a monitor that %s: %s: got %v, want ErrGone", name, command, err)
			}
		}
		if err := q.awaitMigration(t.Context()); !errors.Is(err, vmm.ErrGone) {
			t.Errorf("a monitor that %s: got %v, want ErrGone", name, err)
		}
	}
}

// TestQMPLastWords: messages that arrive just before the end count.
func TestQMPLastWords(t *testing.T) {
	t.Parallel()
	for range 20 {
		q := connected(t, func(m *monitor) {
			m.say(`{"event": "MIGRATION", "data": {"status": "failed"}}`)
			m.answer(m.command("stop"), `"stop"`)
			_ = m.conn.Close()
		})
		execute(t, q, "stop", "stop")
		<-q.ended
		if err := q.awaitMigration(t.Context()); core.CategoryOf(err) != core.DataLoss {
			t.Fatalf("got %v, want that the load failed", err)
		}
	}
}

func TestQMPMigration(t *testing.T) {
	t.Parallel()
	event := func(status string) string {
		return fmt.Sprintf(`{"event": "MIGRATION", "data": {"status": %q}}`, status)
	}
	for name, c := range map[string]struct {
		events []string
		want   string // "" for success
	}{
		"completes":   {[]string{event("setup"), event("active"), event("completed")}, ""},
		"fails":       {[]string{event("setup"), event("active"), event("failed")}, "could not load"},
		"is given up": {[]string{event("cancelled")}, "could not load"},
		"is strange":  {[]string{`{"event": "MIGRATION", "data": {"status": 7}}`}, "cannot be read"},
	} {
		q := connected(t, func(m *monitor) {
			for _, e := range c.events {
				m.say("%s", e)
			}
		})
		if err := q.awaitMigration(t.Context()); (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("a load that %s: got %v, want %q", name, err, c.want)
		}
	}
	cause := errors.New("cause")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	if err := connected(t, func(*monitor) {}).awaitMigration(ctx); !errors.Is(err, cause) {
		t.Errorf("got %v, want the cause", err)
	}
}

// TestQMPDescriptors passes files with a command.
func TestQMPDescriptors(t *testing.T) {
	t.Parallel()
	content := make(chan string, 1)
	q := connected(t, func(m *monitor) {
		b, rights := make([]byte, 1024), make([]byte, 1024)
		n, oob, _, _, err := m.conn.ReadMsgUnix(b, rights)
		if err != nil {
			t.Error(err)
			return
		}
		messages, err := unix.ParseSocketControlMessage(rights[:oob])
		if err != nil || len(messages) != 1 {
			t.Errorf("got %d control messages, %v", len(messages), err)
			return
		}
		fds, err := unix.ParseUnixRights(&messages[0])
		if err != nil || len(fds) != 1 {
			t.Errorf("got the descriptors %v, %v", fds, err)
			return
		}
		f := os.NewFile(uintptr(fds[0]), "passed")
		defer f.Close()
		got, err := io.ReadAll(f)
		if err != nil {
			t.Error(err)
		}
		content <- string(got)
		var r request
		if err := json.Unmarshal(b[:n], &r); err != nil || string(r.Arguments) != `{"fdname":"x"}` {
			t.Errorf("the client sent %q (%v)", b[:n], err)
		}
		m.answer(r, "{}")
	})
	path := t.TempDir() + "/f"
	if err := os.WriteFile(path, []byte("in the file"), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := q.execute(t.Context(), "getfd", map[string]any{"fdname": "x"}, f); err != nil {
		t.Fatal(err)
	}
	if got := <-content; got != "in the file" {
		t.Errorf("the monitor got %q", got)
	}
}
