package pager_test

import (
	"encoding/json"
	"errors"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/sidecar"
	"github.com/coppice-dev/coppice/internal/test/testhalt"
	"github.com/coppice-dev/coppice/runner/pager"
)

// quick detects a hung pager within seconds. It must not take a working pager on a busy machine for a hung one.
var quick = sidecar.Pulse{Every: 20 * time.Millisecond, Limit: time.Second, Misses: 3}

// ensure returns another runner's client of the pager.
func (x *rig) ensure(p sidecar.Pulse) (_ *pager.Client, _ pager.Hello, fresh bool) {
	x.t.Helper()
	config, err := json.Marshal(x.cfg)
	if err != nil {
		x.t.Fatal(err)
	}
	client, fresh, err := pager.Ensure(x.t.Context(), pager.Process{Dir: x.cfg.Dir, Command: []string{os.Args[0], beAPager}, Config: config, Pulse: p})
	if err != nil {
		x.t.Fatal(err)
	}
	hello, err := client.Hello(x.t.Context())
	if err != nil {
		x.t.Fatal(err)
	}
	return client, hello, fresh
}

// TestHung: a stopped pager is detected and killed, and threads that wait in the kernel for its pages get an error.
func TestHung(t *testing.T) {
	x := newDirRig(t)
	b := memory(rand.New(rand.NewPCG(8, 1)), 2000)
	src := sourceOf(x.seal(b, nil, nil))
	x.put(pager.Image{ID: "a", Source: src}, x.part(len(b)))
	f, err := x.client.Open(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	client, hello, fresh := x.ensure(quick)
	if fresh || hello.PID != x.pid {
		t.Fatalf("another pager: %+v", hello)
	}
	heard := make(chan struct{}, 1)
	attended := make(chan error, 1)
	go func() {
		attended <- client.Attend(t.Context(), func([]pager.Status) {
			select {
			case heard <- struct{}{}:
			default:
			}
		})
	}()
	<-heard
	testhalt.Halt(t, x.pid)
	began := time.Now()
	reading := make(chan error, 1)
	go func() {
		_, err := f.ReadAt(make([]byte, len(b)), 0)
		reading <- err
	}()
	giveUp := time.After(5 * time.Minute)
	select {
	case err = <-attended:
	case <-giveUp:
		t.Fatal("a pager that stands still is attended for ever")
	}
	if !errors.Is(err, sidecar.ErrHung) || errors.Is(err, pager.ErrGone) {
		t.Errorf("it is attended: %v", err)
	}
	if took := time.Since(began); took < time.Duration(quick.Misses-1)*quick.Limit {
		t.Errorf("it took %s", took)
	}
	x.waitGone(x.pid)
	if err := <-reading; err == nil {
		t.Error("everything was read from a pager that stood still")
	}
	if client.Alive(t.Context(), hello.Instance) {
		t.Error("it is alive")
	}
	x.start()
	x.put(pager.Image{ID: "a", Source: src}, x.part(len(b)))
	wantEqual(t, x.mapped("a", len(b)), b, "the image of another pager")
}

// TestHungAlive: a runner that lost its connection asks a stopped pager only a few times.
func TestHungAlive(t *testing.T) {
	x := newDirRig(t)
	client, hello, _ := x.ensure(quick)
	testhalt.Halt(t, x.pid)
	alive := make(chan bool, 1)
	go func() { alive <- client.Alive(t.Context(), hello.Instance) }()
	giveUp := time.After(5 * time.Minute)
	select {
	case is := <-alive:
		if is {
			t.Error("a pager that stands still is alive")
		}
	case <-giveUp:
		t.Fatal("a pager that stands still is asked for ever")
	}
	x.waitGone(x.pid)
}

// TestHungBefore: a pager that was stopped before its next runner started is killed by that runner, and also by a
// runner that wants no pager.
func TestHungBefore(t *testing.T) {
	x := newDirRig(t)
	testhalt.Halt(t, x.pid)
	client, hello, fresh := x.ensure(quick)
	if !fresh || hello.PID == x.pid {
		t.Error("it is the same pager")
	}
	x.waitGone(x.pid)
	testhalt.Halt(t, hello.PID)
	if err := client.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	x.waitGone(hello.PID)
}

// TestHungNot: a pager that only pauses, as on an overloaded host, is not killed.
func TestHungNot(t *testing.T) {
	x := newDirRig(t)
	patient := sidecar.Pulse{Every: 20 * time.Millisecond, Limit: time.Second, Misses: 4}
	client, hello, _ := x.ensure(patient)
	attended := make(chan error, 1)
	go func() { attended <- client.Attend(t.Context(), func([]pager.Status) {}) }()
	for range 4 {
		goOn := testhalt.Halt(t, x.pid)
		select {
		case err := <-attended:
			t.Fatalf("it was given up: %v", err)
		case <-time.After(patient.Limit * 3 / 2):
		}
		goOn()
		<-time.After(patient.Limit / 2)
		if !client.Alive(t.Context(), hello.Instance) {
			t.Fatal("a pager that paused counts as dead")
		}
	}
}

// TestHungOther: if this process itself listens in the place of a pager, it is not killed and not waited for, whatever
// it answers.
func TestHungOther(t *testing.T) {
	x := newDirRig(t)
	client, hello, _ := x.ensure(quick)
	if err := client.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	l, err := sidecar.Listen(pager.SocketPath(x.cfg.Dir))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if !client.Alive(t.Context(), hello.Instance) {
		t.Error("a process that could not be killed counts as dead")
	}
	if _, _, err := pager.Ensure(t.Context(), pager.Process{Dir: x.cfg.Dir, Command: []string{"false"}, Pulse: quick}); err == nil {
		t.Error("who does not answer counts as a pager")
	}
}
