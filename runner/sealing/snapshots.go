package sealing

import (
	"context"
	"slices"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// RefOf is the manifest of a checkpoint in the store.
func RefOf(at runnerapi.Stored) manifest.Ref {
	return manifest.Ref{Key: at.Manifest, Digest: at.Digest, Bytes: at.Bytes}
}

// Snapshot opens a manifest that the controller named.
func (s *Sealer) Snapshot(ctx context.Context, at runnerapi.Stored) (*snapshotstore.Snapshot, error) {
	if recent := s.queue.find(at); recent != nil {
		return recent, nil
	}
	snapshot, err := snapshotstore.OpenChecked(ctx, s.cfg.Blobs, RefOf(at), func(h manifest.Header) error {
		if h.CheckpointID != at.CheckpointID {
			return core.Errorf(core.DataLoss, core.CodeManifestInvalid, "the manifest of checkpoint %s is that of %s", at.CheckpointID, h.CheckpointID)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	s.queue.keep(snapshot)
	return snapshot, nil
}

const keptSnapshots = 4

// keep remembers a snapshot. The reference of the next upload is probably among the last ones.
func (q *queue) keep(s *snapshotstore.Snapshot) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.recent = append(q.recent, s)
	if len(q.recent) > keptSnapshots {
		q.recent = slices.Delete(q.recent, 0, 1)
	}
}

// find returns a snapshot that is remembered, or nil.
func (q *queue) find(at runnerapi.Stored) *snapshotstore.Snapshot {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, s := range q.recent {
		if s.Ref().Digest == at.Digest && s.Ref().Key == at.Manifest {
			return s
		}
	}
	return nil
}
