package egress_test

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/sidecar"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testhalt"
	"github.com/coppice-dev/coppice/runner/egress"
)

// quick finds one out that hangs in seconds. One that works, on a machine that is busy, must not be taken for one that hangs.
var quick = egress.Pulse{Every: 20 * time.Millisecond, Limit: time.Second, Misses: 3}

// process says how the rig's process is started.
func (x *rig) process(p egress.Pulse) egress.Process {
	x.t.Helper()
	config, err := json.Marshal(x.cfg)
	if err != nil {
		x.t.Fatal(err)
	}
	return egress.Process{Dir: x.cfg.Dir, Command: []string{os.Args[0], beAProcess}, Config: config, Pulse: p}
}

// ensure is another runner's client of the process.
func (x *rig) ensure(p egress.Pulse) (*egress.Client, int) {
	x.t.Helper()
	client, hello, err := egress.Ensure(x.t.Context(), x.process(p))
	if err != nil {
		x.t.Fatal(err)
	}
	return client, hello.PID
}

// TestHung: a process that stands still is found out and killed, and until another has its sandboxes nothing passes; not even what it had taken.
func TestHung(t *testing.T) {
	x := newRig(t, func(*settings) {})
	port := site(t)
	g := x.guest()
	x.put(g, 1, "tcp://a.example.com:"+port)
	c, status := connect(t, g, "a.example.com:"+port)
	if status != http.StatusOK {
		t.Fatalf("an allowed host: %d", status)
	}
	c.want(t, "hello")
	client, pid := x.ensure(quick)
	if pid != x.pid {
		t.Fatalf("another process: %d, and not %d", pid, x.pid)
	}
	attended := make(chan error, 1)
	go func() { attended <- client.Attend(t.Context()) }()

	testhalt.Halt(t, pid)
	began := time.Now()
	_ = c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	if got, err := c.say("hello"); err == nil {
		t.Errorf("a tunnel goes on while the process stands still: %q", got)
	}
	err := <-attended
	if !errors.Is(err, sidecar.ErrHung) || errors.Is(err, egress.ErrGone) {
		t.Errorf("it is attended: %v", err)
	}
	if took := time.Since(began); took < time.Duration(quick.Misses-1)*quick.Limit {
		t.Errorf("it took %s", took)
	}
	eventually.True(t, "it was killed", func() bool { s := testhalt.State(t, pid); return s == "" || s == "Z" })
	if c, err := net.DialTimeout("tcp4", g.proxy, time.Minute); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("who serves the sandbox: %v, %v", c, err)
	}

	x.start()
	g.open(t, g.proxy, guestAddr, g.names)
	x.put(g, 1, "tcp://a.example.com:"+port)
	again, _ := connect(t, g, "a.example.com:"+port)
	again.want(t, "hello")
}

// TestHungBefore: one that stands still since before its next runner came is killed by that one, and by one that wants none.
func TestHungBefore(t *testing.T) {
	x := newRig(t, func(*settings) {})
	testhalt.Halt(t, x.pid)
	client, pid := x.ensure(quick)
	if pid == x.pid {
		t.Error("it is the same process")
	}
	if s := testhalt.State(t, x.pid); s != "" && s != "Z" {
		t.Errorf("the one that stands still is %q", s)
	}
	testhalt.Halt(t, pid)
	if err := client.Stop(t.Context()); err != nil { // 15 s
		t.Error(err)
	}
	if s := testhalt.State(t, pid); s != "" && s != "Z" {
		t.Errorf("the one that was to end is %q", s)
	}
}

// TestHungNot: what only pauses, as on a host that has too much to do or was asleep, is not killed; neither is one that has ended taken for another.
func TestHungNot(t *testing.T) {
	x := newRig(t, func(*settings) {})
	patient := egress.Pulse{Every: 20 * time.Millisecond, Limit: time.Second, Misses: 4}
	client, pid := x.ensure(patient)
	ctx, stop := context.WithCancel(t.Context())
	attended := make(chan error, 1)
	go func() { attended <- client.Attend(ctx) }()
	for range 4 { // each costs an answer or two, and the next is given
		goOn := testhalt.Halt(t, pid)
		pause := time.NewTimer(patient.Limit * 3 / 2)
		select {
		case err := <-attended:
			t.Fatalf("it was given up: %v", err)
		case <-pause.C:
		}
		goOn()
		if _, err := client.Hello(t.Context()); err != nil {
			t.Fatal(err)
		}
		rest := time.NewTimer(patient.Limit / 2)
		<-rest.C
	}
	stop()
	if err := <-attended; !errors.Is(err, context.Canceled) {
		t.Errorf("it is attended: %v", err)
	}
	if h, err := client.Hello(t.Context()); err != nil || h.PID != pid {
		t.Errorf("the process is %+v, %v", h, err)
	}
	go func() { attended <- client.Attend(t.Context()) }()
	x.kill()
	if err := <-attended; !errors.Is(err, egress.ErrGone) || errors.Is(err, sidecar.ErrHung) {
		t.Errorf("one that ended: %v", err)
	}
}

// TestHungOther: who listens in the place of a process is not killed for it when that is this process itself.
func TestHungOther(t *testing.T) {
	x := newRig(t, func(*settings) {})
	x.kill()
	l, err := sidecar.Listen(egress.SocketPath(x.cfg.Dir))
	if err != nil {
		t.Fatal(err)
	}
	_, _, err = egress.Ensure(t.Context(), x.process(egress.Pulse{Limit: 50 * time.Millisecond, Misses: 2}))
	if err == nil {
		t.Error("who does not answer counts as a process")
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

// TestAlone: without a runner a process ends by itself, with everything that it carries; with one, or one that comes in time, it stays.
func TestAlone(t *testing.T) {
	const alone = 3 * time.Second
	x := newRig(t, func(c *settings) { c.Alone = alone })
	port := site(t)
	watching, leave := context.WithCancel(t.Context())
	watched := make(chan error, 1)
	go func() { watched <- x.client.Watch(watching) }()
	g := x.guest()
	x.put(g, 1, "tcp://a.example.com:"+port)
	c, _ := connect(t, g, "a.example.com:"+port)
	for range 3 { // longer than it stays without one
		wait := time.NewTimer(alone / 2)
		<-wait.C
		c.want(t, "a runner is here")
	}
	leave()
	if err := <-watched; !errors.Is(err, context.Canceled) {
		t.Errorf("it was watched: %v", err)
	}
	for range 10 { // longer, too; and each is early enough by far
		wait := time.NewTimer(alone / 8)
		<-wait.C
		if _, err := x.client.Hello(t.Context()); err != nil { // a runner that comes and goes
			t.Fatal(err)
		}
	}
	left := time.Now()
	c.want(t, "none is here, and not for long")
	if _, err := c.r.ReadByte(); err == nil {
		t.Error("the tunnel has more to say")
	}
	if stayed := time.Since(left); stayed < alone/2 || stayed > 5*time.Minute {
		t.Errorf("it stayed for %s", stayed)
	}
	eventually.True(t, "it is gone", func() bool { s := testhalt.State(t, x.pid); return s == "" || s == "Z" })
	if c, err := net.DialTimeout("tcp4", g.proxy, time.Minute); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("who serves the sandbox: %v, %v", c, err)
	}
	x.cfg.Alone = 0
	x.start() // and what it had recorded is there for its successor
	if list, _ := x.flows(0, 1); list[0].Host != "a.example.com" {
		t.Errorf("flows %+v", list)
	}
}
