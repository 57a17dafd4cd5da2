package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/bench/report"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// standardMiB is the RAM of the guests in most measurements: the default of a workspace.
const standardMiB = 512

// measureBoots measures the operations with which a fork is compared, and single forks through REST, in turns.
func (b *bench) measureBoots(ctx context.Context) error {
	var answer, boot, bootCPU, create, ready, first report.Samples
	var where, reseal, exec report.Stages
	began := time.Now()
	seed, _, err := b.server.create(ctx, standardMiB) // boots the image: the template
	if err != nil {
		return err
	}
	template := report.Samples{report.Since(began)}
	if _, err := b.server.exec(ctx, seed, "true"); err != nil {
		return err
	}
	cp, err := b.server.checkpoint(ctx, seed)
	if err != nil {
		return err
	}
	for range b.rounds(5, 100*time.Second) {
		m, a, f, err := b.lab.boot(ctx, standardMiB)
		if err != nil {
			return err
		}
		answer.Add(a)
		boot.Add(f)
		used, err := cpuMS(m.Handle().PID)
		if err := errors.Join(err, m.close(ctx)); err != nil {
			return err
		}
		bootCPU.Add(used)
		for range 2 {
			if err := b.server.settle(ctx, standardMiB); err != nil {
				return err
			}
			id, took, err := b.server.create(ctx, standardMiB)
			if err != nil {
				return err
			}
			create.Add(took)
			if err := b.server.end(ctx, id); err != nil {
				return err
			}
		}
		for range 4 {
			if err := b.server.settle(ctx, standardMiB); err != nil {
				return err
			}
			began := time.Now()
			child, err := b.server.forkOne(ctx, cp.ID)
			if err != nil {
				return err
			}
			ready.Add(report.Since(began))
			out, err := b.server.exec(ctx, child.Workspace.ID, "true")
			if err != nil {
				return err
			}
			first.Add(report.Since(began))
			where.Public(child.Timings)
			exec.Public(out.Timings)
			for _, s := range child.ResealReport.Steps {
				reseal.Add(s.Name, s.DurationMS)
			}
			if err := b.server.end(ctx, child.Workspace.ID); err != nil {
				return err
			}
		}
	}
	b.report.Group("Cold boot, create and fork of a workspace with 512 MiB (fork and create through REST)",
		answer.MS("cold boot to the agent's answer", "driver alone, no REST"),
		boot.MS("cold boot to first exec", "driver alone, no REST"),
		bootCPU.MS("  CPU time of the VMM", ""),
		template.MS("first create of an image", "boots it, captures the template"),
		create.MS("create", "fork of the template"),
		ready.MS("sealed fork to READY", "N = 1, of a checkpoint"),
		first.MS("sealed fork to first exec", "N = 1, of a checkpoint"),
	)
	b.report.Stages["fork"], b.report.Stages["reseal"], b.report.Stages["exec"] = where.Medians(), reseal.Medians(), exec.Medians()
	b.report.over("fork_over_boot", first, boot, "sealed fork to first exec through REST over cold boot to first exec, ms")
	return b.server.endAll(ctx)
}

// sealedState makes a checkpoint of the lab's runner with the same history as grownClone: booted, forked, one command,
// captured.
func (b *bench) sealedState(ctx context.Context) (core.CheckpointID, error) {
	t, err := b.lab.runner.Template(ctx, runnerapi.Template{
		CheckpointID: core.NewID[core.CheckpointID](), Image: b.lab.image.Digest,
		Resources: core.Resources{VCPUs: 1, MemoryMiB: standardMiB, DiskGiB: 1},
	})
	if err != nil {
		return "", err
	}
	id, err := b.lab.fork(ctx, t.ID)
	if err != nil {
		return "", err
	}
	if err := b.lab.exec(ctx, id, "true"); err != nil {
		return "", err
	}
	cp, err := b.lab.runner.Capture(ctx, id, runnerapi.Capture{CheckpointID: core.NewID[core.CheckpointID]()})
	if err != nil {
		return "", err
	}
	return cp.ID, b.lab.runner.Destroy(ctx, id)
}

// grownClone makes an unsealed clone: booted, forked, prepared by the commands, captured.
func (l *lab) grownClone(ctx context.Context, memoryMiB int, commands ...[]string) (_ *clone, err error) {
	m, _, _, err := l.boot(ctx, memoryMiB)
	if err != nil {
		return nil, err
	}
	root, err := l.take(ctx, m, memoryMiB, nil)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, root.close()) }()
	if m, err = l.unsealed(ctx, root); err != nil {
		return nil, err
	}
	for _, c := range commands {
		if err := m.exec(ctx, c...); err != nil {
			return nil, errors.Join(err, m.close(ctx))
		}
	}
	return l.take(ctx, m, memoryMiB, root.base)
}

// measureSealed compares a sealed fork with a clone that nobody seals: it was captured while it ran, its workload was
// not frozen, and it gets no entropy, no identity, no rules and no evidence. Both find a waiting VMM, as forks usually
// do, and neither uses REST.
func (b *bench) measureSealed(ctx context.Context) (err error) {
	sealedFrom, err := b.sealedState(ctx)
	if err != nil {
		return err
	}
	plain, err := b.lab.grownClone(ctx, standardMiB, []string{"true"})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, plain.close()) }()
	var s, u comparison
	for i := range b.rounds(15, 90*time.Second) {
		spawned, err := b.lab.spawnTime(ctx)
		if err != nil {
			return err
		}
		turns := []func() error{
			func() error { return b.timeSealed(ctx, sealedFrom, spawned, &s) },
			func() error { return b.timeUnsealed(ctx, plain, spawned, &u) },
		}
		for j := range turns { // who goes first changes
			if err := turns[(i+j)%2](); err != nil {
				return err
			}
		}
	}
	b.report.Group("A fork sealed and not sealed (512 MiB, on a waiting VMM, without REST)",
		u.ready.MS("unsealed: to the agent's answer", "neither frozen, reseeded nor given an identity"),
		u.first.MS("unsealed: to first exec", ""),
		s.ready.MS("sealed: to READY", ""),
		s.first.MS("sealed: to first exec", ""),
		u.cold.MS("unsealed: with the VMM's start", ""),
		s.cold.MS("sealed: with the VMM's start", ""),
		u.cpu.MS("unsealed: CPU time of the VMM", "from its start to first exec"),
		s.cpu.MS("sealed: CPU time of the VMM", "from its start to first exec"),
	)
	b.report.over("sealed_over_unsealed", s.first, u.first, "sealed over unsealed fork to first exec, ms")
	return nil
}

// comparison has the measurements of one of the two.
type comparison struct{ ready, first, cold, cpu report.Samples }

func (c *comparison) add(ready, first, spawned, cpu float64) {
	c.ready.Add(ready)
	c.first.Add(first)
	c.cold.Add(first + spawned)
	c.cpu.Add(cpu)
}

func (b *bench) timeSealed(ctx context.Context, id core.CheckpointID, spawned float64, c *comparison) error {
	if err := b.lab.settle(ctx, standardMiB, 0); err != nil {
		return err
	}
	began := time.Now()
	sandbox, err := b.lab.fork(ctx, id)
	if err != nil {
		return err
	}
	ready := report.Since(began)
	if err := b.lab.exec(ctx, sandbox, "true"); err != nil {
		return err
	}
	first := report.Since(began)
	p, err := onlySandbox(b.lab.cluster, 0)
	if err != nil {
		return err
	}
	used, err := cpuMS(p.pid)
	c.add(ready, first, spawned, used)
	return errors.Join(err, b.lab.runner.Destroy(ctx, sandbox))
}

func (b *bench) timeUnsealed(ctx context.Context, from *clone, spawned float64, c *comparison) (err error) {
	m, err := b.lab.spawn(ctx, standardMiB, from.base)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.close(ctx)) }()
	began := time.Now()
	if err := m.grow(ctx, from); err != nil {
		return err
	}
	ready := report.Since(began)
	if err := m.exec(ctx, "true"); err != nil {
		return err
	}
	first := report.Since(began)
	used, err := cpuMS(m.Handle().PID)
	c.add(ready, first, spawned, used)
	return err
}

// spawnTime starts a VMM on the zero base and ends it.
func (l *lab) spawnTime(ctx context.Context) (float64, error) {
	zero, err := l.bases.Zero(standardMiB << 20)
	if err != nil {
		return 0, err
	}
	defer zero.Close()
	began := time.Now()
	m, err := l.spawn(ctx, standardMiB, zero)
	if err != nil {
		return 0, err
	}
	return report.Since(began), m.close(ctx)
}

// widths are the numbers of forks that are compared.
var widths = []int{1, 8, 32}

// wide has the measurements of forks of one width.
type wide struct {
	wall  report.Samples // request to the answer: all are READY
	ready report.Samples // each child's own time to READY, waiting for a CPU included
	first report.Samples // request to each child's first exec
	all   report.Samples // request to the last child's first exec
}

// measureForks forks 1, 8 and 32 at a time through REST.
func (b *bench) measureForks(ctx context.Context) error {
	seed, _, err := b.server.create(ctx, standardMiB)
	if err != nil {
		return err
	}
	cp, err := b.server.checkpoint(ctx, seed)
	if err != nil {
		return err
	}
	if err := b.server.end(ctx, seed); err != nil {
		return err
	}
	by := map[int]*wide{}
	for _, n := range widths {
		by[n] = &wide{}
	}
	for i := range b.rounds(7, 150*time.Second) {
		for _, n := range widths {
			if n == 32 && i > 1 { // twice is enough for what takes so long
				continue
			}
			if err := b.forkWide(ctx, cp.ID, n, by[n]); err != nil {
				return err
			}
		}
	}
	var figures []report.Figure
	for _, n := range widths {
		w := by[n]
		figures = append(figures,
			w.wall.MS(fmt.Sprintf("N = %d: all READY", n), "request to answer"),
			w.ready.MS(fmt.Sprintf("N = %d: a child to READY", n), "its own stages, its wait for a CPU included"),
			w.first.MS(fmt.Sprintf("N = %d: a child to first exec", n), "from the request; all exec at once after the answer"),
			w.all.MS(fmt.Sprintf("N = %d: all to first exec", n), ""),
		)
	}
	b.report.Group("Sealed forks of one checkpoint through REST (512 MiB)", figures...)
	b.report.over("wall_8_over_1", by[8].wall, by[1].wall, "8 forks over 1 to READY, wall, ms")
	return b.server.endAll(ctx)
}

func (b *bench) forkWide(ctx context.Context, id coppice.CheckpointID, n int, w *wide) error {
	if err := b.server.settle(ctx, standardMiB); err != nil {
		return err
	}
	began := time.Now()
	children, err := b.server.fork(ctx, id, n)
	if err != nil {
		return err
	}
	w.wall.Add(report.Since(began))
	firsts := make(report.Samples, n)
	group, groupCtx := errgroup.WithContext(ctx)
	for i, c := range children {
		w.ready.Add(report.Total(c.Timings))
		group.Go(func() error {
			_, err := b.server.exec(groupCtx, c.Workspace.ID, "true")
			firsts[i] = report.Since(began)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	w.first.Add(firsts...)
	w.all.Add(report.Since(began))
	return b.server.end(ctx, idsOf(children)...)
}
