package heartbeat

import (
	"context"
	"strings"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner"
)

var _ runner.Sealing = (*Link)(nil)

// Epoch is the runner's lease; false while it has none.
func (l *Link) Epoch() (int64, bool) {
	epoch := l.epoch.Load()
	return epoch, epoch != 0
}

func (l *Link) sealPath(path string, id core.CheckpointID) string {
	return strings.NewReplacer("{id}", string(l.runner.ID()), "{checkpoint_id}", string(id)).Replace(path)
}

// BeginSeal asks for leave to upload a checkpoint.
func (l *Link) BeginSeal(ctx context.Context, m runnerapi.BeginSeal) (out runnerapi.SealBegun, err error) {
	err = l.post(ctx, l.sealPath(runnerapi.PathSeals, ""), m, &out)
	return out, err
}

// CommitSeal says that a checkpoint is in the store.
func (l *Link) CommitSeal(ctx context.Context, id core.CheckpointID, m runnerapi.CommitSeal) error {
	return l.post(ctx, l.sealPath(runnerapi.PathSealCommit, id), m, &struct{}{})
}

// FailSeal gives an attempt up.
func (l *Link) FailSeal(ctx context.Context, id core.CheckpointID, m runnerapi.FailSeal) error {
	return l.post(ctx, l.sealPath(runnerapi.PathSealFail, id), m, &struct{}{})
}
