package prepared

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testleak"
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
}

func newOwner(t *testing.T, most int) *owner {
	t.Helper()
	o := &owner{now: time.Now(), dead: map[*machine]bool{}, alive: map[*machine]bool{}, ended: make(chan struct{})}
	locked := func(fn func()) {
		o.mu.Lock()
		defer o.mu.Unlock()
		fn()
	}
	o.Pool = New(Config[*machine]{
		Max: most, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
		Make: func(ctx context.Context, _ forecast.Want) (m *machine, err error) {
			var hold chan struct{}
			locked(func() { hold = o.hold })
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
			locked(func() { delete(o.alive, m) })
			return nil
		},
		Used: func(*machine) float64 { return 0 },
		Dead: func(m *machine) (dead bool) { locked(func() { dead = o.dead[m] }); return dead },
		Idle: func() (idle bool) { locked(func() { idle = !o.busy }); return idle },
		Now:  func() (now time.Time) { locked(func() { now = o.now }); return now },
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
			if m, ok := o.Take("c", any1); ok {
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
	if m, ok := o.Take("c", func(*machine) bool { return false }); ok {
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
	if m, ok := o.Take("ended", any1); ok {
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
	if m, ok := o.Take("d", any1); ok {
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
	if m, ok := o.Take("c", any1); ok {
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
	if _, ok := o.Take("c", any1); ok || len(o.forecastWants()) != 0 {
		t.Error("something is expected")
	}
}
