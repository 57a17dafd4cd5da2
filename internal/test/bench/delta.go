package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/bench/report"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// cost is the cost of deltas of one size.
type cost struct {
	mib  int
	from *clone
	size float64 // MiB

	inject, prepare, scan, copied, store, rebase, open report.Samples
}

// measureDelta measures the costs that the rebase policy compares: injecting a delta into a child, copying it out again
// at the child's own capture, and writing base and delta as a new base.
func (b *bench) measureDelta(ctx context.Context) (err error) {
	m, _, _, err := b.lab.boot(ctx, bigMiB)
	if err != nil {
		return err
	}
	root, err := b.lab.take(ctx, m, bigMiB, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, root.close()) }()
	var costs []*cost
	defer func() {
		for _, c := range costs {
			err = errors.Join(err, c.from.close())
		}
	}()
	for _, size := range []int{1, 16, 64, 256} {
		m, err := b.lab.unsealed(ctx, root)
		if err != nil {
			return err
		}
		if err := m.exec(ctx, dirty(size)...); err != nil {
			return errors.Join(err, m.close(ctx))
		}
		from, err := b.lab.take(ctx, m, bigMiB, root.base)
		if err != nil {
			return err
		}
		costs = append(costs, &cost{mib: size, from: from, size: float64(from.delta.Bytes()) / mib})
	}
	for range b.rounds(5, 60*time.Second) {
		for _, c := range costs {
			if err := b.lab.weigh(ctx, c); err != nil {
				return err
			}
		}
	}
	var figures []report.Figure
	for _, c := range costs {
		note := fmt.Sprintf("delta %.1f MiB", c.size)
		figures = append(figures,
			c.inject.MS(fmt.Sprintf("%d MiB written: inject", c.mib), note),
			c.prepare.MS("  prepare, before the pause of a child's own capture", ""),
			c.scan.MS("  scan, in that pause", ""),
			c.copied.MS("  copy, in that pause", ""),
			c.store.MS("  write the delta, after it, durably", ""),
			c.rebase.MS("  rebase: write base and delta, durably, and load it", fmt.Sprintf("base %d MiB", b.lab.baseMiB(root.base))),
			c.open.MS("  of it, load the new base", "a frozen memfd, where the VMM cannot map a read-only file"),
		)
	}
	b.report.Group(fmt.Sprintf("What a delta costs (%d MiB of RAM, memory engine alone)", bigMiB), figures...)
	small, large := costs[1], costs[len(costs)-1]
	perMiB := func(of func(*cost) report.Samples) report.Samples {
		return report.Samples{(of(large).Median() - of(small).Median()) / (large.size - small.size)}
	}
	b.report.Group("A MiB of delta more",
		perMiB(func(c *cost) report.Samples { return c.inject }).MS("inject", "of every child"),
		perMiB(func(c *cost) report.Samples { return c.prepare }).MS("prepare a capture", "of every capture of every child"),
		perMiB(func(c *cost) report.Samples { return c.copied }).MS("copy in the pause", "of every capture of every child"),
		perMiB(func(c *cost) report.Samples { return c.store }).MS("write the delta", "of every capture of every child"),
		perMiB(func(c *cost) report.Samples { return c.rebase }).MS("rebase", "once, in the background, loading included"),
		perMiB(func(c *cost) report.Samples { return c.open }).MS("load as a base", "once, until nobody uses it"),
	)
	return nil
}

func (l *lab) baseMiB(b *memory.Base) int64 {
	n, err := l.bases.AllocatedBytes(b.ID)
	if err != nil {
		return 0
	}
	return n / mib
}

// weigh injects once, captures the injected delta, and rebases once.
func (l *lab) weigh(ctx context.Context, c *cost) (err error) {
	m, err := l.spawn(ctx, c.from.memoryMiB, c.from.base)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.close(ctx)) }()
	spec := vmm.RestoreSpec{State: c.from.state, Inject: func(_ context.Context, r memory.Region) error {
		began := time.Now()
		err := c.from.delta.Inject(r)
		c.inject.Add(report.Since(began))
		return err
	}}
	if err := m.Restore(ctx, spec); err != nil {
		return err
	}
	region, err := m.Memory()
	if err != nil {
		return err
	}
	began := time.Now()
	again, err := memory.Prepare(region)
	if err != nil {
		return err
	}
	defer again.Close()
	c.prepare.Add(report.Since(began))
	if err := again.Copy(); err != nil {
		return err
	}
	c.scan.Add(core.Milliseconds(again.ScanTime))
	c.copied.Add(core.Milliseconds(again.CopyTime))
	file := filepath.Join(l.dir, "delta")
	began = time.Now()
	err = again.Delta().WriteFile(file)
	c.store.Add(report.Since(began))
	if err != nil {
		return err
	}
	return errors.Join(os.Remove(file), l.rebaseOnce(c))
}

func (l *lab) rebaseOnce(c *cost) error {
	began := time.Now()
	base, err := l.bases.Rebase(c.from.base, c.from.delta)
	if err != nil {
		return err
	}
	c.rebase.Add(report.Since(began))
	if err := base.Close(); err != nil { // frees what is in memory
		return err
	}
	began = time.Now()
	if base, err = l.bases.Open(base.ID); err != nil {
		return err
	}
	c.open.Add(report.Since(began))
	return errors.Join(base.Close(), l.bases.Remove(base.ID))
}
