package prepared

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/runner/prepared/forecast"
)

const checkpointOne, checkpointTwo = core.CheckpointID("ckpt_one"), core.CheckpointID("ckpt_two")

func (o *owner) awaitReady(t *testing.T, id core.CheckpointID, n int) {
	t.Helper()
	eventually.True(t, fmt.Sprintf("%d machines of %s", n, id), func() bool {
		o.look()
		return o.Ready(id) == n
	})
}

func (o *owner) askOne(a Ask) Asked { return o.Ask([]Ask{a})[0] }

// TestAsk: machines that are asked for are made without a forecast, are replaced when they are taken, and are counted.
func TestAsk(t *testing.T) {
	t.Parallel()
	o := newOwner(t, 4)
	a := Ask{Checkpoint: checkpointOne, Count: 2, Authority: "project", Version: 1, For: time.Hour}
	first := o.askOne(a)
	o.awaitReady(t, checkpointOne, 2)
	if _, _, ok := o.Take(checkpointOne, "another", any1); ok {
		t.Error("another project took a machine")
	}
	o.set(func() { o.used = 3 })
	_, outcome, ok := o.Take(checkpointOne, "project", any1)
	if !ok {
		t.Fatal("no machine was taken")
	}
	outcome(true)
	o.awaitReady(t, checkpointOne, 2)
	got := o.askOne(a)
	want := Asked{Instance: first.Instance, Ready: 2, MemoryBytes: 2 << 20, Counts: Counts{Hits: 1, TakenCPUSeconds: 3}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("after a hit (-want +got):\n%s", diff)
	}
	o.set(func() { o.busy = true })
	for range 2 {
		if _, _, ok := o.Take(checkpointOne, "project", any1); !ok {
			t.Error("a machine that was ready was not taken")
		}
	}
	if _, _, ok := o.Take(checkpointOne, "project", any1); ok {
		t.Error("a third machine was taken")
	}
	if got := o.askOne(a).Counts.Misses; got != 1 {
		t.Errorf("%d misses", got)
	}
	o.set(func() { o.busy = false })
	o.awaitReady(t, checkpointOne, 2)
	a.Count = 0
	if got := o.askOne(a); got != (Asked{}) {
		t.Errorf("an ask that was ended: %+v", got)
	}
	o.awaitReady(t, checkpointOne, 0)
}

// TestAskEnds: an ask that is not renewed ends, and its machines with it, long before their greatest age.
func TestAskEnds(t *testing.T) {
	t.Parallel()
	o := newOwner(t, 4)
	o.askOne(Ask{Checkpoint: checkpointOne, Count: 1, Version: 1, For: 15 * time.Second})
	o.awaitReady(t, checkpointOne, 1)
	o.set(func() { o.now = o.now.Add(14 * time.Second) })
	o.awaitRound(t)
	if n := o.Ready(checkpointOne); n != 1 {
		t.Errorf("%d machines before the end", n)
	}
	o.set(func() { o.now = o.now.Add(time.Second) })
	o.awaitReady(t, checkpointOne, 0)
	o.askOne(Ask{Checkpoint: checkpointOne, Count: 1, Version: 1, For: 15 * time.Second})
	o.awaitReady(t, checkpointOne, 1)
	o.Removed(checkpointOne)
	o.awaitReady(t, checkpointOne, 0)
	o.awaitRound(t)
	if n := o.Ready(checkpointOne); n != 0 {
		t.Errorf("%d machines of a checkpoint that is gone", n)
	}
}

// TestAskGivenUp: machines that nobody takes are not made again, until they are asked for again. Those that are taken are.
func TestAskGivenUp(t *testing.T) {
	t.Parallel()
	o := newOwner(t, 4)
	a := Ask{Checkpoint: checkpointOne, Count: 1, Version: 1, For: time.Hour}
	o.askOne(a)
	o.awaitReady(t, checkpointOne, 1)
	o.set(func() { o.now = o.now.Add(time.Minute) })
	_, outcome, ok := o.Take(checkpointOne, "", any1)
	if !ok {
		t.Fatal("a machine that was asked for ended after a minute")
	}
	outcome(true)
	o.awaitReady(t, checkpointOne, 1)
	o.set(func() { o.now = o.now.Add(maxAskedAge + time.Second) })
	eventually.True(t, "the ask is given up", func() bool { return o.askOne(a).GivenUp })
	o.awaitReady(t, checkpointOne, 0)
	o.awaitRound(t)
	if n := o.Ready(checkpointOne); n != 0 {
		t.Errorf("%d machines after the ask was given up", n)
	}
	a.Version++
	if o.askOne(a).GivenUp {
		t.Error("a new ask counts as given up")
	}
	o.awaitReady(t, checkpointOne, 1)
}

// TestAskFails: a machine that cannot be made is not tried again and again.
func TestAskFails(t *testing.T) {
	t.Parallel()
	o := newOwner(t, 4)
	o.set(func() { o.fails = core.Errorf(core.Internal, core.CodeInternal, "a test") })
	a := Ask{Checkpoint: checkpointOne, Count: 1, Version: 1, For: time.Hour}
	o.askOne(a)
	paused := func() bool {
		o.Pool.mu.Lock()
		defer o.Pool.mu.Unlock()
		return !o.asks[checkpointOne].pause.IsZero()
	}
	eventually.True(t, "a pause", paused)
	o.set(func() { o.fails = nil })
	o.awaitRound(t)
	if n := o.Ready(checkpointOne); n != 0 {
		t.Errorf("%d machines in the pause", n)
	}
	o.set(func() { o.now = o.now.Add(retryAfter) })
	o.awaitReady(t, checkpointOne, 1)
}

// TestAsksShare: projects get one machine in turn, whoever asked first, and asks come before the forecast.
func TestAsksShare(t *testing.T) {
	t.Parallel()
	p := newOwner(t, 5).Pool
	p.Captured("ckpt_captured", "", "one")
	at := p.cfg.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, a := range []Ask{{checkpointOne, 9, "one", 1, 0, time.Hour}, {"ckpt_more", 9, "one", 1, 0, time.Hour}, {checkpointTwo, 2, "two", 1, 0, time.Hour}} {
		p.renew(a, at.Add(time.Duration(i)))
	}
	want := []forecast.Want{{Checkpoint: checkpointOne, Count: 3, Authority: "one"}, {Checkpoint: checkpointTwo, Count: 2, Authority: "two"}}
	if diff := cmp.Diff(want, p.wants(at)); diff != "" {
		t.Errorf("more than there is room for (-want +got):\n%s", diff)
	}
	p.renew(Ask{checkpointOne, 1, "one", 1, 0, time.Hour}, at)
	p.renew(Ask{Checkpoint: "ckpt_more"}, at)
	want = []forecast.Want{{Checkpoint: checkpointOne, Count: 1, Authority: "one"}, {Checkpoint: checkpointTwo, Count: 2, Authority: "two"}, {Checkpoint: "ckpt_captured", Count: 1, Authority: "one"}}
	if diff := cmp.Diff(want, p.wants(at)); diff != "" {
		t.Errorf("with room left (-want +got):\n%s", diff)
	}
}

// TestAskBounds: what is beyond the bounds is refused, or ignored.
func TestAskBounds(t *testing.T) {
	t.Parallel()
	p := newOwner(t, 1).Pool
	list := make([]Ask, maxAsks+1)
	for i := range list {
		list[i] = Ask{Checkpoint: core.CheckpointID(fmt.Sprint("ckpt_", i)), Count: 1, For: time.Hour}
	}
	got := p.Ask(list)
	if got[maxAsks] != (Asked{}) || got[maxAsks-1].Instance == "" {
		t.Errorf("the last asks: %+v", got[maxAsks-1:])
	}
	ask := runnerapi.PrepareAsk{CheckpointID: "ckpt_0", Count: 1, ForSeconds: 1}
	large, long := ask, ask
	large.CA, long.ForSeconds = strings.Repeat("a", maxAuthority+1), maxFor.Seconds()+1
	for name, asks := range map[string][]runnerapi.PrepareAsk{"many": slices.Repeat([]runnerapi.PrepareAsk{ask}, runnerapi.MaxPrepareAsks+1), "large": {large}, "long": {long}} {
		if _, err := p.Serve(runnerapi.Prepare{Asks: asks}); core.CodeOf(err) != core.CodeInvalidField {
			t.Errorf("%s: %v", name, err)
		}
	}
	if out, err := p.Serve(runnerapi.Prepare{Asks: []runnerapi.PrepareAsk{ask}}); err != nil || out.Max != 1 || out.Asks[0].Instance == "" {
		t.Errorf("a good one: %+v, %v", out, err)
	}
}

// TestIdlePool: a pool that keeps no machine and needs none does not look at the host.
func TestIdlePool(t *testing.T) {
	t.Parallel()
	o := newOwner(t, 4)
	o.awaitRound(t)
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.looks > 0 {
		t.Errorf("it read what the host has left %d times", o.looks)
	}
}
