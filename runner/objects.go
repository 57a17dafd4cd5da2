package runner

import (
	"context"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob/peers"
)

// maxObjects bounds the reads of other runners that are answered at the same time. Further ones get the answer that nothing is here.
const maxObjects = 16

// Object returns a range of an object of the store if this host keeps all of the range. The range is at most peers.MaxRange, and shorter at the
// end of the object. Object reads nothing from the store.
func (r *Runner) Object(key string, off, n int64) ([]byte, bool) {
	if r.cfg.Store.Cached == nil || n < 1 || n > peers.MaxRange {
		return nil, false
	}
	select {
	case r.objects <- struct{}{}:
	default:
		return nil, false
	}
	defer func() { <-r.objects }()
	return r.cfg.Store.Cached(key, off, n)
}

// withPeers makes reads of the store first ask the runners that a fork names.
func (r *Runner) withPeers(ctx context.Context, list []runnerapi.Peer) context.Context {
	var out []peers.Peer
	for _, p := range list[:min(len(list), runnerapi.MaxPeers)] {
		if p.RunnerID != r.cfg.ID {
			out = append(out, peers.Peer{ID: p.RunnerID, Endpoint: p.Endpoint})
		}
	}
	return peers.With(ctx, out)
}

// Fetching returns the checkpoints whose objects in the store this host reads or may still read. Heartbeats name them. As long as they do, the
// objects stay in the store, even if the checkpoints are deleted.
func (r *Runner) Fetching() []core.CheckpointID { return r.fetches.Fetching() }
