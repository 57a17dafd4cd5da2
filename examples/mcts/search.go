package main

import (
	"cmp"
	"context"
	"slices"
	"sync"

	"github.com/coppice-dev/coppice/sdk/go/search"
)

// World forks machines. Its nodes are named by whatever it likes.
type World interface {
	// Expand forks one machine for each action from a node, all at once, and does the action in it. A machine for whose
	// observation keep says yes becomes a node. keep is not called concurrently.
	Expand(ctx context.Context, from string, actions []Action, keep func(Observation) bool) ([]Outcome, error)
}

// Outcome is what became of one action.
type Outcome struct {
	Node    string       // empty when it was not kept
	Seen    *Observation // nil when the action did not apply
	Refused string       // then: why
}

// Settings of a search.
type Settings struct {
	Children    int     // how many children of a node are forked at once
	Budget      int     // how many forks at most
	Exploration float64 // the UCT constant, for values scaled to 0 … 1
	Widening    float64 // a node gets children up to Widening times the root of its visits
	Patience    int     // how many steps in a row may bring nothing before a way is given up
	Trials      int     // how often an action is tried in vain before it waits until nothing else is left
}

// Game is the problem of the search: what may be tried at a node, and what it is worth. The value of a node is the share of tests that pass.
type Game struct {
	World    World
	Policy   Policy
	Settings Settings
	Refused  int // actions that did not apply
	Repeated int // states that were reached a second time on another way, and dropped

	mu     sync.Mutex // guards the fields below: a hook of the search reads them
	seen   map[string]Observation
	states map[string]bool
	known  map[string]Action
	gains  map[string]Gain
	trials int
	least  float64 // of the values
	most   float64
}

// Gain is what an action has been worth so far, wherever it was done.
type Gain struct {
	done int
	sum  float64 // of the change of the share of passing tests
}

func (g Gain) mean() float64 { return g.sum / float64(max(g.done, 1)) }

// newSearch returns a search from a node, over a store of records.
func newSearch(g *Game, store search.Store, root string, seen Observation, report func(search.Expansion)) (*search.Search, error) {
	g.seen, g.states = map[string]Observation{root: seen}, map[string]bool{seen.State: true}
	g.known, g.gains, g.trials = map[string]Action{}, map[string]Gain{}, g.Settings.Trials
	g.least, g.most = seen.Share(), seen.Share()
	return search.New(search.Config{
		Root: root, RootValue: new(seen.Share()), Problem: g, Store: store, Goal: new(1.0),
		Strategy: search.UCT{C: g.Settings.Exploration, MinMax: true, Widening: g.Settings.Widening, Untried: g.promising},
		Batch:    g.Settings.Children, Budget: g.Settings.Budget, Report: report,
	})
}

// play runs a search. When nothing promising is left to try, it goes on with what was tried in vain most often.
func (g *Game) play(ctx context.Context, s *search.Search) (search.Result, error) {
	for {
		r, err := s.Run(ctx)
		if err != nil || r.End != search.Exhausted {
			return r, err
		}
		g.mu.Lock()
		g.trials++
		over := g.trials > g.Settings.Budget
		g.mu.Unlock()
		if over {
			return r, nil // nothing is left to try at all
		}
	}
}

// Actions asks the policy, unless too many steps in a row have brought nothing.
func (g *Game) Actions(_ context.Context, n *search.Node) ([]search.Action, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	idle := 0
	for at := n; at.Parent != nil && at.Value <= at.Parent.Value; at = at.Parent {
		idle++
	}
	if idle > g.Settings.Patience {
		return nil, nil
	}
	var out []search.Action
	for _, a := range g.Policy.Propose(g.seen[n.ID]) {
		g.known[a.Name] = a
		out = append(out, search.Action{Name: a.Name, Prior: a.Prior})
	}
	return out, nil
}

// Expand does actions in forks, and drops states that are known.
func (g *Game) Expand(ctx context.Context, n *search.Node, actions []search.Action) ([]search.Outcome, error) {
	g.mu.Lock()
	todo := make([]Action, len(actions))
	for i, a := range actions {
		todo[i] = g.known[a.Name]
	}
	g.mu.Unlock()
	outcomes, err := g.World.Expand(ctx, n.ID, todo, func(o Observation) bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		known := g.states[o.State]
		g.states[o.State] = true
		return !known
	})
	if err != nil {
		return nil, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	out := make([]search.Outcome, len(outcomes))
	for i, o := range outcomes {
		gain := g.gains[actions[i].Name]
		gain.done++
		switch {
		case o.Seen == nil:
			g.Refused++
			out[i].Reason = o.Refused
		case o.Node == "":
			g.Repeated++
			out[i].Reason = "a known state"
		default:
			g.seen[o.Node] = *o.Seen
			g.least, g.most = min(g.least, o.Seen.Share()), max(g.most, o.Seen.Share())
			out[i] = search.Outcome{Child: o.Node, Value: o.Seen.Share()}
		}
		if o.Seen != nil {
			gain.sum += o.Seen.Share() - n.Value
		}
		g.gains[actions[i].Name] = gain
	}
	return out, nil
}

// promising returns the untried actions of a node that are not known to be useless, best first: those that were worth something
// somewhere, or have not been tried often enough. What counts is the policy's prior, and what the same action was worth elsewhere, in the
// units of the values' range. (Known as all-moves-as-first; it lets a branch learn from the others.)
func (g *Game) promising(_ *search.Node, untried []search.Action) []search.Action {
	g.mu.Lock()
	defer g.mu.Unlock()
	var out []search.Action
	for _, a := range untried {
		if gain := g.gains[a.Name]; gain.sum > 0 || gain.done < g.trials {
			out = append(out, a)
		}
	}
	promise := func(a search.Action) float64 { return a.Prior + g.gains[a.Name].mean()/max(g.most-g.least, 1e-9) }
	slices.SortStableFunc(out, func(a, b search.Action) int { return cmp.Compare(promise(b), promise(a)) })
	return out
}

// observed returns what a node's machine said.
func (g *Game) observed(n *search.Node) Observation {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.seen[n.ID]
}
