package main

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/internal/test/bench/report"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// dirty is a command that makes a guest write n MiB into a file in memory: the same pages every time.
func dirty(n int) []string {
	return []string{"dd", "if=/dev/urandom", "of=/dev/shm/dirty", "bs=1M", fmt.Sprintf("count=%d", n), "conv=notrunc", "status=none"}
}

// measurePauses measures how long a capture stops a guest, depending on its RAM and on the amount of written memory.
func (b *bench) measurePauses(ctx context.Context) error {
	rams, sizes := []int{256, 2048}, []int{1, 10, 100}
	type key struct{ ram, size int }
	var (
		guests = map[key]coppice.WorkspaceID{}
		pauses = map[key]*report.Samples{}
		deltas = map[key]*report.Samples{}
		where  report.Stages
	)
	for _, ram := range rams {
		for _, size := range sizes {
			id, _, err := b.server.create(ctx, ram)
			if err != nil {
				return err
			}
			if _, err := b.server.exec(ctx, id, dirty(size)...); err != nil {
				return err
			}
			k := key{ram, size}
			guests[k], pauses[k], deltas[k] = id, new(report.Samples), new(report.Samples)
		}
	}
	for range b.rounds(9, 60*time.Second) {
		for _, size := range sizes {
			for _, ram := range rams {
				k := key{ram, size}
				cp, err := b.server.checkpoint(ctx, guests[k])
				if err != nil {
					return err
				}
				pauses[k].Add(cp.PauseMS)
				deltas[k].Add(float64(cp.DeltaBytes) / (1 << 20))
				if size == 10 {
					where.Public(cp.Timings)
				}
			}
		}
	}
	var figures []report.Figure
	for _, size := range sizes {
		for _, ram := range rams {
			k := key{ram, size}
			figures = append(figures, pauses[k].MS(fmt.Sprintf("%d MiB dirty, %d MiB of RAM", size, ram),
				fmt.Sprintf("delta %.1f MiB in all", deltas[k].Median())))
		}
	}
	b.report.Group("Checkpoint pause: from before the workload freezes until it runs again", figures...)
	b.report.Stages["checkpoint"] = where.Medians()
	b.report.over("pause_2g_over_256m", *pauses[key{2048, 10}], *pauses[key{256, 10}], "pause at 2 GiB over 256 MiB of RAM, 10 MiB dirty, ms")
	return b.server.endAll(ctx)
}

// The depth of the deep end, and the amount that each generation rewrites.
const (
	deepest   = 64
	rewritten = 4 // MiB
)

// measureDepth makes a line of generations, each of which rewrites the same pages, and compares the first with the
// last.
func (b *bench) measureDepth(ctx context.Context) error {
	w, _, err := b.server.create(ctx, standardMiB)
	if err != nil {
		return err
	}
	if _, err := b.server.exec(ctx, w, dirty(rewritten)...); err != nil {
		return err
	}
	parents := map[int]coppice.CheckpointID{} // by the depth of the checkpoint that is then taken of a child
	first, err := b.server.client.Workspace(ctx, w)
	if err != nil {
		return err
	}
	parents[1] = first.ParentCheckpointID // the template
	for depth := 1; depth < deepest; depth++ {
		cp, err := b.server.checkpoint(ctx, w)
		if err != nil {
			return err
		}
		child, err := b.server.forkOne(ctx, cp.ID)
		if err != nil {
			return err
		}
		if err := b.server.end(ctx, w); err != nil {
			return err
		}
		w = child.Workspace.ID
		if _, err := b.server.exec(ctx, w, dirty(rewritten)...); err != nil {
			return err
		}
		parents[depth+1] = cp.ID
		if depth%16 == 0 {
			b.say("  generation %d", depth)
		}
	}
	if err := b.server.end(ctx, w); err != nil {
		return err
	}
	return b.compareDepths(ctx, parents[1], parents[deepest])
}

func (b *bench) compareDepths(ctx context.Context, shallow, deep coppice.CheckpointID) error {
	ends := []*end{{name: "depth 1", from: shallow}, {name: fmt.Sprintf("depth %d", deepest), from: deep}}
	for i := range b.rounds(11, 90*time.Second) {
		for j := range ends {
			if err := b.toFirstExec(ctx, ends[(i+j)%2]); err != nil { // who goes first changes
				return err
			}
		}
	}
	var figures []report.Figure
	for _, e := range ends {
		figures = append(figures,
			e.exec.MS("checkpoint request to a child's first exec, "+e.name, fmt.Sprintf("delta %.1f MiB, depth %d", e.delta.Median(), e.depth)),
			e.ready.MS("  of it, to READY", ""),
			e.capture.MS("  of it, checkpoint", fmt.Sprintf("pause %.0f ms", e.pause.Median())),
		)
	}
	b.report.Group(fmt.Sprintf("Depth in the DAG, each generation rewriting the same %d MiB (512 MiB of RAM, REST)", rewritten), figures...)
	b.report.over("depth_64_over_1", ends[1].exec, ends[0].exec, "checkpoint to a child's first exec at depth 64 over depth 1, ms")
	return b.server.endAll(ctx)
}

// end is one of the two ends of the line.
type end struct {
	name                               string
	from                               coppice.CheckpointID
	depth                              int
	exec, ready, capture, pause, delta report.Samples
}

// toFirstExec forks a machine, lets it rewrite its pages, and measures the time from its checkpoint to the first exec
// in a child.
func (b *bench) toFirstExec(ctx context.Context, e *end) error {
	parent, err := b.server.forkOne(ctx, e.from)
	if err != nil {
		return err
	}
	if _, err := b.server.exec(ctx, parent.Workspace.ID, dirty(rewritten)...); err != nil {
		return err
	}
	if err := b.server.settle(ctx, standardMiB); err != nil {
		return err
	}
	began := time.Now()
	cp, err := b.server.checkpoint(ctx, parent.Workspace.ID)
	if err != nil {
		return err
	}
	e.capture.Add(report.Since(began))
	child, err := b.server.forkOne(ctx, cp.ID)
	if err != nil {
		return err
	}
	e.ready.Add(report.Since(began))
	if _, err := b.server.exec(ctx, child.Workspace.ID, "true"); err != nil {
		return err
	}
	e.exec.Add(report.Since(began))
	e.pause.Add(cp.PauseMS)
	e.delta.Add(float64(cp.DeltaBytes) / (1 << 20))
	if e.depth == 0 {
		for c, err := range b.server.client.Lineage(ctx, cp.ID) {
			if err != nil {
				return err
			}
			if c.ParentID != "" { // the template is the root, depth 0
				e.depth++
			}
		}
	}
	return b.server.end(ctx, parent.Workspace.ID, child.Workspace.ID)
}

// measureSteps measures what a search does repeatedly: checkpoint, fork, exec, destroy. It runs one search alone, and
// then four at a time.
func (b *bench) measureSteps(ctx context.Context) error {
	alone, one, err := b.steps(ctx, 1, 16)
	if err != nil {
		return err
	}
	four, each, err := b.steps(ctx, 4, 6)
	if err != nil {
		return err
	}
	b.report.Group("Steps of a search: checkpoint + fork + exec + destroy (512 MiB, REST)",
		report.Samples{alone}.Figure("steps a second, one search", "1/s", ""),
		one.MS("  a step", ""),
		report.Samples{four}.Figure("steps a second, four searches", "1/s", ""),
		each.MS("  a step", ""),
	)
	return b.server.endAll(ctx)
}

func (b *bench) steps(ctx context.Context, searches, count int) (rate float64, each report.Samples, err error) {
	roots := make([]coppice.WorkspaceID, searches)
	for i := range roots {
		if roots[i], _, err = b.server.create(ctx, standardMiB); err != nil {
			return 0, nil, err
		}
	}
	took := make(report.Samples, searches*count)
	began := time.Now()
	group, groupCtx := errgroup.WithContext(ctx)
	for i, root := range roots {
		group.Go(func() error {
			for j := range count {
				stepBegan := time.Now()
				if err := b.step(groupCtx, root); err != nil {
					return err
				}
				took[i*count+j] = report.Since(stepBegan)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return 0, nil, err
	}
	wall := time.Since(began).Seconds()
	return float64(searches*count) / wall, took, b.server.end(ctx, roots...)
}

func (b *bench) step(ctx context.Context, from coppice.WorkspaceID) error {
	cp, err := b.server.checkpoint(ctx, from)
	if err != nil {
		return err
	}
	child, err := b.server.forkOne(ctx, cp.ID)
	if err != nil {
		return err
	}
	if _, err := b.server.exec(ctx, child.Workspace.ID, "true"); err != nil {
		return err
	}
	return b.server.end(ctx, child.Workspace.ID)
}
