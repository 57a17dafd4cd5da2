// Package prepared keeps machines into which a checkpoint was restored before anybody asked for a fork of it. A fork takes one of them and gives
// it its identity; the steps before that have been done (docs/adr/0055-prepared-machines.md). Package forecast says for which checkpoints. This
// package makes machines one at a time, gives each to one taker only, and takes down what was not taken. It does not know what a machine is: its
// owner makes machines and takes them down.
package prepared

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/prepared/forecast"
)

// maxAge bounds how long a machine waits, and so how old what it knows of the host can be.
const maxAge = time.Minute

// giveWayIn bounds how long a fork waits until a machine has given way to it.
const giveWayIn = 30 * time.Second

// interval is how often the pool looks for machines that are too old, and whether the host is idle.
const interval = time.Second

// Config says how many machines a pool keeps, and what its owner does. All fields are required.
type Config[Machine any] struct {
	Max int // machines at the same time; 0: none

	// Make prepares a machine. After an error nothing of it is left.
	Make     func(ctx context.Context, want forecast.Want) (Machine, error)
	TakeDown func(ctx context.Context, m Machine) error
	Used     func(m Machine) float64 // seconds of processor time
	Memory   func(m Machine) int64   // bytes that it does not share with other machines
	Dead     func(m Machine) bool    // it has ended by itself, or does not answer any more
	Bound    func(m Machine) bool    // it serves only forks with the authority that it was made with
	Busy     func() bool             // forks are under way, or no machine may be made
	Room     func() (Room, error)    // what the host has left
	Now      func() time.Time
	Log      *slog.Logger
}

// Pool keeps prepared machines. It is safe for concurrent use.
type Pool[Machine any] struct {
	cfg     Config[Machine]
	refresh chan struct{} // of size 1: look again
	metrics metrics

	mu       sync.Mutex // guards what follows
	closed   bool
	paused   bool
	forecast *forecast.Forecast
	ready    []entry[Machine] // oldest first
	useless  []entry[Machine] // to be taken down by Run
	making   *making          // nil: none is being made
	ending   int              // machines that are being taken down
	ended    chan struct{}    // closed, and replaced, when one of them is gone
	refused  map[kind]bool    // the host had too little for them in this round
	asks     map[core.CheckpointID]*ask

	patience time.Duration // of MakeRoom
}

type entry[Machine any] struct {
	kind    kind
	machine Machine
	made    time.Time
	asked   bool // it was made because it was asked for: the forecast is not told what became of it
}

// kind says which machines can take each other's place: those of one checkpoint that were made with the same authority.
type kind struct {
	checkpoint core.CheckpointID
	authority  string
}

// making is a machine that is being made.
type making struct {
	kind   kind
	cancel context.CancelFunc
	done   chan struct{} // closed when it is ready, or nothing of it is left
}

// New returns a pool without machines.
func New[Machine any](cfg Config[Machine]) *Pool[Machine] {
	return &Pool[Machine]{
		cfg: cfg, refresh: make(chan struct{}, 1), forecast: forecast.New(), metrics: newMetrics(), ended: make(chan struct{}), refused: map[kind]bool{},
		asks: map[core.CheckpointID]*ask{}, patience: giveWayIn,
	}
}

// Take takes a machine of a checkpoint out of the pool, for a fork with an authority: no other caller gets it. One that has ended or is not
// current is taken down, and counts as lost. Machines for forks with another authority stay. ok is false if there is none. The caller says with
// outcome whether the machine has served the fork.
func (p *Pool[Machine]) Take(id core.CheckpointID, authority string, current func(m Machine) bool) (m Machine, outcome func(claimed bool), ok bool) {
	if p.cfg.Max == 0 {
		return m, nil, false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, e := range slices.Backward(p.ready) { // the youngest first
		if e.kind.checkpoint != id {
			continue
		}
		usable := !p.cfg.Dead(e.machine) && current(e.machine)
		if usable && e.kind.authority != authority && p.cfg.Bound(e.machine) {
			continue
		}
		p.ready = slices.Delete(p.ready, i, i+1)
		if usable {
			used := p.cfg.Used(e.machine)
			return e.machine, func(claimed bool) { p.served(e, used, claimed) }, true
		}
		p.useless = append(p.useless, e)
		if !e.asked {
			p.forecast.Lost(id, e.kind.authority, 1, p.cfg.Now())
		}
		p.look()
	}
	p.metrics.misses.Inc()
	if a := p.askFor(kind{id, authority}); a != nil {
		a.counts.Misses++
	}
	return m, nil, false
}

// served notes whether a machine that was taken has served the fork. One that has not is lost: if it always happens, machines are no longer made.
func (p *Pool[Machine]) served(e entry[Machine], used float64, claimed bool) {
	p.note(func(f *forecast.Forecast) {
		now := p.cfg.Now()
		if a := p.askFor(e.kind); a != nil {
			a.served(used, claimed, now)
		}
		if claimed {
			p.metrics.hits.Inc()
			p.metrics.cpu.WithLabelValues("taken").Add(used)
		} else {
			p.metrics.failed.Inc()
			p.metrics.cpu.WithLabelValues("wasted").Add(used)
		}
		switch {
		case e.asked:
		case claimed:
			f.Taken(e.kind.checkpoint, e.kind.authority)
		default:
			f.Lost(e.kind.checkpoint, e.kind.authority, 1, now)
		}
	})
}

// Captured notes the capture of a checkpoint, see forecast.Forecast.
func (p *Pool[Machine]) Captured(id, parent core.CheckpointID, authority string) {
	p.note(func(f *forecast.Forecast) { f.Captured(id, parent, authority, p.cfg.Now()) })
}

// Forked notes a fork into children, after its end.
func (p *Pool[Machine]) Forked(id core.CheckpointID, children int, authority string) {
	p.note(func(f *forecast.Forecast) { f.Forked(id, children, authority, p.cfg.Now()) })
}

// Removed notes that a checkpoint is gone, and gives its machines up. It does not wait until they are taken down.
func (p *Pool[Machine]) Removed(id core.CheckpointID) {
	p.note(func(f *forecast.Forecast) {
		f.Removed(id)
		delete(p.asks, id)
		p.giveUp(func(e entry[Machine]) bool { return e.kind.checkpoint == id })
		if p.making != nil && p.making.kind.checkpoint == id {
			p.making.cancel()
		}
	})
}

// Pause begins or ends a time in which no machine is made. All machines are given up when it begins, and are not lost.
func (p *Pool[Machine]) Pause(on bool) {
	p.note(func(*forecast.Forecast) {
		if p.paused = on; !on {
			return
		}
		p.giveUp(func(entry[Machine]) bool { return true })
		if p.making != nil {
			p.making.cancel()
		}
	})
}

func (p *Pool[Machine]) note(change func(f *forecast.Forecast)) {
	if p.cfg.Max == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	change(p.forecast)
	p.look()
}

// giveUp makes machines that match useless. The caller holds mu.
func (p *Pool[Machine]) giveUp(match func(e entry[Machine]) bool) (gone []entry[Machine]) {
	p.ready = slices.DeleteFunc(p.ready, func(e entry[Machine]) bool {
		if match(e) {
			gone = append(gone, e)
			return true
		}
		return false
	})
	p.useless = append(p.useless, gone...)
	return gone
}

func (p *Pool[Machine]) look() {
	select {
	case p.refresh <- struct{}{}:
	default:
	}
}

// Run prepares machines and takes down useless ones until ctx ends.
func (p *Pool[Machine]) Run(ctx context.Context) {
	if p.cfg.Max == 0 {
		return
	}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-p.refresh:
		}
		p.endAsks()
		p.retire()
		p.clear(ctx)
		p.shrink(ctx)
		p.mu.Lock()
		clear(p.refused)
		p.mu.Unlock()
		for p.fill(ctx) {
		}
	}
}

// retire makes machines useless that have ended or are too old.
func (p *Pool[Machine]) retire() {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.cfg.Now()
	old := map[kind]int{}
	for _, e := range p.giveUp(func(e entry[Machine]) bool { return p.cfg.Dead(e.machine) || now.Sub(e.made) > e.maxAge() }) {
		if !e.asked {
			old[e.kind]++
			continue
		}
		if a := p.askFor(e.kind); a != nil {
			a.lost(now, e.made)
		}
	}
	for k, n := range old {
		p.forecast.Lost(k.checkpoint, k.authority, n, now)
	}
}

// clear takes useless machines down. One that cannot be taken down is left to the next runner.
func (p *Pool[Machine]) clear(ctx context.Context) {
	for {
		p.mu.Lock()
		e, ok := p.pop(&p.useless)
		p.mu.Unlock()
		if !ok {
			return
		}
		p.takeDown(ctx, e)
	}
}

// shrink takes machines down while the host has too little left, the oldest first. They are not lost: nobody had the time to take them.
func (p *Pool[Machine]) shrink(ctx context.Context) {
	for ctx.Err() == nil && p.any() {
		room, err := p.cfg.Room()
		if err != nil || !room.short() {
			return // what is left is not known: no machine is made either
		}
		p.mu.Lock()
		e, ok := p.pop(&p.ready)
		p.mu.Unlock()
		if !ok {
			return
		}
		p.takeDown(ctx, e)
	}
}

// pop takes the first machine from a list, to be taken down. The caller holds mu, and calls takeDown afterwards.
func (p *Pool[Machine]) pop(list *[]entry[Machine]) (e entry[Machine], ok bool) {
	if len(*list) == 0 {
		return e, false
	}
	e = (*list)[0]
	*list = slices.Delete(*list, 0, 1)
	p.ending++
	return e, true
}

// takeDown takes down a machine that counts as ending.
func (p *Pool[Machine]) takeDown(ctx context.Context, e entry[Machine]) {
	used := p.cfg.Used(e.machine)
	p.metrics.wasted.Inc()
	p.metrics.cpu.WithLabelValues("wasted").Add(used)
	err := p.cfg.TakeDown(context.WithoutCancel(ctx), e.machine)
	if err != nil {
		p.cfg.Log.ErrorContext(ctx, "prepared machine was not taken down", "checkpoint_id", e.kind.checkpoint, "err", err)
	}
	p.mu.Lock()
	if a := p.askFor(e.kind); a != nil {
		a.counts.Wasted++
		a.counts.WastedCPUSeconds += used
	}
	p.ending--
	close(p.ended)
	p.ended = make(chan struct{})
	p.mu.Unlock()
}

// fill prepares the machine that is missing most, and reports whether there may be more to do. Machines that are wanted less give way to it.
func (p *Pool[Machine]) fill(ctx context.Context) bool {
	if ctx.Err() != nil || p.cfg.Busy() || !p.lacks() {
		return false
	}
	room, err := p.cfg.Room() // it reads files, so only when it decides something
	if err != nil {
		return false
	}
	p.mu.Lock()
	if p.closed || p.paused {
		p.mu.Unlock()
		return false
	}
	next, surplus := p.missing()
	if next == nil {
		p.mu.Unlock()
		return false
	}
	if len(p.ready) >= p.cfg.Max || !room.another() {
		if surplus == nil || room.short() || !room.Holds(0) { // the end of one machine frees a slot for certain, but too little memory or disk
			p.mu.Unlock()
			return false
		}
		first := true
		p.giveUp(func(e entry[Machine]) bool {
			gone := first && e.kind == *surplus
			first = first && !gone
			return gone
		})
		p.forecast.Replaced(p.cfg.Now())
	}
	ctx, cancel := context.WithCancel(ctx)
	m := &making{kind: kindOf(*next), cancel: cancel, done: make(chan struct{})}
	p.making = m
	p.mu.Unlock()
	defer close(m.done)
	defer cancel()
	p.clear(ctx)
	return p.add(ctx, m, *next)
}

func kindOf(w forecast.Want) kind { return kind{w.Checkpoint, w.Authority} }

// any reports whether a machine waits.
func (p *Pool[Machine]) any() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.ready) > 0
}

// lacks reports whether a machine is missing.
func (p *Pool[Machine]) lacks() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.paused {
		return false
	}
	next, _ := p.missing()
	return next != nil
}

// missing says for what a machine should be prepared, and a kind of which there are more than are wanted. The caller holds mu.
func (p *Pool[Machine]) missing() (next *forecast.Want, surplus *kind) {
	have := map[kind]int{}
	for _, e := range p.ready {
		have[e.kind]++
	}
	for _, w := range p.wants(p.cfg.Now()) {
		if have[kindOf(w)] -= w.Count; have[kindOf(w)] < 0 && next == nil && !p.refused[kindOf(w)] {
			next = &w
		}
	}
	for _, e := range p.ready {
		if have[e.kind] > 0 {
			return next, &e.kind
		}
	}
	return next, nil
}

func (p *Pool[Machine]) add(ctx context.Context, m *making, want forecast.Want) bool {
	machine, err := p.cfg.Make(ctx, want)
	p.mu.Lock()
	p.making = nil
	asked := p.askFor(m.kind)
	e := entry[Machine]{kind: m.kind, machine: machine, made: p.cfg.Now(), asked: asked != nil}
	unwanted := err != nil || p.closed || ctx.Err() != nil
	refused := err != nil && ctx.Err() == nil && core.CategoryOf(err) == core.Exhausted
	switch {
	case err != nil && ctx.Err() != nil: // it gave way
		p.metrics.wasted.Inc()
	case refused: // the host may have more left in the next round
		p.refused[m.kind] = true
	case err != nil:
		if asked != nil {
			asked.failed(p.cfg.Now())
		}
		p.forecast.Failed(want.Checkpoint, want.Authority)
		p.metrics.failed.Inc()
	case unwanted:
		p.ending++
	default:
		p.ready = append(p.ready, e)
	}
	p.mu.Unlock()
	switch {
	case err != nil && ctx.Err() == nil && !refused:
		p.cfg.Log.WarnContext(ctx, "machine was not prepared", "checkpoint_id", want.Checkpoint, "err", err)
	case err == nil && unwanted:
		p.takeDown(ctx, e)
	}
	return !unwanted || refused
}

// MakeRoom takes down the oldest machine, or the one that is being made, for a fork that needs its place. If the last one is being taken down, it
// waits for that. It reports whether a machine has gone: its place may be free now, or another fork may have taken it. It waits for giveWayIn at most.
func (p *Pool[Machine]) MakeRoom(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, p.patience)
	defer cancel()
	return p.makeRoom(ctx)
}

// makeRoom is MakeRoom that waits until ctx ends.
func (p *Pool[Machine]) makeRoom(ctx context.Context) bool {
	p.mu.Lock()
	var gone <-chan struct{}
	list := &p.useless
	if len(*list) == 0 {
		list = &p.ready
	}
	e, ok := p.pop(list)
	switch {
	case ok:
		down := make(chan struct{})
		gone = down
		go func() {
			defer close(down)
			p.takeDown(ctx, e)
		}()
	case p.making != nil:
		p.making.cancel()
		gone = p.making.done
	case p.ending > 0:
		gone = p.ended
	}
	p.mu.Unlock()
	if gone == nil {
		return false
	}
	select {
	case <-gone:
		return true
	case <-ctx.Done():
		return false
	}
}

// Purge takes down all machines, and the one that is being made.
func (p *Pool[Machine]) Purge(ctx context.Context) {
	for p.makeRoom(ctx) {
	}
}

// Close takes down all machines. None is kept from then on.
func (p *Pool[Machine]) Close(ctx context.Context) error {
	p.mu.Lock()
	p.closed = true
	all := append(p.ready, p.useless...)
	p.ready, p.useless = nil, nil
	m := p.making
	p.mu.Unlock()
	var errs []error
	for _, e := range all {
		errs = append(errs, p.cfg.TakeDown(ctx, e.machine))
	}
	if m != nil {
		m.cancel()
		select {
		case <-m.done:
		case <-ctx.Done():
			errs = append(errs, context.Cause(ctx))
		}
	}
	return errors.Join(errs...)
}

// Ready is how many machines of a checkpoint wait.
func (p *Pool[Machine]) Ready(id core.CheckpointID) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, e := range p.ready {
		if e.kind.checkpoint == id {
			n++
		}
	}
	return n
}
