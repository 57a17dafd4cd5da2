package runner

import (
	"context"
	"fmt"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/confine"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/diffhelper"
	"github.com/coppice-dev/coppice/runner/memory"
)

// The bounds of comparisons. Comparisons read data that guests wrote, up to whole disks. So they are few, each of them ends, and a confined
// helper reads the disks.
const (
	maxDiffs    = 2                // at the same time; others wait
	diffBudget  = 5 * time.Second  // of a page: after this time the page ends where it is
	diffTimeout = 30 * time.Second // of a page that makes no progress, for example in one huge file
)

var errDiffTimeout = core.Errorf(core.TimedOut, core.CodeTimedOut, "the checkpoints could not be compared within %s", diffTimeout)

// Diff says what differs between two checkpoints of one image: files, and on the first page processes and memory. It starts no
// machine and mounts nothing; see package diskdiff.
func (r *Runner) Diff(ctx context.Context, from core.CheckpointID, req runnerapi.Diff) (runnerapi.DiffPage, error) {
	if req.Limit < 1 || req.Limit > runnerapi.MaxDiffFiles {
		return runnerapi.DiffPage{}, core.Errorf(core.Invalid, core.CodeInvalidField, "limit: it must be from 1 to %d", runnerapi.MaxDiffFiles)
	}
	leave, err := r.enter()
	if err != nil {
		return runnerapi.DiffPage{}, err
	}
	defer leave()
	ctx, cancel := context.WithTimeoutCause(ctx, diffTimeout, errDiffTimeout)
	defer cancel()
	ctx, end := context.WithCancelCause(ctx)
	defer context.AfterFunc(r.runCtx, func() { end(errStopping) })()
	defer end(nil)
	select {
	case r.diffs <- struct{}{}:
		defer func() { <-r.diffs }()
	case <-ctx.Done():
		return runnerapi.DiffPage{}, context.Cause(ctx)
	}
	for _, id := range []core.CheckpointID{from, req.To} {
		rec, err := r.checkpoints.Find(id)
		if err == nil {
			err = r.lazy.Wait(ctx, rec.ImageIDs()...)
		}
		if err != nil {
			return runnerapi.DiffPage{}, err
		}
	}
	a, err := r.checkpoints.Read(from)
	if err != nil {
		return runnerapi.DiffPage{}, err
	}
	defer a.Close()
	b, err := r.checkpoints.Read(req.To)
	if err != nil {
		return runnerapi.DiffPage{}, err
	}
	defer b.Close()
	if a.Image != b.Image || a.Resources.MemoryMiB != b.Resources.MemoryMiB {
		return runnerapi.DiffPage{}, core.Errorf(core.Invalid, core.CodeInvalidField, "to: %s has not grown from the same template as %s, so they cannot be compared", req.To, from)
	}
	page, err := r.diffDisks(ctx, a, b, req)
	if err != nil || len(req.After) > 0 {
		return page, err
	}
	page.Processes = diffProcesses(a, b)
	changed, err := memory.Changed(ctx, a.Memory, b.Memory)
	page.MemoryBytes = &changed
	return page, err
}

func (r *Runner) diffDisks(ctx context.Context, a, b *checkpoints.Side, req runnerapi.Diff) (runnerapi.DiffPage, error) {
	root, err := r.roots.Open(a.RootKey())
	if err != nil {
		return runnerapi.DiffPage{}, err
	}
	defer root.Close()
	got, err := diffhelper.Compare(ctx, diffhelper.Request{
		A: a.Overlay, B: b.Overlay, Root: root, After: req.After, Limit: req.Limit, Budget: diffBudget, Wait: diffTimeout,
	})
	if err != nil {
		return runnerapi.DiffPage{}, r.diskError(ctx, err, a, b)
	}
	page := runnerapi.DiffPage{
		Files: make([]runnerapi.FileChange, 0, len(got.Changes)), Next: got.Next, Unreadable: got.Unreadable,
		Complete: a.Survey.DiskFlushed && b.Survey.DiskFlushed,
	}
	for _, c := range got.Changes {
		page.Files = append(page.Files, runnerapi.FileChange{
			Path: c.Path, Change: string(c.Kind), Type: c.Type, What: c.What, Size: c.Size, SizeBefore: c.SizeBefore,
		})
	}
	return page, nil
}

// diskError says which checkpoints cannot be compared. The log has the whole cause, and the answer has its first line.
func (r *Runner) diskError(ctx context.Context, err error, a, b *checkpoints.Side) error {
	switch {
	case confine.IsLimit(err, confine.LimitTime):
		return errDiffTimeout
	case core.CodeOf(err) == core.CodeDiskUnreadable:
		r.cfg.Log.WarnContext(ctx, "disks not compared", "checkpoint_id", a.ID, "other_checkpoint_id", b.ID, "err", err)
		return core.Wrapf(err, core.FailedPrecondition, core.CodeDiskUnreadable,
			"the disks of checkpoints %s and %s, or the root file system of their image, cannot be read: %s", a.ID, b.ID, core.Clip(core.MessageOf(err)))
	}
	return fmt.Errorf("compare the disks of checkpoints %s and %s: %w", a.ID, b.ID, err)
}

// diffProcesses compares processes by number, start time and command: siblings may start different programs with the same number at the
// same time, and a process may become another program.
func diffProcesses(a, b *checkpoints.Side) *runnerapi.ProcessDiff {
	type key struct {
		pid     int
		start   uint64
		command string
	}
	missing := func(of, in []core.WorkloadProcess) []core.WorkloadProcess {
		there := make(map[key]bool, len(in))
		for _, p := range in {
			there[key{p.PID, p.StartTicks, p.Command}] = true
		}
		out := []core.WorkloadProcess{}
		for _, p := range of {
			if !there[key{p.PID, p.StartTicks, p.Command}] {
				out = append(out, p)
			}
		}
		return out
	}
	return &runnerapi.ProcessDiff{
		Complete: a.Surveyed && b.Surveyed && !a.Survey.Truncated && !b.Survey.Truncated,
		Started:  missing(b.Survey.Processes, a.Survey.Processes), Gone: missing(a.Survey.Processes, b.Survey.Processes),
	}
}
