package search_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/coppice-dev/coppice/sdk/go/search"
)

// words is a problem with a known optimum: a node is a word, an action adds a letter, and the value is how much of the target the word
// begins with. What a real fork would do takes no time here, unless a hook waits.
type words struct {
	search.Memory
	target, letters string
	priors          map[string]float64
	hook            func(ctx context.Context, word string) error // before a word is made

	mu    sync.Mutex
	tried []string // words, in the order of their ends
}

const root = "root"

func wordOf(n *search.Node) string { return strings.Join(n.Path(), "") }

func (w *words) value(word string) float64 {
	same := 0
	for same < min(len(word), len(w.target)) && word[same] == w.target[same] {
		same++
	}
	return float64(same) / float64(len(w.target))
}

func (w *words) Actions(_ context.Context, n *search.Node) ([]search.Action, error) {
	var out []search.Action
	for l := range strings.SplitSeq(w.letters, "") {
		out = append(out, search.Action{Name: l, Prior: w.priors[l]})
	}
	if n.Depth >= len(w.target) {
		return nil, nil
	}
	return out, nil
}

func (w *words) Expand(ctx context.Context, n *search.Node, actions []search.Action) ([]search.Outcome, error) {
	out := make([]search.Outcome, len(actions))
	for i, a := range actions {
		word := wordOf(n) + a.Name[:1]
		if w.hook != nil {
			if err := w.hook(ctx, word); err != nil {
				return nil, err
			}
		}
		out[i] = w.make(n.ID, a.Name, word)
	}
	return out, nil
}

// make is a fork that became a checkpoint.
func (w *words) make(parent, action, word string) search.Outcome {
	w.mu.Lock()
	w.tried = append(w.tried, word)
	id := fmt.Sprintf("%s-%d", word, len(w.tried))
	w.mu.Unlock()
	v := w.value(word)
	w.Add(parent, id, search.Record{Action: action, Value: &v, Visits: 1, ValueSum: v, Min: v, Max: v})
	return search.Outcome{Child: id, Value: v, Terminal: len(word) == len(w.target)}
}

// times counts how often each word was made.
func (w *words) times() map[string]int {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := map[string]int{}
	for _, word := range w.tried {
		out[word]++
	}
	return out
}

// checkTree compares the statistics of every node with what is below it, and wants nothing in flight. It returns how many nodes there are.
func checkTree(t *testing.T, w *words, id string) (nodes int, sum, least, greatest float64) {
	t.Helper()
	r, _, err := w.Load(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	visits := int64(0)
	if r.Value != nil {
		visits, sum, least, greatest = 1, *r.Value, *r.Value, *r.Value
	} else {
		least = 1
	}
	for _, e := range r.Edges {
		if len(e.InFlight) > 0 {
			t.Errorf("node %s: action %s is in flight: %v", id, e.Name, e.InFlight)
		}
		if e.Child == "" {
			continue
		}
		n, s, lo, hi := checkTree(t, w, e.Child)
		nodes, visits, sum, least, greatest = nodes+n, visits+int64(n), sum+s, min(least, lo), max(greatest, hi)
		if e.Visits != int64(n) || !near(e.ValueSum, s) || !near(e.Min, lo) || !near(e.Max, hi) {
			t.Errorf("node %s: edge %s has N %d, W %v, %v … %v; below it are %d, %v, %v … %v", id, e.Name, e.Visits, e.ValueSum, e.Min, e.Max, n, s, lo, hi)
		}
	}
	if r.Visits != visits || !near(r.ValueSum, sum) || visits > 0 && (!near(r.Min, least) || !near(r.Max, greatest)) {
		t.Errorf("node %s has N %d, W %v, %v … %v; there are %d, %v, %v … %v", id, r.Visits, r.ValueSum, r.Min, r.Max, visits, sum, least, greatest)
	}
	if r.Value != nil {
		nodes++
	}
	return nodes, sum, least, greatest
}

func near(a, b float64) bool { return a-b < 1e-9 && b-a < 1e-9 }

func run(t *testing.T, cfg search.Config) search.Result {
	t.Helper()
	s, err := search.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	r, err := s.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if n := s.UnderWay(); n != 0 {
		t.Errorf("%d expansions are under way after the end", n)
	}
	return r
}

func config(w *words, s search.Strategy) search.Config {
	return search.Config{Root: root, Problem: w, Store: w, Strategy: s, Budget: 1000}
}
