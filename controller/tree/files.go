package tree

import (
	"cmp"
	"context"
	"io"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
)

// File says what a path of a checkpoint is, and lists at most the given number of entries of a directory. A symbolic link at the end of the
// path is followed if entries are asked for.
func (t *Tree) File(ctx context.Context, project core.ProjectID, id core.CheckpointID, path string, entries int) (runnerapi.FilePart, error) {
	endpoint, err := t.holder(ctx, project, id)
	if err != nil {
		return runnerapi.FilePart{}, err
	}
	return t.cfg.Runners.ReadFile(ctx, endpoint, id, runnerapi.ReadFile{Path: []byte(path), Follow: entries > 0, Entries: entries})
}

// Content is a regular file of a checkpoint.
type Content struct {
	File  runnerapi.File
	first []byte
	next  func(ctx context.Context, offset int64) (runnerapi.FilePart, error)
}

// Open opens a regular file of a checkpoint. Symbolic links are followed.
func (t *Tree) Open(ctx context.Context, project core.ProjectID, id core.CheckpointID, path string) (*Content, error) {
	endpoint, err := t.holder(ctx, project, id)
	if err != nil {
		return nil, err
	}
	next := func(ctx context.Context, offset int64) (runnerapi.FilePart, error) {
		return t.cfg.Runners.ReadFile(ctx, endpoint, id, runnerapi.ReadFile{Path: []byte(path), Follow: true, Offset: offset, Length: runnerapi.MaxFileData})
	}
	part, err := next(ctx, 0)
	return &Content{part.File, part.Data, next}, err
}

// Write writes the bytes of the file. A checkpoint never changes, so all parts are of one file.
func (c *Content) Write(ctx context.Context, to io.Writer) error {
	for at, data := int64(0), c.first; ; {
		if left := c.File.Size - at; int64(len(data)) > left || len(data) == 0 && left > 0 {
			return core.Errorf(core.Internal, core.CodeInternal, "a runner gave %d bytes of a file where %d are left", len(data), left)
		}
		if _, err := to.Write(data); err != nil {
			return err
		}
		if at += int64(len(data)); at == c.File.Size {
			return nil
		}
		part, err := c.next(ctx, at)
		if err != nil {
			return err
		}
		data = part.Data
	}
}

// Holder returns a checkpoint and the endpoint of a runner that has it. It fails with CHECKPOINT_NOT_READY if the checkpoint was not captured.
// The endpoint is empty if no runner that can be reached has the checkpoint.
func (t *Tree) Holder(ctx context.Context, project core.ProjectID, id core.CheckpointID) (cp model.Checkpoint, endpoint string, err error) {
	cp, err = read(ctx, t, project, func(tx Tx) (model.Checkpoint, error) {
		cp, err := tx.Checkpoint(ctx, id)
		if err == nil {
			endpoint, err = tx.BothHolder(ctx, id, id)
		}
		return cp, err
	})
	if err == nil && cp.State != core.CheckpointCaptured && cp.State != core.CheckpointSealed {
		err = core.Errorf(core.FailedPrecondition, core.CodeCheckpointNotReady, "checkpoint %s is %s, so no runner has its files", id, cp.State)
	}
	return cp, cmp.Or(endpoint, cp.Endpoint), err // a new checkpoint is where it was captured
}

func (t *Tree) holder(ctx context.Context, project core.ProjectID, id core.CheckpointID) (string, error) {
	_, endpoint, err := t.Holder(ctx, project, id)
	if err == nil && endpoint == "" {
		err = core.Errorf(core.Invalid, core.CodeUnsupported, "no runner that can be reached has checkpoint %s; fork it, then its files are where the fork is", id)
	}
	return endpoint, err
}
