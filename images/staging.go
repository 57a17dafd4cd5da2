package images

import (
	"bufio"
	"context"
	"encoding/json"
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
	"github.com/coppice-dev/coppice/internal/failpoint"
)

// The steps between which a crash must leave a sound store.
var (
	beforePublish = failpoint.New("images.before_publish") // all files are written and flushed
	afterPublish  = failpoint.New("images.after_publish")  // the image exists, its name does not
	afterUnname   = failpoint.New("images.after_unname")   // the names are gone, the image still exists
	afterDiscard  = failpoint.New("images.after_discard")  // a directory has lost its name, its files still exist
)

// discard removes a directory of the store in two steps, so that a crash never leaves half of it under its old name.
func (s *Store) discard(ctx context.Context, dir string) error {
	tmp, err := s.newTemp()
	if err != nil {
		return err
	}
	if err := os.Rename(dir, filepath.Join(tmp, "gone")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errors.Join(err, removeTree(tmp))
	}
	if err := errors.Join(atomicfile.SyncDir(s.dir), afterDiscard.Hit(ctx)); err != nil {
		return err
	}
	return removeTree(tmp)
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
			errs = append(errs, removeTree(filepath.Join(s.dir, e.Name())))
		}
	}
	for _, dir := range []string{namesDir, cacheDir} {
		errs = append(errs, atomicfile.RemoveTemporary(filepath.Join(s.dir, dir)))
	}
	return errors.Join(errs...)
}

// removeTree removes a directory, unless something is mounted inside: deleting through a bind mount of /dev would
// delete the host's.
func removeTree(dir string) error {
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

// publish makes the finished files in out an image: it writes image.json, flushes everything and renames out to the
// name that its digest gives. An intact image with that digest is kept if it exists already.
func (s *Store) publish(ctx context.Context, out string, m manifest) (Image, error) {
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
		if err := seal(filepath.Join(out, name)); err != nil {
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

// seal makes a file read-only for everybody and flushes it.
func seal(path string) error {
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

// cacheKey is the digest of everything that a cached part depends on.
func cacheKey(kind string, inputs any) (string, error) {
	raw, err := json.Marshal(struct {
		Recipe int    `json:"recipe"`
		Kind   string `json:"kind"`
		Inputs any    `json:"inputs"`
	}{recipeVersion, kind, inputs})
	if err != nil {
		return "", fmt.Errorf("make a cache key: %w", err)
	}
	return kind + "-" + core.DigestOf(raw).Hex(), nil
}

// cacheGet reads the small JSON file of a cached fact; false when there is none or it cannot be read.
func (s *Store) cacheGet(key string, v any) bool {
	raw, err := os.ReadFile(filepath.Join(s.dir, cacheDir, key))
	return err == nil && json.Unmarshal(raw, v) == nil
}

func (s *Store) cachePut(key string, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("cache %s: %w", key, err)
	}
	if err := atomicfile.Write(filepath.Join(s.dir, cacheDir, key), raw, 0o644); err != nil {
		return fmt.Errorf("cache %s: %w", key, err)
	}
	return nil
}

// cacheAdopt publishes the directory dir as a cached part, replacing a damaged one, and returns its path.
func (s *Store) cacheAdopt(ctx context.Context, key, dir string) (string, error) {
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		return seal(path)
	})
	if err != nil {
		return "", fmt.Errorf("cache %s: %w", key, err)
	}
	to := filepath.Join(s.dir, cacheDir, key)
	if _, err := os.Lstat(to); err == nil {
		if err := s.discard(ctx, to); err != nil {
			return "", err
		}
	}
	if err := errors.Join(atomicfile.SyncDir(dir), atomicfile.Rename(dir, to)); err != nil {
		return "", fmt.Errorf("cache %s: %w", key, err)
	}
	return to, nil
}

// pruneCache removes cached root file systems that no image uses (images have hard links to them), kernels that no
// image was made from, except the newest, and facts about images that no longer exist.
func (s *Store) pruneCache(ctx context.Context) error {
	entries, err := os.ReadDir(filepath.Join(s.dir, cacheDir))
	if err != nil {
		return fmt.Errorf("prune image cache: %w", err)
	}
	keep := s.neededKernels(entries)
	var errs []error
	for _, e := range entries {
		path := filepath.Join(s.dir, cacheDir, e.Name())
		switch {
		case strings.HasPrefix(e.Name(), kindKernel+"-"):
			if !keep[e.Name()] {
				errs = append(errs, s.discard(ctx, path))
			}
		case strings.HasPrefix(e.Name(), kindRootFS+"-"):
			var st unix.Stat_t
			if err := unix.Stat(filepath.Join(path, rootFSFile), &st); err == nil && st.Nlink > 1 {
				continue
			}
			errs = append(errs, s.discard(ctx, path))
		case strings.HasPrefix(e.Name(), kindBuild+"-"):
			var fact buildFact
			if s.cacheGet(e.Name(), &fact) {
				if _, err := os.Lstat(s.imageDir(fact.Digest)); err == nil {
					continue
				}
			}
			errs = append(errs, os.Remove(path))
		}
	}
	return errors.Join(errs...)
}

// neededKernels returns the names of the cached kernels to keep: those that an image was made from, and the newest,
// which the next image will have. While an image cannot be read, all are kept.
func (s *Store) neededKernels(entries []fs.DirEntry) map[string]bool {
	list, damaged := s.List()
	used := map[string]bool{}
	for _, img := range list {
		used[img.Recipe.KernelPackage] = true
	}
	keep := map[string]bool{}
	newest := ""
	var newestAt time.Time
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), kindKernel+"-") {
			continue
		}
		b, err := openBundle(filepath.Join(s.dir, cacheDir, e.Name()))
		keep[e.Name()] = damaged != nil || err == nil && used[b.Kernel.String()]
		if info, err := e.Info(); err == nil && info.ModTime().After(newestAt) {
			newest, newestAt = e.Name(), info.ModTime()
		}
	}
	keep[newest] = true
	return keep
}
