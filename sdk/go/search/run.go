package search

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"
)

// run is one call of Run: its workers choose what to do next, one at a time, and do it side by side.
type run struct {
	*Search
	cancel context.CancelFunc

	// Guarded by Search.mu.
	running int // expansions under way
	end     End
	err     error
}

// work does one thing after the other until the run ends.
func (r *run) work(ctx context.Context) {
	for {
		d, ok := r.next(ctx)
		if !ok {
			return
		}
		var err error
		switch d.step {
		case stepNothing: // next waits for something
		case stepExpand:
			err = r.gone(ctx, d.node, r.expand(ctx, d.node, d.actions))
		case stepRead:
			err = r.gone(ctx, d.node, r.read(ctx, d.node))
		case stepPropose:
			err = r.gone(ctx, d.node, r.propose(ctx, d.node))
		case stepAdopt:
			err = r.gone(ctx, d.node, r.adopt(ctx, d.node))
		}
		if r.done(ctx, d, err); err != nil {
			pause(ctx, r.cfg.Poll) // what failed may be tried again
		}
	}
}

// pause waits for a time, and reports whether it passed.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// next waits until there is something to do.
func (r *run) next(ctx context.Context) (decision, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		root := &r.tree.root.record
		switch {
		case r.end != "" || r.err != nil || ctx.Err() != nil:
			return decision{}, false
		case r.cfg.Goal != nil && root.Visits > 0 && root.Max >= *r.cfg.Goal:
			r.finish(GoalReached, nil)
			return decision{}, false
		case r.tried >= r.cfg.Budget && r.running == 0:
			r.finish(BudgetSpent, nil)
			return decision{}, false
		}
		d := decision{}
		if left := r.cfg.Budget - r.tried; left > 0 {
			if d = r.cfg.Strategy.choose(&r.tree, min(r.cfg.Batch, left)); d.step != stepNothing {
				r.reserve(d)
				return d, true
			}
			if !d.waiting && r.running == 0 {
				r.finish(Exhausted, nil)
				return decision{}, false
			}
		}
		r.wait(ctx, d.waiting)
	}
}

// wait waits for a change, with mu released. While others have something under way, it looks at that now and then.
func (r *run) wait(ctx context.Context, poll bool) {
	changed := r.changed
	r.mu.Unlock()
	defer r.mu.Lock()
	var tick <-chan time.Time
	if poll {
		t := time.NewTimer(r.cfg.Poll)
		defer t.Stop()
		tick = t.C
	}
	select {
	case <-changed:
	case <-ctx.Done():
	case <-tick:
		r.mu.Lock()
		r.tree.refresh(r.tree.root)
		r.mu.Unlock()
	}
}

// finish ends the run. mu is held.
func (r *run) finish(end End, err error) {
	if r.end == "" && r.err == nil {
		r.end, r.err = end, err
	}
	r.cancel()
	r.broadcast()
}

// reserve marks what is about to be done, so that no other worker does it. mu is held.
func (r *run) reserve(d decision) {
	if d.step != stepExpand {
		d.node.busy = true
		return
	}
	r.running++
	r.tried += len(d.actions)
	until := r.tree.now().Add(r.cfg.Lease + margin).UTC().Truncate(time.Second)
	d.node.mark(d.actions, 1, until)
}

// done counts a failure, and wakes the others.
func (r *run) done(ctx context.Context, d decision, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if d.step == stepExpand {
		r.running--
	} else {
		d.node.busy = false
	}
	switch {
	case ctx.Err() != nil: // what failed was cancelled
	case err == nil:
		if d.step == stepExpand {
			r.failed = 0
		}
	default:
		if r.failed++; r.failed > r.cfg.Failures {
			r.finish("", err)
		}
	}
	r.broadcast()
}

// gone has a node that was deleted count as one where nothing is left to try.
func (r *run) gone(ctx context.Context, n *node, err error) error {
	if n.parent == nil || !errors.Is(err, ErrGone) {
		return err
	}
	r.mu.Lock()
	n.record.Done = true
	r.mu.Unlock()
	return r.pass(ctx, n, nil)
}

// propose asks the problem for the actions of a node, and writes them unless another searcher was faster.
func (r *run) propose(ctx context.Context, n *node) error {
	actions, err := r.cfg.Problem.Actions(ctx, r.view(n))
	if err != nil {
		return fmt.Errorf("propose actions for %s: %w", n.id, err)
	}
	actions = r.cfg.Strategy.proposals(n.depth, actions)
	if err := r.update(ctx, n, nil, func(record *Record) error { return record.propose(actions) }); err != nil {
		return err
	}
	return r.pass(ctx, n, nil)
}

// adopt looks for children that a searcher made and could not write down, perhaps because it crashed, and ends its claims.
func (r *run) adopt(ctx context.Context, n *node) (err error) {
	r.mu.Lock()
	lost := n.lost
	n.lost = nil
	r.mu.Unlock()
	defer func() {
		if err != nil {
			r.lose(n, slices.Collect(maps.Keys(lost)))
		}
	}()
	children, err := r.cfg.Store.Children(ctx, n.id)
	if err != nil {
		return fmt.Errorf("read the children of %s: %w", n.id, err)
	}
	err = r.update(ctx, n, nil, func(record *Record) error {
		for id, c := range children {
			if e := record.edge(c.Action); e != nil && c.Value != nil && e.Child == "" && !e.Done {
				e.merge(id, &c)
			}
		}
		for i := range record.Edges {
			record.Edges[i].drop(r.tree.now())
		}
		return nil
	})
	if err != nil {
		return err
	}
	return r.pass(ctx, n, nil)
}

// lose notes actions of a node that may have led to a child that is not written down.
func (r *run) lose(n *node, actions []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n.lost == nil && len(actions) > 0 {
		n.lost = map[string]bool{}
	}
	for _, name := range actions {
		n.lost[name] = true
	}
}

func (r *run) view(n *node) *Node {
	r.mu.Lock()
	defer r.mu.Unlock()
	return n.view()
}

// expand tries actions at a node and writes down what came out.
func (r *run) expand(ctx context.Context, n *node, actions []Action) error {
	working, cancel := context.WithTimeoutCause(ctx, r.cfg.Lease, fmt.Errorf("the expansion took longer than its lease of %s", r.cfg.Lease))
	defer cancel()
	actions, err := r.claim(ctx, n, actions)
	if err != nil || len(actions) == 0 {
		return errors.Join(err, r.settle(ctx, n, actions, nil))
	}
	view := r.view(n)
	outcomes, err := r.cfg.Problem.Expand(working, view, actions)
	if err == nil && len(outcomes) != len(actions) {
		err = fmt.Errorf("%d outcomes for %d actions", len(outcomes), len(actions))
	}
	if err != nil {
		if working.Err() != nil && ctx.Err() == nil {
			err = errors.Join(context.Cause(working), err)
		}
		return errors.Join(fmt.Errorf("expand %s: %w", n.id, err), r.settle(ctx, n, actions, nil))
	}
	var errs []error
	for i := range outcomes {
		o := &outcomes[i]
		if o.Err == nil && o.Child != "" && (math.IsNaN(o.Value) || math.IsInf(o.Value, 0)) {
			o.Err = fmt.Errorf("the value of its child %s is %v", o.Child, o.Value)
		}
		if o.Err != nil {
			errs = append(errs, fmt.Errorf("action %s at %s: %w", actions[i].Name, n.id, o.Err))
		}
	}
	if err := r.settle(ctx, n, actions, outcomes); err != nil {
		return errors.Join(append(errs, err)...)
	}
	r.report(Expansion{Node: view, Actions: actions, Outcomes: outcomes})
	return errors.Join(errs...)
}

// claim writes that the actions are under way: first at the node, where only one searcher can have an action, then on the way to the
// root, where it is a virtual loss. It returns the actions that no other searcher has.
func (r *run) claim(ctx context.Context, n *node, actions []Action) ([]Action, error) {
	var got []Action
	err := r.update(ctx, n, nil, func(record *Record) error {
		got = nil
		var lost []Action
		for _, a := range actions {
			if e := record.edge(a.Name); e == nil || e.Child != "" || e.Done || e.others(r.cfg.Searcher, r.tree.now()) > 0 || e.abandoned(r.cfg.Searcher, r.tree.now()) {
				lost = append(lost, a)
			} else {
				got = append(got, a)
			}
		}
		n.mark(lost, -1, time.Time{})
		r.tried -= len(lost)
		actions = got
		return nil
	})
	if err != nil {
		return actions, err
	}
	if len(got) == 0 {
		return nil, nil
	}
	return got, r.pass(ctx, n, nil)
}

// settle writes down what came out, and that the actions are no longer under way; without outcomes, they were not tried. It does so
// also when the search was cancelled, and retries for up to writeTime. If a child is not written down then, it is looked for before its action is
// tried again.
func (r *run) settle(ctx context.Context, n *node, actions []Action, outcomes []Outcome) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), writeTime)
	defer cancel()
	end := n.ending(actions)
	var unknown, made []string
	for i, o := range outcomes {
		switch {
		case o.unknown:
			unknown = append(unknown, actions[i].Name)
		case o.Err == nil && o.Child != "":
			made = append(made, actions[i].Name)
		}
	}
	r.lose(n, unknown)
	r.mu.Lock()
	for i := range actions {
		if outcomes == nil || outcomes[i].Err != nil {
			r.tried--
		}
	}
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		for at := range end { // where it could not be written
			end.at(at)
		}
	}()
	for {
		err := r.update(ctx, n, end, func(record *Record) error {
			for i, o := range outcomes {
				if e := record.edge(actions[i].Name); e != nil && o.Err == nil {
					e.settle(o)
				}
			}
			return nil
		})
		if err == nil {
			err = r.pass(ctx, n, end)
		}
		if err == nil || errors.Is(err, ErrGone) {
			return err
		}
		if errors.Is(err, errTooLarge) || !pause(ctx, r.cfg.Poll) {
			r.lose(n, made)
			return err
		}
	}
}

func (r *run) report(x Expansion) {
	if r.cfg.Report == nil {
		return
	}
	r.reporting.Lock()
	defer r.reporting.Unlock()
	r.mu.Lock()
	x.Tried = r.tried
	x.Best, _ = r.tree.root.best()
	r.mu.Unlock()
	r.cfg.Report(x)
}

// refresh has the nodes read again at which others have something under way.
func (t *tree) refresh(n *node) {
	for i := range n.record.Edges {
		e := &n.record.Edges[i]
		if e.others(t.searcher, t.now()) > 0 {
			n.stale = true
		}
		if c := n.children[e.Name]; c != nil {
			t.refresh(c)
		}
	}
}

// settle writes what came out into the edge, unless another searcher has tried the same action meanwhile.
func (e *Edge) settle(o Outcome) {
	switch {
	case e.Child != "":
	case o.Child == "":
		e.Done, e.Reason = true, clip(o.Reason)
	default:
		e.merge(o.Child, &Record{Value: &o.Value, Visits: 1, ValueSum: o.Value, Min: o.Value, Max: o.Value, Terminal: o.Terminal})
	}
}
