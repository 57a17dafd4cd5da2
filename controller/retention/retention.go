// Package retention decides which nodes of a tree are removed, and carries out stored policies. A plan
// is a pure function of the tree, a policy and a time, so its promises can be tested on any tree. A
// planned removal may still be refused. Rounds claims stored policies, reads their trees and has
// somebody else delete what their plans remove.
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
	ReasonCascade = "cascade" // the removal of an ancestor, not of a policy
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

	// NextAge is when the first of what is kept now becomes older than MaxAge; zero: nothing does. As long as nothing else changes, a
	// plan before that has the same result.
	NextAge time.Time
}

// Tree is what a plan is made of: nodes in their order of arrival, and about 100 bytes for each. A node must come after its parent. A
// node whose parent is not there is a root.
type Tree struct {
	Most int // nodes; 0: not bounded

	nodes []node
	at    map[core.CheckpointID]int32
}

// node is a Node without its strings.
type node struct {
	id        core.CheckpointID
	createdAt int64 // nanoseconds
	bytes     int64
	score     float64
	parent    int32 // -1: none
	scored    bool
	keep      bool // held, then everything that is protected
	gone      bool
}

// Add adds a node and reports whether there is room for it. One that is there already is not added again: a tree that is read page by page
// changes meanwhile.
func (t *Tree) Add(n Node) bool {
	if t.at == nil {
		t.at = map[core.CheckpointID]int32{}
	}
	if _, ok := t.at[n.ID]; ok {
		return true
	}
	if t.Most > 0 && len(t.nodes) == t.Most {
		return false
	}
	parent, ok := t.at[n.Parent]
	if !ok {
		parent = -1
	}
	t.at[n.ID] = int32(len(t.nodes)) //nolint:gosec // there is no memory for so many
	c := node{id: n.ID, createdAt: n.CreatedAt.UnixNano(), bytes: n.Bytes, parent: parent, keep: n.Held != "", gone: n.Gone}
	if n.Score != nil {
		c.score, c.scored = *n.Score, true
	}
	t.nodes = append(t.nodes, c)
	return true
}

// Plan decides. Ids sort by age, which decides between equal times and equal scores: the older one goes. The tree cannot be used again.
func (t *Tree) Plan(p Policy, now time.Time) Plan {
	t.protect(p)
	var plan Plan
	free := make([]int32, 0, len(t.nodes))
	for i := range t.nodes {
		switch n := &t.nodes[i]; {
		case n.gone:
		case n.keep:
			plan.keep(n)
		default:
			free = append(free, int32(i))
		}
	}
	if p.MaxBytes > 0 { // otherwise the order decides nothing
		slices.SortFunc(free, t.worstFirst)
	}
	left := plan.KeptBytes
	for _, i := range free {
		left += t.nodes[i].bytes
	}
	chosen := func(n *node) string {
		switch {
		case p.MaxAge > 0 && now.UnixNano()-n.createdAt > int64(p.MaxAge):
			return ReasonAge
		case p.MaxAge == 0 && p.MaxBytes == 0:
			return ReasonNotKept
		}
		return ""
	}
	for _, i := range free { // those that go in any case make room for others
		if n := &t.nodes[i]; chosen(n) != "" {
			left -= n.bytes
		}
	}
	for _, i := range free {
		n := &t.nodes[i]
		reason := chosen(n)
		if reason == "" && p.MaxBytes > 0 && left > p.MaxBytes {
			reason = ReasonBytes
			left -= n.bytes
		}
		if reason != "" {
			plan.Remove = append(plan.Remove, Removal{n.id, reason, n.bytes})
			continue
		}
		plan.keep(n)
		if at := time.Unix(0, n.createdAt).Add(p.MaxAge); p.MaxAge > 0 && (plan.NextAge.IsZero() || at.Before(plan.NextAge)) {
			plan.NextAge = at
		}
	}
	slices.SortFunc(plan.Remove, func(a, b Removal) int { return cmp.Compare(a.ID, b.ID) })
	plan.Over = p.MaxBytes > 0 && plan.KeptBytes > p.MaxBytes
	return plan
}

func (p *Plan) keep(n *node) {
	p.Kept++
	p.KeptBytes += n.bytes
}

// protect marks the nodes that may not be chosen.
func (t *Tree) protect(p Policy) {
	if p.KeepBest > 0 {
		scored := []int32{}
		for i := range t.nodes {
			if n := &t.nodes[i]; n.scored && !n.gone {
				scored = append(scored, int32(i))
			}
		}
		slices.SortFunc(scored, func(a, b int32) int { return t.worstFirst(b, a) })
		for _, i := range scored[:min(p.KeepBest, len(scored))] {
			t.nodes[i].keep = true
		}
	}
	if !p.KeepPathToRoot {
		return
	}
	for _, n := range slices.Backward(t.nodes) { // children before their parents
		if n.keep && n.parent >= 0 {
			t.nodes[n.parent].keep = true
		}
	}
}

// worstFirst sorts by score, those without one first, then by age.
func (t *Tree) worstFirst(x, y int32) int {
	a, b := &t.nodes[x], &t.nodes[y]
	switch {
	case !a.scored && b.scored:
		return -1
	case a.scored && !b.scored:
		return 1
	case a.scored && a.score != b.score:
		return cmp.Compare(a.score, b.score)
	}
	return cmp.Or(cmp.Compare(a.createdAt, b.createdAt), cmp.Compare(a.id, b.id))
}
