package controller

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/controller/sweep"
	"github.com/coppice-dev/coppice/core"
)

const (
	keyBatch       = 10_000                   // expired keys that one transaction removes
	prunedBatch    = 2_000                    // rows in one transaction
	movedBatch     = 20_000                   // rows that leave a default partition in one transaction
	reportsInParts = 2 * 365 * 24 * time.Hour // older rows of reports, samples and the audit log stay in the default partition
)

// parts runs the parts of a periodic job.
func (c *Controller) parts(ctx context.Context, list ...sweep.Part) error {
	return sweep.Parts(ctx, func(name string) { c.metrics.jobsFailed.WithLabelValues(name).Inc() }, list...)
}

// batches repeats a transaction of the system; see sweep.Batches.
func (c *Controller) batches(ctx context.Context, limit int, do func(Tx) (int, error)) error {
	return sweep.Batches(ctx, limit, func(ctx context.Context) (int, error) { return read(ctx, c, System(), do) })
}

// makePartitions makes the partitions of the next months or days, and moves the rows of the default partition that belong to them.
func (c *Controller) makePartitions(ctx context.Context) error {
	of := func(table PartitionedTable, keep time.Duration) sweep.Part {
		return sweep.Part{Name: "partitions_" + string(table), Do: func(ctx context.Context) error {
			return c.batches(ctx, 1, func(tx Tx) (int, error) { return tx.MakePartitions(ctx, table, keep, movedBatch) })
		}}
	}
	return c.parts(ctx, of(TableEvents, c.cfg.EventsKept), of(TableReseals, reportsInParts), of(TableUsage, reportsInParts), of(TableAudit, reportsInParts),
		of(TableFlows, c.cfg.FlowsKept), of(TableAttestations, c.cfg.AttestationsKept))
}

// pruneDeleted stops showing deleted checkpoints that are no longer ancestors of others.
func (c *Controller) pruneDeleted(ctx context.Context) error {
	return c.marks.Walk(ctx, "prune", func(ctx context.Context, after string) (string, error) {
		last, err := read(ctx, c, System(), func(tx Tx) (core.CheckpointID, error) {
			return tx.PruneDeleted(ctx, core.CheckpointID(after), prunedBatch)
		})
		return string(last), err
	})
}

// sweepKeys removes expired keys of requests.
func (c *Controller) sweepKeys(ctx context.Context) error {
	for {
		n, err := read(ctx, c, System(), func(tx Tx) (int, error) { return tx.SweepKeys(ctx, keyBatch) })
		if err != nil || n < keyBatch {
			return err
		}
	}
}
