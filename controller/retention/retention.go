// Package retention decides which nodes of a tree are removed. It is a pure function of the tree, a
// policy and a time, so its promises can be tested on any tree. It knows nothing of rows or calls.
// A planned removal may still be refused.
package retention

import (
	"cmp"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// Node is what a plan needs to know of a checkpoint.
type Node struct {
	ID        core.CheckpointID
	Parent    core.CheckpointID
	CreatedAt time.Time
	Bytes     int64
	Score     *float64 // nil: none was given
	Held      string   // what it is needed for, such as "pinned"; empty: it may go
	Gone      bool     // removed already; it stands for its place in the tree
}

// Policy says what is kept. What is held is always kept. KeepBest and KeepPathToRoot protect, MaxAge and MaxBytes choose among what is
// not protected; a policy without either of these chooses all of it.
type Policy struct {
	KeepBest       int           // nodes with the highest scores; 0: none
	KeepPathToRoot bool          // the ancestors of whatever is held or among the best, too
	MaxAge         time.Duration // older ones go; 0: no bound
	MaxBytes       int64         // the lowest scores go first, then the oldest, until what is left fits; 0: no bound
}

// The reasons for a removal.
const (
	ReasonNotKept = "not_kept"
	ReasonAge     = "age"
	ReasonBytes   = "bytes"
)

// Removal is a node that goes.
type Removal struct {
	ID     core.CheckpointID
	Reason string
	Bytes  int64
}

// Plan says what goes and what stays.
type Plan struct {
	Remove    []Removal // oldest first
	Kept      int
	KeptBytes int64
	Over      bool // what had to be kept is more than MaxBytes
}

// Make plans. Ids sort by age, which decides between equal times and equal scores: the older one goes.
func Make(nodes []Node, p Policy, now time.Time) Plan {
	protected := protect(nodes, p)
	free := make([]Node, 0, len(nodes))
	var plan Plan
	for _, n := range nodes {
		switch {
		case n.Gone:
		case protected[n.ID]:
			plan.keep(n)
		default:
			free = append(free, n)
		}
	}
	slices.SortFunc(free, worstFirst)
	left := plan.KeptBytes
	for _, n := range free {
		left += n.Bytes
	}
	chosen := func(n Node) string {
		switch {
		case p.MaxAge > 0 && now.Sub(n.CreatedAt) > p.MaxAge:
			return ReasonAge
		case p.MaxAge == 0 && p.MaxBytes == 0:
			return ReasonNotKept
		}
		return ""
	}
	for _, n := range free { // those that go in any case make room for others
		if chosen(n) != "" {
			left -= n.Bytes
		}
	}
	for _, n := range free {
		reason := chosen(n)
		if reason == "" && p.MaxBytes > 0 && left > p.MaxBytes {
			reason = ReasonBytes
			left -= n.Bytes
		}
		if reason == "" {
			plan.keep(n)
			continue
		}
		plan.Remove = append(plan.Remove, Removal{n.ID, reason, n.Bytes})
	}
	slices.SortFunc(plan.Remove, func(a, b Removal) int { return cmp.Compare(a.ID, b.ID) })
	plan.Over = p.MaxBytes > 0 && plan.KeptBytes > p.MaxBytes
	return plan
}

func (p *Plan) keep(n Node) {
	p.Kept++
	p.KeptBytes += n.Bytes
}

// protect returns the nodes that may not be chosen.
func protect(nodes []Node, p Policy) map[core.CheckpointID]bool {
	keep := map[core.CheckpointID]bool{}
	parents := make(map[core.CheckpointID]core.CheckpointID, len(nodes))
	scored := make([]Node, 0, len(nodes))
	for _, n := range nodes {
		parents[n.ID] = n.Parent
		if n.Held != "" {
			keep[n.ID] = true
		}
		if n.Score != nil && !n.Gone {
			scored = append(scored, n)
		}
	}
	slices.SortFunc(scored, func(a, b Node) int { return worstFirst(b, a) })
	for _, n := range scored[:min(p.KeepBest, len(scored))] {
		keep[n.ID] = true
	}
	if !p.KeepPathToRoot {
		return keep
	}
	for _, n := range nodes {
		if !keep[n.ID] {
			continue
		}
		for at := parents[n.ID]; at != "" && !keep[at]; at = parents[at] {
			keep[at] = true
		}
	}
	return keep
}

// worstFirst sorts by score, those without one first, then by age.
func worstFirst(a, b Node) int {
	switch {
	case a.Score == nil && b.Score != nil:
		return -1
	case a.Score != nil && b.Score == nil:
		return 1
	case a.Score != nil && *a.Score != *b.Score:
		return cmp.Compare(*a.Score, *b.Score)
	}
	return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID))
}
