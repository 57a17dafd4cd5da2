package runnertest

import (
	"bytes"
	"context"
	"maps"
	"slices"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/fakeguest"
)

// diff compares the files and the running programs of two fake guests.
func (r *Runner) diff(ctx context.Context, from core.CheckpointID, in runnerapi.Diff) (runnerapi.DiffPage, error) {
	if err := r.pass(ctx, PointDiff, string(from)); err != nil {
		return runnerapi.DiffPage{}, err
	}
	r.mu.Lock()
	a, b := r.checkpoints[from], r.checkpoints[in.To]
	r.mu.Unlock()
	if a == nil || b == nil {
		return runnerapi.DiffPage{}, core.Errorf(core.NotFound, core.CodeCheckpointNotFound, "a checkpoint is not on this runner")
	}
	was, is := a.guest, b.guest
	page := runnerapi.DiffPage{Files: []runnerapi.FileChange{}, Complete: true, IdentityComplete: true}
	all := maps.Clone(was.Files)
	maps.Copy(all, is.Files)
	for _, path := range slices.Sorted(maps.Keys(all)) {
		before, had := was.Files[path]
		after, has := is.Files[path]
		c := runnerapi.FileChange{Path: []byte(path), Type: "file", Size: int64(len(after.Data)), SizeBefore: int64(len(before.Data))}
		switch {
		case path <= string(in.After) || before.Dir || after.Dir || had && has && bytes.Equal(before.Data, after.Data):
			continue
		case !had:
			c.Change = "added"
		case !has:
			c.Change = "removed"
		default:
			c.Change, c.What = "changed", []string{"content"}
		}
		if len(page.Files) == in.Limit {
			page.Next = page.Files[in.Limit-1].Path
			break
		}
		page.Files = append(page.Files, c)
	}
	if len(in.After) == 0 {
		var changed int64
		page.MemoryBytes = &changed
		page.Processes = &runnerapi.ProcessDiff{Complete: true, Started: only(is, was), Gone: only(was, is)}
	}
	return page, nil
}

// only lists the programs that run in a and not in b.
func only(a, b *fakeguest.State) []core.WorkloadProcess {
	out := []core.WorkloadProcess{}
	for _, p := range a.Workload() {
		if !slices.Contains(b.Workload(), p) {
			out = append(out, p)
		}
	}
	return out
}
