// Package trash reads and changes the trash of a runner's data directory on disk. The runner and
// the operator's command share it.
package trash

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
)

// keepFile in a directory says that an operator wants it kept.
const keepFile = "keep"

// Dir is the trash of a runner's directory. It is not within the directory of the checkpoints: a runner of an older version takes
// whatever is in there for a checkpoint. Such a runner leaves the trash alone, but it removes every base that no record among the checkpoints
// names. When a newer runner follows it, checkpoints in the trash can be without their memory.
func Dir(dataDir string) string { return filepath.Join(dataDir, "trash") }

// Path is the directory of a checkpoint in the trash.
func Path(dir string, id core.CheckpointID) string { return filepath.Join(dir, string(id)) }

// Entry is a checkpoint in the trash.
type Entry struct {
	ID    core.CheckpointID `json:"id"`
	Since time.Time         `json:"since"`
	Bytes int64             `json:"bytes"` // on disk, of its own files
	Kept  bool              `json:"kept"`
}

// List reads the trash. A data directory of an older version has no trash: List returns nothing.
func List(dir string) ([]Entry, error) {
	dirs, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		_, err = os.Stat(filepath.Dir(dir))
	}
	if err != nil {
		return nil, err
	}
	var list []Entry
	for _, d := range dirs {
		id, err := core.ParseID[core.CheckpointID](d.Name())
		if err != nil {
			continue // it is being removed
		}
		e := Entry{ID: id}
		e.Kept, e.Bytes = Kept(dir, e.ID), size(Path(dir, e.ID))
		var st unix.Stat_t
		if err := unix.Stat(Path(dir, e.ID), &st); errors.Is(err, fs.ErrNotExist) {
			continue // it was taken back or removed meanwhile, by a rename: what was read before is whole if it is still there
		} else if err != nil {
			return nil, err
		}
		e.Since = time.Unix(st.Ctim.Unix())
		list = append(list, e)
	}
	return list, nil
}

// size is what the files of a directory take on disk; those that are gone meanwhile do not count.
func size(dir string) (n int64) {
	files, _ := os.ReadDir(dir)
	for _, f := range files {
		var st unix.Stat_t
		if unix.Lstat(filepath.Join(dir, f.Name()), &st) == nil {
			n += st.Blocks * 512
		}
	}
	return n
}

// Keep makes a runner keep a checkpoint in its trash until it is restored from there, or until Unkeep. A runner that removes a checkpoint
// first moves it, and then looks for the mark: if the mark is still here after Keep, the runner has seen it.
func Keep(dir string, id core.CheckpointID) error {
	path := filepath.Join(Path(dir, id), keepFile)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600)
	if err == nil {
		if err = errors.Join(f.Sync(), f.Close()); err == nil {
			err = atomicfile.SyncDir(Path(dir, id))
		}
	}
	if err == nil {
		_, err = os.Lstat(path)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return absent(id)
	}
	return err
}

// Unkeep reverts Keep. It is no error if the checkpoint was not kept, but it is one if the checkpoint is not in the trash.
func Unkeep(dir string, id core.CheckpointID) error {
	_, err := os.Stat(Path(dir, id))
	if errors.Is(err, fs.ErrNotExist) {
		return absent(id)
	}
	if err != nil {
		return err
	}
	return Unmark(Path(dir, id))
}

// Unmark removes the mark from the directory of a checkpoint.
func Unmark(dir string) error {
	err := os.Remove(filepath.Join(dir, keepFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Kept reports whether a checkpoint in the trash is kept. It is if its mark cannot be read.
func Kept(dir string, id core.CheckpointID) bool { return Marked(Path(dir, id)) }

// Marked reports whether the directory of a checkpoint has the mark of Keep.
func Marked(dir string) bool {
	_, err := os.Lstat(filepath.Join(dir, keepFile))
	return !errors.Is(err, fs.ErrNotExist)
}

func absent(id core.CheckpointID) error {
	return core.Errorf(core.NotFound, core.CodeCheckpointNotFound, "checkpoint %s is not in the trash of this runner; list the trash to see what is", core.Clip(string(id)))
}
