package images

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/pace"
)

// Names of files in the directory of layers.
const (
	partialPrefix = "part-"
	layersLock    = "lock"
)

// keptUnused is how long a layer stays that no image has: a pull that was interrupted continues with it.
const keptUnused = 24 * time.Hour

// Layers are the layers of registries' images in a store, as the registry has them (compressed), each under its digest.
// Images share them. While one process has them open, none is removed.
type Layers struct {
	dir  string
	lock *os.File
}

// Layers opens the layers of the store. It first removes layers that no image has and that are older than a day.
func (s *Store) Layers(ctx context.Context) (*Layers, error) {
	if err := s.pruneLayers(); err != nil {
		return nil, err
	}
	l := &Layers{dir: filepath.Join(s.dir, layersDir)}
	err := os.MkdirAll(l.dir, 0o700)
	if err != nil {
		return nil, fmt.Errorf("open the layers of the image store: %w", err)
	}
	if l.lock, err = lockFileAt(ctx, filepath.Join(l.dir, layersLock), unix.LOCK_SH); err != nil {
		return nil, fmt.Errorf("open the layers of the image store: %w", err)
	}
	return l, nil
}

// Close allows others to remove layers.
func (l *Layers) Close() error { return l.lock.Close() }

// Path is where a layer is, if it is there.
func (l *Layers) Path(d core.Digest) string { return filepath.Join(l.dir, imagePrefix+d.Hex()) }

// Partial opens the file of a layer that is being fetched, with what an earlier attempt has left in it. It waits until no
// other process has it.
func (l *Layers) Partial(ctx context.Context, d core.Digest) (*os.File, error) {
	path := l.partialPath(d)
	for {
		f, err := lockFileAt(ctx, path, unix.LOCK_EX)
		if err != nil {
			return nil, fmt.Errorf("open layer %s: %w", d.Short(), err)
		}
		// The former owner may have published the file that we waited for, or removed it.
		var ours, named unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &ours); err != nil {
			return nil, errors.Join(err, f.Close())
		}
		if err := unix.Stat(path, &named); err == nil && ours.Dev == named.Dev && ours.Ino == named.Ino {
			return f, nil
		}
		if err := f.Close(); err != nil {
			return nil, err
		}
	}
}

// Adopt publishes the complete file of Partial, whose content the caller has compared with the digest.
func (l *Layers) Adopt(f *os.File, d core.Digest) error {
	if err := errors.Join(f.Chmod(0o444), f.Sync(), atomicfile.Rename(f.Name(), l.Path(d))); err != nil {
		return fmt.Errorf("keep layer %s: %w", d.Short(), err)
	}
	return nil
}

// Discard removes the file of Partial.
func (l *Layers) Discard(f *os.File) error {
	if err := os.Remove(f.Name()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove a part of a layer: %w", err)
	}
	return nil
}

// Remove removes a layer whose content is not what its digest says.
func (l *Layers) Remove(d core.Digest) error {
	if err := os.Remove(l.Path(d)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove layer %s: %w", d.Short(), err)
	}
	return nil
}

func (l *Layers) partialPath(d core.Digest) string {
	return filepath.Join(l.dir, partialPrefix+d.Hex())
}

// pruneLayers removes layers, and parts of layers, that no image has: those of a removed image at once, others when they have
// not changed for a day. It does nothing while a process has the layers open, or while an image cannot be read.
func (s *Store) pruneLayers(removed ...core.Digest) error {
	dir := filepath.Join(s.dir, layersDir)
	lock, err := os.OpenFile(filepath.Join(dir, layersLock), os.O_CREATE|os.O_RDWR, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // no layer was ever fetched
	}
	if err != nil {
		return fmt.Errorf("prune layers: %w", err)
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil // somebody uses them: the next removal or pull prunes
		}
		return fmt.Errorf("prune layers: %w", err)
	}
	list, damaged := s.List()
	if damaged != nil {
		return nil // the layers of the damaged image are not known
	}
	needed := map[string]bool{layersLock: true}
	for _, img := range list {
		for _, d := range img.Recipe.Layers {
			needed[imagePrefix+d.Hex()] = true
		}
	}
	atOnce := map[string]bool{}
	for _, d := range removed {
		atOnce[imagePrefix+d.Hex()] = true
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("prune layers: %w", err)
	}
	var errs []error
	for _, e := range entries {
		ours := strings.HasPrefix(e.Name(), imagePrefix) || strings.HasPrefix(e.Name(), partialPrefix)
		info, err := e.Info()
		if !ours || needed[e.Name()] || err != nil || !atOnce[e.Name()] && time.Since(info.ModTime()) < keptUnused {
			continue
		}
		errs = append(errs, os.Remove(filepath.Join(dir, e.Name())))
	}
	return errors.Join(errs...)
}

// lockFileAt opens a file, making it if it is not there, and waits for a lock on it. Closing the file gives the lock back.
func lockFileAt(ctx context.Context, path string, how int) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return nil, errors.Join(err, f.Close())
		}
		if err := pace.Pause(ctx, lockPoll); err != nil {
			return nil, errors.Join(err, f.Close())
		}
	}
}

// Layer is one layer of an image of a registry.
type Layer struct {
	Digest    core.Digest // of the bytes that the registry has
	Content   core.Digest // of the tar without its compression
	SizeBytes int64       // as the registry has it
}

// Room fails with DISK_FULL if the file system of the layers has less than so many free bytes.
func (l *Layers) Room(bytes int64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(l.dir, &st); err != nil {
		return fmt.Errorf("look for room for layers: %w", err)
	}
	if free := int64(st.Bavail) * st.Bsize; free < bytes { //nolint:gosec // G115: a disk is smaller
		return core.Errorf(core.Exhausted, core.CodeDiskFull, "the layers of the image need %d MiB, and %d MiB are free in the image store", bytes>>20, free>>20)
	}
	return nil
}
