package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	coppice "github.com/coppice-dev/coppice/sdk/go"
	"github.com/coppice-dev/coppice/sdk/go/search"
)

// The game of TestSearch: a file of the machine holds a word, and an action adds a letter to it. Of the words of at most three letters the
// target is the best.
const (
	wordFile = "/workspace/word"
	target   = "bab"
)

func worth(word string) float64 {
	same := 0
	for same < min(len(word), len(target)) && word[same] == target[same] {
		same++
	}
	return float64(same) / float64(len(target))
}

// spell returns the problem for one searcher.
func spell(t *testing.T, at address) *search.Forks {
	t.Helper()
	client, err := coppice.New(coppice.Config{Server: at.URL, Token: at.Token})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	return &search.Forks{
		Checkpoints: search.Checkpoints{Client: client, Name: "spell"},
		Fork:        coppice.ForkCheckpointRequest{Labels: coppice.Labels{"game": "spell"}},
		Propose: func(_ context.Context, n *search.Node) ([]search.Action, error) {
			if n.Depth == len(target) {
				return nil, nil
			}
			return []search.Action{{Name: "a", Prior: 0.5}, {Name: "b", Prior: 0.5}}, nil
		},
		Act: func(ctx context.Context, ws coppice.Workspace, a search.Action) (search.Outcome, error) {
			res, err := client.Exec(ctx, ws.ID, coppice.ExecRequest{Command: []string{"cat", wordFile}})
			if err != nil {
				return search.Outcome{}, err
			}
			if res.ExitCode != 0 {
				return search.Outcome{}, fmt.Errorf("read the word: status %d: %s", res.ExitCode, res.Stderr)
			}
			word := res.Stdout + a.Name
			if word == "aa" {
				return search.Outcome{Reason: "no word has two a at the beginning"}, nil
			}
			_, err = client.WriteFile(ctx, ws.ID, wordFile, strings.NewReader(word), coppice.WriteOptions{})
			return search.Outcome{Value: worth(word), Terminal: len(word) == len(target), Data: []byte(`{"word":"` + word + `"}`)}, err
		},
	}
}

// rootOf makes the checkpoint at the root.
func rootOf(t *testing.T, forks *search.Forks, image string) coppice.CheckpointID {
	t.Helper()
	ws, err := forks.Client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{Image: image})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := forks.Client.WriteFile(t.Context(), ws.ID, wordFile, strings.NewReader(""), coppice.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	cp, err := forks.Client.CreateCheckpoint(t.Context(), ws.ID, coppice.CreateCheckpointRequest{Annotations: coppice.Annotations{"note": "kept"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := forks.Client.TerminateWorkspace(t.Context(), ws.ID); err != nil {
		t.Fatal(err)
	}
	return cp.ID
}

func newSearch(t *testing.T, forks *search.Forks, root coppice.CheckpointID, budget int) *search.Search {
	t.Helper()
	s, err := search.New(search.Config{
		Root: root, Problem: forks, Store: forks, Strategy: search.UCT{C: 0.5}, RootValue: new(0.0), Parallel: 2, Budget: budget, Poll: 20 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestSearch searches a tree of real checkpoints: one searcher begins and crashes, and two others, which share the tree, go on.
func TestSearch(t *testing.T) {
	t.Parallel()
	next, input, done := begin(t)
	at := next()
	forks := spell(t, at)
	root := rootOf(t, forks, at.Image)
	first, err := newSearch(t, forks, root, 2).Run(t.Context())
	if err != nil || first.End != search.BudgetSpent || first.Best.Action != "b" || first.Best.Value != worth("b") {
		t.Fatalf("the first searcher: %+v, %v", first, err)
	}
	leave(t, forks, first.Best)
	var searchers sync.WaitGroup
	results := make([]search.Result, 2)
	for i := range results {
		s := newSearch(t, spell(t, at), root, 100)
		searchers.Go(func() {
			var err error
			if results[i], err = s.Run(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	searchers.Wait()
	for _, r := range results {
		if r.End != search.Exhausted || strings.Join(r.Best.Path(), "") != target || string(r.Best.Data) != `{"word":"`+target+`"}` {
			t.Errorf("a searcher ended because of %q with %v, %s", r.End, r.Best.Path(), r.Best.Data)
		}
	}
	// 14 words, of which "aa" is none and "aaa" and "aab" cannot be reached; the first searcher has tried two, and left "ba".
	if n := results[0].Tried + results[1].Tried; n != 9 {
		t.Errorf("the two tried %d actions, want 9", n)
	}
	words := map[string]int{}
	for node, err := range forks.Client.Tree(t.Context(), root, -1) {
		if err != nil {
			t.Fatal(err)
		}
		checkNode(t, forks, node.Checkpoint)
		if node.Checkpoint.ID != root {
			words[node.Checkpoint.Annotations["coppice.search/v1/spell"].(map[string]any)["data"].(map[string]any)["word"].(string)]++
		}
	}
	if got := slices.Sorted(maps.Keys(words)); strings.Join(got, " ") != "a ab aba abb b ba baa bab bb bba bbb" || slices.Max(slices.Collect(maps.Values(words))) != 1 {
		t.Errorf("checkpoints: %v", words)
	}
	left, err := coppice.Collect(forks.Client.Workspaces(t.Context(), coppice.WorkspaceFilter{}))
	if err != nil || len(left) != 0 {
		t.Errorf("%d workspaces are left: %v", len(left), err)
	}
	deleted(t, forks, root)
	if err := input.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// leave does what a searcher has done that crashes between a checkpoint and its backup: a claim, whose time is over, and a child.
func leave(t *testing.T, forks *search.Forks, n *search.Node) {
	t.Helper()
	r, version, err := forks.Load(t.Context(), n.ID)
	if err != nil {
		t.Fatal(err)
	}
	r.Proposed, r.Edges = true, []search.Edge{{Action: search.Action{Name: "a"}}, {Action: search.Action{Name: "b"}}}
	r.Edges[0].InFlight = map[string]search.Claim{"crashed": {Count: 1, Until: time.Now().Add(-time.Second)}}
	if _, err := forks.Save(t.Context(), n.ID, version, r); err != nil {
		t.Fatal(err)
	}
	if _, err := forks.Save(t.Context(), n.ID, version, r); !errors.Is(err, search.ErrConflict) {
		t.Errorf("a write with an old version: %v", err)
	}
	out, err := forks.Expand(t.Context(), n, []search.Action{{Name: "a"}})
	if err != nil || len(out) != 1 || out[0].Err != nil || out[0].Child == "" {
		t.Fatalf("%+v, %v", out, err)
	}
}

// checkNode compares a checkpoint's annotations with its children.
func checkNode(t *testing.T, forks *search.Forks, cp coppice.Checkpoint) {
	t.Helper()
	r, _, err := forks.Load(t.Context(), cp.ID)
	if err != nil {
		t.Fatal(err)
	}
	children, err := forks.Children(t.Context(), cp.ID)
	if err != nil {
		t.Fatal(err)
	}
	visits, sum := int64(1), *r.Value
	for _, e := range r.Edges {
		child, there := children[e.Child]
		if e.Child != "" && (!there || child.Visits != e.Visits || child.ValueSum != e.ValueSum) || len(e.InFlight) > 0 {
			t.Errorf("edge %+v of %s leads to %+v", e, cp.ID, child)
		}
		visits, sum = visits+e.Visits, sum+e.ValueSum
		delete(children, e.Child)
	}
	if r.Visits != visits || r.ValueSum != sum || len(children) > 0 {
		t.Errorf("%s has N %d, W %v; its edges give %d, %v; children without an edge: %v", cp.ID, r.Visits, r.ValueSum, visits, sum, children)
	}
	if cp.Annotations["visits"] != float64(visits) || cp.Annotations["mean"] != sum/float64(visits) || cp.Annotations["score"] != *r.Value {
		t.Errorf("annotations %v of %s; want %d visits, mean %v, score %v", cp.Annotations, cp.ID, visits, sum/float64(visits), *r.Value)
	}
}

// deleted: what is left to be tried below a checkpoint that somebody deletes is not tried, and nothing fails.
func deleted(t *testing.T, forks *search.Forks, root coppice.CheckpointID) {
	t.Helper()
	again := *forks
	again.Name = "again"
	s := newSearch(t, &again, root, 2)
	if _, err := s.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, c := range s.Tree().Children {
		if err := forks.Client.DeleteCheckpoint(t.Context(), c.ID); err != nil {
			t.Fatal(err)
		}
		if _, err := again.Save(t.Context(), c.ID, 0, search.Record{}); !errors.Is(err, search.ErrGone) {
			t.Errorf("a change of a deleted checkpoint: %v", err)
		}
	}
	r, err := newSearch(t, &again, root, 100).Run(t.Context())
	if err != nil || r.End != search.Exhausted || r.Tried != 0 {
		t.Errorf("below deleted checkpoints: %+v, %v", r, err)
	}
	cp, err := forks.Client.Checkpoint(t.Context(), root)
	if err != nil || cp.Annotations["note"] != "kept" {
		t.Errorf("the root afterwards: %v, %v", cp.Annotations, err)
	}
}
