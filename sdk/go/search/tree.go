package search

import (
	"encoding/json"
	"sync"
	"time"
)

// Node is a copy of what a search knows of a node.
type Node struct {
	ID       string // the checkpoint
	Action   string // that led here from Parent; empty at the root
	Depth    int    // 0 at the root
	Parent   *Node  // nil at the root
	Value    float64
	Visits   int64   // N(s)
	ValueSum float64 // W(s); the mean value is ValueSum / Visits
	Terminal bool
	Data     json.RawMessage // what the problem keeps with it
	Children []*Node         // in the order of the actions; only in Search.Tree
}

// Mean is the mean value of the node and all below it; 0 without visits.
func (n *Node) Mean() float64 { return mean(n.ValueSum, n.Visits) }

// Path returns the actions from the root to the node.
func (n *Node) Path() []string {
	if n.Parent == nil {
		return nil
	}
	return append(n.Parent.Path(), n.Action)
}

// Walk calls f for the node and everything below it, parents first.
func (n *Node) Walk(f func(*Node)) {
	f(n)
	for _, c := range n.Children {
		c.Walk(f)
	}
}

// tree is what one searcher remembers of the nodes, and what it has under way. It asks nobody.
type tree struct {
	root     *node
	searcher string
	now      func() time.Time
}

// node is a node as it was last read or written.
type node struct {
	writing sync.Mutex // held during a compare-and-set

	id       string
	action   string
	parent   *node
	depth    int
	record   Record
	version  int64
	stale    bool             // it must be read before it is used
	busy     bool             // it is being read, or its edges are being proposed
	written  bool             // this searcher has written it
	lost     map[string]bool  // actions that may have led to a child that is not written down
	mine     counts           // what this searcher has under way
	children map[string]*node // those that were looked at, by action
}

// counts has expansions under way, by the action of a node that leads to them.
type counts map[string]Claim

// add counts further expansions, or fewer.
func (c counts) add(action string, by int, until time.Time) {
	at := c[action]
	if at.Count += by; at.Count <= 0 {
		delete(c, action)
		return
	}
	if until.After(at.Until) {
		at.Until = until
	}
	c[action] = at
}

// less is a count without some of it.
func (c counts) less(action string, by int) Claim {
	at := c[action]
	at.Count -= by
	return at
}

// mark counts actions of a node as under way, and on the way to it; or no longer as that.
func (n *node) mark(actions []Action, sign int, until time.Time) {
	for _, a := range actions {
		n.mine.add(a.Name, sign, until)
	}
	for ; n.parent != nil && len(actions) > 0; n = n.parent {
		n.parent.mine.add(n.action, sign*len(actions), until)
	}
}

// ending has what is under way until it has been written down, at each node of a way. In one moment a node's record has the outcome, the
// claim is gone, and the action can be chosen no more: else another worker or searcher would try it again.
type ending map[*node]map[string]int

func (n *node) ending(actions []Action) ending {
	end := ending{n: {}}
	for _, a := range actions {
		end[n][a.Name] = 1
	}
	for ; n.parent != nil; n = n.parent {
		end[n.parent] = map[string]int{n.action: len(actions)}
	}
	return end
}

// at ends what is under way at a node.
func (end ending) at(n *node) {
	for action, by := range end[n] {
		n.mine.add(action, -by, time.Time{})
	}
	delete(end, n)
}

func newNode(id string) *node {
	return &node{id: id, stale: true, mine: counts{}, children: map[string]*node{}}
}

// child returns the node that an edge led to.
func (n *node) child(e *Edge) *node {
	c := n.children[e.Name]
	if c == nil {
		c = newNode(e.Child)
		c.parent, c.action, c.depth = n, e.Name, n.depth+1
		n.children[e.Name] = c
	}
	return c
}

// view copies a node, with its way from the root.
func (n *node) view() *Node {
	v := &Node{
		ID: n.id, Action: n.action, Depth: n.depth, Visits: n.record.Visits, ValueSum: n.record.ValueSum,
		Terminal: n.record.Terminal, Data: n.record.Data,
	}
	if n.record.Value != nil {
		v.Value = *n.record.Value
	}
	if n.parent != nil {
		v.Parent = n.parent.view()
	}
	return v
}

// viewAll copies a node and all below it that were looked at. What is known of the others is in their parents' edges.
func (n *node) viewAll(parent *Node) *Node {
	v := n.view()
	v.Parent = parent
	for i := range n.record.Edges {
		e := &n.record.Edges[i]
		switch c := n.children[e.Name]; {
		case e.Child == "":
		case c != nil && c.version > 0:
			v.Children = append(v.Children, c.viewAll(v))
		default:
			leaf := n.child(e).fromEdge(e)
			leaf.Parent = v
			v.Children = append(v.Children, leaf)
		}
	}
	return v
}

// best returns the node of the greatest value: the first of equals on the way from the root, then in the order of the
// actions. If a node must be read to know the way to it, or all about it, it returns that too.
func (n *node) best() (*Node, *node) {
	r := &n.record
	if r.Visits == 0 || r.Value != nil && *r.Value >= r.Max {
		return n.view(), nil
	}
	for i := range r.Edges {
		e := &r.Edges[i]
		if e.Visits == 0 || e.Max < r.Max {
			continue
		}
		c := n.child(e)
		if c.record.Visits > 0 && c.record.Max >= e.Max {
			return c.best()
		}
		if e.Value >= e.Max {
			return c.fromEdge(e), c
		}
		return n.view(), c
	}
	return n.view(), nil
}

// fromEdge is the view of a node that was not read, out of the edge that leads to it.
func (n *node) fromEdge(e *Edge) *Node {
	return &Node{ID: e.Child, Action: e.Name, Depth: n.depth, Parent: n.parent.view(), Value: e.Value, Visits: e.Visits, ValueSum: e.ValueSum}
}

// inFlight counts what is under way at an edge and below it: of this searcher by what it remembers, of others by the record.
func (t *tree) inFlight(n *node, e *Edge) int {
	return n.mine[e.Name].Count + e.others(t.searcher, t.now())
}

// free reports whether an edge can be tried now.
func (t *tree) free(n *node, e *Edge) bool {
	return e.Child == "" && !e.Done && t.inFlight(n, e) == 0
}

// untried returns the actions of a node that can be tried now, and whether others are under way.
func (t *tree) untried(n *node) (actions []Action, waiting bool) {
	for i := range n.record.Edges {
		switch e := &n.record.Edges[i]; {
		case t.free(n, e):
			actions = append(actions, e.Action)
		case e.Child == "" && !e.Done:
			waiting = true
		}
	}
	return actions, waiting
}

// step is what kind of thing to do next.
type step int

const (
	stepNothing step = iota // nothing is left, or nothing until something under way has ended
	stepRead                // read the node
	stepPropose             // ask what can be tried at the node
	stepAdopt               // look for children that a searcher has made and not written down
	stepExpand              // try actions at the node
)

// decision is what a strategy has chosen.
type decision struct {
	step    step
	node    *node
	actions []Action // to try
	waiting bool     // something that may change the choice is under way
}

// ready says what must be done at a node before a strategy can look at its edges.
func (t *tree) ready(n *node) (decision, bool) {
	switch {
	case len(n.lost) > 0 && !n.busy && !n.stale:
		return decision{step: stepAdopt, node: n}, false
	case n.record.Done:
		return decision{}, false
	case n.busy:
		return decision{waiting: true}, false
	case n.stale:
		return decision{step: stepRead, node: n}, false
	case !n.record.Proposed:
		return decision{step: stepPropose, node: n}, false
	}
	for i := range n.record.Edges {
		e := &n.record.Edges[i]
		if e.abandoned(t.searcher, t.now()) {
			return decision{step: stepAdopt, node: n}, false
		}
	}
	return decision{}, true
}
