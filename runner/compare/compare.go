// Package compare says what differs between two checkpoints of a host: files, processes and memory. It starts no machine and mounts nothing.
package compare

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/confine"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/diffhelper"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/roots"
)

// The bounds of comparisons. Comparisons read data that guests wrote, up to whole disks. So they are few, each of them ends, and a confined
// helper reads the disks.
const (
	MaxComparisons = 2                // at the same time; others wait
	budget         = 5 * time.Second  // of a page: after this time the page ends where it is
	timeout        = 30 * time.Second // of a page that makes no progress, for example in one huge file
)

var errTimeout = core.Errorf(core.TimedOut, core.CodeTimedOut, "the checkpoints could not be compared within %s", timeout)

// Roots opens root file systems; roots.Store implements it.
type Roots interface {
	Open(k roots.Key) (*os.File, error)
}

// Images waits until images are complete; lazy.Images implements it.
type Images interface {
	Wait(ctx context.Context, ids ...string) error
}

// Config has what a Comparer needs. All fields are required.
type Config struct {
	Checkpoints *checkpoints.Store
	Roots       Roots
	Images      Images
	// Enter counts an operation of the runner until leave is called. It fails when the runner takes no work.
	Enter    func() (leave func(), err error)
	Life     context.Context //nolint:containedctx // the lifetime of the runner
	Stopping error           // the error of work that the end of the runner interrupts
	Log      *slog.Logger
}

// Comparer compares the checkpoints of one host.
type Comparer struct {
	cfg    Config
	places chan struct{} // a place per comparison
}

// New returns a Comparer.
func New(cfg Config) *Comparer {
	return &Comparer{cfg: cfg, places: make(chan struct{}, MaxComparisons)}
}

// begin waits for a place. The timeout, with late as its cause, and the end of the runner bound the work. The caller calls done.
func (c *Comparer) begin(ctx context.Context, late error) (_ context.Context, done func(), err error) {
	leave, err := c.cfg.Enter()
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, late)
	ctx, end := context.WithCancelCause(ctx)
	stop := context.AfterFunc(c.cfg.Life, func() { end(c.cfg.Stopping) })
	undo := func() {
		end(nil)
		stop()
		cancel()
		leave()
	}
	release, err := c.Acquire(ctx)
	if err != nil {
		undo()
		return nil, nil, err
	}
	return ctx, func() {
		release()
		undo()
	}, nil
}

// Diff says what differs between two checkpoints of one image: files, and on the first page processes and memory. It starts no
// machine and mounts nothing; see package diskdiff.
func (c *Comparer) Diff(ctx context.Context, from core.CheckpointID, req runnerapi.Diff) (runnerapi.DiffPage, error) {
	if req.Limit < 1 || req.Limit > runnerapi.MaxDiffFiles {
		return runnerapi.DiffPage{}, core.Errorf(core.Invalid, core.CodeInvalidField, "limit: it must be from 1 to %d", runnerapi.MaxDiffFiles)
	}
	ctx, done, err := c.begin(ctx, errTimeout)
	if err != nil {
		return runnerapi.DiffPage{}, err
	}
	defer done()
	for _, id := range []core.CheckpointID{from, req.To} {
		rec, err := c.cfg.Checkpoints.Find(id)
		if err == nil {
			err = c.cfg.Images.Wait(ctx, rec.ImageIDs()...)
		}
		if err != nil {
			return runnerapi.DiffPage{}, err
		}
	}
	a, err := c.cfg.Checkpoints.Read(from)
	if err != nil {
		return runnerapi.DiffPage{}, err
	}
	defer a.Close()
	b, err := c.cfg.Checkpoints.Read(req.To)
	if err != nil {
		return runnerapi.DiffPage{}, err
	}
	defer b.Close()
	if a.Image != b.Image || a.Resources.MemoryMiB != b.Resources.MemoryMiB {
		return runnerapi.DiffPage{}, core.Errorf(core.Invalid, core.CodeInvalidField, "to: %s does not descend from the same template as %s, so they cannot be compared", req.To, from)
	}
	page, err := c.disks(ctx, a, b, req)
	if err != nil || len(req.After) > 0 {
		return page, err
	}
	page.Processes = processes(a, b)
	changed, err := memory.Changed(ctx, a.Memory, b.Memory)
	page.MemoryBytes = &changed
	return page, err
}

// Acquire waits for a place for a comparison.
func (c *Comparer) Acquire(ctx context.Context) (release func(), err error) {
	select {
	case c.places <- struct{}{}:
		return func() { <-c.places }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

func (c *Comparer) disks(ctx context.Context, a, b *checkpoints.Side, req runnerapi.Diff) (runnerapi.DiffPage, error) {
	root, err := c.cfg.Roots.Open(a.RootKey())
	if err != nil {
		return runnerapi.DiffPage{}, err
	}
	defer root.Close()
	got, err := diffhelper.Compare(ctx, diffhelper.Request{
		A: a.Overlay, B: b.Overlay, Root: root, After: req.After, Limit: req.Limit, Budget: budget, Wait: timeout,
	})
	if err != nil {
		return runnerapi.DiffPage{}, c.diskError(ctx, err, a, b)
	}
	page := runnerapi.DiffPage{
		Files: make([]runnerapi.FileChange, 0, len(got.Changes)), Next: got.Next, Unreadable: got.Unreadable,
		Complete: a.Survey.DiskFlushed && b.Survey.DiskFlushed,
	}
	for _, change := range got.Changes {
		page.Files = append(page.Files, runnerapi.FileChange{
			Path: change.Path, Change: string(change.Kind), Type: change.Type, What: change.What, Size: change.Size, SizeBefore: change.SizeBefore,
		})
	}
	addIdentity(&page, a.Survey.IdentityFiles, b.Survey.IdentityFiles, req)
	return page, nil
}

// diskError says which checkpoints cannot be compared. The log has the whole cause, and the answer has its first line.
func (c *Comparer) diskError(ctx context.Context, err error, a, b *checkpoints.Side) error {
	switch {
	case confine.IsLimit(err, confine.LimitTime):
		return errTimeout
	case core.CodeOf(err) == core.CodeDiskUnreadable:
		c.cfg.Log.WarnContext(ctx, "disks not compared", "checkpoint_id", a.ID, "other_checkpoint_id", b.ID, "err", err)
		return core.Wrapf(err, core.FailedPrecondition, core.CodeDiskUnreadable,
			"the disks of checkpoints %s and %s, or the root file system of their image, cannot be read: %s", a.ID, b.ID, core.Clip(core.MessageOf(err)))
	}
	return fmt.Errorf("compare the disks of checkpoints %s and %s: %w", a.ID, b.ID, err)
}

// processes compares processes by number, start time and command: siblings may start different programs with the same number at the
// same time, and a process may become another program.
func processes(a, b *checkpoints.Side) *runnerapi.ProcessDiff {
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
