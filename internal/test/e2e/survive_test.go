package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestSurvival kills the server (runner and controller in one process) again and again: at rest, in the middle of captures, in the
// middle of a fork. Its VMs live on and the next server takes them over: memory, sessions with their output, forwarded ports. A
// capture that was cut short has failed, one that was published counts, and nothing half-made is left.
func TestSurvival(t *testing.T) {
	s := newStack(t, "--warm", "1")
	ws, err := s.client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{
		Name: "survivor", Image: string(baseImage(t)), Resources: coppice.ResourcesRequest{MemoryMiB: new(256)},
	})
	if err != nil {
		t.Fatal(err)
	}
	upload(t, s, ws.ID)
	first := startWitness(t, s, ws.ID)
	counter := launch(t, s, ws.ID, "/bin/sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.1; done")
	read := newCounted(t, s, counter.ID)
	read.further()
	port, err := s.client.CreatePort(t.Context(), ws.ID, coppice.CreatePortRequest{GuestPort: 7000})
	if err != nil {
		t.Fatal(err)
	}
	pid := s.mustMachine(t, ws.ID).pid
	var path []string
	alive := func(where string) {
		t.Helper()
		if now := s.mustMachine(t, ws.ID).pid; now != pid {
			t.Fatalf("%s: its VMM is %d, was %d", where, now, pid)
		}
		path = append(path, where)
		compare(t, where, after(first, path...), step(t, s, ws.ID, where))
		read.further()
		compareAlive(t, s, ws.ID)
		exchange(t, port.Listen, "hold", "held")
	}
	alive("start")
	account := newAccount(t, s, ws.ID, pid)
	account.settle("at first")
	began := time.Now()
	s.kill(t)
	s.start(t)
	awaitState(t, s, ws.ID, coppice.WorkspaceReady)
	alive("rest")
	t.Logf("everything answers %.1f s after a kill -9", time.Since(began).Seconds())
	account.settle("after a kill -9")

	points := []string{"capture.cloned", "capture.reseeded"} // TestKillSweep kills at capture.published and fork.resealed
	if *long {
		points = append(points, "capture.frozen", "capture.published", "fork.resealed")
	}
	for _, point := range points {
		parent := workspace(t, s, ws.ID).CheckpointID
		s.killAt(t, point, func(ctx context.Context) {
			_, _ = s.client.ForkWorkspace(ctx, ws.ID, coppice.ForkWorkspaceRequest{})
		})
		began := time.Now()
		s.start(t)
		awaitState(t, s, ws.ID, coppice.WorkspaceReady)
		alive(point)
		t.Logf("killed at %s: goes on after %.1f s", point, time.Since(began).Seconds())
		head := workspace(t, s, ws.ID).CheckpointID
		whole := point == "capture.published" || point == "fork.resealed"
		if (head != parent) != whole {
			t.Errorf("killed at %s: the head was %s and is %s", point, parent, head)
		}
	}
	account.settle("after all kills")
	child := forkOne(t, s, checkpoint(t, s, ws.ID).ID)
	compare(t, "a fork after all that", after(first, path...), look(t, s, child))
	terminate(t, s, child)
	terminate(t, s, ws.ID)
}

// killAt restarts the server so that it kills itself at a point, does what leads there, and waits for the end.
func (s *stack) killAt(t *testing.T, point string, do func(context.Context)) {
	t.Helper()
	s.kill(t)
	t.Setenv("COPPICE_FAILPOINTS", point+"=kill")
	s.start(t)
	t.Setenv("COPPICE_FAILPOINTS", "")
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	go func() { <-s.ended; cancel() }()
	do(ctx)
	<-ctx.Done()
	select {
	case <-s.ended:
		s.client.Close()
	default:
		t.Fatalf("the server lives past %s", point)
	}
}

func awaitState(t *testing.T, s *stack, id coppice.WorkspaceID, want coppice.WorkspaceState) {
	t.Helper()
	until(t, fmt.Sprintf("%s is %s", id, want), func() (bool, error) {
		w, err := s.client.Workspace(t.Context(), id)
		if err == nil && w.State == coppice.WorkspaceLost {
			err = fmt.Errorf("it is lost: %+v", w.Failure)
		}
		return w.State == want, err
	})
}

// counted reads a session that prints 1, 2, 3 and so on, a line each.
type counted struct {
	t      *testing.T
	s      *stack
	id     coppice.SessionID
	offset int64
	last   int
}

func newCounted(t *testing.T, s *stack, id coppice.SessionID) *counted {
	t.Helper()
	return &counted{t: t, s: s, id: id}
}

// further reads on where it has left off, until more has come than there was at first, and misses nothing.
func (c *counted) further() {
	c.t.Helper()
	seen := c.last
	until(c.t, "the session goes on", func() (bool, error) {
		o, err := c.s.client.SessionOutput(c.t.Context(), c.id, coppice.Stdout, c.offset, false)
		if err != nil {
			return false, err
		}
		defer o.Close()
		b, err := io.ReadAll(o)
		if err != nil {
			return false, err
		}
		if o.Dropped > 0 {
			return false, fmt.Errorf("%d bytes are lost", o.Dropped)
		}
		b = b[:strings.LastIndexByte(string(b), '\n')+1]
		c.offset += int64(len(b))
		for line := range strings.Lines(string(b)) {
			c.last++
			if want := strconv.Itoa(c.last) + "\n"; line != want {
				return false, fmt.Errorf("it printed %q after %d", line, c.last-1)
			}
		}
		return c.last > seen+2, nil
	})
}

// exchange sends a line to a forwarded port and wants another back.
func exchange(t *testing.T, address, line, want string) {
	t.Helper()
	var got string
	until(t, "the port is forwarded", func() (bool, error) {
		c, err := net.DialTimeout("tcp", address, 10*time.Second)
		if err != nil {
			return false, nil // not yet
		}
		defer c.Close()
		if err := c.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
			return false, err
		}
		if _, err := io.WriteString(c, line+"\n"); err != nil {
			return false, err
		}
		got, err = bufio.NewReader(c).ReadString('\n')
		return true, err
	})
	if got != want+"\n" {
		t.Errorf("%s answered %q, want %q", address, got, want)
	}
}

// account follows what a workspace is said to have used, which is what the kernel says that its only VMM has: no runner that takes the
// machine over begins again, counts anything twice, or goes back.
type account struct {
	t    *testing.T
	s    *stack
	id   coppice.WorkspaceID
	pid  int
	last coppice.Usage
}

func newAccount(t *testing.T, s *stack, id coppice.WorkspaceID, pid int) *account {
	t.Helper()
	return &account{t: t, s: s, id: id, pid: pid}
}

// spent is the processor time of the VMM, in seconds.
func (a *account) spent() float64 {
	a.t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", a.pid))
	if err != nil {
		a.t.Fatal(err)
	}
	var ticks float64
	for _, field := range strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))[11:13] { // proc(5): 14 and 15
		n, err := strconv.ParseFloat(field, 64)
		if err != nil {
			a.t.Fatal(err)
		}
		ticks += n
	}
	return ticks / 100
}

// settle waits for a sample and compares. The first heartbeats to a server that has just started are written down at once.
func (a *account) settle(where string) {
	a.t.Helper()
	var now coppice.Usage
	until(a.t, where+" a sample of its use is there", func() (bool, error) {
		var err error
		now, err = a.s.client.WorkspaceUsage(a.t.Context(), a.id)
		return now.SampledAt.After(a.last.SampledAt), err
	})
	if now.CPUSeconds <= a.last.CPUSeconds || now.SentBytes < a.last.SentBytes || now.ReceivedBytes < a.last.ReceivedBytes {
		a.t.Errorf("%s it had used %+v, and before that %+v", where, now, a.last)
	}
	if real := a.spent(); now.CPUSeconds > real || now.CPUSeconds <= 0 {
		a.t.Errorf("%s it is said to have used the processor for %.2f s, and its VMM has for %.2f s", where, now.CPUSeconds, real)
	}
	a.t.Logf("%s: %.2f s of processor time, %d bytes sent and %d received", where, now.CPUSeconds, now.SentBytes, now.ReceivedBytes)
	a.last = now
}
