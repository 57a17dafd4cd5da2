package transfer

import (
	"context"
	"io"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// ExportedFile is a checkpoint that will be sent as one file. Close it.
type ExportedFile struct {
	Checkpoint model.Checkpoint
	Size       int64 // bytes

	write func(ctx context.Context, w io.Writer) error
	close func() error
}

// ExportCheckpoint opens a checkpoint, to send it as one file. With a store the file comes from there: the call fails with
// CHECKPOINT_NOT_READY if the checkpoint is not sealed yet, and if the checkpoint is deleted meanwhile, its objects stay in the store for the
// grace time. Without a store, the runner that has the checkpoint makes the file.
func (t *Transfers) ExportCheckpoint(ctx context.Context, project core.ProjectID, id core.CheckpointID) (_ *ExportedFile, err error) {
	leave, err := enter(t.exports, "exports")
	if err != nil {
		return nil, err
	}
	open := t.exportStored
	if t.cfg.Blobs == nil {
		open = t.exportFromRunner
	}
	file, err := open(ctx, project, id)
	if err != nil {
		leave()
		return nil, err
	}
	write, end := file.write, file.close
	file.write = func(ctx context.Context, w io.Writer) error {
		if err := write(ctx, w); err != nil {
			return err
		}
		t.cfg.Log.InfoContext(ctx, "checkpoint exported", "checkpoint_id", id, "bytes", file.Size)
		return nil
	}
	file.close = func() error {
		defer leave()
		return end()
	}
	return file, nil
}

func (t *Transfers) exportStored(ctx context.Context, project core.ProjectID, id core.CheckpointID) (*ExportedFile, error) {
	cp, err := t.checkpoint(ctx, project, id)
	if err != nil {
		return nil, err
	}
	if cp.State != core.CheckpointSealed {
		return nil, core.Errorf(core.FailedPrecondition, core.CodeCheckpointNotReady,
			"checkpoint %s is %s, and where a store is configured, only a sealed checkpoint can be exported; wait until it is sealed (GET it with ?wait=sealed)", id, cp.State)
	}
	store, err := t.cfg.Keys.Store(ctx, *cp.Stored)
	if err != nil {
		return nil, err
	}
	s, err := snapshotstore.Open(ctx, store, manifest.Ref{Key: cp.Stored.Manifest, Digest: cp.Stored.Digest, Bytes: cp.Stored.Bytes})
	if err != nil {
		return nil, err
	}
	file, err := snapshotstore.NewExport(s, cp.Image.Name)
	if err != nil {
		return nil, err
	}
	return &ExportedFile{
		Checkpoint: cp, Size: file.Size(),
		write: func(ctx context.Context, w io.Writer) error { return file.Write(ctx, store, w) },
		close: func() error { return nil },
	}, nil
}

func (t *Transfers) exportFromRunner(ctx context.Context, project core.ProjectID, id core.CheckpointID) (*ExportedFile, error) {
	cp, endpoint, err := t.cfg.Holder(ctx, project, id)
	if err == nil && endpoint == "" {
		err = core.Errorf(core.Unavailable, core.CodeRunnerUnreachable, "the host of checkpoint %s cannot be reached, and no store has a copy; try again when the host is back", id)
	}
	if err != nil {
		return nil, err
	}
	body, size, err := t.cfg.Runners.ExportCheckpoint(ctx, endpoint, id, runnerapi.ExportCheckpoint{ProjectID: cp.ProjectID, ImageName: cp.Image.Name})
	if err != nil {
		return nil, err
	}
	return &ExportedFile{
		Checkpoint: cp, Size: size,
		write: func(_ context.Context, w io.Writer) error {
			_, err := io.CopyN(w, body, size)
			return err //nolint:wrapcheck // of a connection
		},
		close: body.Close,
	}, nil
}

// Write writes the file. If it fails, the file is incomplete, and a reader can see this.
func (f *ExportedFile) Write(ctx context.Context, w io.Writer) error { return f.write(ctx, w) }

// Close lets others export.
func (f *ExportedFile) Close() error { return f.close() }
