package search_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/sdk/go/search"
)

func TestMain(m *testing.M) { testleak.Main(m) }

// TestFindsTheOptimum gives each tree search a sixth of the 5,460 words.
func TestFindsTheOptimum(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]search.Strategy{
		"UCT":          search.UCT{C: 0.2},
		"UCT widening": search.UCT{C: 0.2, Widening: 2},
		"UCT MinMax":   search.UCT{C: 0.3, MinMax: true},
		"PUCT":         search.PUCT{C: 0.5},
		"PUCT MinMax":  search.PUCT{C: 0.5, MinMax: true, FPU: 0.2},
		"Beam":         search.Beam{Width: 2, Depth: 6},
	} {
		for _, parallel := range []int{1, 4, 16} {
			for _, batch := range []int{1, 3} {
				t.Run(fmt.Sprintf("%s/%d/%d", name, parallel, batch), func(t *testing.T) {
					t.Parallel()
					w := &words{target: "dbcadb", letters: "abcd"}
					cfg := config(w, s)
					cfg.Parallel, cfg.Batch, cfg.Goal, cfg.RootValue, cfg.Budget = parallel, batch, new(1.0), new(0.0), 900
					r := run(t, cfg)
					if r.End != search.GoalReached || wordOf(r.Best) != w.target || r.Best.Value != 1 {
						t.Errorf("it ended because of %q after %d actions with %q", r.End, r.Tried, wordOf(r.Best))
					}
					nodes, _, _, _ := checkTree(t, w, root)
					if nodes != r.Tried+1 || nodes != len(w.tried)+1 {
						t.Errorf("%d nodes after %d actions, of which %d were done", nodes, r.Tried, len(w.tried))
					}
				})
			}
		}
	}
}

// TestUCTIsBetterThanChance: half of the words would have to be tried on average.
func TestUCTIsBetterThanChance(t *testing.T) {
	t.Parallel()
	for _, s := range []search.Strategy{search.UCT{C: 0.2}, search.PUCT{C: 0.5}} {
		w := &words{target: "dbcadb", letters: "abcd"}
		cfg := config(w, s)
		cfg.Goal = new(1.0)
		if r := run(t, cfg); r.End != search.GoalReached || r.Tried > 200 {
			t.Errorf("%T: %d actions, %s", s, r.Tried, r.End)
		}
	}
}

func TestPriorsLeadPUCT(t *testing.T) {
	t.Parallel()
	w := &words{target: "ccc", letters: "abc", priors: map[string]float64{"a": 1, "b": 1, "c": 8}}
	cfg := config(w, search.PUCT{C: 1.25})
	cfg.Goal = new(1.0)
	run(t, cfg)
	if want := []string{"c", "cc", "ccc"}; !slices.Equal(w.tried, want) {
		t.Errorf("tried %v, want %v", w.tried, want)
	}
}

// TestExhausted wants every word once, also when several searchers share the tree.
func TestExhausted(t *testing.T) {
	t.Parallel()
	for _, s := range []search.Strategy{search.UCT{C: 1}, search.PUCT{C: 1}, search.Beam{Width: 100, Depth: 3}} {
		for _, searchers := range []int{1, 4} {
			t.Run(fmt.Sprintf("%T/%d", s, searchers), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					w := &words{target: "cab", letters: "abc", hook: work()}
					var all sync.WaitGroup
					tried := make([]int, searchers)
					for i := range searchers {
						all.Go(func() {
							cfg := config(w, s)
							cfg.Parallel, cfg.Searcher = 4, fmt.Sprint("searcher ", i)
							r := run(t, cfg)
							tried[i] = r.Tried
							if r.End != search.Exhausted || wordOf(r.Best) != "cab" {
								t.Errorf("searcher %d ended because of %q with %q", i, r.End, wordOf(r.Best))
							}
						})
					}
					all.Wait()
					times, sum := w.times(), 0
					for _, n := range tried {
						sum += n
					}
					if nodes, _, _, _ := checkTree(t, w, root); nodes != 39 || len(times) != 39 || len(w.tried) != 39 || sum != 39 {
						t.Errorf("%d nodes, %d words, tried %d times by searchers that count %v; want 39", nodes, len(times), len(w.tried), tried)
					}
					if slices.Contains(tried, 0) {
						t.Errorf("a searcher found nothing to do: %v", tried)
					}
				})
			})
		}
	}
}

// work takes some time for each word, another one for each.
func work() func(context.Context, string) error {
	return func(ctx context.Context, word string) error {
		after := time.NewTimer(time.Duration(len(word)*700+int(word[len(word)-1])) * time.Millisecond)
		defer after.Stop()
		select {
		case <-after.C:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func TestBestOfN(t *testing.T) {
	t.Parallel()
	w := &words{target: "cab", letters: "abc"}
	cfg := config(w, search.BestOfN{N: 7})
	cfg.Parallel, cfg.Batch = 2, 2
	r := run(t, cfg)
	slices.Sort(w.tried)
	if got := strings.Join(w.tried, ""); got != "aaabbcc" || r.End != search.Exhausted || r.Best.Action != "c" {
		t.Errorf("tried %s, ended because of %q with %q", got, r.End, r.Best.Action)
	}
	checkTree(t, w, root)
}

func TestBeam(t *testing.T) {
	t.Parallel()
	w := &words{target: "cab", letters: "abc"}
	cfg := config(w, search.Beam{Width: 1, Depth: 3})
	cfg.Parallel = 4
	if r := run(t, cfg); r.End != search.Exhausted || wordOf(r.Best) != "cab" {
		t.Errorf("ended because of %q with %q", r.End, wordOf(r.Best))
	}
	slices.Sort(w.tried)
	if want := []string{"a", "b", "c", "ca", "caa", "cab", "cac", "cb", "cc"}; !slices.Equal(w.tried, want) {
		t.Errorf("tried %v, want %v", w.tried, want)
	}
	checkTree(t, w, root)
}

// TestGoesOn: a search that has spent its budget goes on where it was, in another searcher too.
func TestGoesOn(t *testing.T) {
	t.Parallel()
	w := &words{target: "cab", letters: "abc"}
	for i := range 4 {
		cfg := config(w, search.UCT{C: 0.5})
		cfg.Budget = 10
		r := run(t, cfg)
		want := search.BudgetSpent
		if i == 3 {
			want = search.Exhausted
		}
		if nodes, _, _, _ := checkTree(t, w, root); r.End != want || nodes != min(10*(i+1), 39) {
			t.Errorf("part %d: %q after %d actions, %d nodes", i, r.End, r.Tried, nodes)
		}
	}
	if len(w.times()) != 39 || len(w.tried) != 39 {
		t.Errorf("%d words, tried %d times", len(w.times()), len(w.tried))
	}
}

// TestUntried: a hook that leaves actions out ends the search before they were tried, and the same search goes on without it.
func TestUntried(t *testing.T) {
	t.Parallel()
	w := &words{target: "cab", letters: "abc"}
	all := false
	s, err := search.New(config(w, search.UCT{C: 0.5, Untried: func(n *search.Node, untried []search.Action) []search.Action {
		slices.Reverse(untried)
		if !all {
			untried = slices.DeleteFunc(untried, func(a search.Action) bool { return a.Name == "c" && n.Depth == 0 })
		}
		return untried
	}}))
	if err != nil {
		t.Fatal(err)
	}
	r, err := s.Run(t.Context())
	if err != nil || r.End != search.Exhausted || r.Tried != 26 || w.tried[0] != "b" {
		t.Errorf("%q after %d actions, %v: %v", r.End, r.Tried, w.tried, err)
	}
	all = true
	if r, err = s.Run(t.Context()); err != nil || r.End != search.Exhausted || r.Tried != 39 {
		t.Errorf("%q after %d actions: %v", r.End, r.Tried, err)
	}
}

// TestTree compares the copy of the tree and the reports with what was done.
func TestTree(t *testing.T) {
	t.Parallel()
	w := &words{target: "cab", letters: "abc"}
	cfg := config(w, search.UCT{C: 0.2})
	cfg.Goal, cfg.Batch = new(1.0), 3
	var reports []string
	cfg.Report = func(x search.Expansion) {
		reports = append(reports, fmt.Sprintf("%s %d %d %s", wordOf(x.Node), len(x.Outcomes), x.Tried, wordOf(x.Best)))
	}
	s, err := search.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if want := []string{" 3 3 c", "c 3 6 ca", "ca 3 9 cab"}; !slices.Equal(reports, want) {
		t.Errorf("reports %q, want %q", reports, want)
	}
	var got []string
	s.Tree().Walk(func(n *search.Node) {
		got = append(got, fmt.Sprintf("%d%s %d %.3f", n.Depth, wordOf(n), n.Visits, n.Mean()))
	})
	want := []string{"0 9 0.444", "1a 1 0.000", "1b 1 0.000", "1c 7 0.571", "2ca 4 0.750", "3caa 1 0.667", "3cab 1 1.000", "3cac 1 0.667", "2cb 1 0.333", "2cc 1 0.333"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("tree (-want +got):\n%s", diff)
	}
}

// TestGoalCancels: what is under way when the goal is reached is cancelled, and nobody has it afterwards.
func TestGoalCancels(t *testing.T) {
	t.Parallel()
	w := &words{target: "c", letters: "abc"}
	cancelled := make(chan string, 2)
	w.hook = func(ctx context.Context, word string) error {
		if word == "c" {
			return nil
		}
		<-ctx.Done()
		cancelled <- word
		return ctx.Err()
	}
	cfg := config(w, search.UCT{})
	cfg.Parallel, cfg.Goal = 3, new(1.0)
	r := run(t, cfg)
	if r.End != search.GoalReached || r.Tried != 1 || len(cancelled) != 2 {
		t.Errorf("%q after %d actions, %d cancelled", r.End, r.Tried, len(cancelled))
	}
	checkTree(t, w, root)
}

func TestFailures(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := &words{target: "cab", letters: "abc"}
		broken, left := errors.New("no capacity"), 3
		w.hook = func(context.Context, string) error {
			if left--; left >= 0 {
				return broken
			}
			return nil
		}
		cfg := config(w, search.UCT{})
		cfg.Failures = 1
		s, err := search.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		r, err := s.Run(t.Context())
		if !errors.Is(err, broken) || r.End != "" || r.Tried != 0 || left != 1 {
			t.Errorf("%v, %+v with %d failures to come", err, r, left)
		}
		checkTree(t, w, root)
		if r, err = s.Run(t.Context()); err != nil || r.End != search.Exhausted || r.Tried != 39 {
			t.Errorf("the second run: %v, %+v", err, r)
		}
		checkTree(t, w, root)
	})
}

// TestLease: an expansion that takes longer is cancelled, so that no claim ends while its owner works.
func TestLease(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := &words{target: "cab", letters: "abc"}
		w.hook = func(ctx context.Context, _ string) error { <-ctx.Done(); return ctx.Err() }
		cfg := config(w, search.UCT{})
		cfg.Lease = time.Minute
		s, err := search.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		_, err = s.Run(t.Context())
		if err == nil || !strings.Contains(err.Error(), "longer than its lease of 1m0s") || time.Since(began) < time.Minute {
			t.Errorf("after %s: %v", time.Since(began), err)
		}
		checkTree(t, w, root)
	})
}

func TestCancel(t *testing.T) {
	t.Parallel()
	w := &words{target: "cab", letters: "abc"}
	ctx, cancel := context.WithCancel(t.Context())
	w.hook = func(ctx context.Context, word string) error {
		if len(word) == 2 {
			cancel()
			return ctx.Err()
		}
		return nil
	}
	cfg := config(w, search.UCT{})
	s, err := search.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if r, err := s.Run(ctx); !errors.Is(err, context.Canceled) || r.Tried != 3 || r.Best.Action != "c" {
		t.Errorf("%v, %+v", err, r)
	}
	checkTree(t, w, root)
}

func TestConfig(t *testing.T) {
	t.Parallel()
	w := &words{}
	for _, s := range []search.Strategy{nil, search.UCT{C: -1}, search.PUCT{FPU: -1}, search.BestOfN{}, search.BestOfN{N: 51}, search.Beam{Width: 1}, &search.UCT{}} {
		if _, err := search.New(config(w, s)); err == nil {
			t.Errorf("strategy %#v passed", s)
		}
	}
	for _, change := range []func(*search.Config){
		func(c *search.Config) { c.Root = "" },
		func(c *search.Config) { c.Problem = nil },
		func(c *search.Config) { c.Store = nil },
		func(c *search.Config) { c.Parallel = -1 },
		func(c *search.Config) { c.Searcher = strings.Repeat("x", 129) },
	} {
		cfg := config(w, search.UCT{})
		change(&cfg)
		if _, err := search.New(cfg); err == nil {
			t.Errorf("%+v passed", cfg)
		}
	}
}
