package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
)

// World grows machines. Its nodes are named by whatever it likes.
type World interface {
	// Expand grows one machine for each action from a node, all at once, and does the action in it. A machine for whose
	// observation keep says yes becomes a node. keep is not called concurrently.
	Expand(ctx context.Context, from string, actions []Action, keep func(Observation) bool) ([]Outcome, error)
	// Score records what the search thinks of a node.
	Score(ctx context.Context, node string, s Score) error
}

// Outcome is what became of one action.
type Outcome struct {
	Node    string       // empty when it was not kept
	Seen    *Observation // nil when the action did not apply
	Refused string       // then: why
}

// Score is what the search keeps with a node, for people and other programs.
type Score struct {
	Visits int     `json:"visits"`
	Mean   float64 `json:"score"` // mean share of passing tests over the visits
	Share  float64 `json:"reward"`
	Action string  `json:"action"`
	Depth  int     `json:"depth"`
}

// Node is a state of the game that was reached.
type Node struct {
	ID       string
	Action   string
	Depth    int
	Seen     Observation
	Parent   *Node
	Children []*Node

	visits  int
	sum     float64
	idle    int // steps in a row, up to here, that brought nothing
	untried []Action
}

// Gain is what an action has been worth so far, wherever it was done.
type Gain struct {
	done int
	sum  float64 // of the change of the share of passing tests
}

func (g Gain) mean() float64 { return g.sum / float64(max(g.done, 1)) }

// Score returns the node's score.
func (n *Node) Score() Score {
	return Score{Visits: n.visits, Mean: n.sum / float64(max(n.visits, 1)), Share: n.Seen.Share(), Action: n.Action, Depth: n.Depth}
}

// Settings of a search.
type Settings struct {
	Children    int     // how many children of a node are grown at once
	Budget      int     // how many forks at most
	Exploration float64 // weight of the confidence bound against the mean, both in units of the rewards' range
	Widening    float64 // a node gets children up to Widening times the root of its visits
	Patience    int     // how many steps in a row may bring nothing before a way is given up
	Trials      int     // how often an action is tried in vain before it waits until nothing else is left
}

// Search is one tree search. Run it once.
type Search struct {
	World    World
	Policy   Policy
	Settings Settings
	Root     *Node
	Best     *Node
	Forks    int
	Refused  int // actions that did not apply
	Repeated int // states that were reached a second time on another way, and dropped

	states   map[string]bool
	gains    map[string]Gain
	trials   int
	min, max float64
}

// Run searches until every test passes, the budget is spent or nothing is left to try. It reports whether it solved.
func (s *Search) Run(ctx context.Context, progress func(*Search, *Node)) (bool, error) {
	s.Best = s.Root
	s.states, s.gains = map[string]bool{s.Root.Seen.State: true}, map[string]Gain{}
	s.min, s.max = s.Root.Seen.Share(), s.Root.Seen.Share()
	s.Root.untried = s.Policy.Propose(s.Root.Seen)
	s.backUp(s.Root, s.Root.Seen.Share())
	s.trials = s.Settings.Trials
	for s.Best.Seen.Share() < 1 && s.Forks < s.Settings.Budget {
		for !s.open(s.Root) {
			if s.trials++; s.trials > s.Settings.Budget {
				return false, nil // nothing is left to try at all
			}
		}
		n := s.choose()
		if err := s.expand(ctx, n); err != nil {
			return false, fmt.Errorf("expand %s: %w", n.ID, err)
		}
		progress(s, n)
	}
	return s.Best.Seen.Share() == 1, nil
}

// choose descends from the root: at a node that may have more children it stops, else it goes to the child with the
// best confidence bound.
func (s *Search) choose() *Node {
	n := s.Root
	for {
		var best *Node
		bound := math.Inf(-1)
		for _, c := range n.Children {
			if b := s.bound(n, c); b > bound && s.open(c) {
				best, bound = c, b
			}
		}
		wide := float64(len(n.Children)) >= s.Settings.Widening*math.Sqrt(float64(n.visits))
		if best == nil || (!wide && len(s.promising(n)) > 0) {
			return n
		}
		n = best
	}
}

// promising returns the untried actions of a node that are not known to be useless: those that were worth something
// somewhere, or have not been tried often enough.
func (s *Search) promising(n *Node) []Action {
	var out []Action
	for _, a := range n.untried {
		if g := s.gains[a.Name]; g.sum > 0 || g.done < s.trials {
			out = append(out, a)
		}
	}
	return out
}

// open reports whether something promising is left to be tried at or below a node.
func (s *Search) open(n *Node) bool {
	return len(s.promising(n)) > 0 || slices.ContainsFunc(n.Children, s.open)
}

// bound is UCB1 over rewards scaled to the range that was seen.
func (s *Search) bound(parent, child *Node) float64 {
	mean := child.sum / float64(child.visits)
	if s.max > s.min {
		mean = (mean - s.min) / (s.max - s.min)
	}
	return mean + s.Settings.Exploration*math.Sqrt(math.Log(float64(parent.visits))/float64(child.visits))
}

// expand tries the next actions of a node, all at once, and backs their rewards up.
func (s *Search) expand(ctx context.Context, n *Node) error {
	actions := s.promising(n)
	slices.SortStableFunc(actions, func(a, b Action) int { return cmp.Compare(s.promise(b), s.promise(a)) })
	k := min(s.Settings.Children, len(actions), s.Settings.Budget-s.Forks)
	actions = actions[:k]
	n.untried = slices.DeleteFunc(n.untried, func(a Action) bool {
		return slices.ContainsFunc(actions, func(b Action) bool { return a.Name == b.Name })
	})
	s.Forks += k
	outcomes, err := s.World.Expand(ctx, n.ID, actions, func(o Observation) bool {
		if s.states[o.State] {
			return false
		}
		s.states[o.State] = true
		return true
	})
	if err != nil {
		return err
	}
	touched := map[*Node]bool{}
	for i, o := range outcomes {
		g := s.gains[actions[i].Name]
		g.done++
		if o.Seen != nil {
			g.sum += o.Seen.Share() - n.Seen.Share()
		}
		s.gains[actions[i].Name] = g
		switch {
		case o.Seen == nil:
			s.Refused++
			continue
		case o.Node == "":
			s.Repeated++
			continue
		}
		child := &Node{ID: o.Node, Action: actions[i].Name, Depth: n.Depth + 1, Seen: *o.Seen, Parent: n}
		if o.Seen.Share() <= n.Seen.Share() {
			child.idle = n.idle + 1
		}
		if child.idle <= s.Settings.Patience {
			child.untried = s.Policy.Propose(*o.Seen)
		}
		n.Children = append(n.Children, child)
		s.backUp(child, o.Seen.Share())
		for a := child; a != nil; a = a.Parent {
			touched[a] = true
		}
		if child.Seen.Share() > s.Best.Seen.Share() {
			s.Best = child
		}
	}
	var errs []error
	for a := range touched {
		errs = append(errs, s.World.Score(ctx, a.ID, a.Score()))
	}
	return errors.Join(errs...)
}

// promise orders the untried actions of a node: the policy's prior, and what the same action was worth elsewhere, in
// the units of the rewards' range. (Known as all-moves-as-first; it lets a branch learn from the others.)
func (s *Search) promise(a Action) float64 {
	return a.Prior + s.gains[a.Name].mean()/max(s.max-s.min, 1e-9)
}

func (s *Search) backUp(n *Node, reward float64) {
	s.min, s.max = min(s.min, reward), max(s.max, reward)
	for ; n != nil; n = n.Parent {
		n.visits++
		n.sum += reward
	}
}

// All calls f for the root and everything below it, parents first.
func (n *Node) All(f func(*Node)) {
	f(n)
	for _, c := range n.Children {
		c.All(f)
	}
}

// Path returns the actions from the root to the node.
func (n *Node) Path() []string {
	if n.Parent == nil {
		return nil
	}
	return append(n.Parent.Path(), n.Action)
}
