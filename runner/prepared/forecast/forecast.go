// Package forecast says which checkpoints of a host will probably be forked soon, and into how many children. It learns from the captures and
// forks that it is told of, and from what became of the machines that were prepared. It is a pure function of these events: it has no clock,
// reads nothing and starts nothing.
//
// Captures and forks of one tree are alike: a search captures many checkpoints, forks some of them, and does so again and again with about as
// many children. So shares and numbers are kept for each tree, separately for the first fork of a checkpoint and for later ones. If machines are
// prepared in vain for one of these, there is a pause, each time for twice as long, and likewise for the host as a whole.
//
// A machine is prepared for forks with the same authority, which is that of a project. Forks of one checkpoint with different authorities are as
// different as forks of different checkpoints: what one project does says nothing about another one.
package forecast

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"time"
	"unique"

	"github.com/coppice-dev/coppice/core"
)

const (
	// maxTrees and maxNodes bound what is remembered. Beyond them, what was used longest ago is forgotten.
	maxTrees     = 256
	maxNodes     = 1024
	maxAuthority = 16 << 10 // bytes of an authority; forks with more are not learned from

	horizon   = time.Minute // a checkpoint that was not used for so long is not expected to be forked
	minShare  = 0.25        // of the checkpoints like it that must have been forked for a machine to be prepared
	sureShare = 0.5         // of the captures of a tree: then its newest one comes first
	minHits   = 0.25        // of prepared machines that must have been taken, or there is a pause
	history   = 32          // events after which a share is halved, so that it follows what happens now
	weight    = 0.3         // of the last fork in the usual number of children

	firstPause = 30 * time.Second
	maxPause   = time.Hour
	// How many machines a habit and the host may lose before the share of hits counts.
	habitPatience, hostPatience = 1, 8
)

// Want is a checkpoint for which machines should be prepared.
type Want struct {
	Checkpoint core.CheckpointID
	Count      int
	Authority  string // the certificate of the forks, as PEM; empty: they have none
}

// key says which forks are alike: those of one checkpoint with the same authority.
type key struct {
	id        core.CheckpointID
	authority unique.Handle[string]
}

func keyOf(id core.CheckpointID, authority string) key { return key{id, unique.Make(authority)} }

// Forecast is what is known of a host. It is not safe for concurrent use.
type Forecast struct {
	trees map[key]*tree // by their first checkpoint
	nodes map[key]*node
	trust trust // in the host as a whole
}

// tree is a checkpoint with its descendants, as far as this host has seen their captures.
type tree struct {
	last     time.Time
	first    habit   // that a captured checkpoint is forked
	again    habit   // that a checkpoint is forked once more
	children float64 // usual number in a fork; 0: unknown
}

// habit is how often something happens, and whether it was worth preparing for.
type habit struct {
	share
	trust
}

// next is the habit that the next fork of a checkpoint would follow.
func (t *tree) next(n *node) *habit {
	if n.forks > 0 {
		return &t.again
	}
	return &t.first
}

// node is a checkpoint.
type node struct {
	tree   key
	last   time.Time // its capture, or its last fork
	forks  int
	own    bool // its capture was seen: descendants belong to the same tree
	failed bool // what was prepared since the last event was not taken
}

// share is how often something came true.
type share struct{ yes, all float64 }

func (s *share) tried() {
	if s.all++; s.all > history {
		s.yes, s.all = s.yes/2, s.all/2
	}
}

// rate begins at one half: the first try is worth its price, and what it teaches is remembered.
func (s share) rate() float64 { return (s.yes + 1) / (s.all + 2) }

// trust says whether preparing has been worth it.
type trust struct {
	hits, losses float64
	inVain       int // pauses since the last hit
	pause        time.Time
}

func (t *trust) hit() {
	t.hits++
	t.inVain, t.pause = 0, time.Time{}
}

func (t *trust) lost(n, patience int, at time.Time) {
	t.losses += float64(n)
	if sum := t.hits + t.losses; sum > history {
		t.hits, t.losses = t.hits/2, t.losses/2
	} else if sum < float64(patience) {
		return
	}
	if t.hits/(t.hits+t.losses) < minHits {
		t.inVain++
		t.pause = at.Add(min(firstPause<<min(t.inVain-1, 10), maxPause))
	}
}

// New returns a forecast that has seen nothing.
func New() *Forecast {
	return &Forecast{trees: map[key]*tree{}, nodes: map[key]*node{}}
}

// Captured notes the capture of a checkpoint. parent is the checkpoint that it descends from; empty if it is the first one of its tree, such as
// a child of a template.
func (f *Forecast) Captured(id, parent core.CheckpointID, authority string, at time.Time) {
	if len(authority) > maxAuthority {
		return
	}
	k := keyOf(id, authority)
	if n := f.nodes[k]; n != nil && n.own {
		return // the request was repeated
	}
	root := k
	if n := f.nodes[key{parent, k.authority}]; n != nil && n.own {
		root = n.tree
	} else if parent != "" {
		root.id = parent // it was captured before this host began to learn
	}
	f.tree(root, at).first.tried()
	f.add(k, &node{tree: root, own: true}, at)
}

// Forked notes a fork of a checkpoint into children.
func (f *Forecast) Forked(id core.CheckpointID, children int, authority string, at time.Time) {
	if len(authority) > maxAuthority {
		return
	}
	k := keyOf(id, authority)
	n := f.nodes[k]
	if n == nil {
		n = f.add(k, &node{tree: k}, at)
	}
	t := f.tree(n.tree, at)
	switch soon := at.Sub(n.last) <= horizon; {
	case n.forks > 0 && soon:
		t.again.yes++
	case n.forks == 0 && n.own:
		t.first.yes++
	}
	t.again.tried()
	if t.children == 0 {
		t.children = float64(children)
	}
	t.children += weight * (float64(children) - t.children)
	n.forks++
	n.last, n.failed = at, false
}

// Taken notes that a fork has taken a machine that was prepared for forks with an authority.
func (f *Forecast) Taken(id core.CheckpointID, authority string) {
	f.trust.hit()
	if n := f.nodes[keyOf(id, authority)]; n != nil {
		f.trees[n.tree].next(n).hit()
	}
}

// Lost notes that prepared machines of a checkpoint were not taken in their time.
func (f *Forecast) Lost(id core.CheckpointID, authority string, machines int, at time.Time) {
	f.trust.lost(machines, hostPatience, at)
	if n := f.nodes[keyOf(id, authority)]; n != nil {
		n.failed = true
		f.trees[n.tree].next(n).lost(machines, habitPatience, at)
	}
}

// Replaced notes that a prepared machine gave way to one of another checkpoint. Its habit had no full chance, but the host has paid for it.
func (f *Forecast) Replaced(at time.Time) { f.trust.lost(1, hostPatience, at) }

// Failed notes that no machine can be prepared for a checkpoint. Nobody tries again before its next fork.
func (f *Forecast) Failed(id core.CheckpointID, authority string) {
	if n := f.nodes[keyOf(id, authority)]; n != nil {
		n.failed = true
	}
}

// Removed notes that a checkpoint is gone.
func (f *Forecast) Removed(id core.CheckpointID) {
	maps.DeleteFunc(f.nodes, func(k key, _ *node) bool { return k.id == id })
}

// Wants says what should be prepared now, most probable forks first. It is at most limit machines. The newest capture of a tree whose captures are
// usually forked comes before everything else: that is where the search goes on, and older nodes have had their forks.
func (f *Forecast) Wants(limit int, now time.Time) []Want {
	if now.Before(f.trust.pause) {
		return nil
	}
	type candidate struct {
		Want
		share  float64
		last   time.Time
		newest bool
	}
	newest := map[key]*node{} // capture of each tree
	for _, n := range f.nodes {
		if old := newest[n.tree]; n.own && n.forks == 0 && (old == nil || n.last.After(old.last)) {
			newest[n.tree] = n
		}
	}
	var list []candidate
	for k, n := range f.nodes {
		t := f.trees[n.tree]
		habit := t.next(n)
		chance := habit.rate()
		if n.failed || now.Sub(n.last) > horizon || chance < minShare || now.Before(habit.pause) {
			continue
		}
		count := max(1, int(math.Round(t.children)))
		list = append(list, candidate{Want{Checkpoint: k.id, Count: count, Authority: k.authority.Value()}, chance, n.last, n == newest[n.tree] && chance >= sureShare})
	}
	slices.SortFunc(list, func(a, b candidate) int {
		if a.newest != b.newest {
			if a.newest {
				return -1
			}
			return 1
		}
		return cmp.Or(cmp.Compare(b.share, a.share), b.last.Compare(a.last), cmp.Compare(a.Checkpoint, b.Checkpoint), cmp.Compare(a.Authority, b.Authority))
	})
	var out []Want
	for _, c := range list {
		if c.Count = min(c.Count, limit); c.Count == 0 {
			break
		}
		limit -= c.Count
		out = append(out, c.Want)
	}
	return out
}

// tree finds a tree, or begins one.
func (f *Forecast) tree(root key, at time.Time) *tree {
	t := f.trees[root]
	if t == nil {
		if len(f.trees) >= maxTrees {
			f.forgetTree()
		}
		t = &tree{}
		f.trees[root] = t
	}
	t.last = at
	return t
}

// add remembers a node, whose tree is remembered before or after it.
func (f *Forecast) add(k key, n *node, at time.Time) *node {
	if _, there := f.nodes[k]; !there && len(f.nodes) >= maxNodes {
		delete(f.nodes, oldestOf(f.nodes, func(n *node) time.Time { return n.last }))
	}
	n.last = at
	f.nodes[k] = n
	return n
}

// forgetTree forgets the tree that was used longest ago, with its nodes.
func (f *Forecast) forgetTree() {
	oldest := oldestOf(f.trees, func(t *tree) time.Time { return t.last })
	delete(f.trees, oldest)
	maps.DeleteFunc(f.nodes, func(_ key, n *node) bool { return n.tree == oldest })
}

func oldestOf[V any](m map[key]V, last func(V) time.Time) key {
	var oldest key
	var at time.Time
	for k, v := range m {
		if t := last(v); oldest.id == "" || t.Before(at) || t.Equal(at) && k.id < oldest.id {
			oldest, at = k, t
		}
	}
	return oldest
}
