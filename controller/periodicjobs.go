package controller

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/controller/builds"
	"github.com/coppice-dev/coppice/controller/idle"
	"github.com/coppice-dev/coppice/controller/prepare"
	"github.com/coppice-dev/coppice/controller/sessions"
	"github.com/coppice-dev/coppice/controller/steps"
	"github.com/coppice-dev/coppice/controller/storegc"
	"github.com/coppice-dev/coppice/controller/tenancy"
	"github.com/coppice-dev/coppice/controller/uploads"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
)

const (
	expiryBatch   = 64
	expiryEvery   = time.Second
	sweepInterval = 10 * time.Minute
	abandonEvery  = 10 * time.Second
)

// periodicJobs are the periodic work that one controller does for all. It does not include the repairs after a crash (reconcileLoop), because
// an election may take a quarter of a minute.
func (c *Controller) periodicJobs() []PeriodicJob {
	keeper, sealer, transfers, collector := c.Keeper, c.Sealer, c.Transfers, c.Collector
	list := []PeriodicJob{
		{Name: "expire", Every: expiryEvery, Do: c.expire},
		{Name: "idle", Every: idle.Every, Do: c.idle.Expire},
		{Name: "overdue", Every: idle.Every, Do: c.idle.SuspendOverdue},
		{Name: "partitions", Every: sweepInterval, Do: c.upkeep.MakePartitions},
		{Name: "roll_usage", Every: sweepInterval, Do: c.Tenancy.RollUsage},
		{Name: "sweep_tokens", Every: sweepInterval, Do: keeper.SweepTokens},
		{Name: "prune", Every: sweepInterval, Do: c.upkeep.PruneDeleted},
		{Name: "sessions", Every: sessions.Every, Do: keeper.Sweep},
		{Name: "count_sessions", Every: sessions.Every, Do: keeper.Count},
		{Name: "seal_audit", Every: tenancy.AuditEvery, Do: c.Tenancy.CloseAudit},
		{Name: "sweep_keys", Every: sweepInterval, Do: c.upkeep.SweepKeys},
		{Name: "prepare", Every: prepare.Every, Do: c.Prepare.Round},
		{Name: "sweep_steps", Every: steps.Every, Do: c.Steps.Sweep},
		{Name: "sweep_builds", Every: builds.Every, Do: c.Builds.Sweep},
		{Name: "sweep_transfers", Every: uploads.Every, Do: c.Uploads.Sweep},
		{Name: "abandon_seals", Every: abandonEvery, Do: sealer.Abandon},
		{Name: "abandon_imports", Every: abandonEvery, Do: transfers.AbandonImports},
		{Name: "events", Every: sweepInterval, Do: c.Events.Tidy},
		{Name: "flows", Every: sweepInterval, Do: c.tidyFlows},
		{Name: "attestations", Every: sweepInterval, Do: c.attestations.Tidy},
	}
	if c.cfg.Store != nil {
		list = append(list, PeriodicJob{Name: "collect", Every: storegc.Every, Do: collector.Collect}, PeriodicJob{Name: "sweep_uploads", Every: storegc.UploadsEvery, Do: collector.SweepUploads})
	}
	for i, job := range list {
		list[i].Do = func(ctx context.Context) error {
			err := job.Do(ctx)
			if err != nil {
				c.jobFailed(job.Name)
			}
			return err
		}
	}
	return list
}

// jobFailed counts a failure of a periodic job, or of a part of one.
func (c *Controller) jobFailed(name string) { c.metrics.JobsFailed.WithLabelValues(name).Inc() }

// periodicJobsLoop takes part in the periodic jobs whenever the database is reachable.
func (c *Controller) periodicJobsLoop(ctx context.Context) {
	pace.Every(ctx, c.cfg.LoopInterval, nil, func() {
		if err := c.store.RunPeriodicJobs(ctx, c.periodicJobs(), c.log); err != nil && ctx.Err() == nil {
			c.log.WarnContext(ctx, "periodic jobs ended", "err", err)
		}
	})
}

// listenLoop listens for operations that other controllers have ended, and for keys that they have revoked.
func (c *Controller) listenLoop(ctx context.Context) {
	pace.Every(ctx, c.cfg.LoopInterval, nil, func() {
		if err := c.store.Listen(ctx, c.operations.WakeWaiters, c.keyEnded); err != nil && ctx.Err() == nil {
			c.log.WarnContext(ctx, "notifications ended", "err", err)
		}
	})
}

// reconcileLoop runs on every controller. It repairs the results of crashes: it ends terminations that no controller works on, and the
// workspaces of runners that have been silent for too long.
func (c *Controller) reconcileLoop(ctx context.Context) {
	pace.Every(ctx, c.cfg.LoopInterval, nil, func() {
		if err := c.terminateAll(ctx, "termination resumed", Tx.OrphanedTerminations); err != nil && ctx.Err() == nil {
			c.log.WarnContext(ctx, "half terminated workspaces were not ended", "err", err)
		}
		if err := c.fleet.Fence(ctx); err != nil && ctx.Err() == nil {
			c.log.WarnContext(ctx, "silent runners were not given up", "err", err)
		}
	})
}

// expire starts the termination of workspaces whose time is up.
func (c *Controller) expire(ctx context.Context) error {
	return c.terminateAll(ctx, "workspace expired", Tx.ExpiredWorkspaces)
}

// terminateAll starts the termination of the workspaces that a query finds. Several controllers may do so at the same time: the state
// decides.
func (c *Controller) terminateAll(ctx context.Context, what string, find func(Tx, context.Context, int) ([]Workspace, error)) error {
	var due []Workspace
	err := c.store.InTx(ctx, System(), func(tx Tx) error {
		var err error
		due, err = find(tx, ctx, expiryBatch)
		return err
	})
	if err != nil {
		return err
	}
	for _, w := range due {
		_, err := c.terminate(ctx, w.ProjectID, w.ID)
		switch core.CodeOf(err) {
		case "":
			c.log.InfoContext(ctx, "termination started", "workspace_id", w.ID, "why", what)
		case core.CodeStateConflict, core.CodeControllerStopping:
		default:
			return err
		}
	}
	return nil
}

// limitLoop forgets what the limits of requests no longer need.
func (c *Controller) limitLoop(ctx context.Context) {
	pace.Every(ctx, c.cfg.LoopInterval, nil, func() { c.DropIdle(time.Now()) })
}
