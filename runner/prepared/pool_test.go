package prepared

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/internal/test/testmetrics"
	"github.com/coppice-dev/coppice/runner/prepared/forecast"
)

func TestMain(m *testing.M) { testleak.Main(m) }

// machine is what the pools of these tests keep.
type machine struct{ number int }

// owner makes machines, and knows which of them there are.
type owner struct {
	*Pool[*machine]
	ended chan struct{}

	mu    sync.Mutex // guards what follows
	now   time.Time
	busy  bool
	fails error
	dead  map[*machine]bool
	made  int
	alive map[*machine]bool
	hold  chan struct{} // Make waits for it; nil: it does not
	keep  chan struct{} // TakeDown waits for it; nil: it does not
	room  Room
	any   bool // machines serve every fork

	refuses core.CheckpointID // the host has too little for its machines
	used    float64           // by each machine
	rounds  int               // times that the pool has asked whether forks are under way
	looks   int               // times that it has read what the host has left
}

// awaitRound waits until the pool has looked at the host once more, and has done what it would do then.
func (o *owner) awaitRound(t *testing.T) {
	t.Helper()
	o.mu.Lock()
	n := o.rounds
	o.mu.Unlock()
	eventually.True(t, "another round", func() bool {
		o.look()
		o.mu.Lock()
		defer o.mu.Unlock()
		return o.rounds >= n+3 // one may have begun before, and one may not have ended
	})
}

func (o *owner) isMaking() bool {
	o.Pool.mu.Lock()
	defer o.Pool.mu.Unlock()
	return o.making != nil
}

func newOwner(t *testing.T, most int) *owner {
	t.Helper()
	o := &owner{room: Room{Memory: makeMemory, Disk: 1, FreeSlots: 64, Slots: 64}, now: time.Now(), dead: map[*machine]bool{}, alive: map[*machine]bool{}, ended: make(chan struct{})}
	locked := func(fn func()) {
		o.mu.Lock()
		defer o.mu.Unlock()
		fn()
	}
	o.Pool = New(Config[*machine]{
		Max: most, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
		Make: func(ctx context.Context, want forecast.Want) (m *machine, err error) {
			var hold chan struct{}
			locked(func() {
				if hold = o.hold; o.refuses == want.Checkpoint {
					err = core.Errorf(core.Exhausted, core.CodeCapacity, "a test")
				}
			})
			if err != nil {
				return nil, err
			}
			if hold != nil {
				select {
				case <-hold:
				case <-ctx.Done():
					return nil, context.Cause(ctx)
				}
			}
			locked(func() {
				if err = o.fails; err == nil {
					o.made++
					m = &machine{o.made}
					o.alive[m] = true
				}
			})
			return m, err
		},
		TakeDown: func(_ context.Context, m *machine) error {
			var keep chan struct{}
			locked(func() { keep = o.keep })
			if keep != nil {
				<-keep
			}
			locked(func() { delete(o.alive, m) })
			return nil
		},
		Used:   func(*machine) (used float64) { locked(func() { used = o.used }); return used },
		Memory: func(*machine) int64 { return 1 << 20 },
		Dead:   func(m *machine) (dead bool) { locked(func() { dead = o.dead[m] }); return dead },
		Bound:  func(*machine) (bound bool) { locked(func() { bound = !o.any }); return bound },
		Busy:   func() (busy bool) { locked(func() { busy = o.busy; o.rounds++ }); return busy },
		Room:   func() (room Room, err error) { locked(func() { room = o.room; o.looks++ }); return room, nil },
		Now:    func() (now time.Time) { locked(func() { now = o.now }); return now },
	})
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	go func() {
		defer close(o.ended)
		o.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		if err := o.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
		<-o.ended
	})
	return o
}

func (o *owner) set(fn func()) {
	o.mu.Lock()
	fn()
	o.mu.Unlock()
	o.look()
}

func (o *owner) living() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.alive)
}

func (o *owner) await(t *testing.T, id core.CheckpointID, n int) {
	t.Helper()
	eventually.True(t, "machines are ready", func() bool { return o.Ready(id) == n })
}

func any1(*machine) bool { return true }

// TestOneTakerEach: of 500 forks that ask at the same time, as many get a machine as there are, and none gets one that another has.
func TestOneTakerEach(t *testing.T) {
	t.Parallel()
	o := newOwner(t, 40)
	o.Forked("c", 40, "")
	o.await(t, "c", 40)
	o.set(func() { o.busy = true })
	var wg sync.WaitGroup
	var mu sync.Mutex
	taken := map[*machine]int{}
	begin := make(chan struct{})
	for range 500 {
		wg.Go(func() {
			<-begin
			if m, _, ok := o.Take("c", "", any1); ok {
				mu.Lock()
				taken[m]++
				mu.Unlock()
			}
		})
	}
	close(begin)
	wg.Wait()
	if len(taken) != 40 {
		t.Errorf("%d machines were taken", len(taken))
	}
	for m, n := range taken {
		if n != 1 {
			t.Errorf("machine %d was taken by %d", m.number, n)
		}
	}
}

// TestUselessMachines: what does not fit, has ended, is too old or whose checkpoint is gone is never given out and is taken down. What was not
// taken in its time is not made again before the next fork.
func TestUselessMachines(t *testing.T) {
	t.Parallel()
	o := newOwner(t, 2)
	o.Forked("c", 2, "")
	o.await(t, "c", 2)
	o.set(func() { o.busy = true })
	if m, _, ok := o.Take("c", "", func(*machine) bool { return false }); ok {
		t.Errorf("took %v, which does not fit", m)
	}
	eventually.True(t, "they are gone", func() bool { return o.living() == 0 })

	o.set(func() { o.busy = false })
	o.Forked("ended", 2, "") // what did not fit was lost: no more are made for it before its next fork
	o.await(t, "ended", 2)
	o.set(func() {
		o.busy = true
		for m := range o.alive {
			o.dead[m] = true
		}
	})
	if m, _, ok := o.Take("ended", "", any1); ok {
		t.Errorf("took %v, which has ended", m)
	}
	eventually.True(t, "they are gone", func() bool { return o.living() == 0 })

	o.set(func() { o.busy = false })
	o.Forked("old", 2, "")
	o.await(t, "old", 2)
	o.set(func() { o.now = o.now.Add(maxAge + time.Second) })
	eventually.True(t, "they are gone", func() bool { return o.living() == 0 && o.Ready("old") == 0 })
	made := o.made
	o.look()
	o.Forked("d", 1, "")
	o.await(t, "d", 1)
	if o.Ready("c") != 0 || o.made != made+1 {
		t.Errorf("%d machines were made again", o.made-made-1)
	}
	o.Removed("d")
	if m, _, ok := o.Take("d", "", any1); ok {
		t.Errorf("took %v of a checkpoint that is gone", m)
	}
	eventually.True(t, "it is gone", func() bool { return o.living() == 0 })
}

// TestNewerFirst: a checkpoint that is more likely to be forked takes the places of others.
func TestNewerFirst(t *testing.T) {
	t.Parallel()
	o := newOwner(t, 2)
	o.Forked("old", 2, "")
	o.await(t, "old", 2)
	o.set(func() { o.now = o.now.Add(time.Second) })
	o.Captured("new", "", "")
	o.await(t, "new", 1)
	o.await(t, "old", 1)
	if n := o.living(); n != 2 {
		t.Errorf("%d machines", n)
	}
}

// TestMakeRoom: one machine after the other gives way, at last the one that is being made.
func TestMakeRoom(t *testing.T) {
	t.Parallel()
	o := newOwner(t, 2)
	o.Forked("c", 1, "")
	o.await(t, "c", 1)
	o.set(func() { o.hold, o.now = make(chan struct{}), o.now.Add(time.Second) })
	o.Forked("d", 1, "")
	making := func() bool {
		o.Pool.mu.Lock()
		defer o.Pool.mu.Unlock()
		return o.making != nil
	}
	eventually.True(t, "a machine is being made", making)
	o.set(func() { o.busy = true })
	for i := range 2 {
		if !o.MakeRoom(t.Context()) {
			t.Errorf("no room the %d. time", i+1)
		}
	}
	if o.MakeRoom(t.Context()) || o.living() != 0 || making() {
		t.Errorf("%d machines are left", o.living())
	}
}

// TestAuthorities: forks of one checkpoint with different authorities have machines of their own, and leave those of the others alone.
func TestAuthorities(t *testing.T) {
	t.Parallel()
	o := newOwner(t, 4)
	o.Forked("c", 1, "one")
	o.Forked("c", 1, "two")
	o.await(t, "c", 2)
	registry := prometheus.NewRegistry()
	registry.MustRegister(o.Collectors()...)
	if n := testmetrics.Of(t, registry)["coppice_runner_prepared_memory_bytes"]; n != 2<<20 {
		t.Errorf("two machines have %v bytes", n)
	}
	o.set(func() { o.busy = true })
	if m, _, ok := o.Take("c", "three", any1); ok {
		t.Errorf("took %v, which was made with another authority", m)
	}
	first, _, ok := o.Take("c", "one", any1)
	if !ok || o.Ready("c") != 1 {
		t.Errorf("took %v, %v; %d are left", first, ok, o.Ready("c"))
	}
	if m, _, ok := o.Take("c", "one", any1); ok {
		t.Errorf("took %v, which was made with another authority", m)
	}
	if m, _, ok := o.Take("c", "two", any1); !ok || m == first {
		t.Errorf("took %v, %v", m, ok)
	}
	o.set(func() { o.busy, o.any = false, true })
	o.Forked("d", 1, "one")
	eventually.True(t, "a machine is ready", func() bool { return o.Ready("d") == 1 })
	if _, _, ok := o.Take("d", "two", any1); !ok {
		t.Error("a machine that serves every fork was not taken")
	}
}

// awaited is a context that tells when somebody waits for its end.
type awaited struct {
	context.Context

	once sync.Once
	seen chan struct{}
}

func (a *awaited) Done() <-chan struct{} {
	a.once.Do(func() { close(a.seen) })
	return a.Context.Done()
}

// TestPlaceUnderWay: a fork that needs a place waits for the machine that is being taken down already.
func TestPlaceUnderWay(t *testing.T) {
	t.Parallel()
	o := newOwner(t, 1)
	o.Forked("c", 1, "")
	o.await(t, "c", 1)
	keep := make(chan struct{})
	o.set(func() { o.keep, o.busy = keep, true })
	o.Removed("c")
	ending := func() bool {
		o.Pool.mu.Lock()
		defer o.Pool.mu.Unlock()
		return o.ending == 1 && len(o.useless) == 0
	}
	eventually.True(t, "it is being taken down", ending)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if o.MakeRoom(ctx) {
		t.Error("there is room before the machine is gone")
	}
	waits := &awaited{Context: t.Context(), seen: make(chan struct{})}
	made := make(chan bool)
	go func() { made <- o.MakeRoom(waits) }()
	select {
	case <-made:
		t.Error("nobody waited for the machine that is being taken down")
	case <-waits.seen:
		keep <- struct{}{}
		if !<-made || o.living() != 0 {
			t.Errorf("%d machines are left", o.living())
		}
	}
	if o.MakeRoom(t.Context()) {
		t.Error("there is room where there is no machine")
	}
}

// TestPause: in a pause there is no machine, also none that was being made, and after it they are made again.
func TestPause(t *testing.T) {
	t.Parallel()
	o := newOwner(t, 2)
	o.Forked("c", 1, "")
	o.await(t, "c", 1)
	o.set(func() { o.hold = make(chan struct{}) })
	o.Forked("d", 1, "")
	making := func() bool {
		o.Pool.mu.Lock()
		defer o.Pool.mu.Unlock()
		return o.making != nil
	}
	eventually.True(t, "a machine is being made", making)
	o.Pause(true)
	o.set(func() { o.hold = nil })
	eventually.True(t, "there is none", func() bool { return o.living() == 0 && !making() })
	if o.fill(t.Context()) || o.living() != 0 {
		t.Error("a machine was made in a pause")
	}
	o.Pause(false)
	o.await(t, "c", 1)
	o.await(t, "d", 1)
}

// TestRoom: no machine is made that would leave too little, and machines end, the oldest first, when there is too little.
func TestRoom(t *testing.T) {
	t.Parallel()
	plenty := Room{Memory: makeMemory, Disk: 1, FreeSlots: 9, Slots: 64}
	for name, r := range map[string]Room{
		"memory": {Memory: makeMemory - 1, Disk: 1, FreeSlots: 9, Slots: 64},
		"disk":   {Memory: makeMemory, FreeSlots: 9, Slots: 64},
		"slots":  {Memory: makeMemory, Disk: 1, FreeSlots: 8, Slots: 64},
		"few":    {Memory: makeMemory, Disk: 1, FreeSlots: 1, Slots: 2},
	} {
		if r.another() || !plenty.another() || plenty.short() {
			t.Errorf("%s: another machine fits into %+v", name, r)
		}
	}
	for name, r := range map[string]Room{
		"memory": {Memory: keepMemory - 1, Disk: 1, FreeSlots: 9, Slots: 64},
		"disk":   {Memory: makeMemory, FreeSlots: 9, Slots: 64},
		"slots":  {Memory: makeMemory, Disk: 1, FreeSlots: 7, Slots: 64},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := newOwner(t, 2)
			o.Forked("c", 2, "")
			o.await(t, "c", 2)
			o.set(func() { o.room = r })
			eventually.True(t, "they are gone", func() bool { return o.Ready("c") == 0 && o.living() == 0 })
			o.set(func() { o.room = Room{Memory: makeMemory - 1, Disk: 1, FreeSlots: 8, Slots: 64} }) // enough to keep, too little for another
			o.set(func() { o.room = plenty })
			o.await(t, "c", 2) // what ended for this reason was not lost
		})
	}
}

// TestLittleMemory: where memory is short, no machine gives way to another one that could not be made either. What the host has too little for is
// tried again, and others are made meanwhile.
func TestLittleMemory(t *testing.T) {
	t.Parallel()
	o := newOwner(t, 1)
	o.Forked("old", 1, "")
	o.await(t, "old", 1)
	o.set(func() {
		o.room = Room{Memory: makeMemory - 1, Disk: 1, FreeSlots: 64, Slots: 64}
		o.now = o.now.Add(time.Second)
	})
	o.Forked("new", 1, "")
	for range 3 { // rounds
		o.awaitRound(t)
	}
	if o.Ready("old") != 1 || o.living() != 1 {
		t.Error("a machine gave way to one for which there was too little memory")
	}
	o.set(func() { o.room.Memory = makeMemory; o.refuses = "new" })
	o.await(t, "old", 0) // there is room, as far as the pool knows
	for range 3 {
		o.awaitRound(t)
	}
	if o.Ready("new") != 0 {
		t.Error("a machine is ready that the host had too little for")
	}
	o.set(func() { o.refuses = "" })
	o.await(t, "new", 1)
}

// TestGivesWayToFork: a machine that gave way to a fork while it was being made is made afterwards.
func TestGivesWayToFork(t *testing.T) {
	t.Parallel()
	o := newOwner(t, 1)
	o.set(func() { o.hold = make(chan struct{}) })
	o.Forked("c", 1, "")
	eventually.True(t, "a machine is being made", o.isMaking)
	if !o.MakeRoom(t.Context()) {
		t.Error("it did not give way")
	}
	o.set(func() { o.hold = nil })
	o.await(t, "c", 1)
}

// TestOutcome: a machine counts as taken when it has served its fork. One that was taken in vain is lost.
func TestOutcome(t *testing.T) {
	t.Parallel()
	o := newOwner(t, 2)
	registry := prometheus.NewRegistry()
	registry.MustRegister(o.Collectors()...)
	want := func(taken, failed float64) {
		t.Helper()
		got := testmetrics.Of(t, registry)
		if got["coppice_runner_prepared_total taken"] != taken || got["coppice_runner_prepared_total failed"] != failed {
			t.Errorf("%v", got)
		}
		if got["coppice_runner_prepared_cpu_seconds_total taken"] != taken || got["coppice_runner_prepared_cpu_seconds_total wasted"] != failed {
			t.Errorf("%v", got)
		}
	}
	o.set(func() { o.used = 1 })
	o.Forked("c", 1, "")
	o.await(t, "c", 1)
	o.set(func() { o.busy = true })
	_, outcome, ok := o.Take("c", "", any1)
	if !ok {
		t.Fatal("no machine")
	}
	want(0, 0)
	outcome(true)
	want(1, 0)
	o.Removed("c") // while the host is busy: else another machine may be made for it, which counts as wasted
	o.set(func() { o.busy = false })
	for i := range 8 { // lost in vain again and again
		o.Forked("d", 1, "")
		if len(o.forecastWants()) == 0 {
			break
		}
		if i == 7 {
			t.Error("machines are still made, although none serves a fork")
		}
		eventually.True(t, "it is ready", func() bool { return o.Ready("d") > 0 })
		_, outcome, _ := o.Take("d", "", any1)
		outcome(false)
		want(1, float64(i+1))
	}
}

// TestHungTakedown: a fork does not wait for ever for a machine that cannot be taken down.
func TestHungTakedown(t *testing.T) {
	t.Parallel()
	o := newOwner(t, 1)
	o.Forked("c", 1, "")
	o.await(t, "c", 1)
	keep := make(chan struct{})
	o.set(func() { o.keep, o.busy = keep, true })
	o.patience = time.Millisecond
	for range 2 { // it takes it down, then it finds that it is being taken down
		if o.MakeRoom(context.WithoutCancel(t.Context())) {
			t.Error("there is room before the machine is gone")
		}
	}
	close(keep)
	eventually.True(t, "it is gone", func() bool { return o.living() == 0 })
}

// TestFailures: after a failure nothing is tried before the next fork. A closed pool makes and keeps nothing.
func TestFailures(t *testing.T) {
	t.Parallel()
	o := newOwner(t, 1)
	o.set(func() { o.fails = errors.New("a test") })
	o.Forked("c", 1, "")
	eventually.True(t, "it was tried", func() bool { return len(o.forecastWants()) == 0 })
	o.set(func() { o.fails = nil })
	o.look()
	if o.Ready("c") != 0 {
		t.Error("it was tried again")
	}
	o.Forked("c", 1, "")
	o.await(t, "c", 1)
	if err := o.Close(t.Context()); err != nil || o.living() != 0 {
		t.Errorf("%d machines after the end (%v)", o.living(), err)
	}
	o.Forked("c", 1, "")
	if m, _, ok := o.Take("c", "", any1); ok {
		t.Errorf("took %v of a closed pool", m)
	}
}

func (o *owner) forecastWants() []forecast.Want {
	o.Pool.mu.Lock()
	defer o.Pool.mu.Unlock()
	return o.forecast.Wants(o.cfg.Max, o.cfg.Now())
}

// TestOff: a pool of none remembers nothing.
func TestOff(t *testing.T) {
	t.Parallel()
	o := newOwner(t, 0)
	o.Forked("c", 1, "")
	if _, _, ok := o.Take("c", "", any1); ok || len(o.forecastWants()) != 0 {
		t.Error("something is expected")
	}
}
