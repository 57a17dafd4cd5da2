package transfer

import (
	"context"
	"io"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// ExportedFile is a checkpoint that will be sent as one file. Close it.
type ExportedFile struct {
	Checkpoint model.Checkpoint
	Size       int64 // bytes

	t     *Transfers
	store blob.Blobs // with the keys
	file  *snapshotstore.Export
	leave func()
}

// ExportCheckpoint opens a sealed checkpoint, to send it as one file. It fails with CHECKPOINT_NOT_READY if the checkpoint is not sealed yet. If
// the checkpoint is deleted meanwhile, its objects stay in the store for the grace time.
func (t *Transfers) ExportCheckpoint(ctx context.Context, project core.ProjectID, id core.CheckpointID) (_ *ExportedFile, err error) {
	if err := t.configured(); err != nil {
		return nil, err
	}
	cp, err := t.checkpoint(ctx, project, id)
	if err != nil {
		return nil, err
	}
	if cp.State != core.CheckpointSealed {
		return nil, core.Errorf(core.FailedPrecondition, core.CodeCheckpointNotReady,
			"checkpoint %s is %s, and only what is in the store can be exported; wait until it is sealed (GET it with ?wait=sealed)", id, cp.State)
	}
	leave, err := enter(t.exports, "exports")
	if err != nil {
		return nil, err
	}
	store, err := t.cfg.Keys.Store(ctx, *cp.Stored)
	if err != nil {
		leave()
		return nil, err
	}
	s, err := snapshotstore.Open(ctx, store, manifest.Ref{Key: cp.Stored.Manifest, Digest: cp.Stored.Digest, Bytes: cp.Stored.Bytes})
	if err != nil {
		leave()
		return nil, err
	}
	file, err := snapshotstore.NewExport(s, cp.Image.Name)
	if err != nil {
		leave()
		return nil, err
	}
	return &ExportedFile{Checkpoint: cp, Size: file.Size(), t: t, store: store, file: file, leave: leave}, nil
}

// Write writes the file. If it fails, the file is incomplete, and a reader can see this.
func (f *ExportedFile) Write(ctx context.Context, w io.Writer) error {
	if err := f.file.Write(ctx, f.store, w); err != nil {
		return err
	}
	f.t.cfg.Log.InfoContext(ctx, "checkpoint exported", "checkpoint_id", f.Checkpoint.ID, "bytes", f.Size)
	return nil
}

// Close lets others export.
func (f *ExportedFile) Close() { f.leave() }
