// Package openlimit limits requests by their source address, if no key says whose they are.
// Addresses form a tree of prefixes. The package never forgets anything that limits somebody: it
// removes an entry only when its bucket is full and its failures are old, so that a new entry would
// be the same. A prefix with the maximum number of entries has one shared bucket for all of its
// further addresses. So the owner of a prefix can use up the entries and the rate of that prefix,
// and of no other.
package openlimit

import (
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// level is one length of prefix.
type level struct {
	bits  int
	times float64 // of the rate of one address; 0: no rate of its own, since strangers share such a prefix
	most  int     // entries below it
	free  int     // failures in a minute that are not answered late; 0: not counted here
}

// One customer has a /64 of IPv6, often a /56 or a /48. Nobody has less than one address of IPv4.
var (
	levels6 = []level{{bits: 32, most: 4096}, {bits: 48, times: 16, most: 512, free: 80}, {bits: 56, times: 4, most: 128, free: 20}, {bits: 64, times: 1, free: 5}}
	levels4 = []level{{bits: 16, most: 4096}, {bits: 24, most: 256}, {bits: 32, times: 1, free: 5}}
)

const (
	// Most is how many entries there are at most.
	Most = 1 << 16
	// Idle is how long failures count.
	Idle = time.Minute

	reclaimEvery = time.Second
	sharedTimes  = 16 // of the rate of one address, for all that find no room at the top
)

// Tree holds the entries. Make it with New.
type Tree struct {
	perSecond float64
	burst     int

	// mu guards root.
	mu   sync.Mutex
	root *node
}

// node is a prefix.
type node struct {
	parent    *node
	prefix    netip.Prefix
	level     level
	bucket    *rate.Limiter // nil where the level has no rate
	shared    *rate.Limiter // of the addresses below it that have no entry; nil until there is one
	failed    int
	last      time.Time // of the failures
	children  map[netip.Prefix]*node
	size      int // entries below it
	reclaimed time.Time
}

// New makes a tree with the rate of one address.
func New(perSecond float64, burst int) *Tree {
	return &Tree{perSecond: perSecond, burst: burst, root: &node{level: level{most: Most}}}
}

// Left says how many requests an address may still send.
type Left struct {
	Limit, Remaining int
	Reset            time.Duration // until its bucket is full again
}

// Take takes a request of an address into account. A wait above zero refuses it: it may come again then. The invalid address
// stands for everybody who comes by a socket of this host.
func (t *Tree) Take(now time.Time, from netip.Addr) (Left, time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	buckets := t.buckets(now, from)
	left, wait := Left{Limit: t.burst, Remaining: t.burst}, time.Duration(0)
	for i, b := range buckets {
		tokens := b.TokensAt(now)
		if tokens < 1 {
			wait = max(wait, seconds((1-tokens)/float64(b.Limit())))
		}
		if n := max(0, int(tokens)-1); i == 0 || n < left.Remaining {
			left = Left{Limit: b.Burst(), Remaining: n, Reset: seconds((float64(b.Burst()) - tokens + 1) / float64(b.Limit()))}
		}
	}
	if wait > 0 {
		left.Remaining = 0
		return left, wait
	}
	for _, b := range buckets {
		b.AllowN(now, 1)
	}
	return left, 0
}

// GiveBack undoes a Take that must not count. A bucket never gets more than it holds.
func (t *Tree) GiveBack(now time.Time, from netip.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, b := range t.buckets(now, from) {
		if b.TokensAt(now) <= float64(b.Burst()-1) {
			b.AllowN(now, -1)
		}
	}
}

// buckets needs mu. It returns all that limit an address.
func (t *Tree) buckets(now time.Time, from netip.Addr) []*rate.Limiter {
	at, whole := t.find(now, from)
	var buckets []*rate.Limiter
	for n := at; n != nil; n = n.parent {
		if n.bucket != nil {
			buckets = append(buckets, n.bucket)
		}
	}
	if !whole {
		if at.shared == nil {
			times := 1.0
			if at == t.root {
				times = sharedTimes
			}
			at.shared = t.limiter(times)
		}
		buckets = append(buckets, at.shared)
	}
	return buckets
}

// Failed counts a wrong key of an address, and says how many more there were in the last minute than are answered at once.
func (t *Tree) Failed(now time.Time, from netip.Addr) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	at, whole := t.find(now, from)
	over := 0
	for n := at; n != nil; n = n.parent {
		free := n.level.free
		if !whole && n == at {
			free = levels6[len(levels6)-1].free // of all that share its bucket together
		}
		if free == 0 {
			continue
		}
		if now.Sub(n.last) > Idle {
			n.failed = 0
		}
		n.failed, n.last = n.failed+1, now
		over = max(over, n.failed-free)
	}
	return over
}

// Sweep drops entries that limit nobody.
func (t *Tree) Sweep(now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.root.reclaim(now)
}

// Size is how many entries there are.
func (t *Tree) Size() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.root.size
}

// find returns the entry of an address. It is the entry of a wider prefix, and not whole, where there is no room for more.
func (t *Tree) find(now time.Time, from netip.Addr) (at *node, whole bool) {
	from = from.Unmap().WithZone("")
	levels := levels4
	switch {
	case !from.IsValid():
		levels = []level{{times: 1, free: 5}}
	case from.Is6():
		levels = levels6
	}
	at = t.root
	for _, l := range levels {
		p := netip.Prefix{}
		if from.IsValid() {
			p, _ = from.Prefix(l.bits) // the lengths fit
		}
		next, ok := at.children[p]
		if !ok {
			if !at.room(now) {
				return at, false
			}
			next = t.add(at, p, l)
		}
		at = next
	}
	return at, true
}

// room reports whether one more entry may be below a node. Entries that limit nobody make room, also below wider prefixes.
func (n *node) room(now time.Time) bool {
	for at := n; at != nil; at = at.parent {
		if at.size < at.level.most {
			continue
		}
		if now.Sub(at.reclaimed) < reclaimEvery {
			return false
		}
		at.reclaimed = now
		at.reclaimExcept(now, n)
		if at.size >= at.level.most {
			return false
		}
	}
	return true
}

func (t *Tree) add(parent *node, p netip.Prefix, l level) *node {
	n := &node{parent: parent, prefix: p, level: l}
	if l.times > 0 {
		n.bucket = t.limiter(l.times)
	}
	if parent.children == nil {
		parent.children = map[netip.Prefix]*node{}
	}
	parent.children[p] = n
	for at := parent; at != nil; at = at.parent {
		at.size++
	}
	return n
}

func (t *Tree) limiter(times float64) *rate.Limiter {
	return rate.NewLimiter(rate.Limit(t.perSecond*times), int(float64(t.burst)*times))
}

func (n *node) reclaim(now time.Time) { n.reclaimExcept(now, nil) }

// reclaimExcept drops what limits nobody below a node, but never kept nor what is above it.
func (n *node) reclaimExcept(now time.Time, kept *node) {
	for p, child := range n.children {
		child.reclaimExcept(now, kept)
		if child == kept || child.size > 0 || !child.spent(now) {
			continue
		}
		delete(n.children, p)
		for at := n; at != nil; at = at.parent {
			at.size--
		}
	}
}

// spent reports whether a new entry would be the same as this one.
func (n *node) spent(now time.Time) bool {
	full := func(b *rate.Limiter) bool { return b == nil || b.TokensAt(now) >= float64(b.Burst()) }
	return full(n.bucket) && full(n.shared) && (n.failed == 0 || now.Sub(n.last) > Idle)
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
