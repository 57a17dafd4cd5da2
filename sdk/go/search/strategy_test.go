package search

import (
	"math"
	"testing"
	"time"
)

// small is a tree whose root has three children and one action that was not tried.
func small(values ...[2]float64) *tree {
	root := newNode("root")
	root.stale, root.version = false, 1
	root.record.Proposed = true
	for i, v := range values {
		name := string(rune('a' + i))
		e := Edge{Action: Action{Name: name, Prior: float64(i + 1)}}
		if v[0] > 0 {
			e.Child, e.Visits, e.ValueSum, e.Min, e.Max = "child "+name, int64(v[0]), v[1], v[1]/v[0], v[1]/v[0]
		}
		root.record.Edges = append(root.record.Edges, e)
	}
	root.record.count()
	return &tree{root: root, searcher: "me", now: func() time.Time { return time.Unix(1000, 0) }}
}

// takes names the action of the root that a strategy takes.
func takes(t *testing.T, tree *tree, s Strategy) string {
	t.Helper()
	switch d := s.choose(tree, 1); d.step {
	case stepRead: // of the child that it would descend to
		return d.node.action
	case stepExpand:
		return "try " + d.actions[0].Name
	default:
		t.Fatalf("decision %+v", d)
		return ""
	}
}

// TestFormulas compares choices with what the formulas give by hand.
func TestFormulas(t *testing.T) {
	t.Parallel()
	full := func() *tree { return small([2]float64{10, 6}, [2]float64{4, 2}, [2]float64{2, 0.6}) }
	for name, x := range map[string]struct {
		tree *tree
		s    Strategy
		want string
	}{
		"the mean alone":  {full(), UCT{}, "a"},
		"UCT, great C":    {full(), UCT{C: 1.4}, "c"},  // 1.337, 1.666, 1.948
		"PUCT, small C":   {full(), PUCT{C: 0.1}, "a"}, // P is 1/6, 2/6, 3/6: 0.606, 0.527, 0.367
		"all tried first": {small([2]float64{10, 9}, [2]float64{}), UCT{}, "try b"},
		"widening":        {small([2]float64{10, 9}, [2]float64{}), UCT{Widening: 0.3}, "a"}, // 1 child ≥ 0.3·√10
		"PUCT, first":     {small([2]float64{10, 9}, [2]float64{}), PUCT{C: 0.1}, "try b"},   // 0.910; 0.9+0.211
		"PUCT, FPU":       {small([2]float64{10, 9}, [2]float64{}), PUCT{C: 0.1, FPU: 0.3}, "a"},
	} {
		if got := takes(t, x.tree, x.s); got != x.want {
			t.Errorf("%s: it takes %q, want %q", name, got, x.want)
		}
	}
	// The constant at which b gets ahead of a: 0.6 + C·√(ln 16/10) = 0.5 + C·√(ln 16/4).
	tie := 0.1 / (math.Sqrt(math.Log(16)/4) - math.Sqrt(math.Log(16)/10))
	for c, want := range map[float64]string{tie - 0.01: "a", tie + 0.001: "b"} {
		tree := full()
		tree.root.record.Edges[2].Done = true
		if got := takes(t, tree, UCT{C: c}); got != want {
			t.Errorf("UCT with C %.4f takes %q, want %q", c, got, want)
		}
	}
	// The same for PUCT: 0.6 + C·(1/6)·4/11 = 0.5 + C·(2/6)·4/5.
	tie = 0.1 / (4.0*2/6/5 - 4.0/6/11)
	for c, want := range map[float64]string{tie - 0.001: "a", tie + 0.001: "b"} {
		tree := full()
		tree.root.record.Edges[2].Done = true
		if got := takes(t, tree, PUCT{C: c}); got != want {
			t.Errorf("PUCT with C %.4f takes %q, want %q", c, got, want)
		}
	}
}

// TestVirtualLoss: parallel descents spread over equal children, and without it, or almost, they do not.
func TestVirtualLoss(t *testing.T) {
	t.Parallel()
	for _, s := range []struct {
		Strategy
		least int
	}{{UCT{C: 0.5}, 2}, {PUCT{C: 0.5, VirtualLoss: 3}, 2}, {UCT{C: 0.01, VirtualLoss: 1e-6}, 0}} {
		tree := small([2]float64{4, 2.01}, [2]float64{4, 2}, [2]float64{4, 2})
		for i := range tree.root.record.Edges {
			tree.root.record.Edges[i].Prior = 1
		}
		times := map[string]int{}
		for range 9 {
			d := s.choose(tree, 1)
			times[d.node.action]++
			d.node.mark([]Action{{Name: "x"}}, 1, time.Unix(2000, 0)) // an expansion at the child
		}
		for _, name := range []string{"b", "c"} {
			if n := times[name]; n < s.least || s.least == 0 && n > 0 {
				t.Errorf("%#v: %v", s.Strategy, times)
			}
		}
	}
}

// TestClaimsEnd: what another searcher has under way is a virtual loss until its time is over.
func TestClaimsEnd(t *testing.T) {
	t.Parallel()
	for until, want := range map[int64]string{1001: "b", 1000: "a", 999: "a"} {
		for _, s := range []Strategy{UCT{C: 0.5}, PUCT{C: 0.5}} {
			tree := small([2]float64{4, 2.4}, [2]float64{4, 2})
			for i := range tree.root.record.Edges {
				tree.root.record.Edges[i].Prior = 1
			}
			tree.root.record.Edges[0].InFlight = map[string]Claim{"other": {3, time.Unix(until, 0)}}
			if got := takes(t, tree, s); got != want {
				t.Errorf("%T, a claim until %d at 1000: it takes %q, want %q", s, until, got, want)
			}
		}
	}
}

// TestMinMax: values of any unit are scaled.
func TestMinMax(t *testing.T) {
	t.Parallel()
	for factor, shift := range map[float64]float64{1: 0, 1000: -5, 0.001: 7} {
		for c, want := range map[float64]string{0.01: "a", 0.6: "b"} {
			v := func(n, sum float64) [2]float64 { return [2]float64{n, sum*factor + n*shift} }
			tree := small(v(10, 6), v(4, 2), v(50, 0))
			if got := takes(t, tree, UCT{C: c, MinMax: true}); got != want {
				t.Errorf("factor %v, C %v: it takes %q, want %q", factor, c, got, want)
			}
		}
	}
}

// TestBusy: what another worker is about to do is waited for.
func TestBusy(t *testing.T) {
	t.Parallel()
	for _, s := range []Strategy{UCT{}, PUCT{}, BestOfN{2}, Beam{2, 2}} {
		tree := small([2]float64{}, [2]float64{})
		d := s.choose(tree, 5)
		if d.step != stepExpand || len(d.actions) != 2 {
			t.Errorf("%T: %+v", s, d)
		}
		d.node.mark(d.actions, 1, time.Unix(2000, 0))
		if d := s.choose(tree, 5); d.step != stepNothing || !d.waiting {
			t.Errorf("%T, all in flight: %+v", s, d)
		}
		tree.root.busy = true
		if d := s.choose(tree, 5); d.step != stepNothing || !d.waiting {
			t.Errorf("%T, busy: %+v", s, d)
		}
	}
}

// TestMinMaxOfEqualValues: while all values are equal, they are scaled to 0, however great they are.
func TestMinMaxOfEqualValues(t *testing.T) {
	t.Parallel()
	for _, s := range []Strategy{UCT{C: 1, MinMax: true}, PUCT{C: 1, MinMax: true}} {
		tree := small([2]float64{10, 10_000}, [2]float64{2, 2000})
		tree.root.mark([]Action{{Name: "b"}}, 1, time.Unix(2000, 0)) // its virtual loss is one value of 0, and not of 1000 less than the others
		if got := takes(t, tree, s); got != "b" {
			t.Errorf("%T takes %q", s, got)
		}
	}
}

// TestTimes: a searcher that is slow, and not dead, has written down everything before others take over its actions.
func TestTimes(t *testing.T) {
	t.Parallel()
	const begun = 5 * time.Second // that the client asks which operation a request has started
	if begun+2*endTime+writeTime >= margin {
		t.Errorf("it may take %s, twice %s and %s after a lease to end, and others wait for %s", begun, endTime, writeTime, margin)
	}
}
