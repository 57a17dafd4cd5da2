package workspace

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/cli/render"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// errEnough ends a walk that has found too much.
var errEnough = errors.New("enough")

// checkFit refuses a copy that is larger than the disk of the target workspace, or than the room that is left here. If it cannot find that out,
// the copy begins, and says itself what is wrong.
func checkFit(ctx context.Context, client *coppice.Client, from, to copyEnd) error {
	switch {
	case to.remote() && !from.remote() && !from.stream:
		ws, err := client.Workspace(ctx, to.workspace)
		room := int64(ws.Resources.DiskGiB) << 30
		if err != nil || room == 0 {
			return nil //nolint:nilerr // see above
		}
		if sizeOf(from.path, room) > room {
			return core.Errorf(core.Exhausted, core.CodeDiskFull, "%s has more than %s, and so much is the whole disk of workspace %s; make a workspace with a larger one: coppice ws create --disk",
				core.Clip(from.path), render.Size(room), core.Clip(ws.Name))
		}
	case from.remote() && !to.remote() && !to.stream:
		file, err := client.StatFile(ctx, from.workspace, from.path)
		if err != nil || file.Type != coppice.FileTypeFile {
			return nil //nolint:nilerr // see above
		}
		if room, ok := roomAt(filepath.Clean(to.path)); ok && file.Size > room {
			return core.Errorf(core.Exhausted, core.CodeDiskFull, "%s has %s, and %s are left at %s on this machine; make room, or choose another place",
				core.Clip(from.path), render.Size(file.Size), render.Size(room), core.Clip(to.path))
		}
	}
	return nil
}

// sizeOf is the size of the files at and below a path. It stops counting above a bound.
func sizeOf(path string, bound int64) (size int64) {
	if real, err := filepath.EvalSymlinks(path); err == nil { // the copy follows the link that is typed, too
		path = real
	}
	_ = filepath.WalkDir(path, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil //nolint:nilerr // the copy says what is wrong
		}
		if info, err := d.Info(); err == nil && info.Mode().IsRegular() {
			size += info.Size()
		}
		if size > bound {
			return errEnough
		}
		return nil
	})
	return size
}

// roomAt is the room that is left on the file system of a path, or of the nearest directory above it that exists.
func roomAt(path string) (int64, bool) {
	for {
		if _, err := os.Stat(path); err == nil {
			return freeBytes(path)
		}
		up := filepath.Dir(path)
		if up == path {
			return 0, false
		}
		path = up
	}
}
