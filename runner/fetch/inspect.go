package fetch

import (
	"context"
	"errors"

	"github.com/coppice-dev/coppice/api/runnerapi"
)

// UsesAncestor reports whether a lazy fetch of a checkpoint would compare it with one of its ancestors on this host.
func (f *Fetcher) UsesAncestor(ctx context.Context, at runnerapi.Stored, ancestors []runnerapi.Stored) (bool, error) {
	snapshot, err := f.cfg.Uploads.Snapshot(ctx, at)
	if err != nil {
		return false, err
	}
	rec, err := recordOf(snapshot)
	if err != nil {
		return false, err
	}
	w := fetching{Fetcher: f, at: at, snapshot: snapshot, rec: rec, lazy: true}
	if err := w.findNear(ctx, ancestors); err != nil || w.near == nil {
		return false, err
	}
	return true, errors.Join(err, w.near.Close())
}
