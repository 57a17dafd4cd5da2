package prepared

import (
	"cmp"
	"crypto/rand"
	"maps"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/prepared/forecast"
)

const (
	// maxAsks bounds the checkpoints for which machines are asked for at the same time.
	maxAsks = 1024
	// maxAskedAge bounds the age of a machine that was asked for. If none was taken meanwhile, no other one is made.
	maxAskedAge = 10 * time.Minute
	// retryAfter is the pause after a failure to make a machine that was asked for.
	retryAfter = 10 * time.Second
	// maxFor bounds how long an ask lasts unless it is renewed.
	maxFor = time.Hour
	// maxAuthority bounds the authority of an ask, in bytes.
	maxAuthority = 16 << 10
)

// Ask says that somebody wants machines of a checkpoint, whatever the forecast says.
type Ask struct {
	Checkpoint core.CheckpointID
	Count      int           // machines that wait at the same time; 0: the ask ends
	Authority  string        // see forecast.Want
	Version    int64         // another version tries again
	Moves      int64         // another number begins another instance of the counts
	For        time.Duration // until the ask ends, if it is not repeated
}

// Counts say what became of the machines of an ask, and of the forks of its checkpoint.
type Counts = runnerapi.PreparedCounts

// Asked is what a pool knows of an ask.
type Asked struct {
	Instance    string // of the counts: another one begins at zero
	Ready       int
	MemoryBytes int64
	GivenUp     bool // none of its machines was taken
	Counts      Counts
}

type ask struct {
	Ask
	instance string
	since    time.Time
	until    time.Time
	pause    time.Time // no machine is made before
	lastHit  time.Time
	givenUp  bool
	counts   Counts
}

// served notes whether a machine has served a fork.
func (a *ask) served(used float64, claimed bool, now time.Time) {
	if claimed {
		a.lastHit = now
		a.counts.Hits++
		a.counts.TakenCPUSeconds += used
		return
	}
	a.counts.Misses++
	a.counts.WastedCPUSeconds += used
	a.failed(now)
}

// lost notes that a machine has ended, or has become too old.
func (a *ask) lost(now, made time.Time) {
	if now.Sub(made) <= maxAskedAge {
		a.failed(now) // it has ended by itself
		return
	}
	a.givenUp = a.givenUp || !a.lastHit.After(made)
}

func (a *ask) failed(now time.Time) { a.pause = now.Add(retryAfter) }

func (e entry[Machine]) maxAge() time.Duration {
	if e.asked {
		return maxAskedAge
	}
	return maxAge
}

// Ask begins, renews and ends asks. Those that are not in the list stay. It returns what is known of each, in the same order. An ask beyond
// maxAsks has no effect, and the zero value.
func (p *Pool[Machine]) Ask(list []Ask) []Asked {
	out := make([]Asked, len(list))
	if p.cfg.Max == 0 {
		return out
	}
	machines := make([][]Machine, len(list))
	p.note(func(*forecast.Forecast) {
		now := p.cfg.Now()
		for i, want := range list {
			a := p.renew(want, now)
			if a == nil {
				continue
			}
			out[i] = Asked{Instance: a.instance, GivenUp: a.givenUp, Counts: a.counts}
			for _, e := range p.ready {
				if e.kind == a.kind() {
					out[i].Ready++
					machines[i] = append(machines[i], e.machine)
				}
			}
		}
	})
	for i, of := range machines { // reading is slow; no fork waits for it
		for _, m := range of {
			out[i].MemoryBytes += p.cfg.Memory(m)
		}
	}
	return out
}

// renew notes an ask. nil: there is none any more. The caller holds mu.
func (p *Pool[Machine]) renew(want Ask, now time.Time) *ask {
	a := p.asks[want.Checkpoint]
	if want.Count <= 0 || want.For <= 0 {
		if a != nil {
			p.endAsk(a)
		}
		return nil
	}
	if a != nil && a.Authority != want.Authority { // its machines fit no fork any more
		p.endAsk(a)
		a = nil
	}
	if a == nil {
		if len(p.asks) >= maxAsks {
			return nil
		}
		a = &ask{Ask: want, instance: rand.Text(), since: now}
		p.asks[want.Checkpoint] = a
	}
	if a.Moves != want.Moves { // another runner was asked meanwhile
		a.instance, a.counts = rand.Text(), Counts{}
	}
	if a.Version != want.Version {
		a.givenUp, a.pause = false, time.Time{}
	}
	a.Ask, a.until = want, now.Add(want.For)
	return a
}

func (a *ask) kind() kind { return kind{a.Checkpoint, a.Authority} }

// askFor returns the ask for machines of a kind, or nil. The caller holds mu.
func (p *Pool[Machine]) askFor(k kind) *ask {
	if a := p.asks[k.checkpoint]; a != nil && a.Authority == k.authority {
		return a
	}
	return nil
}

// endAsks ends the asks that were not renewed.
func (p *Pool[Machine]) endAsks() {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.cfg.Now()
	for _, a := range p.asks {
		if !now.Before(a.until) {
			p.endAsk(a)
		}
	}
}

// endAsk forgets an ask and gives up its machines. The caller holds mu.
func (p *Pool[Machine]) endAsk(a *ask) {
	delete(p.asks, a.Checkpoint)
	p.giveUp(func(e entry[Machine]) bool { return e.asked && e.kind == a.kind() })
}

// wants says which machines should wait: first those that were asked for, then those of the forecast. Each project has an authority of its
// own. Projects get one machine in turn, so that each gets its share. The caller holds mu.
func (p *Pool[Machine]) wants(now time.Time) []forecast.Want {
	left := p.cfg.Max
	asks := slices.SortedFunc(maps.Values(p.asks), func(a, b *ask) int {
		return cmp.Or(a.since.Compare(b.since), cmp.Compare(a.Checkpoint, b.Checkpoint))
	})
	asks = slices.DeleteFunc(asks, func(a *ask) bool { return a.givenUp || now.Before(a.pause) })
	given := map[kind]int{}
	for progress := true; progress && left > 0; {
		progress = false
		served := map[string]bool{} // authorities, in this round
		for _, a := range asks {
			if left > 0 && !served[a.Authority] && given[a.kind()] < a.Count {
				served[a.Authority], progress = true, true
				given[a.kind()]++
				left--
			}
		}
	}
	var out []forecast.Want
	for _, a := range asks {
		if n := given[a.kind()]; n > 0 {
			out = append(out, forecast.Want{Checkpoint: a.Checkpoint, Count: n, Authority: a.Authority})
		}
	}
	for _, w := range p.forecast.Wants(p.cfg.Max, now) {
		if w.Count = min(w.Count-given[kindOf(w)], left); w.Count > 0 {
			left -= w.Count
			out = append(out, w)
		}
	}
	return out
}
