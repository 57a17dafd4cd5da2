package controller

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// The budgets of what one controller sweeps for all. The queue library cancels a chore after 30 seconds.
const (
	walkTime       = 15 * time.Second         // a walk stops after this time, and continues from there the next time
	partsTime      = 24 * time.Second         // of all parts of a chore; each has its share
	tokensBatch    = 10_000                   // rows in one transaction
	prunedBatch    = 2_000                    // rows in one transaction
	movedBatch     = 20_000                   // rows that leave a default partition in one transaction
	reportsInParts = 2 * 365 * 24 * time.Hour // older rows of reports, samples and the audit log stay in the default partition
)

// marks are the places where walks continue.
type marks struct {
	mu sync.Mutex
	at map[string]string
}

func (m *marks) get(name string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.at[name]
}

func (m *marks) set(name, at string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.at == nil {
		m.at = map[string]string{}
	}
	m.at[name] = at
}

// walk looks at all rows of a kind, batch by batch, each in a transaction of its own. step returns the last row of its batch, or none at the
// end. A walk that takes too long or fails continues from there the next time, so that each row is looked at.
func (c *Controller) walk(ctx context.Context, name string, step func(tx Tx, after string) (last string, err error)) error {
	until := time.Now().Add(walkTime)
	for {
		last, err := read(ctx, c, System(), func(tx Tx) (string, error) { return step(tx, c.marks.get(name)) })
		if err != nil {
			return err
		}
		if c.marks.set(name, last); last == "" || !time.Now().Before(until) {
			return nil
		}
	}
}

// part is one part of a chore.
type part struct {
	name string
	do   func(ctx context.Context) error
}

// parts runs the parts of a chore, each for a bounded time. One that fails does not stop the others.
func (c *Controller) parts(ctx context.Context, list ...part) error {
	var errs []error
	for _, p := range list {
		limited, cancel := context.WithTimeout(ctx, partsTime/time.Duration(len(list)))
		err := p.do(limited)
		cancel()
		if err != nil {
			c.metrics.choresFailed.WithLabelValues(p.name).Inc()
			errs = append(errs, fmt.Errorf("%s: %w", p.name, err))
		}
	}
	return errors.Join(errs...)
}

// batches repeats a transaction that does at most limit things. It stops when a transaction does
// fewer, or when half of the time is over. The other half is left for the last transaction. The
// next run does the rest.
func (c *Controller) batches(ctx context.Context, limit int, do func(Tx) (int, error)) error {
	until := time.Now().Add(walkTime)
	if deadline, ok := ctx.Deadline(); ok {
		until = time.Now().Add(time.Until(deadline) / 2)
	}
	for {
		n, err := read(ctx, c, System(), do)
		if err != nil || n < limit || !time.Now().Before(until) {
			return err
		}
	}
}

// makePartitions makes the partitions of the next months or days, and moves the rows of the default partition that belong to them.
func (c *Controller) makePartitions(ctx context.Context) error {
	of := func(table PartitionedTable, keep time.Duration) part {
		return part{"partitions_" + string(table), func(ctx context.Context) error {
			return c.batches(ctx, 1, func(tx Tx) (int, error) { return tx.MakePartitions(ctx, table, keep, movedBatch) })
		}}
	}
	return c.parts(ctx, of(TableEvents, c.cfg.EventsKept), of(TableReseals, reportsInParts), of(TableUsage, reportsInParts), of(TableAudit, reportsInParts),
		of(TableFlows, c.cfg.FlowsKept), of(TableAttestations, c.cfg.AttestationsKept))
}

// rollUsage adds up the samples of earlier versions. A sandbox has one row afterwards instead of one for each minute.
func (c *Controller) rollUsage(ctx context.Context) error {
	return c.batches(ctx, movedBatch, func(tx Tx) (int, error) { return tx.RollUsage(ctx, movedBatch) })
}

// sweepTokens removes attach tokens that expired long ago.
func (c *Controller) sweepTokens(ctx context.Context) error {
	return c.batches(ctx, tokensBatch, func(tx Tx) (int, error) { return tx.SweepTokens(ctx, tokensBatch) })
}

// pruneDeleted stops showing deleted checkpoints that are no longer ancestors of others.
func (c *Controller) pruneDeleted(ctx context.Context) error {
	return c.walk(ctx, "prune", func(tx Tx, after string) (string, error) {
		last, err := tx.PruneDeleted(ctx, core.CheckpointID(after), prunedBatch)
		return string(last), err
	})
}
