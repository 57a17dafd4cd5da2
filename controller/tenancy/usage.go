package tenancy

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/sweep"
	"github.com/coppice-dev/coppice/core"
)

// rollBatch is how many samples one transaction adds up.
const rollBatch = 20_000

// Usage is what workspaces have used since they were made.
type Usage struct {
	Workspaces    int
	Checkpoints   int
	CPUSeconds    float64 // of the VMMs
	GiBSeconds    float64 // memory, for as long as it was allocated
	StoredBytes   int64   // of checkpoints, each counted in full
	SentBytes     int64   // by the guests
	ReceivedBytes int64
	// PreparedCPUSeconds are of machines that were prepared because they were asked for, and that no fork took; PreparedMemoryBytes of those that wait.
	PreparedCPUSeconds  float64
	PreparedMemoryBytes int64
	SampledAt           time.Time // when CPU and network were last reported; zero: never
}

// UsageTx adds up what runners have reported.
type UsageTx interface {
	// Workspace and Checkpoint fail with a NotFound error if the transaction sees no such object.
	Workspace(ctx context.Context, id core.WorkspaceID) (model.Workspace, error)
	Checkpoint(ctx context.Context, id core.CheckpointID) (model.Checkpoint, error)
	WorkspaceUsage(ctx context.Context, id core.WorkspaceID) (Usage, error)
	CheckpointUsage(ctx context.Context, id core.CheckpointID) (Usage, error)
	// RollUsage moves at most limit samples that earlier versions have written into the totals, and returns how many it moved.
	RollUsage(ctx context.Context, limit int) (int, error)
}

// WorkspaceUsage sums what a workspace has used, in all its epochs.
func (m *Manager) WorkspaceUsage(ctx context.Context, project core.ProjectID, id core.WorkspaceID) (Usage, error) {
	return query(ctx, m, model.InProject(project), func(tx Tx) (Usage, error) {
		if _, err := tx.Workspace(ctx, id); err != nil {
			return Usage{}, err
		}
		return tx.WorkspaceUsage(ctx, id)
	})
}

// CheckpointUsage sums what all descendants of a checkpoint have used.
func (m *Manager) CheckpointUsage(ctx context.Context, project core.ProjectID, id core.CheckpointID) (Usage, error) {
	return query(ctx, m, model.InProject(project), func(tx Tx) (Usage, error) {
		if _, err := tx.Checkpoint(ctx, id); err != nil {
			return Usage{}, err
		}
		return tx.CheckpointUsage(ctx, id)
	})
}

// RollUsage adds up the samples of earlier versions. A sandbox has one row afterwards instead of one for each minute.
func (m *Manager) RollUsage(ctx context.Context) error {
	return sweep.Batches(ctx, rollBatch, func(ctx context.Context) (int, error) {
		return query(ctx, m, model.System(), func(tx Tx) (int, error) { return tx.RollUsage(ctx, rollBatch) })
	})
}
