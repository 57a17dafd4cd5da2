package images

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/failpoint"
)

// The steps between which a crash must leave a sound store.
var (
	beforePublish = failpoint.New("images.before_publish") // all files are written and flushed
	afterPublish  = failpoint.New("images.after_publish")  // the image exists, its name does not
	afterUnname   = failpoint.New("images.after_unname")   // the names are gone, the image still exists
	afterDiscard  = failpoint.New("images.after_discard")  // a directory has lost its name, its files still exist
)

// Staging is the right to change a store, with a directory for what is not published yet. One process has it at a time.
type Staging struct {
	// Dir is a fresh directory in the store that only its owner may enter.
	Dir    string
	store  *Store
	unlock func()
}

// Stage waits for the right to change the store, and removes what dead writers have left behind.
func (s *Store) Stage(ctx context.Context) (*Staging, error) {
	unlock, err := s.lock(ctx)
	if err != nil {
		return nil, err
	}
	err = s.cleanTemp()
	var dir string
	if err == nil {
		dir, err = s.newTemp()
	}
	if err != nil {
		unlock()
		return nil, err
	}
	return &Staging{Dir: dir, store: s, unlock: unlock}, nil
}

// Close removes the directory and gives the right back.
func (g *Staging) Close() error {
	defer g.unlock()
	return RemoveTree(g.Dir)
}

// Image returns the published image with a digest. Its name is empty.
func (g *Staging) Image(digest core.Digest) (Image, error) {
	return loadImage(g.store.imageDir(digest), digest)
}

// Name points a name at a published image.
func (g *Staging) Name(name string, digest core.Digest) error { return g.store.writeName(name, digest) }

// discard removes a directory of the store in two steps, so that a crash never leaves half of it under its old name.
func (s *Store) discard(ctx context.Context, dir string) error {
	tmp, err := s.newTemp()
	if err != nil {
		return err
	}
	if err := os.Rename(dir, filepath.Join(tmp, "gone")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errors.Join(err, RemoveTree(tmp))
	}
	if err := errors.Join(atomicfile.SyncDir(s.dir), afterDiscard.Hit(ctx)); err != nil {
		return err
	}
	return RemoveTree(tmp)
}

// newTemp makes a fresh temporary directory that only its owner may enter: half-made trees hold setuid programs and
// device nodes.
func (s *Store) newTemp() (string, error) {
	tmp, err := os.MkdirTemp(s.dir, tempPrefix)
	if err != nil {
		return "", fmt.Errorf("make staging directory: %w", err)
	}
	return tmp, nil
}

// cleanTemp removes what dead builds left behind. The caller holds the lock, so none of it belongs to a living build.
func (s *Store) cleanTemp() error {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return fmt.Errorf("clean image store: %w", err)
	}
	var errs []error
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), tempPrefix) {
			errs = append(errs, RemoveTree(filepath.Join(s.dir, e.Name())))
		}
	}
	for _, dir := range []string{namesDir, cacheDir} {
		errs = append(errs, atomicfile.RemoveTemporary(filepath.Join(s.dir, dir)))
	}
	return errors.Join(errs...)
}

// RemoveTree removes a directory, unless something is mounted inside: deleting through a bind mount of /dev would
// delete the host's.
func RemoveTree(dir string) error {
	mounts, err := mountsBelow(dir)
	if err != nil {
		return err
	}
	if len(mounts) > 0 {
		return core.Errorf(core.FailedPrecondition, CodeImageBuildFailed,
			"%s cannot be removed because %s is mounted there; cure: umount %s", dir, mounts[0], mounts[0])
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove staging directory: %w", err)
	}
	return nil
}

// mountsBelow returns the mount points inside dir.
func mountsBelow(dir string) ([]string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("read mounts: %w", err)
	}
	defer f.Close()
	var out []string
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 5 {
			continue
		}
		// Blanks, tabs, newlines and backslashes are written as octal escapes.
		at := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(fields[4])
		if strings.HasPrefix(at, dir+"/") {
			out = append(out, at)
		}
	}
	return out, lines.Err()
}

// Publish makes the finished files in out an image: it writes image.json, flushes everything and renames out to the
// name that its digest gives. An intact image with that digest is kept if it exists already.
func (g *Staging) Publish(ctx context.Context, out string, m Manifest) (Image, error) {
	s := g.store
	m.Format = formatVersion
	raw, err := m.encode()
	if err != nil {
		return Image{}, err
	}
	digest := core.DigestOf(raw)
	dir := s.imageDir(digest)
	if img, err := loadImage(dir, digest); err == nil {
		return img, nil
	}
	if err := atomicfile.Write(filepath.Join(out, manifestFile), raw, 0o644); err != nil {
		return Image{}, err
	}
	for _, name := range imageFiles() {
		if err := stageFile(filepath.Join(out, name)); err != nil {
			return Image{}, err
		}
	}
	if err := os.Chmod(out, 0o755); err != nil { //nolint:gosec // G302: the VMM's own uid reads it
		return Image{}, err
	}
	if _, err := os.Lstat(dir); err == nil { // a damaged one
		if err := s.discard(ctx, dir); err != nil {
			return Image{}, err
		}
	}
	if err := errors.Join(atomicfile.SyncDir(out), beforePublish.Hit(ctx)); err != nil {
		return Image{}, fmt.Errorf("publish image: %w", err)
	}
	if err := atomicfile.Rename(out, dir); err != nil {
		return Image{}, fmt.Errorf("publish image: %w", err)
	}
	if err := afterPublish.Hit(ctx); err != nil {
		return Image{}, err
	}
	return loadImage(dir, digest)
}

// stageFile makes a file read-only for everybody and flushes it.
func stageFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	err = errors.Join(f.Chmod(0o444), f.Sync(), f.Close())
	if err != nil {
		return fmt.Errorf("flush %s: %w", filepath.Base(path), err)
	}
	return nil
}
