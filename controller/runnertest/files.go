package runnertest

import (
	"context"
	"path"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// readFile reads the files of a fake guest as they were when it was captured.
func (r *Runner) readFile(ctx context.Context, id core.CheckpointID, in runnerapi.ReadFile) (runnerapi.FilePart, error) {
	if err := r.pass(ctx, PointReadFile, string(id)); err != nil {
		return runnerapi.FilePart{}, err
	}
	r.mu.Lock()
	cp := r.checkpoints[id]
	r.mu.Unlock()
	if cp == nil {
		return runnerapi.FilePart{}, core.Errorf(core.NotFound, core.CodeCheckpointNotFound, "the checkpoint is not on this runner")
	}
	g, p := cp.guest, path.Clean(string(in.Path))
	info, err := g.Stat(p)
	switch {
	case err != nil:
		return runnerapi.FilePart{}, err
	case in.Entries > 0 && info.Type != "dir", in.Length > 0 && info.Type != "file":
		return runnerapi.FilePart{}, core.Errorf(core.Invalid, core.CodeInvalidField, "path: %s is a %s", p, info.Type)
	}
	fileOf := func(p string) runnerapi.File {
		info, _ := g.Stat(p) // it is there
		return runnerapi.File{Name: []byte(info.Name), Type: info.Type, Mode: 0o644, Size: info.Size, ModTime: info.MTime}
	}
	part := runnerapi.FilePart{File: fileOf(p), Entries: []runnerapi.File{}, Complete: true}
	for _, below := range g.Below(p) {
		if path.Dir(below) != p {
			continue
		}
		if len(part.Entries) == in.Entries {
			part.Truncated = in.Entries > 0
			break
		}
		part.Entries = append(part.Entries, fileOf(below))
	}
	if body := g.Files[p].Data; in.Length > 0 && in.Offset < int64(len(body)) {
		part.Data = body[in.Offset:min(int64(len(body)), in.Offset+int64(in.Length))]
	}
	return part, nil
}
