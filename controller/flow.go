package controller

import (
	"context"

	"github.com/coppice-dev/coppice/controller/flows"
	"github.com/coppice-dev/coppice/core"
)

// Flows is the journal of what sandboxes sent out.
func (c *Controller) Flows() *flows.Journal { return c.journal }

// newJournal makes the journal of a controller.
func newJournal(c *Controller) *flows.Journal {
	return flows.New(flows.Config{
		Quota: c.cfg.FlowQuota, Kept: c.cfg.FlowsKept, Metrics: c.cfg.Metrics, Log: c.log,
		Batches: func(ctx context.Context, limit int, do func(flows.Tx) (int, error)) error {
			return c.batches(ctx, limit, func(tx Tx) (int, error) { return do(tx) })
		},
	}, flowStore{c.store})
}

// flowStore runs the transactions of the journal.
type flowStore struct{ store Store }

// InProject implements flows.Store.
func (s flowStore) InProject(ctx context.Context, project core.ProjectID, fn func(flows.Tx) error) error {
	return s.store.InTx(ctx, InProject(project), func(tx Tx) error { return fn(tx) })
}

// InSystem implements flows.Store.
func (s flowStore) InSystem(ctx context.Context, fn func(flows.Tx) error) error {
	return s.store.InTx(ctx, System(), func(tx Tx) error { return fn(tx) })
}

// tidyFlows is the periodic job that keeps the journal's partitions and its counts.
func (c *Controller) tidyFlows(ctx context.Context) error {
	return c.parts(ctx,
		part{"flow_partitions", c.journal.MakePartitions},
		part{"fold_flow_counts", c.journal.FoldCounts},
		part{"flow_counts", c.journal.RemoveOldCounts})
}
