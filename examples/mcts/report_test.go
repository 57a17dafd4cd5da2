package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/sdk/go/search"
)

func TestPercentiles(t *testing.T) {
	t.Parallel()
	var hundred []float64
	for i := range 100 {
		hundred = append(hundred, float64(100-i))
	}
	for _, x := range []struct {
		samples []float64
		want    Percentiles
	}{
		{nil, Percentiles{}},
		{[]float64{7}, Percentiles{7, 7}},
		{[]float64{3, 1, 2}, Percentiles{2, 3}},
		{hundred, Percentiles{50, 95}},
	} {
		if got := percentiles(x.samples); got != x.want {
			t.Errorf("percentiles of %d samples: %+v, want %+v", len(x.samples), got, x.want)
		}
	}
}

func TestDistinct(t *testing.T) {
	t.Parallel()
	a := Identity{Random: "1", MachineID: "1", Hostname: "1", MAC: "1", IP: "1"}
	b := Identity{Random: "2", MachineID: "2", Hostname: "2", MAC: "2", IP: "2"}
	shared := b
	shared.MAC, shared.Random = "1", ""
	for _, x := range []struct {
		ids  []Identity
		want Distinct
	}{
		{[]Identity{a, b}, Distinct{true, true, true, true, true}},
		{[]Identity{a, shared}, Distinct{false, true, true, false, true}},
		{[]Identity{a}, Distinct{}}, // nothing to differ from
		{nil, Distinct{}},
	} {
		if got := distinct(x.ids); got != x.want || got.All() != (x.want == Distinct{true, true, true, true, true}) {
			t.Errorf("%+v: %+v, want %+v", x.ids, got, x.want)
		}
	}
}

// solved is a small search that succeeded.
func solved() (*Game, *search.Node, search.Result) {
	root := &search.Node{ID: "ckpt_0000000000000000000000root", Value: 0.5, Visits: 3, ValueSum: 2}
	left := &search.Node{ID: "ckpt_0000000000000000000000left", Action: "left", Depth: 1, Parent: root, Value: 0.5, Visits: 1, ValueSum: 0.5}
	right := &search.Node{ID: "ckpt_000000000000000000000right", Action: "right", Depth: 1, Parent: root, Value: 1, Visits: 1, ValueSum: 1}
	root.Children = []*search.Node{left, right}
	g := &Game{Refused: 1, seen: map[string]Observation{
		root.ID:  {Passed: 1, Total: 2, Nonce: "n", PID: 5},
		left.ID:  {Passed: 1, Total: 2, Nonce: "n", PID: 5, Journal: []string{"left"}},
		right.ID: {Passed: 2, Total: 2, Nonce: "n", PID: 5, Journal: []string{"right"}},
	}}
	return g, root, search.Result{Best: right, Tried: 3, End: search.GoalReached}
}

func TestReport(t *testing.T) {
	t.Parallel()
	g, root, result := solved()
	m := &Machines{forks: 4, on: map[string]int{"rnr_b": 1, "rnr_a": 3}, createMS: []float64{1}, pauseMS: []float64{2}, readyMS: []float64{3}, forkMS: []float64{4}}
	r := fill(g, root, result, m, 1500e6)
	path := filepath.Join(t.TempDir(), "new", "report.json")
	if err := r.write(path); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]any
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	both := func(v float64) map[string]any { return map[string]any{"p50": v, "p95": v} }
	no := map[string]any{"random": false, "machine_id": false, "hostname": false, "mac": false, "ip": false}
	want := map[string]any{
		"solved": true, "reward_start": 0.5, "reward_best": 1.0, "fix": []any{"right"}, "nodes": 3.0, "forks": 4.0, "runners": map[string]any{"rnr_a": 3.0, "rnr_b": 1.0}, "depth_max": 1.0,
		"refused": 1.0, "repeated": 0.0, "wall_s": 1.5, "template_ms": 0.0, "create_ms": both(1), "checkpoint_pause_ms": both(2),
		"fork_ready_ms": both(3), "fork_call_ms": both(4), "distinct": no, "siblings": nil, "memory_branches": true,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("report (-want +got):\n%s", diff)
	}
	if err := verdict(r, 1); err == nil || !strings.Contains(err.Error(), "siblings share an identity") {
		t.Errorf("verdict without distinct siblings: %v", err)
	}
	r.Distinct = Distinct{true, true, true, true, true}
	if err := verdict(r, 1); err != nil {
		t.Error(err)
	}
	if err := verdict(r, 3); err == nil || !strings.Contains(err.Error(), "2 runners have had forks, want 3") {
		t.Errorf("verdict of forks on too few runners: %v", err)
	}
	if got, line := r.summary(), "solved with right; 4 forks, 3 on rnr_a, 1 on rnr_b; 1.5 s"; got != line {
		t.Errorf("%q, want %q", got, line)
	}
	lost := g.observed(result.Best)
	lost.Journal = []string{"left"} // a sibling's
	g.seen[result.Best.ID] = lost
	if remembers(g, root) {
		t.Error("a machine that remembers its sibling's way passed")
	}
	if err := verdict(Report{Distinct: r.Distinct}, 0); err == nil {
		t.Error("a search without a solution passed")
	}
}

func TestPrintTree(t *testing.T) {
	t.Parallel()
	g, root, result := solved()
	var b strings.Builder
	printTree(&b, g, root, result.Best)
	want := `* root                                                        1/2  visits   3  mean 0.6667  0000root
├─  left                                                      1/2  visits   1  mean 0.5000  0000left
└─* right                                                     2/2  visits   1  mean 1.0000  000right
`
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
