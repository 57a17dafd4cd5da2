package heartbeat

import (
	"context"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/sealing"
)

var _ sealing.Controller = (*Link)(nil)

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

// commitTime bounds a commit: the controller reads the manifest from the store first, and few at once.
const commitTime = 2 * time.Minute

// CommitSeal says that a checkpoint is in the store.
func (l *Link) CommitSeal(ctx context.Context, id core.CheckpointID, m runnerapi.CommitSeal) error {
	patient := *l.client // the same connections
	patient.Timeout = commitTime
	return l.postBy(ctx, &patient, l.sealPath(runnerapi.PathSealCommit, id), m, &struct{}{})
}

// FailSeal gives an attempt up.
func (l *Link) FailSeal(ctx context.Context, id core.CheckpointID, m runnerapi.FailSeal) error {
	return l.post(ctx, l.sealPath(runnerapi.PathSealFail, id), m, &struct{}{})
}
