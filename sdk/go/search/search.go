package search

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"
)

// Problem is what is searched. Its methods are called concurrently if Config.Parallel is more than 1.
type Problem interface {
	// Actions proposes what can be tried at a node, best first, with priors. If it proposes none, the node is a leaf. One searcher asks once for
	// each node; the record keeps the answer for all.
	Actions(ctx context.Context, n *Node) ([]Action, error)
	// Expand tries actions at a node, all at once, and returns one outcome for each. An error is one of all of them. If it writes the
	// records of the children (see Checkpoints.Annotations) when it makes them, a crash loses no child.
	Expand(ctx context.Context, n *Node, actions []Action) ([]Outcome, error)
}

// Outcome is what became of an action.
type Outcome struct {
	// Child is the node that it led to. Empty: it led to none, for the Reason; it counts as tried, and has no value.
	Child  string
	Reason string
	// Value of the child, the greater the better; from 0 to 1 unless the strategy has MinMax.
	Value float64
	// Terminal says that nothing can be tried at the child.
	Terminal bool
	// Data is kept with the child. Its numbers may become JSON doubles.
	Data json.RawMessage
	// Err says that the action could not be tried. It may be tried again.
	Err error

	unknown bool // with Err: it may have led to a child all the same
}

// Store keeps the records of nodes.
type Store interface {
	// Load returns the record of a node, the zero Record if it has none, and its version, which is 1 or more and grows with each
	// change. ErrGone: the node cannot be expanded any more.
	Load(ctx context.Context, id string) (Record, int64, error)
	// Save replaces the record of a node if it has this version still, and returns the new one; otherwise ErrConflict.
	Save(ctx context.Context, id string, version int64, r Record) (int64, error)
	// Children returns the children of a node that have a record. It is asked when a searcher may have made children that it did not write down, for
	// example because it crashed. It answers when the children that are being made exist or have failed.
	Children(ctx context.Context, id string) (map[string]Record, error)
}

// Errors of a Store.
var (
	ErrConflict = errors.New("another searcher has changed the node")
	ErrGone     = errors.New("the node is deleted")
)

// Config says what to search, and how.
type Config struct {
	Root     string // the checkpoint to start from
	Problem  Problem
	Store    Store
	Strategy Strategy

	// RootValue is the value of the root, if it is known.
	RootValue *float64
	// Parallel is how many expansions this searcher has under way at once; 1 if it is 0.
	Parallel int
	// Batch is how many actions an expansion tries at most, in one call of Expand; 1 if it is 0.
	Batch int
	// Budget is how many actions this searcher tries at most, in all its runs.
	Budget int
	// Goal ends the search when a node has this value, whoever found it. Expansions under way are cancelled.
	Goal *float64
	// Failures is how many expansions in a row may fail before the search does.
	Failures int
	// Lease limits the time of one expansion, which is cancelled at its end. Half a minute later, others stop waiting for a crashed
	// searcher, and its virtual losses end. 10 minutes if it is 0. The clocks of searchers must agree to a few seconds.
	Lease time.Duration
	// Poll is how often to look at what other searchers have done while this one waits for them; 1 s if it is 0.
	Poll time.Duration
	// Searcher names this searcher, in at most 128 bytes, so that its own work from before a crash ends at once when it starts again.
	// No two that run at the same time may have the same name. Empty: a random name.
	Searcher string
	// Report is called after each expansion that was written down, never concurrently.
	Report func(Expansion)
}

// Expansion is what one expansion brought.
type Expansion struct {
	Node     *Node
	Actions  []Action
	Outcomes []Outcome // one for each action
	Best     *Node     // of all nodes that the searcher knows
	Tried    int       // actions that this searcher has tried so far
}

// End is why a search ended.
type End string

// The ends of a search.
const (
	GoalReached End = "goal reached"
	BudgetSpent End = "budget spent"
	Exhausted   End = "nothing left to try"
)

// Result is what a search found.
type Result struct {
	Best  *Node // the node of the greatest value; the first of equals
	Tried int   // actions that this searcher has tried
	End   End   // empty after an error
}

const (
	// How long others wait for a searcher beyond its lease: it may still be ending its forks, and writing down what came out.
	margin = 30 * time.Second
	// How long to write down what came out, also when the search was cancelled.
	writeTime = 15 * time.Second
	// How often one change of a record is tried while others change it.
	maxConflicts = 1000
)

// Search is one searcher. It may run several times, one after the other; each run goes on where the tree is.
type Search struct {
	cfg       Config
	reporting sync.Mutex

	mu      sync.Mutex // guards the fields below
	tree    tree
	tried   int
	failed  int           // expansions in a row
	changed chan struct{} // closed when anything has changed
}

// New checks a configuration.
func New(cfg Config) (*Search, error) {
	if cfg.Root == "" || cfg.Problem == nil || cfg.Store == nil {
		return nil, errors.New("a search needs Root, Problem and Store")
	}
	if err := check(cfg.Strategy); err != nil {
		return nil, err
	}
	if cfg.Parallel < 0 || cfg.Batch < 0 || cfg.Budget < 0 || cfg.Failures < 0 || cfg.Lease < 0 || cfg.Poll < 0 || len(cfg.Searcher) > maxName || cfg.Searcher == earlier {
		return nil, errors.New("a setting of the search is out of its range")
	}
	cfg.Parallel, cfg.Batch = max(cfg.Parallel, 1), max(cfg.Batch, 1)
	if cfg.Lease == 0 {
		cfg.Lease = 10 * time.Minute
	}
	if cfg.Poll == 0 {
		cfg.Poll = time.Second
	}
	if cfg.Searcher == "" {
		cfg.Searcher = rand.Text()
	}
	return &Search{cfg: cfg, tree: tree{root: newNode(cfg.Root), searcher: cfg.Searcher, now: time.Now}, changed: make(chan struct{})}, nil
}

// Run searches until the goal is reached, the budget is spent, or nothing is left to try. What others have done, and what this one
// has done before, counts.
func (s *Search) Run(ctx context.Context) (Result, error) {
	if err := s.start(ctx); err != nil {
		return Result{Best: s.best()}, err
	}
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	r := &run{Search: s, cancel: cancel}
	var workers sync.WaitGroup
	for range s.cfg.Parallel {
		workers.Go(func() { r.work(inner) })
	}
	workers.Wait()
	if r.err == nil && r.end == "" {
		r.err = context.Cause(ctx)
	}
	if r.err == nil {
		r.err = s.tidy(ctx)
	}
	if r.err == nil {
		r.err = s.readBest(ctx)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	n, _ := s.tree.root.best()
	return Result{Best: n, Tried: s.tried, End: r.end}, r.err
}

// tidy tells parents of subtrees that are done, of which they do not know: a searcher that crashed has finished the subtree, and nobody tries
// anything there any more who would tell them.
func (s *Search) tidy(ctx context.Context) error {
	for _, n := range s.untold() {
		if err := s.pass(ctx, n, nil); err != nil && !errors.Is(err, ErrGone) {
			return err
		}
	}
	return nil
}

// untold returns the nodes that are done and whose parents do not know it, the deepest first.
func (s *Search) untold() (list []*node) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var walk func(n *node)
	walk = func(n *node) {
		for _, c := range n.children {
			walk(c)
		}
		if n.parent == nil || !n.record.Done {
			return
		}
		if e := n.parent.record.edge(n.action); e != nil && e.Child == n.id && !e.Done {
			list = append(list, n)
		}
	}
	walk(s.tree.root)
	return list
}

// Tree returns a copy of the tree as this searcher knows it.
func (s *Search) Tree() *Node {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tree.root.viewAll(nil)
}

func (s *Search) best() *Node {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, _ := s.tree.root.best()
	return n
}

// start reads the root, and writes its value if nobody has.
func (s *Search) start(ctx context.Context) error {
	root := s.tree.root
	if err := s.read(ctx, root); err != nil {
		return fmt.Errorf("read the root of the search: %w", err)
	}
	s.mu.Lock()
	s.failed = 0
	s.mu.Unlock()
	if v := s.cfg.RootValue; v != nil {
		if math.IsNaN(*v) || math.IsInf(*v, 0) {
			return fmt.Errorf("the value of the root is %v", *v)
		}
		return s.update(ctx, root, nil, func(r *Record) error {
			if r.Value == nil {
				r.Value = v
			}
			return nil
		})
	}
	return nil
}

// readBest reads what is not known on the way to the best node: another searcher may have found it. Where that cannot be read any
// more, the way ends.
func (s *Search) readBest(ctx context.Context) error {
	var last *node
	for {
		s.mu.Lock()
		_, unknown := s.tree.root.best()
		s.mu.Unlock()
		if unknown == nil || unknown == last {
			return nil
		}
		last = unknown
		if err := s.read(ctx, unknown); err != nil && !errors.Is(err, ErrGone) {
			return err
		}
	}
}

// read reads a node. An older version than the known one is dropped.
func (s *Search) read(ctx context.Context, n *node) error {
	record, version, err := s.cfg.Store.Load(ctx, n.id)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		return fmt.Errorf("read node %s: %w", n.id, err)
	}
	n.stale = false
	if version <= n.version {
		return nil
	}
	if !n.written {
		record.disown(s.cfg.Searcher)
	}
	if n.parent != nil && record.Value == nil { // it was made without a record
		if e := n.parent.record.edge(n.action); e != nil && e.Child == n.id {
			record.Action, record.Value = e.Name, new(e.Value)
			record.count()
		}
	}
	n.record, n.version = record, version
	return nil
}

// update changes a node by compare-and-set. change may be called several times, with mu held. It also writes this searcher's
// claims at the node, except those that end now.
func (s *Search) update(ctx context.Context, n *node, end ending, change func(*Record) error) error {
	n.writing.Lock()
	defer n.writing.Unlock()
	for range maxConflicts {
		s.mu.Lock()
		stale, version := n.stale, n.version
		s.mu.Unlock()
		if stale {
			if err := s.read(ctx, n); err != nil {
				return err
			}
			continue
		}
		record, changed, err := s.draft(n, end, change)
		if err != nil || !changed {
			return err
		}
		version, err = s.cfg.Store.Save(ctx, n.id, version, record)
		s.mu.Lock()
		if n.stale = err != nil; err == nil {
			n.record, n.version, n.written = record, version, true
			end.at(n)
		}
		s.mu.Unlock()
		if err == nil {
			return nil
		}
		if !errors.Is(err, ErrConflict) {
			return fmt.Errorf("write node %s: %w", n.id, err)
		}
	}
	return fmt.Errorf("write node %s: %w %d times in a row; use fewer searchers", n.id, ErrConflict, maxConflicts)
}

// draft returns a node's record with a change. If that is none, nothing need be written.
func (s *Search) draft(n *node, end ending, change func(*Record) error) (record Record, changed bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before, err := n.record.encode()
	if err != nil {
		return record, false, fmt.Errorf("node %s: %w", n.id, err)
	}
	record = n.record.clone()
	if err := change(&record); err != nil {
		return record, false, fmt.Errorf("node %s: %w", n.id, err)
	}
	for i := range record.Edges {
		name := record.Edges[i].Name
		record.Edges[i].claim(s.cfg.Searcher, n.mine.less(name, end[n][name]), s.tree.now())
		if n.lost[name] {
			record.Edges[i].abandon()
		}
	}
	record.count()
	after, err := record.encode()
	if err != nil {
		return record, false, fmt.Errorf("node %s: %w", n.id, err)
	}
	if string(before) == string(after) {
		end.at(n)
		return record, false, nil
	}
	return record, true, nil
}

// pass writes what is known of a node into its parents, up to the root. Parents that were deleted have nothing left to try.
func (s *Search) pass(ctx context.Context, n *node, end ending) error {
	for ; n.parent != nil; n = n.parent {
		err := s.update(ctx, n.parent, end, func(r *Record) error {
			if e := r.edge(n.action); e != nil {
				e.merge(n.id, &n.record)
			}
			return nil
		})
		switch {
		case errors.Is(err, ErrGone) && n.parent.parent != nil:
			s.mu.Lock()
			n.parent.record.Done = true
			s.mu.Unlock()
		case err != nil:
			return err
		}
	}
	return nil
}

// broadcast wakes those that wait. mu is held.
func (s *Search) broadcast() {
	close(s.changed)
	s.changed = make(chan struct{})
}
