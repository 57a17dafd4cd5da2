// Package diffhelper compares the disks of two checkpoints in a confined helper. Package diskdiff
// reads data that guests and tenants wrote, and the runner that needs the result has root and
// everybody's machines.
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
	"github.com/coppice-dev/coppice/runner/ext4"
	"github.com/coppice-dev/coppice/runner/rootimage"
)

const taskName = "diff"

// batch is how many changes one answer of the helper has at most.
const batch = 100

// MaxFiles bounds Request.Limit.
const MaxFiles = 10_000

// Limits of the helper. With the bounds of packages ext4, rootimage and diskdiff a comparison needs less; they hold if one of those
// has a hole.
func limits(wait time.Duration) confine.Limits {
	return confine.Limits{
		Memory: 512 << 20, CPU: 30 * time.Second, Time: wait,
		Frame: 1 << 20, Answers: MaxFiles/batch + 2, Bytes: 24 << 20,
	}
}

// Request asks for one page of a comparison. See diskdiff.Request.
type Request struct {
	A, B   *os.File // the overlay disks, open for reading only
	Root   *os.File // the root file system of their image, open for reading only
	After  []byte
	Limit  int           // changes; MaxFiles at most
	Budget time.Duration // after it the page ends where it is
	Wait   time.Duration // after it the helper is killed
}

// request travels to the helper.
type request struct {
	After  []byte
	Limit  int
	Budget time.Duration
}

// answer travels back: some changes, or the end of the page.
type answer struct {
	Changes []diskdiff.Change `json:",omitempty"`
	End     *end              `json:",omitempty"`
}

type end struct {
	Next       []byte
	Unreadable int
}

// Task is the runner's task for confine.Enter.
func Task() confine.Task { return confine.Task{Name: taskName, Run: serve} }

// serve compares, in the helper.
func serve(c *confine.Child) error {
	var in request
	if err := c.Request(&in); err != nil {
		return err
	}
	if len(c.Files) != 3 {
		return fmt.Errorf("it was given %d files, want 3", len(c.Files))
	}
	lower, err := rootimage.Open(c.Files[2])
	if err != nil {
		return unreadable(err)
	}
	page, err := diskdiff.Compare(context.Background(), diskdiff.Request{
		A: c.Files[0], B: c.Files[1], Lower: lower, After: in.After, Limit: in.Limit, Until: time.Now().Add(in.Budget),
	})
	if err != nil {
		return unreadable(err)
	}
	for part := range slices.Chunk(page.Changes, batch) {
		if err := c.Answer(answer{Changes: part}); err != nil {
			return err
		}
	}
	return c.Answer(answer{End: &end{page.Next, page.Unreadable}})
}

// unreadable marks the errors that are of a disk or an image as a whole.
func unreadable(err error) error {
	_, isDamaged := errors.AsType[*ext4.DamagedError](err)
	_, isForeign := errors.AsType[*ext4.UnsupportedError](err)
	_, isImage := errors.AsType[*rootimage.DamagedError](err)
	if isDamaged || isForeign || isImage {
		return core.Wrapf(err, core.FailedPrecondition, core.CodeDiskUnreadable, "%v", err)
	}
	return err
}

// Compare returns one page. DISK_UNREADABLE says that the disks cannot be compared, because one cannot be read as a whole, or
// because the comparison hit a limit of its helper or crashed it.
func Compare(ctx context.Context, r Request) (diskdiff.Page, error) {
	if r.Limit < 1 || r.Limit > MaxFiles {
		return diskdiff.Page{}, core.Errorf(core.Internal, core.CodeInternal, "a comparison of %d files was asked for", r.Limit)
	}
	var page diskdiff.Page
	ended := false
	err := confine.Run(ctx, confine.Spec{
		Task: taskName, Limits: limits(r.Wait), Files: []*os.File{r.A, r.B, r.Root},
		Request: request{r.After, r.Limit, r.Budget},
	}, func(b json.RawMessage) error {
		var a answer
		if err := json.Unmarshal(b, &a); err != nil || ended {
			return errors.Join(errAnswer, err)
		}
		if err := a.check(r, &page); err != nil {
			return err
		}
		if ended = a.End != nil; ended {
			page.Next, page.Unreadable = a.End.Next, a.End.Unreadable
		}
		page.Changes = append(page.Changes, a.Changes...)
		return nil
	})
	if err == nil && !ended {
		err = errAnswer
	}
	if err != nil {
		return diskdiff.Page{}, judge(err)
	}
	return page, nil
}

// errAnswer says that the helper answered what no comparison can give.
var errAnswer = errors.New("the confined helper answered what no comparison gives")

// maxSize is the largest file that either reader knows.
const maxSize = rootimage.MaxFile

// check refuses an answer that no comparison can give. A guest may have taken over the helper.
func (a answer) check(r Request, page *diskdiff.Page) error {
	if len(page.Changes)+len(a.Changes) > r.Limit || len(a.Changes) > batch {
		return errAnswer
	}
	for _, c := range a.Changes {
		ok := plausible(c.Path) && slices.Contains([]diskdiff.Kind{diskdiff.Added, diskdiff.Changed, diskdiff.Removed}, c.Kind) &&
			slices.Contains([]string{"file", "dir", "symlink", "other"}, c.Type) && len(c.What) <= 7 &&
			c.Size >= 0 && c.Size <= maxSize && c.SizeBefore >= 0 && c.SizeBefore <= maxSize
		for _, w := range c.What {
			ok = ok && slices.Contains([]string{diskdiff.Content, diskdiff.Type, diskdiff.Mode, diskdiff.Owner, diskdiff.ModTime, diskdiff.Target, diskdiff.Device}, w)
		}
		if !ok {
			return errAnswer
		}
	}
	if e := a.End; e != nil && (len(e.Next) > 0 && (!plausible(e.Next) || bytes.Equal(e.Next, r.After)) || e.Unreadable < 0) {
		return errAnswer
	}
	return nil
}

// plausible reports whether a guest can have a file of this path.
func plausible(path []byte) bool {
	return len(path) > 0 && len(path) <= diskdiff.MaxPath && path[0] == '/' && bytes.IndexByte(path, 0) < 0
}

// judge makes what happened to the helper an error of the API.
func judge(err error) error {
	if failed, ok := errors.AsType[*confine.TaskError](err); ok {
		if failed.Code == core.CodeDiskUnreadable {
			return core.Wrapf(err, core.FailedPrecondition, core.CodeDiskUnreadable, "%s", failed.Message)
		}
		return err
	}
	if hit, ok := errors.AsType[*confine.LimitError](err); ok && hit.Limit != confine.LimitTime {
		return core.Wrapf(err, core.FailedPrecondition, core.CodeDiskUnreadable,
			"the helper reached its limit of %s (%s), which no ordinary disk reaches", hit.Limit, hit.Bound)
	}
	if _, crashed := errors.AsType[*confine.CrashError](err); crashed || errors.Is(err, errAnswer) {
		return core.Wrapf(err, core.FailedPrecondition, core.CodeDiskUnreadable, "the contents of the disks made the helper fail")
	}
	return err
}
