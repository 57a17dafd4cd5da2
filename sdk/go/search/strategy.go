package search

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// Strategy chooses which node is expanded next, and by which actions: UCT, PUCT, BestOfN or Beam. It is a pure function of
// what the search knows of the tree.
type Strategy interface {
	// choose returns what to do next, with at most batch actions.
	choose(t *tree, batch int) decision
	// proposals returns the actions that a node of a depth gets, out of those that the problem proposed.
	proposals(depth int, actions []Action) []Action
}

// UCT is upper confidence bounds applied to trees. It descends from the root to the child with the greatest
//
//	Q'(s, a) + C · √(ln N'(s) / n'(s, a))
//
// and expands the first node that has an action to try. With f expansions in flight below an edge, n' = n + VirtualLoss·f and
// Q' = W / n': each counts as VirtualLoss values of 0, so that parallel expansions spread.
type UCT struct {
	// C is the UCT constant, in the unit of values; √2 for values from 0 to 1 in theory, often 0.1 to 0.5 in practice.
	C float64
	// VirtualLoss is the number of values of 0 that an expansion in flight counts for; 1 if it is 0.
	VirtualLoss float64
	// MinMax scales Q to 0 … 1 by the least and the greatest value of the whole tree, as MuZero does. C has no unit then, and
	// values need not be between 0 and 1.
	MinMax bool
	// Widening is k of progressive widening: a node gets a further child only while it has fewer than k · √N(s), or no other
	// child can be descended to. 0: all actions of a node are tried before one of its children is expanded.
	Widening float64
	// Untried orders the untried actions of a node, best first, and may leave some out for now; nil: the order of the proposal. It
	// is called often, and must be quick.
	Untried func(n *Node, untried []Action) []Action
}

// PUCT is UCT with priors, as AlphaZero uses it. It takes the action of the greatest
//
//	Q'(s, a) + C · P(s, a) · √N'(s) / (1 + n'(s, a))
//
// whether it has been tried or not. P is normalised over the node's actions; Q' and n' are those of UCT.
type PUCT struct {
	// C is the exploration constant, in the unit of values; AlphaZero's c_puct is 1.25 at the start.
	C float64
	// FPU is the first-play urgency reduction: an action that was not tried counts with Q(s) - FPU.
	FPU float64
	// VirtualLoss and MinMax are as in UCT.
	VirtualLoss float64
	MinMax      bool
}

// BestOfN tries N actions of the root, and nothing else. If fewer are proposed, each is tried several times, under names that end
// in "#2", "#3", … N is at most 50. The root's record has room for fewer if names, priors or data are long; then the search fails.
type BestOfN struct {
	N int
}

// Beam is beam search. It tries all actions of the nodes of a level, keeps the Width children of the greatest values, and goes on
// with these, Depth levels deep.
type Beam struct {
	Width int
	Depth int
}

// maxOfN bounds the actions of BestOfN.
const maxOfN = 50

// check refuses settings that mean nothing.
func check(s Strategy) error {
	var ok bool
	switch s := s.(type) {
	case UCT:
		ok = s.C >= 0 && s.VirtualLoss >= 0 && s.Widening >= 0
	case PUCT:
		ok = s.C >= 0 && s.VirtualLoss >= 0 && s.FPU >= 0
	case BestOfN:
		ok = s.N > 0 && s.N <= maxOfN
	case Beam:
		ok = s.Width > 0 && s.Depth > 0
	default:
		return fmt.Errorf("strategy %T: it is UCT, PUCT, BestOfN or Beam", s)
	}
	if !ok {
		return fmt.Errorf("strategy %T: a number is out of its range: %+v", s, s)
	}
	return nil
}

func (UCT) proposals(_ int, actions []Action) []Action  { return actions }
func (PUCT) proposals(_ int, actions []Action) []Action { return actions }

func (b Beam) proposals(depth int, actions []Action) []Action {
	if depth >= b.Depth {
		return nil
	}
	return actions
}

func (b BestOfN) proposals(depth int, actions []Action) []Action {
	if depth > 0 || len(actions) == 0 {
		return nil
	}
	out := make([]Action, b.N)
	for i := range out {
		out[i] = actions[i%len(actions)]
		if attempt := i/len(actions) + 1; attempt > 1 {
			out[i].Name = fmt.Sprintf("%s#%d", out[i].Name, attempt)
		}
	}
	return out
}

// scale turns sums of values into means between 0 and 1.
type scale struct {
	min, span, loss float64
}

func (t *tree) scale(minMax bool, virtualLoss float64) scale {
	s := scale{span: 1, loss: cmp.Or(virtualLoss, 1)}
	if r := &t.root.record; minMax {
		if s.min = r.Min; r.Max > r.Min {
			s.span = r.Max - r.Min
		}
	}
	return s
}

// mean is Q' and n' of visits and a sum of values, with f expansions in flight.
func (s scale) mean(visits int64, sum float64, f int) (q, n float64) {
	n = float64(visits) + s.loss*float64(f)
	if n == 0 {
		return 0, 0
	}
	return (sum - float64(visits)*s.min) / s.span / n, n
}

// total is N' of a node: its visits, and what is in flight below it.
func (s scale) total(t *tree, n *node) float64 {
	f := 0
	for i := range n.record.Edges {
		f += t.inFlight(n, &n.record.Edges[i])
	}
	return float64(n.record.Visits) + s.loss*float64(f)
}

// candidate is an edge that a descent may take.
type candidate struct {
	edge  *Edge // nil: expand the node
	score float64
}

// descend follows the best candidates until one can be expanded. If there is nothing on the way of the best, it takes the next.
func descend(t *tree, n *node, batch int, order func(*node) ([]candidate, []Action, bool)) decision {
	if d, ok := t.ready(n); !ok {
		return d
	}
	candidates, untried, waiting := order(n)
	for _, c := range candidates {
		if c.edge == nil {
			return decision{step: stepExpand, node: n, actions: untried[:min(batch, len(untried))]}
		}
		d := descend(t, n.child(c.edge), batch, order)
		if d.step != stepNothing {
			return d
		}
		waiting = waiting || d.waiting
	}
	return decision{waiting: waiting}
}

// open calls f for the edges with a child below which something may be left.
func (n *node) open(f func(*Edge)) (children int) {
	for i := range n.record.Edges {
		e := &n.record.Edges[i]
		if e.Child == "" {
			continue
		}
		children++
		if !e.Done {
			f(e)
		}
	}
	return children
}

func best(a, b candidate) int { return cmp.Compare(b.score, a.score) }

func (u UCT) choose(t *tree, batch int) decision {
	scaled := t.scale(u.MinMax, u.VirtualLoss)
	return descend(t, t.root, batch, func(n *node) ([]candidate, []Action, bool) {
		untried, waiting := t.untried(n)
		free := len(untried)
		if u.Untried != nil && len(untried) > 0 {
			untried = u.Untried(n.view(), untried)
		}
		var out []candidate
		total := scaled.total(t, n)
		children := n.open(func(e *Edge) {
			q, visits := scaled.mean(e.Visits, e.ValueSum, t.inFlight(n, e))
			out = append(out, candidate{e, q + u.C*math.Sqrt(math.Log(max(total, 1))/max(visits, 1))})
		})
		slices.SortStableFunc(out, best)
		if len(untried) == 0 {
			return out, nil, waiting
		}
		children += len(n.record.Edges) - tried(n.record.Edges) - free // those that are being made
		if u.Widening > 0 && float64(children) >= u.Widening*math.Sqrt(total) {
			return append(out, candidate{}), untried, waiting
		}
		return append([]candidate{{}}, out...), untried, waiting
	})
}

func (p PUCT) choose(t *tree, batch int) decision {
	scaled := t.scale(p.MinMax, p.VirtualLoss)
	return descend(t, t.root, batch, func(n *node) ([]candidate, []Action, bool) {
		untried, waiting := t.untried(n)
		prior := priors(n.record.Edges)
		root := math.Sqrt(max(scaled.total(t, n), 1))
		var out []candidate
		n.open(func(e *Edge) {
			q, visits := scaled.mean(e.Visits, e.ValueSum, t.inFlight(n, e))
			out = append(out, candidate{e, q + p.C*prior(e.Action)*root/(1+visits)})
		})
		if len(untried) > 0 {
			slices.SortStableFunc(untried, func(a, b Action) int { return cmp.Compare(prior(b), prior(a)) })
			q, _ := scaled.mean(n.record.Visits, n.record.ValueSum, 0)
			out = append(out, candidate{nil, q - p.FPU + p.C*prior(untried[0])*root})
		}
		slices.SortStableFunc(out, best)
		return out, untried, waiting
	})
}

// tried counts the edges that nobody will try again.
func tried(edges []Edge) int {
	n := 0
	for i := range edges {
		if edges[i].Child != "" || edges[i].Done {
			n++
		}
	}
	return n
}

// priors returns P(s, ·).
func priors(edges []Edge) func(Action) float64 {
	sum := 0.0
	for i := range edges {
		sum += edges[i].Prior
	}
	return func(a Action) float64 {
		if sum == 0 {
			return 1 / float64(len(edges))
		}
		return a.Prior / sum
	}
}

func (b BestOfN) choose(t *tree, batch int) decision {
	if d, ok := t.ready(t.root); !ok {
		return d
	}
	untried, waiting := t.untried(t.root)
	if len(untried) == 0 {
		return decision{waiting: waiting}
	}
	return decision{step: stepExpand, node: t.root, actions: untried[:min(batch, len(untried))]}
}

func (b Beam) choose(t *tree, batch int) decision {
	level := []*node{t.root}
	for range b.Depth {
		waiting := false
		for _, n := range level {
			if d, ok := t.ready(n); !ok {
				if d.step != stepNothing {
					return d
				}
				waiting = waiting || d.waiting
				continue
			}
			untried, busy := t.untried(n)
			if len(untried) > 0 {
				return decision{step: stepExpand, node: n, actions: untried[:min(batch, len(untried))]}
			}
			waiting = waiting || busy
		}
		if waiting {
			return decision{waiting: true} // the best of a level are known when it is complete
		}
		level = b.next(level)
	}
	return decision{}
}

// next returns the best children of a level, the first of equals.
func (b Beam) next(level []*node) []*node {
	type child struct {
		of   *node
		edge *Edge
	}
	var all []child
	for _, n := range level {
		for i := range n.record.Edges {
			if e := &n.record.Edges[i]; e.Child != "" {
				all = append(all, child{n, e})
			}
		}
	}
	slices.SortStableFunc(all, func(x, y child) int { return cmp.Compare(y.edge.Value, x.edge.Value) })
	var out []*node
	for _, c := range all[:min(b.Width, len(all))] {
		out = append(out, c.of.child(c.edge))
	}
	return out
}
