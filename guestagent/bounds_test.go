//go:build linux

package guestagent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/coder/websocket"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// queue is a listener in memory; its kernel's queue has no end.
type queue struct {
	waiting chan net.Conn
	closed  chan struct{}
	once    sync.Once
	taken   atomic.Int64
}

func (q *queue) Accept() (net.Conn, error) {
	select {
	case c := <-q.waiting:
		q.taken.Add(1)
		return c, nil
	case <-q.closed:
		return nil, net.ErrClosed
	}
}

func (q *queue) Close() error {
	q.once.Do(func() { close(q.closed) })
	return nil
}

func (q *queue) Addr() net.Addr { return named("here") }

// named is a connection's address, and the connection.
type named string

func (n named) Network() string { return "memory" }
func (n named) String() string  { return string(n) }

type namedConn struct {
	net.Conn
	from named
}

func (c namedConn) RemoteAddr() net.Addr { return c.from }

func (q *queue) dial(from named) net.Conn {
	host, guest := net.Pipe()
	q.waiting <- namedConn{guest, from}
	return host
}

// TestHostsAreBounded: over vsock the agent holds the connections of maxHosts hosts. The next one waits until one of them has gone, and is
// answered then. Who is no host takes no place.
func TestHostsAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a := linkAgent(t)
		l := &queue{waiting: make(chan net.Conn, 100), closed: make(chan struct{})}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- a.serveHosts(ctx, l, func(from net.Addr) bool { return from == named("host") }) }()
		for range 3 * maxHosts { // processes of the guest
			c := l.dial("guest")
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
				t.Errorf("a process of the guest: %v, want the end of the connection", err)
			}
		}
		var hosts []net.Conn
		for range maxHosts + 2 {
			hosts = append(hosts, l.dial("host"))
		}
		taken := func(want int) {
			t.Helper()
			synctest.Wait()
			if n := int(l.taken.Load()) - 3*maxHosts; n != want {
				t.Errorf("%d hosts are served, want %d", n, want)
			}
		}
		taken(maxHosts)
		_ = hosts[0].Close()
		taken(maxHosts + 1)
		for _, i := range []int{maxHosts - 1, maxHosts} { // one who was there, and one who waited
			link, err := guestapi.Greet(ctx, hosts[i])
			if err != nil {
				t.Errorf("host %d: %v", i, err)
			} else if err := link.Close(); err != nil {
				t.Error(err)
			}
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		for _, c := range hosts {
			_ = c.Close()
		}
		for len(l.waiting) > 0 {
			_ = (<-l.waiting).Close()
		}
	})
}

// TestRunningSessionsAreBounded starts more sessions at once than may run.
func TestRunningSessionsAreBounded(t *testing.T) {
	t.Parallel()
	const beyond = 20
	a := newTestAgent(t)
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
	if _, err := ask[guestapi.Session](a, http.MethodPost, guestapi.PathSessions, spec); core.CodeOf(err) != guestapi.CodeSessionLimit {
		t.Errorf("one more: %v", err)
	}
	// Those that run go on, and one that ends makes room for one.
	one := a.sessions.all()[0].info.ID
	if _, _, err := a.do(http.MethodPost, a.route(guestapi.PathSessionStdin, one)+"?close=1", strings.NewReader("hello")); err != nil { //nolint:bodyclose // do has read and closed it
		t.Fatal(err)
	}
	a.wait(one)
	if out, _ := a.output(one, "follow=1"); out != "hello" { //nolint:bodyclose // output has read and closed it
		t.Errorf("a session that ran meanwhile said %q", out)
	}
	a.start(spec)
	if _, err := ask[guestapi.Session](a, http.MethodPost, guestapi.PathSessions, spec); core.CodeOf(err) != guestapi.CodeSessionLimit {
		t.Errorf("one more again: %v", err)
	}
}

// TestAdmittedTogether: no two sessions are counted before both are on the list, however many are about to start.
func TestAdmittedTogether(t *testing.T) {
	t.Parallel()
	for range 20 {
		m := newSessions(&plainWorkload{})
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
	a := newTestAgent(t)
	count := func(s guestapi.Session) string {
		t.Helper()
		a.wait(s.ID)
		out, _ := a.output(s.ID, "follow=1") //nolint:bodyclose // output has read and closed it
		return strings.TrimSpace(out)
	}
	args := func(n int) guestapi.SessionSpec {
		return guestapi.SessionSpec{Command: append([]string{"sh", "-c", `echo $#`, "sh"}, strings.Split(strings.Repeat("x", n-4), "")...), Cwd: "/"}
	}
	if got := count(a.start(args(maxArgs))); got != fmt.Sprint(maxArgs-4) {
		t.Errorf("the program got %s arguments, want %d", got, maxArgs-4)
	}
	if _, err := ask[guestapi.Session](a, http.MethodPost, guestapi.PathSessions, args(maxArgs+1)); core.CodeOf(err) != core.CodeInvalidField || !strings.Contains(err.Error(), fmt.Sprint(maxArgs+1)) {
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
	if _, _, err := a.do(http.MethodPost, guestapi.PathSessions, body(maxSpecBody+1)); core.CodeOf(err) != core.CodeBodyTooLarge { //nolint:bodyclose // do has read and closed it
		t.Errorf("a specification of %d bytes: %v", maxSpecBody+1, err)
	}
	if n := len(a.sessions.all()); n != before {
		t.Errorf("%d sessions were started by refused requests", n-before)
	}
	if _, _, err := a.do(http.MethodPost, guestapi.PathSessions, body(maxSpecBody)); err != nil { //nolint:bodyclose // do has read and closed it
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
	a := newTestAgent(t)
	s := a.start(guestapi.SessionSpec{Command: []string{"wc", "-c"}, StdinOpen: true})
	attach := func() *websocket.Conn {
		t.Helper()
		conn, _, err := websocket.Dial(t.Context(), a.url+a.route(guestapi.PathSessionAttach, s.ID), nil) //nolint:bodyclose // websocket.Dial leaves nothing to close
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
	a.wait(s.ID)
	if out, _ := a.output(s.ID, "follow=1"); strings.TrimSpace(out) != fmt.Sprint(2*maxFrame) { //nolint:bodyclose // output has read and closed it
		t.Errorf("the session read %q bytes, want two frames of %d", out, maxFrame)
	}
}

// crowd is a workload whose processes are what a directory says.
type crowd struct {
	plainWorkload
	dir string
}

func (c *crowd) proc() string { return c.dir }

// newCrowd makes that many processes, all alike, with a command line. The last one has a file open.
func newCrowd(t *testing.T, n int, cmdline, open string) *crowd {
	t.Helper()
	c := &crowd{dir: t.TempDir()}
	one, last := t.TempDir(), filepath.Join(c.dir, fmt.Sprint(n))
	for _, dir := range []string{one, last} {
		if err := os.MkdirAll(filepath.Join(dir, "fd"), 0o700); err != nil {
			t.Fatal(err)
		}
		for name, content := range map[string]string{
			"stat": "7 (many) S 3 4 5 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987 12345 67 1 1 1", "cmdline": cmdline,
		} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	for pid := 1; pid < n; pid++ {
		if err := os.Symlink(one, filepath.Join(c.dir, fmt.Sprint(pid))); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(open, filepath.Join(last, "fd", "3")); err != nil {
		t.Fatal(err)
	}
	return c
}

// TestProcessesAreBounded: of more processes than a list takes, the first ones are listed, and each command line is cut.
func TestProcessesAreBounded(t *testing.T) {
	t.Parallel()
	w := newCrowd(t, maxProcesses+1, strings.Repeat("x", maxCmdline)+"y", "socket:[12345]")
	for beyond := 1; beyond >= 0; beyond-- {
		list, err := listProcesses(w)
		if err != nil || len(list.Processes) != maxProcesses {
			t.Fatalf("%d beyond: %d processes are listed, want %d: %v", beyond, len(list.Processes), maxProcesses, err)
		}
		for _, p := range list.Processes {
			if p.Cmdline != strings.Repeat("x", maxCmdline) || p.Comm != "many" {
				t.Fatalf("%d beyond: process %d, %s, has a command line of %d bytes", beyond, p.PID, p.Comm, len(p.Cmdline))
			}
		}
		// Nor are more of them looked at for who listens at a port. The port is listed all the same.
		ports := []guestapi.Port{{Port: 80}}
		nameOwners(w, map[string]int{"socket:[12345]": 0}, ports)
		if found := ports[0].PID == maxProcesses+1; found != (beyond == 0) {
			t.Errorf("%d beyond: process %d listens", beyond, ports[0].PID)
		}
		if beyond == 1 { // one ends, and the last has its place
			if err := os.Remove(filepath.Join(w.dir, "1")); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestStaleProcessesAreBounded: a report names so many, and the list of the workload does not end there.
func TestStaleProcessesAreBounded(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]int{maxStale - 1: maxStale - 1, maxStale: maxStale, maxStale + 1: maxStale, maxStale + 100: maxStale} {
		w := &plainWorkload{}
		for range n {
			w.started = append(w.started, os.Getpid()) // which is Go
		}
		var s staleScanner
		if got, err := s.scan(w); err != nil || len(got) != want || len(s.running) != n || s.truncated {
			t.Errorf("of %d processes %d are named and %d listed (%v), want %d and %d", n, len(got), len(s.running), err, want, n)
		}
	}
}
