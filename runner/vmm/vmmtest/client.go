package vmmtest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/vmmtest/line"
)

// silence is how long a guest may be silent before the client connects again: a guest that was just restored may first
// have to notice that its parent's host is gone.
const silence = time.Second

// client is a connection to the guest program, after the greeting.
type client struct {
	net.Conn
	lines *bufio.Reader
}

// connect dials again and again until the guest answers.
func connect(ctx context.Context, m vmm.Machine) (*client, error) {
	for {
		conn, err := m.DialAgent(ctx)
		if err != nil {
			return nil, fmt.Errorf("dial the guest: %w", err)
		}
		c := &client{conn, bufio.NewReader(conn)}
		if err = c.greet(ctx); err == nil {
			return c, nil
		}
		_ = conn.Close() // another one follows
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("the guest does not answer: %w", errors.Join(ctx.Err(), err))
		case <-m.Done():
			return nil, fmt.Errorf("the machine has ended: %+v", m.Exit())
		default:
		}
	}
}

// greet discards the guest's output up to the answer to our own greeting.
func (c *client) greet(ctx context.Context) error {
	hello := "hi " + core.Short(core.NewID[core.SessionID]())
	if err := c.SetDeadline(time.Now().Add(silence)); err != nil {
		return err
	}
	if _, err := fmt.Fprintf(c, "\n%s\n", hello); err != nil {
		return err
	}
	for ctx.Err() == nil {
		if err := c.SetDeadline(time.Now().Add(silence)); err != nil {
			return err
		}
		l, err := c.lines.ReadString('\n')
		if err != nil {
			return err
		}
		if strings.TrimSpace(l) == hello {
			return nil
		}
	}
	return context.Cause(ctx)
}

// ask sends one request and returns the answer.
func (c *client) ask(request string) (string, error) {
	if err := c.SetDeadline(time.Now().Add(Patience)); err != nil {
		return "", err
	}
	if _, err := fmt.Fprintln(c, request); err != nil {
		return "", fmt.Errorf("ask %q: %w", request, err)
	}
	l, err := c.lines.ReadString('\n')
	if err != nil {
		return "", fmt.Errorf("ask %q: %w", request, err)
	}
	l = strings.TrimSpace(l)
	if reason, failed := strings.CutPrefix(l, "error "); failed {
		return "", fmt.Errorf("ask %q: the guest says: %s", request, reason)
	}
	return l, nil
}

// try asks over its own connection, and asks again over another one if that breaks off: see DialAgent. A request that
// changes something is sent only once.
func (m *machine) try(ctx context.Context, request string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	for {
		c, err := connect(ctx, m.Machine)
		if err != nil {
			return "", err
		}
		answer, err := c.ask(request)
		_ = c.Close() // the answer is there, or never will be
		if !brokeOff(err) || changes(request) || ctx.Err() != nil {
			return answer, err
		}
		select {
		case <-m.Done():
			return answer, err
		default:
		}
	}
}

func brokeOff(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE)
}

// changes reports whether a request changes the guest.
func changes(request string) bool {
	verb, _, _ := strings.Cut(request, " ")
	return verb != "count" && verb != "read" && verb != "size"
}

func (m *machine) ask(t *testing.T, request string) string {
	t.Helper()
	answer, err := m.try(t.Context(), request)
	if err != nil {
		t.Fatalf("%v; the console ends with %q", err, end(m.Console()))
	}
	return answer
}

func (m *machine) want(t *testing.T, answer, request string) {
	t.Helper()
	if got := m.ask(t, request); got != answer {
		t.Errorf("asked %q, the guest answers %q, want %q", request, got, answer)
	}
}

func end(s string) string { return s[max(0, len(s)-500):] }

// number parses an answer that is a number.
func number(t *testing.T, s string) int64 {
	t.Helper()
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		t.Fatalf("the answer %q is not a number", s)
	}
	return n
}

// probe reads the guest program's memory from outside.
type probe struct {
	mem    *os.File // the address space of the VMM
	region memory.Region
	at     int64 // of the program's first page, in RAM
}

// newProbe finds the program's memory among the private pages. The machine is paused meanwhile and runs afterwards.
func newProbe(t *testing.T, m *machine) *probe {
	t.Helper()
	region, err := m.Memory()
	if err != nil {
		t.Fatal(err)
	}
	var found []int64
	eventually(t, "the guest program writes to its first page", func() bool {
		found = findProgram(t, m, region)
		return len(found) > 0
	})
	if len(found) > 1 {
		t.Fatalf("the guest program's first page was found at %#x, want one place", found)
	}
	return &probe{mem: open(t, fmt.Sprintf("/proc/%d/mem", region.PID), os.O_RDONLY), region: region, at: found[0]}
}

func findProgram(t *testing.T, m *machine, region memory.Region) (found []int64) {
	t.Helper()
	c, err := memory.Prepare(region)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	m.pause(t)
	if err := c.Copy(); err != nil {
		t.Fatal(err)
	}
	m.resume(t)
	err = c.Delta().Each(func(e memory.Extent, data []byte) error {
		for at := 0; at < len(data); at += memory.PageSize {
			if bytes.HasPrefix(data[at:], []byte(line.Magic)) {
				found = append(found, e.Offset+int64(at))
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// ticks reads the clock of the program.
func (p *probe) ticks(t *testing.T) uint64 {
	t.Helper()
	var b [8]byte
	if _, err := p.mem.ReadAt(b[:], int64(p.region.Addr(p.at+line.OffsetTicks))); err != nil {
		t.Fatal(err)
	}
	return binary.LittleEndian.Uint64(b[:])
}

// moves waits until the clock has moved.
func (p *probe) moves(t *testing.T) {
	t.Helper()
	start := p.ticks(t)
	eventually(t, "the guest's clock moves", func() bool { return p.ticks(t) != start })
}

// standsStill watches the clock for a while.
func (p *probe) standsStill(t *testing.T) {
	t.Helper()
	start := p.ticks(t)
	for range 20 {
		pause(t, 10*time.Millisecond)
		if now := p.ticks(t); now != start {
			t.Fatalf("the clock of a paused guest went from %d to %d", start, now)
		}
	}
}

// stops waits until the clock stands still: a signal is sent at once, and takes effect a moment later.
func (p *probe) stops(t *testing.T) {
	t.Helper()
	const looks = 20
	last, same := p.ticks(t), 0
	eventually(t, "the guest's clock stops", func() bool {
		if now := p.ticks(t); now != last {
			last, same = now, 0
		}
		same++
		return same > looks
	})
	p.standsStill(t)
}

// eventually waits until ok returns true, for states that are not announced.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(Patience); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("it never came true that %s", what)
		}
		pause(t, 5*time.Millisecond)
	}
}

// pause waits for a time in which something must not happen, or before something is checked again.
func pause(t *testing.T, d time.Duration) {
	t.Helper()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-t.Context().Done():
		t.Fatal(context.Cause(t.Context()))
	}
}

// promptly fails when do takes long.
func promptly(t *testing.T, what string, do func()) {
	t.Helper()
	start := time.Now()
	do()
	if took := time.Since(start); took > prompt {
		t.Errorf("%s took %s", what, took)
	}
}
