package runnertest

import (
	"bytes"
	"context"
	"maps"
	"slices"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
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
	was, is := a.guest.clone(), b.guest.clone()
	page := runnerapi.DiffPage{Files: []runnerapi.FileChange{}, Complete: true}
	all := maps.Clone(was.files)
	maps.Copy(all, is.files)
	for _, path := range slices.Sorted(maps.Keys(all)) {
		before, had := was.files[path]
		after, has := is.files[path]
		c := runnerapi.FileChange{Path: []byte(path), Type: "file", Size: int64(len(after)), SizeBefore: int64(len(before))}
		switch {
		case path <= string(in.After) || had && has && bytes.Equal(before, after):
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
func only(a, b *guest) []core.WorkloadProcess {
	out := []core.WorkloadProcess{}
	for id, s := range a.sessions {
		if other := b.sessions[id]; s.view.State == "running" && (other == nil || other.view.State != "running") {
			out = append(out, core.WorkloadProcess{PID: s.view.PID, Command: s.view.Command[0]})
		}
	}
	return out
}
