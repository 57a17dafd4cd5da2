package search_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coppice-dev/coppice/sdk/go/search"
)

// store is what one searcher has of a shared store: it may crash, lose nodes, and have other writers.
type store struct {
	*words
	dead      atomic.Bool
	conflicts atomic.Int64
	saves     atomic.Int64
	gone      string // the prefix of words that are deleted
	others    bool   // every second change comes after one of somebody else
}

var errDead = errors.New("the searcher has crashed")

func (s *store) Load(ctx context.Context, id string) (search.Record, int64, error) {
	if s.dead.Load() {
		return search.Record{}, 0, errDead
	}
	if s.gone != "" && strings.HasPrefix(id, s.gone) {
		return search.Record{}, 0, search.ErrGone
	}
	return s.words.Load(ctx, id)
}

func (s *store) Save(ctx context.Context, id string, version int64, r search.Record) (int64, error) {
	if s.dead.Load() {
		return 0, errDead
	}
	if s.gone != "" && strings.HasPrefix(id, s.gone) {
		return 0, search.ErrGone
	}
	if s.others && s.saves.Add(1)%2 == 0 { // as a change of a label
		now, v, err := s.words.Load(ctx, id)
		if err != nil {
			return 0, err
		}
		if _, err := s.words.Save(ctx, id, v, now); err != nil && !errors.Is(err, search.ErrConflict) {
			return 0, err
		}
	}
	v, err := s.words.Save(ctx, id, version, r)
	if errors.Is(err, search.ErrConflict) {
		s.conflicts.Add(1)
	}
	return v, err
}

// TestConflicts: nothing is lost when others change the same nodes all the time.
func TestConflicts(t *testing.T) {
	t.Parallel()
	w := &words{target: "cabd", letters: "abcd"}
	var all sync.WaitGroup
	shared := &store{words: w, others: true}
	for i := range 4 {
		all.Go(func() {
			cfg := config(w, search.UCT{C: 0.5, VirtualLoss: 2})
			cfg.Store, cfg.Parallel, cfg.Searcher, cfg.Poll = shared, 3, fmt.Sprint("searcher ", i), time.Millisecond
			run(t, cfg)
		})
	}
	all.Wait()
	if n := shared.conflicts.Load(); n < 100 {
		t.Errorf("only %d conflicts", n)
	}
	if nodes, _, _, _ := checkTree(t, w, root); nodes != 340 || len(w.times()) != 340 || len(w.tried) != 340 {
		t.Errorf("%d nodes, %d words, tried %d times; want 340", nodes, len(w.times()), len(w.tried))
	}
}

// crash runs a searcher that dies while it has the word "b" and two more under way. If it has made the children by then, they are
// checkpoints that nobody has written down.
func crash(t *testing.T, w *words, searcher string, made bool) {
	t.Helper()
	s := &store{words: w}
	var under sync.WaitGroup
	under.Add(3)
	ctx, kill := context.WithCancel(t.Context())
	w.hook = func(ctx context.Context, _ string) error {
		under.Done()
		<-ctx.Done()
		if made {
			return nil
		}
		return ctx.Err()
	}
	cfg := config(w, search.UCT{C: 0.5})
	cfg.Store, cfg.Parallel, cfg.Searcher, cfg.Lease = s, 3, searcher, time.Minute
	one, err := search.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() {
		_, err := one.Run(ctx)
		done <- err
	}()
	under.Wait()
	s.dead.Store(true)
	kill()
	if err := <-done; err == nil {
		t.Error("a searcher that crashed ended well")
	}
	w.hook = nil
}

// TestCrash: other searchers leave the actions of one that crashed alone until its lease is over, and then try them, or take over the
// children that it has made.
func TestCrash(t *testing.T) {
	t.Parallel()
	for _, made := range []bool{false, true} {
		for _, again := range []string{"first", "second"} {
			t.Run(fmt.Sprint(again, " ", made), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					w := &words{target: "cab", letters: "abcde"}
					began := time.Now()
					crash(t, w, "first", made)
					r, _, err := w.Load(t.Context(), root)
					if err != nil {
						t.Fatal(err)
					}
					for _, e := range r.Edges[:3] {
						if e.InFlight["first"].Count != 1 || e.Child != "" {
							t.Errorf("after the crash: %+v", e)
						}
					}
					cfg := config(w, search.UCT{C: 0.5})
					cfg.Searcher, cfg.Lease = again, time.Minute
					var took time.Duration // until something was tried at or below what the first had under way
					cfg.Report = func(x search.Expansion) {
						if word := wordOf(x.Node) + x.Actions[0].Name; took == 0 && strings.ContainsAny(word[:1], "abc") {
							took = time.Since(began)
						}
					}
					if r := run(t, cfg); r.End != search.Exhausted || wordOf(r.Best) != "cab" {
						t.Errorf("%q with %q", r.End, wordOf(r.Best))
					}
					// The clock of the test stands still while the searcher works.
					if waited := took > time.Minute; waited != (again == "second") || took > 3*time.Minute {
						t.Errorf("what the first had under way was tried after %s", took)
					}
					nodes, _, _, _ := checkTree(t, w, root)
					if nodes != 155 || len(w.times()) != 155 || len(w.tried) != 155 {
						t.Errorf("%d nodes, %d words, tried %d times; want 155", nodes, len(w.times()), len(w.tried))
					}
				})
			})
		}
	}
}

// TestLostWrites: a searcher that made a child while its store was away, and could not write it down, finds it later. Neither it nor another searcher
// makes it again.
func TestLostWrites(t *testing.T) {
	t.Parallel()
	for _, parallel := range []int{1, 3} {
		for _, searchers := range []int{1, 2} {
			t.Run(fmt.Sprint(parallel, searchers), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					w := &words{target: "cab", letters: "abc"}
					first := &store{words: w}
					var all sync.WaitGroup
					for i := range searchers {
						mine := &store{words: w}
						if i == 0 {
							mine = first
						}
						cfg := config(w, search.UCT{C: 0.5})
						cfg.Problem = lossy{words: w, store: mine, fails: i == 0}
						cfg.Store, cfg.Failures, cfg.Parallel, cfg.Lease = mine, 1000, parallel, time.Minute
						all.Go(func() {
							if r := run(t, cfg); r.End != search.Exhausted || wordOf(r.Best) != "cab" {
								t.Errorf("%q with %q", r.End, wordOf(r.Best))
							}
						})
					}
					all.Wait()
					if nodes, _, _, _ := checkTree(t, w, root); nodes != 39 || len(w.times()) != 39 || len(w.tried) != 39 {
						t.Errorf("%d nodes, %d words, tried %d times; want 39", nodes, len(w.times()), len(w.tried))
					}
				})
			})
		}
	}
}

// lossy is a problem whose searcher's store is away for a while after some children were made.
type lossy struct {
	*words
	store *store
	fails bool
}

func (l lossy) Expand(ctx context.Context, n *search.Node, actions []search.Action) ([]search.Outcome, error) {
	select {
	case <-time.After(time.Second):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	out, err := l.words.Expand(ctx, n, actions)
	if word := wordOf(n) + actions[0].Name; l.fails && (word == "a" || word == "b" || word == "ca") {
		l.store.dead.Store(true)
		time.AfterFunc(40*time.Second, func() { l.store.dead.Store(false) })
	}
	return out, err
}

// TestVirtualLossIsShared: a searcher keeps away from where another one has much under way.
func TestVirtualLossIsShared(t *testing.T) {
	t.Parallel()
	for _, until := range []time.Duration{time.Hour, -time.Hour} {
		w := &words{target: "cab", letters: "ab"}
		for _, l := range []string{"a", "b"} {
			w.make(root, l, l)
		}
		edge := func(action, child string) search.Edge {
			return search.Edge{Action: search.Action{Name: action}, Child: child, Value: 0.5, Visits: 1, ValueSum: 0.5, Min: 0.5, Max: 0.5}
		}
		a, b := edge("a", "a-1"), edge("b", "b-2")
		a.InFlight = map[string]search.Claim{"other": {Count: 3, Until: time.Now().Add(until)}}
		if _, err := w.Save(t.Context(), root, 1, search.Record{Visits: 2, ValueSum: 1, Min: 0.5, Max: 0.5, Proposed: true, Edges: []search.Edge{a, b}}); err != nil {
			t.Fatal(err)
		}
		w.tried = nil
		cfg := config(w, search.UCT{C: 0.5})
		cfg.Budget = 1
		run(t, cfg)
		want := "b"
		if until < 0 {
			want = "a"
		}
		if len(w.tried) != 1 || w.tried[0][:1] != want {
			t.Errorf("claim until %s from now: tried %v, want it below %s", until, w.tried, want)
		}
	}
}

// TestClaimsOnTheWay: an expansion is in flight on its whole way, and on no other.
func TestClaimsOnTheWay(t *testing.T) {
	t.Parallel()
	w := &words{target: "cab", letters: "abc"}
	w.hook = func(ctx context.Context, word string) error {
		if len(word) < 3 {
			return nil
		}
		for at, id := range map[int]string{0: root, 1: "c-3", 2: "ca-4"} {
			r, _, err := w.Load(ctx, id)
			if err != nil {
				return err
			}
			for _, e := range r.Edges {
				want := 0
				if e.Name == word[at:at+1] {
					want = 1
				}
				if c := e.InFlight["me"]; c.Count != want || want > 0 && time.Until(c.Until) < time.Minute {
					t.Errorf("while %s is tried, at %s: %s is in flight %+v", word, id, e.Name, e.InFlight)
				}
			}
		}
		return nil
	}
	cfg := config(w, search.UCT{})
	cfg.Goal, cfg.Searcher = new(1.0), "me"
	run(t, cfg)
	checkTree(t, w, root)
}

// TestDeletedNodes: nothing is tried below a node that somebody has deleted.
func TestDeletedNodes(t *testing.T) {
	t.Parallel()
	w := &words{target: "cab", letters: "abc"}
	cfg := config(w, search.UCT{C: 0.5})
	cfg.Store = &store{words: w, gone: "b"}
	r := run(t, cfg)
	if r.End != search.Exhausted || wordOf(r.Best) != "cab" || r.Tried != 27 {
		t.Errorf("%q after %d actions with %q", r.End, r.Tried, wordOf(r.Best))
	}
	checkTree(t, w, root)
	cfg.Store = &store{words: w, gone: root}
	s, err := search.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Run(t.Context()); !errors.Is(err, search.ErrGone) {
		t.Errorf("a search from a deleted root: %v", err)
	}
}

// never is a store in which others are always faster.
type never struct{ *words }

func (never) Save(context.Context, string, int64, search.Record) (int64, error) {
	return 0, search.ErrConflict
}

func TestEndlessConflicts(t *testing.T) {
	t.Parallel()
	w := &words{target: "cab", letters: "abc"}
	cfg := config(w, search.UCT{})
	cfg.Store, cfg.RootValue = never{w}, new(0.5)
	s, err := search.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Run(t.Context()); !errors.Is(err, search.ErrConflict) || !strings.Contains(err.Error(), "1000 times") {
		t.Errorf("%v", err)
	}
}

func TestNamesAreBounded(t *testing.T) {
	t.Parallel()
	for length, ok := range map[int]bool{0: true, 64: true, 65: false} {
		c := search.Checkpoints{Name: strings.Repeat("x", length)}
		if _, err := c.Annotations("a", search.Outcome{Value: 0.5}); (err == nil) != ok {
			t.Errorf("a search with a name of %d bytes: %v", length, err)
		}
	}
	w := &words{target: "cab", letters: "abc"}
	cfg := config(w, search.UCT{})
	cfg.Problem = refuser{strings.Repeat("x", 1000)}
	if r := run(t, cfg); r.End != search.Exhausted || r.Tried != 1 {
		t.Errorf("%+v", r)
	}
	if r, _, err := w.Load(t.Context(), root); err != nil || len(r.Edges) != 1 || len(r.Edges[0].Reason) != search.MaxReason || !r.Done || r.Visits != 0 {
		t.Errorf("%+v, %v", r, err)
	}
}

// refuser is a problem whose one action leads nowhere, for a long reason.
type refuser struct{ reason string }

func (refuser) Actions(context.Context, *search.Node) ([]search.Action, error) {
	return []search.Action{{Name: "a"}}, nil
}

func (r refuser) Expand(context.Context, *search.Node, []search.Action) ([]search.Outcome, error) {
	return []search.Outcome{{Reason: r.reason}}, nil
}

// untried is a problem of which nothing is left to try.
type untried struct{ t *testing.T }

func (u untried) Actions(context.Context, *search.Node) ([]search.Action, error) {
	u.t.Error("a node was asked for its actions")
	return nil, nil
}

func (u untried) Expand(context.Context, *search.Node, []search.Action) ([]search.Outcome, error) {
	u.t.Error("a node was expanded")
	return nil, errors.New("nothing is left to try")
}

// TestSubtreeThatNobodyToldOf: a searcher that crashed has finished a subtree, and its parents do not know. The next one tells them.
func TestSubtreeThatNobodyToldOf(t *testing.T) {
	t.Parallel()
	var m search.Memory
	leaf := search.Record{Action: "b", Value: new(0.75), Terminal: true, Done: true, Visits: 1, ValueSum: 0.75, Min: 0.75, Max: 0.75}
	child := search.Record{
		Action: "a", Value: new(0.5), Proposed: true, Done: true, Visits: 2, ValueSum: 1.25, Min: 0.5, Max: 0.75,
		Edges: []search.Edge{{Action: search.Action{Name: "b"}, Child: "leaf", Value: 0.75, Visits: 1, ValueSum: 0.75, Min: 0.75, Max: 0.75, Done: true}},
	}
	root := search.Record{
		Proposed: true, Visits: 1, ValueSum: 0.5, Min: 0.5, Max: 0.5,
		Edges: []search.Edge{{Action: search.Action{Name: "a"}, Child: "child", Value: 0.5, Visits: 1, ValueSum: 0.5, Min: 0.5, Max: 0.5}},
	}
	m.Add("", "root", root)
	m.Add("root", "child", child)
	m.Add("child", "leaf", leaf)
	s, err := search.New(search.Config{Root: "root", Problem: untried{t}, Store: &m, Strategy: search.UCT{C: 1}, Budget: 10})
	if err != nil {
		t.Fatal(err)
	}
	r, err := s.Run(t.Context())
	if err != nil || r.Tried != 0 || r.Best.Value != 0.75 {
		t.Fatalf("%v: %+v, best %+v", err, r, r.Best)
	}
	if got, _, err := m.Load(t.Context(), "root"); err != nil || got.Visits != 2 || got.ValueSum != 1.25 || !got.Done || got.Max != 0.75 {
		t.Errorf("the root has %+v, %v", got, err)
	}
}
