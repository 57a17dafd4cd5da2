package compare

import (
	"bytes"
	"context"
	"fmt"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/confine"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/diffhelper"
	"github.com/coppice-dev/coppice/runner/diskdiff"
)

var errReadTimeout = core.Errorf(core.TimedOut, core.CodeTimedOut, "the file could not be read within %s", timeout)

// File reads a file or lists a directory of a checkpoint, as its guest saw it. It starts no machine and mounts nothing; a confined helper
// reads the disk.
func (c *Comparer) File(ctx context.Context, id core.CheckpointID, req runnerapi.ReadFile) (runnerapi.FilePart, error) {
	if req.Entries < 0 || req.Entries > runnerapi.MaxFileEntries || req.Length < 0 || req.Length > runnerapi.MaxFileData || req.Offset < 0 {
		return runnerapi.FilePart{}, core.Errorf(core.Invalid, core.CodeInvalidField, "at most %d entries or %d bytes of a file are read at once", runnerapi.MaxFileEntries, runnerapi.MaxFileData)
	}
	if n := len(req.Path); n == 0 || n > runnerapi.MaxFilePath || req.Path[0] != '/' || bytes.IndexByte(req.Path, 0) >= 0 {
		return runnerapi.FilePart{}, core.Errorf(core.Invalid, core.CodeInvalidField, "path: it must be absolute, without NUL and at most %d bytes long", runnerapi.MaxFilePath)
	}
	ctx, done, err := c.begin(ctx, errReadTimeout)
	if err != nil {
		return runnerapi.FilePart{}, err
	}
	defer done()
	side, err := c.side(ctx, id)
	if err != nil {
		return runnerapi.FilePart{}, err
	}
	defer side.Close()
	return c.look(ctx, side, req)
}

// side opens a checkpoint once its images are complete.
func (c *Comparer) side(ctx context.Context, id core.CheckpointID) (*checkpoints.Side, error) {
	rec, err := c.cfg.Checkpoints.Find(id)
	if err == nil {
		err = c.cfg.Images.Wait(ctx, rec.ImageIDs()...)
	}
	if err != nil {
		return nil, err
	}
	return c.cfg.Checkpoints.Read(id)
}

func (c *Comparer) look(ctx context.Context, side *checkpoints.Side, req runnerapi.ReadFile) (runnerapi.FilePart, error) {
	root, err := c.cfg.Roots.Open(side.RootKey())
	if err != nil {
		return runnerapi.FilePart{}, err
	}
	defer root.Close()
	got, err := diffhelper.Look(ctx, diffhelper.LookRequest{
		Query: diskdiff.Query{Overlay: side.Overlay, Path: req.Path, Follow: req.Follow, List: req.Entries, Offset: req.Offset, Length: req.Length},
		Root:  root, Wait: timeout,
	})
	if err != nil {
		return runnerapi.FilePart{}, c.lookError(ctx, err, side.ID, req.Path)
	}
	part := runnerapi.FilePart{
		File: fileOf(got.File), Truncated: got.Truncated, Unreadable: got.Unreadable, Data: got.Data, Complete: side.Survey.DiskFlushed,
		Entries: make([]runnerapi.File, 0, len(got.Entries)),
	}
	for _, f := range got.Entries {
		part.Entries = append(part.Entries, fileOf(f))
	}
	return part, nil
}

func fileOf(f diskdiff.File) runnerapi.File {
	return runnerapi.File{Name: f.Name, Type: f.Type, Mode: f.Mode, UID: f.UID, GID: f.GID, Size: f.Size, ModTime: f.ModTime, Target: f.Target}
}

// lookError says which file of which checkpoint cannot be read. The log has the whole cause.
func (c *Comparer) lookError(ctx context.Context, err error, id core.CheckpointID, path []byte) error {
	name := core.Clip(string(path))
	switch code := core.CodeOf(err); {
	case confine.IsLimit(err, confine.LimitTime):
		return errReadTimeout
	case code == core.CodeFileNotFound, code == core.CodeInvalidField:
		return core.Wrapf(err, core.CategoryOf(err), code, "path: %s in checkpoint %s: %s", name, id, core.Clip(core.MessageOf(err)))
	case code == core.CodeDiskUnreadable:
		c.cfg.Log.WarnContext(ctx, "file of a checkpoint not read", "checkpoint_id", id, "err", err)
		return core.Wrapf(err, core.FailedPrecondition, core.CodeDiskUnreadable, "%s in checkpoint %s cannot be read: %s", name, id, core.Clip(core.MessageOf(err)))
	}
	return fmt.Errorf("read a file of checkpoint %s: %w", id, err)
}
