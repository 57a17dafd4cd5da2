package sealing

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/room"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/blob/dir"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// maxExports bounds the exports of one host at the same time: each takes processor time and space on the disk.
const maxExports = 2

const (
	exportsDir   = "exports" // below the data directory; New empties it
	exportPrefix = "whole/"  // of the keys in an export's own store
)

// Export writes a checkpoint of this host as one file to the writer that begin returns. It needs no store: it packs the checkpoint in a
// directory of its own, and then calls begin with the size of the file in bytes. To pack takes as long as the upload of a whole checkpoint,
// without the network. It fails before it calls begin with CHECKPOINT_NOT_FOUND, with CHECKPOINT_NOT_READY if an image of the checkpoint is
// not complete on this host, with DISK_FULL, and with CAPACITY while maxExports others are under way. If it fails afterwards, the file is
// incomplete, and a reader can see this.
func (s *Sealer) Export(ctx context.Context, id core.CheckpointID, in runnerapi.ExportCheckpoint, begin func(size int64) io.Writer) (err error) {
	leave, err := s.cfg.Enter()
	if err != nil {
		return err
	}
	defer leave()
	select {
	case s.exports <- struct{}{}:
		defer func() { <-s.exports }()
	default:
		return core.Errorf(core.Exhausted, core.CodeCapacity, "the host of checkpoint %s exports %d others already; repeat the request when one has ended", id, cap(s.exports))
	}
	path := filepath.Join(s.cfg.DataDir, exportsDir, rand.Text())
	if err := os.MkdirAll(path, 0o700); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(path)) }()
	store, err := dir.Open(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	file, err := s.pack(ctx, id, in, store)
	if err != nil {
		return err
	}
	return file.Write(ctx, store, begin(file.Size()))
}

// pack stores a whole checkpoint in an empty store, after it has reserved the space.
func (s *Sealer) pack(ctx context.Context, id core.CheckpointID, in runnerapi.ExportCheckpoint, to *dir.Store) (_ *snapshotstore.Export, err error) {
	ckpt, err := s.cfg.Checkpoints.Open(id)
	if err != nil {
		return nil, err
	}
	src := &source{now: ckpt}
	defer func() { err = errors.Join(err, src.close(), ckpt.Close()) }()
	if some, problem := s.cfg.Incomplete.Missing(ckpt.ImageIDs()...); some {
		return nil, core.Wrapf(problem, core.FailedPrecondition, core.CodeCheckpointNotReady, "checkpoint %s is not complete on its host yet", id)
	}
	images, err := s.sources(src, nil)
	if err != nil {
		return nil, err
	}
	var most int64
	for _, image := range images {
		for _, r := range image.Changed {
			most += r.Length
		}
	}
	reserved, err := s.cfg.Room.Reserve(most)
	if err != nil {
		return nil, err
	}
	defer reserved.Release()
	h, err := s.header(ckpt, in.ProjectID)
	if err != nil {
		return nil, err
	}
	written, err := snapshotstore.Write(ctx, counting{to, reserved}, exportPrefix, h, nil, images, snapshotstore.Options{Dir: s.cfg.DataDir})
	if err != nil {
		return nil, err
	}
	return snapshotstore.NewExport(written.Snapshot, in.ImageName)
}

// counting is a store that takes what is written out of a reservation: the file system counts it from then on.
type counting struct {
	*dir.Store
	room *room.Reservation
}

// Put implements blob.Blobs.
func (c counting) Put(ctx context.Context, key string, body io.ReaderAt, size int64, digest core.Digest) error {
	err := c.Store.Put(ctx, key, body, size, digest)
	if err == nil {
		c.room.Wrote(size)
	}
	return err
}

// header is the header of a checkpoint's manifest.
func (s *Sealer) header(ckpt *checkpoints.Opened, project core.ProjectID) (manifest.Header, error) {
	record, err := json.Marshal(runnerapi.StoredRecord{
		DeltaBytes: ckpt.DeltaBytes, DiskBytes: ckpt.DiskBytes, DeviceStateBytes: ckpt.DeviceStateBytes, PauseMS: ckpt.PauseMS, Timings: ckpt.Timings,
		ParentReseal: ckpt.ParentReseal, Processes: ckpt.Processes, WorkingSet: s.workingSet(ckpt.Record),
	})
	return manifest.Header{
		ProjectID: project, CheckpointID: ckpt.ID, Parent: ckpt.Parent, CapturedAt: ckpt.CreatedAt.UTC().Format(time.RFC3339Nano), GuestImage: ckpt.Image,
		Class: ckpt.Class.Fields(), Resources: ckpt.Resources, Record: record,
	}, err
}
