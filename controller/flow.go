package controller

import (
	"context"

	"github.com/coppice-dev/coppice/controller/flows"
	"github.com/coppice-dev/coppice/controller/sweep"
)

// Flows is the journal of what sandboxes sent out.
func (c *Controller) Flows() *flows.Journal { return c.journal }

// newJournal makes the journal of a controller.
func newJournal(c *Controller) *flows.Journal {
	store := partStore[flows.Tx]{c.store.Store, func(tx AllTx) flows.Tx { return tx }}
	return flows.New(flows.Config{
		Quota: c.cfg.FlowQuota, Kept: c.cfg.FlowsKept, Metrics: c.cfg.Metrics, Log: c.log,
		Batches: func(ctx context.Context, limit int, do func(flows.Tx) (int, error)) error {
			return sweep.Batches(ctx, limit, func(ctx context.Context) (n int, err error) {
				err = store.InSystem(ctx, func(tx flows.Tx) error {
					n, err = do(tx)
					return err
				})
				return n, err
			})
		},
	}, store)
}

// tidyFlows is the periodic job that keeps the journal's partitions and its counts.
func (c *Controller) tidyFlows(ctx context.Context) error {
	return sweep.Parts(ctx, c.jobFailed,
		sweep.Part{Name: "flow_partitions", Do: c.journal.MakePartitions},
		sweep.Part{Name: "fold_flow_counts", Do: c.journal.FoldCounts},
		sweep.Part{Name: "flow_counts", Do: c.journal.RemoveOldCounts})
}
