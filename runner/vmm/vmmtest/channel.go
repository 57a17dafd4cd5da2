package vmmtest

import (
	"bufio"
	"fmt"
	"io/fs"
	"path/filepath"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/runner/vmm"
)

// testReconnect disconnects in the middle of requests and answers.
func testReconnect(t *testing.T, w *world) {
	t.Helper()
	m := w.fork(t, w.template)
	for i := range 10 {
		c, err := connect(t.Context(), m.Machine)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := c.ask("inc"); err != nil || got != fmt.Sprint(i+2) {
			t.Fatalf("connection %d: got %q, want %d (%v)", i, got, i+2, err)
		}
		if _, err := c.Write([]byte("sum\nsum\nco")); err != nil { // half a request, and answers that nobody reads
			t.Fatal(err)
		}
		closeAll(t, c)
	}
	// An open connection of the parent goes on after a capture; the clone needs a new one.
	c, err := connect(t.Context(), m.Machine)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("cou")); err != nil {
		t.Fatal(err)
	}
	s := m.capture(t)
	if got, err := c.ask("nt"); err != nil || got != "11" {
		t.Errorf("a request that a capture interrupts is answered by %q, want 11 (%v)", got, err)
	}
	w.fork(t, s).want(t, "11", "count")
}

func testOneConnection(t *testing.T, w *world) {
	t.Helper()
	m := w.fork(t, w.template)
	first, err := connect(t.Context(), m.Machine)
	if err != nil {
		t.Fatal(err)
	}
	if second, err := m.DialAgent(t.Context()); err == nil { // it may be refused, wait, or be answered by a greeting of its own
		if err := second.SetDeadline(time.Now().Add(300 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		served := false
		if _, err := second.Write([]byte("\nhi second\ninc\n")); err == nil {
			l, err := bufio.NewReader(second).ReadString('\n')
			served = err == nil
			if served && l != "hi second\n" {
				t.Errorf("the second connection begins with %q, which is nothing that it asked for", l)
			}
		}
		if got, err := first.ask("count"); err != nil || got != "1" && (!served || got != "2") {
			t.Errorf("the first connection has the answer %q, want 1, or 2 if the second is served (%t, %v)", got, served, err)
		}
		closeAll(t, second)
	}
	if got, err := first.ask("hi first"); err != nil || got != "hi first" {
		t.Errorf("the first connection has the answer %q (%v)", got, err)
	}
	closeAll(t, first)
	if got := number(t, m.ask(t, "count")); got > 2 { // what the second asked for may be carried out now
		t.Errorf("the count is %d", got)
	}
}

// testBabble uses a guest that sends without a request, while nobody reads.
func testBabble(t *testing.T, w *world) {
	t.Helper()
	m := w.fork(t, w.template)
	c, err := connect(t.Context(), m.Machine)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.ask("babble 2000000"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.lines.Peek(2048); err != nil { // it has begun
		t.Fatal(err)
	}
	var s *snapshot
	promptly(t, "a capture of a guest that babbles", func() { s = m.capture(t) })
	closeAll(t, c)
	// The rubbish may go on for a while, also in the child, and mix with the answers.
	for who, v := range map[string]*machine{"the parent": m, "the child": w.fork(t, s)} {
		eventually(t, who+" makes sense again", func() bool {
			got, err := v.try(t.Context(), "count")
			return err == nil && got == "1"
		})
	}
}

// testHangUpWhilePaused disconnects from a paused guest that is about to send, like a runner that dies in the middle of
// a capture. A host that connects before the guest goes on gets its answers on that very connection.
func testHangUpWhilePaused(t *testing.T, w *world) {
	t.Helper()
	m := w.fork(t, w.template)
	for range 3 {
		c, err := connect(t.Context(), m.Machine)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.ask("babble 30000"); err != nil { // the socket has room for all of it
			t.Fatal(err)
		}
		if _, err := c.lines.Peek(2048); err != nil { // it has begun
			t.Fatal(err)
		}
		m.pause(t)
		closeAll(t, c)
		conn, err := m.DialAgent(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		m.resume(t)
		next := &client{conn, bufio.NewReader(conn)}
		// The rubbish may go on for a while, and mix with the answers.
		eventually(t, "the connection that was there before the guest went on is answered", func() bool {
			if next.greet(t.Context()) != nil {
				return false
			}
			got, err := next.ask("count")
			return err == nil && got == "1"
		})
		closeAll(t, next)
	}
}

func testConsoleFlood(t *testing.T, w *world) {
	t.Helper()
	m := w.fork(t, w.template)
	m.want(t, "ok", "print 50000000")
	for has := 0; has < vmm.ConsoleBytes; { // a VMM whose serial port is emulated byte by byte takes minutes where it is emulated itself
		before := has
		eventually(t, fmt.Sprintf("the console has more than %d bytes", before), func() bool { has = len(m.Console()); return has > before })
	}
	for range 20 {
		checkConsole(t, m.Console())
		pause(t, 10*time.Millisecond)
	}
	checkFiles(t, m.Handle().Dir)
	promptly(t, "the pause of a guest that prints", func() { m.pause(t) })
	var s *snapshot
	promptly(t, "the capture of a guest that prints", func() { m.resume(t); s = m.capture(t) })
	child := w.fork(t, s)
	child.want(t, "1", "count")
	for _, v := range []*machine{m, child} {
		promptly(t, "the kill of a guest that prints", func() { v.kill(t) })
		checkConsole(t, v.ended(t).Console)
	}
}

// checkFiles fails if a guest's output reaches files of the host.
func checkFiles(t *testing.T, dir string) {
	t.Helper()
	const most = 64 << 10 // of what a driver keeps there: sockets, and a configuration
	total := int64(0)
	if err := filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err == nil {
			total += info.Size()
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if total > most {
		t.Errorf("the machine's files have %d bytes, want at most %d", total, most)
	}
}

func checkConsole(t *testing.T, s string) {
	t.Helper()
	if len(s) > vmm.ConsoleBytes {
		t.Fatalf("the console has %d bytes", len(s))
	}
	for i := range len(s) {
		if c := s[i]; c != '\n' && c != '\t' && (c < 0x20 || c > 0x7e) {
			t.Fatalf("the console has the byte %#x", c)
		}
	}
}
