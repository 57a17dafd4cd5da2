// Package upkeep removes old rows that no other package owns, and makes the partitions of tables in
// advance. Each of its jobs runs on one controller for all.
package upkeep

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

// Store runs transactions. Package controller/postgres has the methods of Tx.
type Store interface {
	// InSystem runs fn in a transaction that sees all projects and commits when it returns nil.
	InSystem(ctx context.Context, fn func(Tx) error) error
}

// Tx removes old rows and makes partitions.
type Tx interface {
	// SweepKeys removes at most limit expired idempotency keys and returns how many it has removed.
	SweepKeys(ctx context.Context, limit int) (int, error)
	// MakePartitions makes the next partitions of a table. It moves the rows of the default
	// partition that are in the way and not older than keep, about batch rows in one call. It
	// returns how many rows it has moved. Call it again until it returns 0.
	MakePartitions(ctx context.Context, table Table, keep time.Duration, batch int) (moved int, err error)
	// PruneDeleted looks at the next deleted checkpoints with ids above after, at most limit of
	// them. It stops showing those that are nobody's ancestors. It returns the last one that it has
	// looked at, or an empty id if there are no more.
	PruneDeleted(ctx context.Context, after core.CheckpointID, limit int) (last core.CheckpointID, err error)
}

// Table is a table whose partitions are made in advance.
type Table string

// The tables with partitions.
const (
	Reseals      Table = "reseal_reports"
	Usage        Table = "usage_samples"
	Audit        Table = "audit_records"
	Attestations Table = "attestations"
	Flows        Table = "flows"
	Events       Table = "events"
)

// Config says how long rows are kept.
type Config struct {
	EventsKept, FlowsKept, AttestationsKept time.Duration
	Failed                                  func(part string) // hears which part of a job failed
}

// Keeper has the jobs. It is safe for concurrent use.
type Keeper struct {
	cfg   Config
	store Store
	marks sweep.Marks
}

// New makes a keeper. It starts nothing.
func New(cfg Config, store Store) *Keeper { return &Keeper{cfg: cfg, store: store} }

func inSystem[T any](ctx context.Context, k *Keeper, query func(Tx) (T, error)) (out T, err error) {
	err = k.store.InSystem(ctx, func(tx Tx) (err error) {
		out, err = query(tx)
		return err
	})
	return out, err
}

// MakePartitions makes the partitions of the next months or days, and moves the rows of the default partition that belong to them.
func (k *Keeper) MakePartitions(ctx context.Context) error {
	of := func(table Table, keep time.Duration) sweep.Part {
		return sweep.Part{Name: "partitions_" + string(table), Do: func(ctx context.Context) error {
			return sweep.Batches(ctx, 1, func(ctx context.Context) (int, error) {
				return inSystem(ctx, k, func(tx Tx) (int, error) { return tx.MakePartitions(ctx, table, keep, movedBatch) })
			})
		}}
	}
	return sweep.Parts(ctx, k.cfg.Failed, of(Events, k.cfg.EventsKept), of(Reseals, reportsInParts), of(Usage, reportsInParts), of(Audit, reportsInParts),
		of(Flows, k.cfg.FlowsKept), of(Attestations, k.cfg.AttestationsKept))
}

// PruneDeleted stops showing deleted checkpoints that are no longer ancestors of others.
func (k *Keeper) PruneDeleted(ctx context.Context) error {
	return k.marks.Walk(ctx, "prune", func(ctx context.Context, after string) (string, error) {
		last, err := inSystem(ctx, k, func(tx Tx) (core.CheckpointID, error) {
			return tx.PruneDeleted(ctx, core.CheckpointID(after), prunedBatch)
		})
		return string(last), err
	})
}

// SweepKeys removes expired keys of requests.
func (k *Keeper) SweepKeys(ctx context.Context) error {
	for {
		n, err := inSystem(ctx, k, func(tx Tx) (int, error) { return tx.SweepKeys(ctx, keyBatch) })
		if err != nil || n < keyBatch {
			return err
		}
	}
}
