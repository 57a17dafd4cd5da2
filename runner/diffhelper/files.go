package diffhelper

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/confine"
	"github.com/coppice-dev/coppice/runner/diskdiff"
	"github.com/coppice-dev/coppice/runner/rootimage"
)

const filesTask = "files"

// The bounds of one look at a file.
const (
	MaxEntries = 10_000  // of a directory
	MaxData    = 4 << 20 // bytes of a file

	dataBatch  = 512 << 10 // bytes of a file in one answer
	entryBatch = 64        // entries in one answer: their names and targets fit, encoded
)

func filesLimits(wait time.Duration) confine.Limits {
	return confine.Limits{
		Memory: 512 << 20, CPU: 30 * time.Second, Time: wait,
		Frame: 1 << 20, Answers: MaxEntries/entryBatch + MaxData/dataBatch + 4, Bytes: 64 << 20,
	}
}

// LookRequest asks for one file of a checkpoint. See diskdiff.Query.
type LookRequest struct {
	diskdiff.Query
	Root *os.File      // the root file system of the image, open for reading only
	Wait time.Duration // after it the helper is killed
}

// lookRequest travels to the helper.
type lookRequest struct {
	Path   []byte
	Follow bool
	List   int
	Offset int64
	Length int
}

// lookAnswer travels back: what the file is, then its entries or bytes in parts, then the end.
type lookAnswer struct {
	File    *diskdiff.File  `json:",omitempty"`
	Entries []diskdiff.File `json:",omitempty"`
	Data    []byte          `json:",omitempty"`
	End     *lookEnd        `json:",omitempty"`
}

type lookEnd struct {
	Truncated  bool
	Unreadable int
}

// FilesTask is the runner's task for confine.Enter that reads single files.
func FilesTask() confine.Task { return confine.Task{Name: filesTask, Run: serveFiles} }

func serveFiles(c *confine.Child) error {
	var in lookRequest
	if err := c.Request(&in); err != nil {
		return err
	}
	if len(c.Files) != 2 {
		return fmt.Errorf("it was given %d files, want 2", len(c.Files))
	}
	lower, err := rootimage.Open(c.Files[1])
	if err != nil {
		return unreadable(err)
	}
	found, err := diskdiff.Look(context.Background(), diskdiff.Query{
		Overlay: c.Files[0], Lower: lower, Path: in.Path, Follow: in.Follow, List: in.List, Offset: in.Offset, Length: in.Length,
	})
	if err != nil {
		return noFile(unreadable(err))
	}
	if err := c.Answer(lookAnswer{File: &found.File}); err != nil {
		return err
	}
	for part := range slices.Chunk(found.Entries, entryBatch) {
		if err := c.Answer(lookAnswer{Entries: part}); err != nil {
			return err
		}
	}
	for part := range slices.Chunk(found.Data, dataBatch) {
		if err := c.Answer(lookAnswer{Data: part}); err != nil {
			return err
		}
	}
	return c.Answer(lookAnswer{End: &lookEnd{found.Truncated, found.Unreadable}})
}

// noFile gives the errors of a path their codes.
func noFile(err error) error {
	switch {
	case errors.Is(err, diskdiff.ErrNoFile):
		return core.Errorf(core.NotFound, core.CodeFileNotFound, "%v", err)
	case errors.Is(err, diskdiff.ErrNotDir), errors.Is(err, diskdiff.ErrNotFile), errors.Is(err, diskdiff.ErrLinks):
		return core.Errorf(core.Invalid, core.CodeInvalidField, "%v", err)
	case errors.Is(err, diskdiff.ErrDamaged):
		return core.Errorf(core.FailedPrecondition, core.CodeDiskUnreadable, "%v", err)
	}
	return err
}

// Look returns one file of a checkpoint: FILE_NOT_FOUND if the guest has none, INVALID_FIELD if it is of another type than the request
// needs, and DISK_UNREADABLE if the disk or the file cannot be read, or if the helper hit a limit or crashed.
func Look(ctx context.Context, r LookRequest) (diskdiff.Found, error) {
	if r.List < 0 || r.List > MaxEntries || r.Length < 0 || r.Length > MaxData || r.Offset < 0 || !plausible(r.Path) {
		return diskdiff.Found{}, core.Errorf(core.Internal, core.CodeInternal, "a look at a file has no bounds: %d entries, %d bytes from %d on", r.List, r.Length, r.Offset)
	}
	var found diskdiff.Found
	begun, ended := false, false
	err := confine.Run(ctx, confine.Spec{
		Task: filesTask, Limits: filesLimits(r.Wait), Files: []*os.File{r.Overlay, r.Root},
		Request: lookRequest{r.Path, r.Follow, r.List, r.Offset, r.Length},
	}, func(b json.RawMessage) error {
		var a lookAnswer
		if err := json.Unmarshal(b, &a); err != nil || ended || begun == (a.File != nil) {
			return errors.Join(errAnswer, err)
		}
		if begun = true; a.File != nil {
			found.File = *a.File
		}
		found.Entries, found.Data = append(found.Entries, a.Entries...), append(found.Data, a.Data...)
		if ended = a.End != nil; ended {
			found.Truncated, found.Unreadable = a.End.Truncated, a.End.Unreadable
		}
		return checkFound(r, found, a.Entries)
	})
	if err == nil && !ended {
		err = errAnswer
	}
	if err != nil {
		return diskdiff.Found{}, judgeFiles(err)
	}
	return found, nil
}

// checkFound refuses an answer that no file can give. fresh are the entries of the last message. A guest may have taken over the helper.
func checkFound(r LookRequest, found diskdiff.Found, fresh []diskdiff.File) error {
	if len(found.Entries) > r.List || len(found.Data) > r.Length || found.Unreadable < 0 || !plausibleFile(found.File) {
		return errAnswer
	}
	for _, f := range fresh {
		if !plausibleFile(f) || bytes.IndexByte(f.Name, '/') >= 0 || string(f.Name) == "." || string(f.Name) == ".." {
			return errAnswer
		}
	}
	return nil
}

func plausibleFile(f diskdiff.File) bool {
	return len(f.Name) > 0 && len(f.Name) <= 255 && bytes.IndexByte(f.Name, 0) < 0 && f.Mode <= 0o7777 && f.Size >= 0 && f.Size <= maxSize &&
		len(f.Target) <= diskdiff.MaxPath && bytes.IndexByte(f.Target, 0) < 0 && slices.Contains([]string{"file", "dir", "symlink", "other"}, f.Type) &&
		f.ModTime.Year() >= 0 && f.ModTime.Year() < 10_000
}

// judgeFiles makes what happened to the helper an error of the API. The message comes from the
// helper, so it may be false; package confine has made it short and printable.
func judgeFiles(err error) error {
	if failed, ok := errors.AsType[*confine.TaskError](err); ok {
		switch failed.Code { //nolint:exhaustive // all others are faults of the helper
		case core.CodeFileNotFound:
			return core.Errorf(core.NotFound, core.CodeFileNotFound, "%s", failed.Message)
		case core.CodeInvalidField:
			return core.Errorf(core.Invalid, core.CodeInvalidField, "%s", failed.Message)
		}
	}
	return judge(err)
}
