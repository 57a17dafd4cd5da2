package guest_test

import (
	"context"
	"crypto/rand"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/runner/guest"
)

func entropy() []byte {
	b := make([]byte, guestapi.EntropySize)
	_, _ = rand.Read(b)
	return b
}

func quiesce(t *testing.T, c *guest.Client, id string) guestapi.QuiesceResponse {
	t.Helper()
	q, err := c.Quiesce(t.Context(), guestapi.QuiesceRequest{CaptureID: id, TimeoutMS: 10_000})
	if err != nil {
		t.Fatalf("quiesce: %v", err)
	}
	return q
}

// goOn is what the runner does with the captured machine itself.
func goOn(t *testing.T, c *guest.Client, generation string) {
	t.Helper()
	res, err := c.Reseed(t.Context(), guestapi.ReseedRequest{Entropy: entropy(), Generation: generation})
	if err != nil {
		t.Fatalf("reseed: %v", err)
	}
	if err := guest.VerifyReseed(res); err != nil {
		t.Fatal(err)
	}
	out, err := c.Release(t.Context(), guestapi.ReleaseRequest{Generation: generation})
	if err != nil {
		t.Fatalf("release: %v", err)
	}
	if out.State != guestapi.StateReleased {
		t.Errorf("released into %+v", out)
	}
}

// counter counts in memory and shows the number in a file, as fast as it can.
const counter = `
import os, mmap, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
fd = os.open("/root/count", os.O_RDWR | os.O_CREAT); os.ftruncate(fd, 8)
m = mmap.mmap(fd, 8); n = 0
print("up", flush=True)
while True:
    n += 1
    m[:8] = n.to_bytes(8, "little")
`

func startCounter(t *testing.T, c *guest.Client) {
	t.Helper()
	s := start(t, c, guestapi.SessionSpec{Command: []string{"python3", "-c", counter}})
	m := &terminal{t: t, conn: attach(t, c, s.ID)}
	m.until("up\n")
	_ = m.conn.CloseNow()
}

func testFreeze(t *testing.T, c *guest.Client) {
	t.Helper()
	startCounter(t, c)
	h, err := c.Health(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	q := quiesce(t, c, "ckpt_a")
	t.Logf("froze %d processes in %.1f ms, scan %.1f ms: %+v", q.Processes, q.FreezeMS, q.ScanMS, q.StaleProcesses)
	if q.Processes < 1 || q.Generation != h.Generation || q.CaptureID != "ckpt_a" {
		t.Errorf("unexpected answer %+v", q)
	}
	found := false
	for _, p := range q.StaleProcesses {
		found = found || p.Runtime == "python" && p.Command == "python3" && p.PID > 1
	}
	if !found {
		t.Errorf("the Python process is not reported: %+v", q.StaleProcesses)
	}
	if again := quiesce(t, c, "ckpt_a"); again.FreezeMS != q.FreezeMS {
		t.Errorf("a repeated quiesce is answered differently: %+v", again)
	}
	if h, err = c.Health(t.Context()); err != nil || h.State != guestapi.StateFrozen || h.CaptureID != "ckpt_a" {
		t.Errorf("health %+v %v", h, err)
	}
	refused := []struct {
		name string
		call func(ctx context.Context) error
		want core.Code
	}{
		{"another quiesce", func(ctx context.Context) error {
			_, err := c.Quiesce(ctx, guestapi.QuiesceRequest{CaptureID: "ckpt_b"})
			return err
		}, guestapi.CodeWrongState},
		{"release without a reseed", func(ctx context.Context) error {
			_, err := c.Release(ctx, guestapi.ReleaseRequest{Generation: h.Generation})
			return err
		}, guestapi.CodeWrongState},
		{"release of another generation", func(ctx context.Context) error {
			_, err := c.Release(ctx, guestapi.ReleaseRequest{Generation: "other"})
			return err
		}, guestapi.CodeWrongGeneration},
		{"reseed of another generation", func(ctx context.Context) error {
			_, err := c.Reseed(ctx, guestapi.ReseedRequest{Entropy: entropy(), Generation: "other"})
			return err
		}, guestapi.CodeWrongGeneration},
		{"zero entropy", func(ctx context.Context) error {
			_, err := c.Reseed(ctx, guestapi.ReseedRequest{Entropy: make([]byte, guestapi.EntropySize), Generation: h.Generation})
			return err
		}, core.CodeResealFailed},
		{"reseal to the same generation", func(ctx context.Context) error {
			_, err := c.Reseal(ctx, wantReseal(1, h.Generation))
			return err
		}, guestapi.CodeAlreadySealed},
	}
	for _, r := range refused {
		if err := r.call(t.Context()); core.CodeOf(err) != r.want {
			t.Errorf("%s: %v, want %s", r.name, err, r.want)
		}
	}

	// A user's request waits, and is done once the machine goes on.
	type result struct {
		err  error
		when time.Time
	}
	waited := make(chan result, 1)
	go func() {
		_, _, err := do(t.Context(), c, http.MethodPost, guestapi.PathSessions, strings.NewReader(`{"command":["/bin/true"]}`)) //nolint:bodyclose // do has read and closed it
		waited <- result{err, time.Now()}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, _, err := do(ctx, c, http.MethodGet, guestapi.PathProcesses, nil); !errors.Is(err, context.DeadlineExceeded) { //nolint:bodyclose // do has read and closed it
		t.Errorf("a request to a frozen guest: %v, want that it waits", err)
	}
	select {
	case r := <-waited:
		t.Errorf("a session was started in a frozen guest: %v", r.err)
	default:
	}
	before := time.Now()
	goOn(t, c, h.Generation)
	if r := <-waited; r.err != nil || r.when.Before(before) {
		t.Errorf("the waiting request: %+v", r)
	}
	if _, err := c.Release(t.Context(), guestapi.ReleaseRequest{Generation: h.Generation}); err != nil {
		t.Errorf("a repeated release: %v", err)
	}
	const look = `od -An -td8 /root/count`
	if a, b := sh(t, c, look), sh(t, c, look); a == b || a == "0" {
		t.Errorf("the counter does not go on: %s, %s", a, b)
	}
	sh(t, c, "pkill -9 python3")
}

// testNotQuiesced has a process that waits in the kernel where no signal reaches it: it writes to a file system that was
// frozen by FIFREEZE.
func testNotQuiesced(t *testing.T, c *guest.Client) {
	t.Helper()
	s := start(t, c, guestapi.SessionSpec{Command: []string{"python3", "-u", "-c", `
import fcntl, os, sys, threading
os.makedirs("/mnt/disk", exist_ok=True)
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mount(b"/dev/vdb", b"/mnt/disk", b"ext4", 0, None) == 0, os.strerror(ctypes.get_errno())
d = os.open("/mnt/disk", os.O_RDONLY)
fcntl.ioctl(d, 0xC0045877, 0)
pid = os.fork()
if pid == 0:
    os.mkdir("/mnt/disk/stuck")
    os._exit(0)
while "D" not in open(f"/proc/{pid}/stat").read().split()[2]: pass
print(pid, "stuck")
sys.stdin.readline()
fcntl.ioctl(d, 0xC0045878, 0)
os.waitpid(pid, 0)
print("thawed")
`}, StdinOpen: true})
	m := &terminal{t: t, conn: attach(t, c, s.ID)}
	m.until("stuck\n")
	pid := strings.Fields(m.seen)[0]
	_, err := c.Quiesce(t.Context(), guestapi.QuiesceRequest{CaptureID: "ckpt_c", TimeoutMS: 300})
	if core.CodeOf(err) != core.CodeNotQuiesced || !strings.Contains(err.Error(), "process "+pid+" (python3, state D") {
		t.Errorf("got %v, want NOT_QUIESCED that names %s", err, pid)
	}
	t.Logf("%v", err)
	h, err := c.Health(t.Context())
	if err != nil || h.State != guestapi.StateReleased {
		t.Errorf("health %+v %v", h, err)
	}
	m.send(2, "go\n") // everything runs again
	m.until("thawed\n")
	quiesce(t, c, "ckpt_c")
	goOn(t, c, h.Generation)
}

// testAgentRestart ends the agent: PID 1 starts another, which finds the workload that runs; and when the kernel has killed all of it,
// makes another.
func testAgentRestart(t *testing.T, v *vm, c *guest.Client) {
	t.Helper()
	startCounter(t, c)
	h, err := c.Health(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	workload := sh(t, c, "stat -L -c %i /proc/1/ns/pid")
	// The kernel's keys for "terminate all but init" and "kill all but init" reach the agent from inside.
	restart := func(key string) (*guest.Client, guestapi.Health) {
		t.Helper()
		body := strings.NewReader(`{"command":["sh","-c","trap '' TERM; echo ` + key + ` >/proc/sysrq-trigger"]}`)
		if _, _, err := do(t.Context(), c, http.MethodPost, guestapi.PathSessions, body); err != nil { //nolint:bodyclose // do closes it
			t.Logf("the answer did not come before the end: %v", err)
		}
		select {
		case <-c.Done(): // the next agent announces itself, and the host sees that the session is over
		case <-time.After(5 * time.Minute):
			t.Fatal("the host has not noticed that the agent ended")
		}
		c := v.dial()
		h, err := c.Health(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return c, h
	}
	c, h2 := restart("e")
	if h2.BootNonce == h.BootNonce || h2.Generation != h.Generation || h2.State != guestapi.StateReleased {
		t.Errorf("after a restart: %+v, before: %+v", h2, h)
	}
	if got := sh(t, c, "stat -L -c %i /proc/1/ns/pid; pgrep -c python3"); got != workload+"\n1" {
		t.Errorf("the workload is another one: %q, was %s", got, workload)
	}
	hostname := sh(t, c, "echo renamed > /etc/hostname; cat /etc/machine-id /etc/hostname")
	c, h3 := restart("i")
	if h3.BootNonce == h2.BootNonce || h3.Generation != h.Generation {
		t.Errorf("after a kill: %+v", h3)
	}
	if got := sh(t, c, "pgrep -c python3; cat /etc/machine-id /etc/hostname"); got != "0\n"+hostname {
		t.Errorf("a new workload has %q, want no Python and %q", got, hostname)
	}
}
