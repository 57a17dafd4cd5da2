package retention_test

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/controller/retention"
	"github.com/coppice-dev/coppice/core"
)

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// tree makes nodes out of "id parent score age-in-minutes bytes held".
func node(id, parent string, score float64, age int, bytes int64, held string) retention.Node {
	n := retention.Node{ID: core.CheckpointID(id), Parent: core.CheckpointID(parent), CreatedAt: start.Add(-time.Duration(age) * time.Minute), Bytes: bytes, Held: held}
	if score >= 0 {
		n.Score = &score
	}
	return n
}

// A small search: r is the template, 1 and 2 descend from it, 11 and 12 from 1, 21 from 2; p is pinned below 12.
func search() []retention.Node {
	return []retention.Node{
		node("r", "", -1, 100, 50, "template"), node("1", "r", 0.2, 90, 10, ""), node("2", "r", 0.5, 80, 10, ""),
		node("11", "1", 0.9, 70, 10, ""), node("12", "1", 0.1, 60, 10, ""), node("21", "2", 0.6, 5, 10, ""), node("p", "12", -1, 50, 10, "pinned"),
	}
}

// TestTreeIsBounded fills a tree.
func TestTreeIsBounded(t *testing.T) {
	t.Parallel()
	tree := retention.Tree{Most: 3}
	for i, n := range search() {
		if got := tree.Add(n); got != (i < 3) {
			t.Errorf("node %d of 3: %v", i+1, got)
		}
	}
	if plan := tree.Plan(retention.Policy{MaxAge: time.Nanosecond}, start); plan.Kept+len(plan.Remove) != 3 {
		t.Errorf("%+v", plan)
	}
}

// planOf adds nodes with parents first and plans.
func planOf(nodes []retention.Node, p retention.Policy, now time.Time) retention.Plan {
	nodes = slices.Clone(nodes)
	slices.SortStableFunc(nodes, func(a, b retention.Node) int { return cmp.Compare(depth(nodes, a), depth(nodes, b)) })
	var tree retention.Tree
	for _, n := range nodes {
		tree.Add(n)
		tree.Add(n) // once is enough
	}
	return tree.Plan(p, now)
}

func depth(nodes []retention.Node, n retention.Node) (depth int) {
	for n.Parent != "" {
		i := slices.IndexFunc(nodes, func(x retention.Node) bool { return x.ID == n.Parent })
		n, depth = nodes[i], depth+1
	}
	return depth
}

func TestPlan(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		policy retention.Policy
		remove map[string]string
		over   bool
	}{
		"best":               {retention.Policy{KeepBest: 1}, map[string]string{"1": "not_kept", "2": "not_kept", "12": "not_kept", "21": "not_kept"}, false},
		"best and its path":  {retention.Policy{KeepBest: 1, KeepPathToRoot: true}, map[string]string{"2": "not_kept", "21": "not_kept"}, false},
		"age":                {retention.Policy{MaxAge: 65 * time.Minute}, map[string]string{"1": "age", "2": "age", "11": "age"}, false},
		"age but the best":   {retention.Policy{MaxAge: 65 * time.Minute, KeepBest: 1}, map[string]string{"1": "age", "2": "age"}, false},
		"bytes":              {retention.Policy{MaxBytes: 90}, map[string]string{"12": "bytes", "1": "bytes"}, false},
		"bytes after age":    {retention.Policy{MaxBytes: 80, MaxAge: 85 * time.Minute}, map[string]string{"1": "age", "12": "bytes", "2": "bytes"}, false},
		"fits":               {retention.Policy{MaxBytes: 110}, map[string]string{}, false},
		"more than it may":   {retention.Policy{MaxBytes: 40}, map[string]string{"1": "bytes", "2": "bytes", "11": "bytes", "12": "bytes", "21": "bytes"}, true},
		"more best than are": {retention.Policy{KeepBest: 100}, map[string]string{}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			plan := planOf(search(), c.policy, start)
			got := map[string]string{}
			var bytes int64
			for _, r := range plan.Remove {
				got[string(r.ID)] = r.Reason
				bytes += r.Bytes
			}
			if diff := gocmp.Diff(c.remove, got); diff != "" || plan.Over != c.over {
				t.Errorf("over: %v; (-want +got)\n%s", plan.Over, diff)
			}
			if plan.Kept+len(plan.Remove) != 7 || plan.KeptBytes+bytes != 110 {
				t.Errorf("%+v does not add up", plan)
			}
		})
	}
}

// TestPromises plans for random trees and policies and checks each promise by itself.
func TestPromises(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	for range 3000 {
		nodes := forest(random)
		p := retention.Policy{KeepBest: random.IntN(4), KeepPathToRoot: random.IntN(2) == 0}
		if random.IntN(2) == 0 {
			p.MaxAge = time.Duration(1+random.IntN(60)) * time.Minute
		}
		if random.IntN(2) == 0 {
			p.MaxBytes = int64(1 + random.IntN(500))
		}
		plan := planOf(nodes, p, start)
		if fault := broken(nodes, p, plan); fault != "" {
			t.Fatalf("%s\n%+v\n%+v\n%+v", fault, nodes, p, plan)
		}
		want := model(nodes, p, start)
		want.NextAge = plan.NextAge
		if diff := gocmp.Diff(want, plan); diff != "" {
			t.Fatalf("the model decides otherwise (-want +got)\n%s\n%+v\n%+v", diff, nodes, p)
		}
		later := planOf(nodes, p, start.Add(time.Minute))
		if soon := !plan.NextAge.IsZero() && plan.NextAge.Before(start.Add(time.Minute)); !soon && p.MaxBytes == 0 && !gocmp.Equal(later.Remove, plan.Remove) {
			t.Fatalf("a minute later the plan differs, but it was said to be the same until %v:\n%+v\n%+v", plan.NextAge, plan, later)
		}
	}
}

func forest(random *rand.Rand) []retention.Node {
	nodes := make([]retention.Node, 1+random.IntN(30))
	for i := range nodes {
		parent, score, held := "", -1.0, ""
		if i > 0 {
			parent = fmt.Sprintf("%02d", random.IntN(i))
		}
		if random.IntN(3) > 0 {
			score = float64(random.IntN(5))
		}
		if random.IntN(5) == 0 {
			held = []string{"pinned", "workspace", "operation", "template"}[random.IntN(4)]
		}
		nodes[i] = node(fmt.Sprintf("%02d", i), parent, score, random.IntN(60), int64(random.IntN(50)), held)
		nodes[i].Gone = held == "" && random.IntN(6) == 0
	}
	random.Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
	return nodes
}

// broken names a promise that a plan does not keep.
func broken(nodes []retention.Node, p retention.Policy, plan retention.Plan) string {
	byID, removed := map[core.CheckpointID]retention.Node{}, map[core.CheckpointID]bool{}
	for _, n := range nodes {
		byID[n.ID] = n
	}
	for _, r := range plan.Remove {
		n, ok := byID[r.ID]
		if !ok || removed[r.ID] || n.Gone || n.Bytes != r.Bytes {
			return "it removes what is not there: " + string(r.ID)
		}
		removed[r.ID] = true
		if n.Held != "" {
			return "it removes what is held: " + string(r.ID)
		}
		if r.Reason == retention.ReasonAge && start.Sub(n.CreatedAt) <= p.MaxAge {
			return "it is not that old: " + string(r.ID)
		}
	}
	best := 0
	var keptBytes int64
	for _, n := range nodes {
		if n.Gone || removed[n.ID] {
			continue
		}
		keptBytes += n.Bytes
		if n.Score != nil {
			best++
		}
		if p.KeepPathToRoot && n.Held != "" {
			for at := n.Parent; at != ""; at = byID[at].Parent {
				if removed[at] {
					return "it removes an ancestor of what is held: " + string(at)
				}
			}
		}
	}
	scored := 0
	for _, n := range nodes {
		if n.Score == nil || n.Gone {
			continue
		}
		scored++
		if !removed[n.ID] {
			continue
		}
		better := 0
		for _, m := range nodes {
			if m.Score != nil && !m.Gone && *m.Score >= *n.Score && m.ID != n.ID {
				better++
			}
		}
		if better < p.KeepBest {
			return "it removes one of the best: " + string(n.ID)
		}
	}
	switch {
	case best < min(p.KeepBest, scored):
		return "fewer are left than the best that are to be kept"
	case keptBytes != plan.KeptBytes:
		return "the bytes do not add up"
	case plan.Over != (p.MaxBytes > 0 && keptBytes > p.MaxBytes):
		return "it does not say whether it fits"
	}
	return ""
}
