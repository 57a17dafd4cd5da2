package main

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/internal/pace"
	"github.com/coppice-dev/coppice/internal/test/bench/report"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

const (
	treeNodes  = 64
	treeBranch = 4
	idleForks  = 3
	idleTime   = 3 * time.Second // for a fork to do what it does on its own
	mib        = 1 << 20
)

// treeMemory is the memory that a tree of checkpoints, with a living sandbox on each, takes on the host, in MiB.
type treeMemory struct {
	Nodes     int     `json:"nodes"`
	RAMMiB    int     `json:"ram_mib"`     // of each guest
	Bases     int     `json:"bases"`       //
	BaseMiB   float64 `json:"base_mib"`    // all bases, each once
	DeltaMiB  float64 `json:"delta_mib"`   // private pages of all guests
	VMMMiB    float64 `json:"vmm_mib"`     // the VMM itself, of all sandboxes
	WarmMiB   float64 `json:"warm_mib"`    // likewise, of shells that wait
	Warm      int     `json:"warm_shells"` //
	SumMiB    float64 `json:"sum_mib"`
	HostMiB   float64 `json:"host_mib"`   // by which the host's available memory fell
	IfCopied  float64 `json:"if_copied"`  // what 64 guests with RAM of their own would take, in MiB
	PerFork   float64 `json:"per_fork"`   // delta and VMM of one sandbox
	DiskMiB   float64 `json:"disk_mib"`   // of the volume, by which the checkpoints filled it
	NodeDelta float64 `json:"node_delta"` // median of the checkpoints' deltas
}

func (m *treeMemory) show(p *report.Printer) {
	p.Line("\nMemory of the host for a tree of %d checkpoints with a sandbox of %d MiB on each", m.Nodes, m.RAMMiB)
	p.Columns([][]string{
		{"bases", report.Number(m.BaseMiB) + " MiB", fmt.Sprintf("%d, each once for all", m.Bases)},
		{"deltas", report.Number(m.DeltaMiB) + " MiB", fmt.Sprintf("%s MiB of each guest is private", report.Number(m.DeltaMiB/float64(m.Nodes)))},
		{"VMM", report.Number(m.VMMMiB) + " MiB", fmt.Sprintf("%s MiB of the VMM itself each", report.Number(m.VMMMiB/float64(m.Nodes)))},
		{"warm shells", report.Number(m.WarmMiB) + " MiB", fmt.Sprintf("%d that wait", m.Warm)},
		{"sum", report.Number(m.SumMiB) + " MiB", fmt.Sprintf("available memory fell by %s MiB; copies of RAM would take %s MiB", report.Number(m.HostMiB), report.Number(m.IfCopied))},
		{"volume", report.Number(m.DiskMiB) + " MiB", fmt.Sprintf("for the checkpoints; the median delta is %s MiB", report.Number(m.NodeDelta))},
	})
}

// measureMemory measures one idle fork, then a tree.
func (b *bench) measureMemory(ctx context.Context) error {
	if err := b.measureIdle(ctx); err != nil {
		return err
	}
	before, err := availableMiB()
	if err != nil {
		return err
	}
	diskBefore, err := b.server.volumeMiB()
	if err != nil {
		return err
	}
	deltas, err := b.growTree(ctx)
	if err != nil {
		return err
	}
	if err := b.server.settle(ctx, standardMiB); err != nil {
		return err
	}
	m, err := b.server.tally(treeNodes)
	if err != nil {
		return err
	}
	after, err := availableMiB()
	if err != nil {
		return err
	}
	diskAfter, err := b.server.volumeMiB()
	if err != nil {
		return err
	}
	m.HostMiB, m.DiskMiB, m.NodeDelta = before-after, diskAfter-diskBefore, deltas.Median()
	b.report.Memory = m
	return b.server.endAll(ctx)
}

// measureIdle measures the private pages of idle forks of the template.
func (b *bench) measureIdle(ctx context.Context) error {
	ids := make([]coppice.WorkspaceID, idleForks)
	for i := range ids {
		var err error
		if ids[i], _, err = b.server.create(ctx, standardMiB); err != nil {
			return err
		}
	}
	if err := pace.Pause(ctx, idleTime); err != nil {
		return err
	}
	all, err := findVMMs(b.server.cluster)
	if err != nil {
		return err
	}
	var anonymous, vmm report.Samples
	for _, p := range all {
		u, err := measureVMM(p)
		if err != nil {
			return err
		}
		if u.runs() && p.memoryMiB == standardMiB {
			anonymous.Add(float64(u.anonymous) / mib)
			vmm.Add(float64(u.vmm) / mib)
		}
	}
	if len(anonymous) != idleForks {
		return fmt.Errorf("%d sandboxes were found instead of %d", len(anonymous), idleForks)
	}
	b.report.Group("An idle fork with 512 MiB",
		anonymous.Figure("anonymous pages of the RAM mapping", "MiB", "after 3 idle seconds"),
		vmm.Figure("the rest of the VMM", "MiB", "proportional set size"),
	)
	b.report.ratio("anon_share", anonymous.Median()/standardMiB, fmt.Sprintf("anonymous share of the RAM mapping: %.1f MiB of %d, n=%d", anonymous.Median(), standardMiB, len(anonymous)))
	return b.server.endAll(ctx)
}

// runs reports whether this is a sandbox and not a waiting shell: in a waiting shell, no guest has written anything.
func (u usage) runs() bool { return u.anonymous > 256<<10 }

// growTree makes nodes breadth first. Each is a checkpoint whose sandbox lives on and wrote one MiB of its own.
func (b *bench) growTree(ctx context.Context) (deltas report.Samples, err error) {
	root, _, err := b.server.create(ctx, standardMiB)
	if err != nil {
		return nil, err
	}
	type node struct {
		id    coppice.CheckpointID
		delta float64
	}
	mark := func(ctx context.Context, id coppice.WorkspaceID) (node, error) {
		if _, err := b.server.exec(ctx, id, dirty(1)...); err != nil {
			return node{}, err
		}
		cp, err := b.server.checkpoint(ctx, id)
		return node{cp.ID, float64(cp.DeltaBytes) / mib}, err
	}
	first, err := mark(ctx, root)
	if err != nil {
		return nil, err
	}
	nodes := []node{first}
	for at := 0; len(nodes) < treeNodes; at++ {
		children, err := b.server.fork(ctx, nodes[at].id, min(treeBranch, treeNodes-len(nodes)))
		if err != nil {
			return nil, err
		}
		grown := make([]node, len(children))
		group, groupCtx := errgroup.WithContext(ctx)
		for i, c := range children {
			group.Go(func() error {
				var err error
				grown[i], err = mark(groupCtx, c.Workspace.ID)
				return err
			})
		}
		if err := group.Wait(); err != nil {
			return nil, err
		}
		nodes = append(nodes, grown...)
	}
	for _, n := range nodes {
		deltas.Add(n.delta)
	}
	return deltas, nil
}

// tally adds up the memory of all VMMs.
func (s *server) tally(nodes int) (*treeMemory, error) {
	all, err := findVMMs(s.cluster)
	if err != nil {
		return nil, err
	}
	m := &treeMemory{Nodes: nodes, RAMMiB: standardMiB}
	bases := map[inode]int64{}
	var resident int64
	sandboxes := 0
	for _, p := range all {
		u, err := measureVMM(p)
		if err != nil {
			return nil, err
		}
		if u.base != (inode{}) {
			bases[u.base] = u.baseBytes
		}
		if !u.runs() {
			m.Warm++
			m.WarmMiB += float64(u.vmm+u.anonymous) / mib
			continue
		}
		sandboxes++
		resident = max(resident, u.shared)
		m.DeltaMiB += float64(u.anonymous) / mib
		m.VMMMiB += float64(u.vmm) / mib
	}
	if sandboxes != nodes {
		return nil, fmt.Errorf("%d sandboxes were found instead of %d", sandboxes, nodes)
	}
	m.Bases = len(bases)
	for _, n := range bases {
		m.BaseMiB += float64(n) / mib
	}
	m.SumMiB = m.BaseMiB + m.DeltaMiB + m.VMMMiB + m.WarmMiB
	m.PerFork = (m.DeltaMiB + m.VMMMiB) / float64(nodes)
	// A guest with its own RAM would have in memory what it shares with the base here, its delta, and a VMM.
	m.IfCopied = float64(nodes)*m.BaseMiB/float64(m.Bases) + m.DeltaMiB + m.VMMMiB
	return m, nil
}
