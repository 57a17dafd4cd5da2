package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/sdk/go/search"
)

// Percentiles of a measurement, in milliseconds.
type Percentiles struct {
	P50 float64 `json:"p50"`
	P95 float64 `json:"p95"`
}

// percentiles by the nearest rank; zero for no samples.
func percentiles(samples []float64) Percentiles {
	if len(samples) == 0 {
		return Percentiles{}
	}
	s := slices.Sorted(slices.Values(samples))
	rank := func(p float64) float64 { return s[max(int(math.Ceil(p*float64(len(s))))-1, 0)] }
	return Percentiles{P50: rank(0.50), P95: rank(0.95)}
}

// Distinct says of each part of an identity whether no two siblings shared it.
type Distinct struct {
	Random    bool `json:"random"`
	MachineID bool `json:"machine_id"`
	Hostname  bool `json:"hostname"`
	MAC       bool `json:"mac"`
	IP        bool `json:"ip"`
}

func distinct(ids []Identity) Distinct {
	differ := func(part func(Identity) string) bool {
		seen := map[string]bool{}
		for _, id := range ids {
			seen[part(id)] = true
		}
		return len(ids) > 1 && len(seen) == len(ids) && !seen[""]
	}
	return Distinct{
		Random:    differ(func(i Identity) string { return i.Random }),
		MachineID: differ(func(i Identity) string { return i.MachineID }),
		Hostname:  differ(func(i Identity) string { return i.Hostname }),
		MAC:       differ(func(i Identity) string { return i.MAC }),
		IP:        differ(func(i Identity) string { return i.IP }),
	}
}

// All reports whether every part differs.
func (d Distinct) All() bool { return d == Distinct{true, true, true, true, true} }

// Report is what a run leaves in its report file.
type Report struct {
	Solved            bool           `json:"solved"`
	RewardStart       float64        `json:"reward_start"`
	RewardBest        float64        `json:"reward_best"`
	Fix               []string       `json:"fix"` // the actions that lead to the best node
	Nodes             int            `json:"nodes"`
	Forks             int            `json:"forks"`
	Runners           map[string]int `json:"runners"` // forks on each
	DepthMax          int            `json:"depth_max"`
	Refused           int            `json:"refused"`  // actions that did not apply
	Repeated          int            `json:"repeated"` // forks that reached a known state and were dropped
	WallS             float64        `json:"wall_s"`
	TemplateMS        float64        `json:"template_ms"` // the first create, which boots the image once
	CreateMS          Percentiles    `json:"create_ms"`
	CheckpointPauseMS Percentiles    `json:"checkpoint_pause_ms"`
	ForkReadyMS       Percentiles    `json:"fork_ready_ms"` // of a child, from the request to READY, its siblings starting beside it
	ForkCallMS        Percentiles    `json:"fork_call_ms"`  // of a whole fork call, as the client sees it
	Distinct          Distinct       `json:"distinct"`
	Siblings          []Identity     `json:"siblings"`
	MemoryBranches    bool           `json:"memory_branches"` // in every node, one process since the root has the node's way, and no other, in memory
}

// remembers checks that the bench in every node is the process that was started at the root, and that its memory holds
// exactly the way that leads there.
func remembers(g *Game, root *search.Node) bool {
	ok, first := true, g.observed(root)
	root.Walk(func(n *search.Node) {
		o := g.observed(n)
		ok = ok && o.Nonce == first.Nonce && o.PID == first.PID && slices.Equal(o.Journal, n.Path())
	})
	return ok
}

func fill(g *Game, root *search.Node, result search.Result, m *Machines, wall time.Duration) Report {
	r := Report{
		Solved: result.Best.Value == 1, RewardStart: root.Value, RewardBest: result.Best.Value, Fix: result.Best.Path(),
		Forks: m.forks, Runners: m.on, Refused: g.Refused, Repeated: g.Repeated, WallS: math.Round(wall.Seconds()*10) / 10,
		CreateMS: percentiles(m.createMS), CheckpointPauseMS: percentiles(m.pauseMS),
		ForkReadyMS: percentiles(m.readyMS), ForkCallMS: percentiles(m.forkMS), MemoryBranches: remembers(g, root),
	}
	root.Walk(func(n *search.Node) {
		r.Nodes++
		r.DepthMax = max(r.DepthMax, n.Depth)
	})
	return r
}

func (r Report) write(path string) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil { //nolint:gosec // G301: a report for everybody
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644) //nolint:gosec // G306: a report for everybody
}

// printTree draws the tree; the way to the best node is marked.
func printTree(w io.Writer, g *Game, root, best *search.Node) {
	way := map[string]bool{}
	for n := best; n != nil; n = n.Parent {
		way[n.ID] = true
	}
	var draw func(n *search.Node, first, rest string)
	draw = func(n *search.Node, first, rest string) {
		mark, seen := " ", g.observed(n)
		if way[n.ID] {
			mark = "*"
		}
		label := cmp.Or(n.Action, "root")
		pad := max(1, 58-len([]rune(first))-len(label))
		fmt.Fprintf(w, "%s%s %s%s%3d/%d  visits %3d  mean %.4f  %s\n",
			first, mark, label, strings.Repeat(" ", pad), seen.Passed, seen.Total, n.Visits, n.Mean(), short(n.ID))
		for i, c := range n.Children {
			if i == len(n.Children)-1 {
				draw(c, rest+"└─", rest+"  ")
			} else {
				draw(c, rest+"├─", rest+"│ ")
			}
		}
	}
	draw(root, "", "")
}

func short(id string) string { return id[max(0, len(id)-8):] }

func (r Report) print(w io.Writer) {
	fmt.Fprintf(w, "\nreward %.4f → %.4f with: %s\n", r.RewardStart, r.RewardBest, strings.Join(r.Fix, ", "))
	fmt.Fprintf(w, "%d nodes, depth %d, %d forks (%d actions did not apply, %d reached a known state), %.1f s\n\n",
		r.Nodes, r.DepthMax, r.Forks, r.Refused, r.Repeated, r.WallS)
	fmt.Fprintf(w, "%-28s %10s %10s\n", "milliseconds", "p50", "p95")
	for _, row := range []struct {
		name string
		p    Percentiles
	}{
		{"create", r.CreateMS}, {"checkpoint: pause", r.CheckpointPauseMS}, {"fork: request to READY", r.ForkReadyMS}, {"fork: whole call", r.ForkCallMS},
	} {
		fmt.Fprintf(w, "%-28s %10.1f %10.1f\n", row.name, row.p.P50, row.p.P95)
	}
	fmt.Fprintf(w, "\nsiblings of one checkpoint, asked through a process that is older than the fork:\n")
	for _, id := range r.Siblings {
		fmt.Fprintf(w, "  random %s  machine-id %s  %s  %s  %s\n", clip(id.Random, 12), clip(id.MachineID, 12), id.MAC, id.IP, id.Hostname)
	}
	fmt.Fprintf(w, "distinct: random %v, machine-id %v, hostname %v, MAC %v, IP %v; memory branched with the machine: %v\n",
		r.Distinct.Random, r.Distinct.MachineID, r.Distinct.Hostname, r.Distinct.MAC, r.Distinct.IP, r.MemoryBranches)
}

// summary is the run in one line.
func (r Report) summary() string {
	what := "not solved"
	if r.Solved {
		what = "solved with " + strings.Join(r.Fix, ", ")
	}
	var on []string
	for _, id := range slices.Sorted(maps.Keys(r.Runners)) {
		on = append(on, fmt.Sprintf("%d on %s", r.Runners[id], id))
	}
	return fmt.Sprintf("%s; %d forks, %s; %.1f s", what, r.Forks, strings.Join(on, ", "), r.WallS)
}

func clip(s string, n int) string { return s[:min(n, len(s))] }
