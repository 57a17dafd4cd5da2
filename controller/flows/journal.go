package flows

import (
	"context"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// Config says how much a Journal keeps.
type Config struct {
	Quota   Quota         // of rows
	Kept    time.Duration // how long flows are kept; they are removed by whole months, so up to a month later
	Metrics prometheus.Registerer
	Log     *slog.Logger

	// Batches repeats a transaction that sees all projects and changes at most limit rows. It stops when one changes fewer rows, or when the
	// time of the job is over.
	Batches func(ctx context.Context, limit int, do func(Tx) (int, error)) error
}

// Journal records and lists flows. It is safe for concurrent use.
type Journal struct {
	cfg     Config
	store   Store
	ended   *prometheus.CounterVec // outcome, spoken
	omitted prometheus.Counter
}

// New makes a journal and registers its metrics.
func New(cfg Config, store Store) *Journal {
	j := &Journal{
		cfg: cfg, store: store,
		ended: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "coppice_controller_flows_total", Help: "Flows of sandboxes that have ended, including denied ones.",
		}, []string{"outcome", "spoken"}),
		omitted: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "coppice_controller_flows_omitted_total",
			Help: "Flows that are counted by host and have no rows of their own in the journal, because their workspace or project has reached its bound of rows.",
		}),
	}
	cfg.Metrics.MustRegister(j.ended, j.omitted)
	return j
}

// maxFlows bounds the flows of one statement.
const maxFlows = 1000

// Record keeps the flows that a runner reports. It ignores flows of sandboxes that are not the runner's own.
func (j *Journal) Record(ctx context.Context, runner core.RunnerID, in runnerapi.Flows) error {
	for list := in.Flows; len(list) > 0; {
		n := min(len(list), maxFlows)
		part, odd := plainFlows(list[:n])
		list = list[n:]
		kept, foreign, err := j.insert(ctx, runner, part)
		if err != nil {
			return err
		}
		if foreign > 0 || odd > 0 {
			j.cfg.Log.WarnContext(ctx, "a runner reported flows of sandboxes that it does not have, or invalid flows",
				"runner_id", runner, "sandboxes", foreign, "flows", odd)
		}
		if kept.Omitted > 0 {
			j.omitted.Add(float64(kept.Omitted))
			j.cfg.Log.WarnContext(ctx, "flows are counted by host and have no rows: their workspace or project has reached its bound of rows",
				"runner_id", runner, "flows", kept.Omitted)
		}
		for _, f := range kept.Fresh {
			if f.Final() {
				j.ended.WithLabelValues(string(f.Outcome), string(f.Spoken)).Add(float64(f.Flows()))
			}
		}
	}
	return nil
}

// insert writes one batch. It returns how many sandboxes of the batch are not the runner's.
func (j *Journal) insert(ctx context.Context, runner core.RunnerID, part []core.Flow) (kept Kept, foreign int, err error) {
	ids := map[core.SandboxID]bool{}
	for _, f := range part {
		ids[f.SandboxID] = true
	}
	asked := make([]core.SandboxID, 0, len(ids))
	for id := range ids {
		asked = append(asked, id)
	}
	err = j.store.InSystem(ctx, func(tx Tx) error {
		own, err := tx.OwnSandboxes(ctx, runner, asked)
		if err != nil {
			return err
		}
		foreign = len(asked) - len(own)
		kept, err = tx.InsertFlows(ctx, runner, part, j.cfg.Quota)
		return err
	})
	return kept, foreign, err
}

// Omitted counts flows of a workspace that have no rows.
func (j *Journal) Omitted(ctx context.Context, project core.ProjectID, id core.WorkspaceID) (omitted Omitted, err error) {
	err = j.store.InProject(ctx, project, func(tx Tx) error {
		omitted, err = tx.OmittedFlows(ctx, id)
		return err
	})
	return omitted, err
}

// List returns the flows of a workspace, newest first.
func (j *Journal) List(ctx context.Context, project core.ProjectID, id core.WorkspaceID, f Filter) (list []Flow, err error) {
	err = j.store.InProject(ctx, project, func(tx Tx) error {
		list, err = tx.WorkspaceFlows(ctx, id, f)
		if err == nil && len(list) == 0 {
			err = tx.Find(ctx, string(id))
		}
		return err
	})
	return list, err
}

// Effects lists the effects on the path from the root to a checkpoint, in the order in which they happened.
func (j *Journal) Effects(ctx context.Context, project core.ProjectID, id core.CheckpointID, after EffectMark, limit int) (list []Effect, err error) {
	err = j.store.InProject(ctx, project, func(tx Tx) error {
		if err := tx.Find(ctx, string(id)); err != nil {
			return err
		}
		list, err = tx.Effects(ctx, id, after, limit)
		return err
	})
	return list, err
}

// countsBatch is how many counts one transaction folds or removes.
const countsBatch = 5000

// MakePartitions makes the next partitions of the journal and removes those that are too old.
func (j *Journal) MakePartitions(ctx context.Context) error {
	return j.store.InSystem(ctx, func(tx Tx) error { return tx.TidyFlows(ctx, j.cfg.Kept) })
}

// FoldCounts adds the counts of old minutes to the counts of their days.
func (j *Journal) FoldCounts(ctx context.Context) error {
	return j.cfg.Batches(ctx, countsBatch, func(tx Tx) (int, error) { return tx.FoldFlowCounts(ctx, countsBatch) })
}

// RemoveOldCounts removes counts of flows that are older than Config.Kept.
func (j *Journal) RemoveOldCounts(ctx context.Context) error {
	return j.cfg.Batches(ctx, countsBatch, func(tx Tx) (int, error) { return tx.TidyFlowCounts(ctx, j.cfg.Kept, countsBatch) })
}
