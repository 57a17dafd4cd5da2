package images

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
)

// DefaultName is the name of an image when none is given.
const DefaultName = "base"

// Directories and prefixes inside a store.
const (
	namesDir     = "names"
	cacheDir     = "cache"
	layersDir    = "layers"
	lockFile     = "lock"
	imagePrefix  = "sha256-"
	tempPrefix   = "tmp-"
	minPrefixLen = 6 // hex digits of a shortened digest that Get accepts
)

// Store is a directory of images. Reading needs no lock and works while a build runs; changes of the store are
// serialised by an flock, also between processes. It is safe for concurrent use.
type Store struct{ dir string }

// Open opens the store in dir. It makes dir if it does not exist.
func Open(dir string) (*Store, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("open image store: %w", err)
	}
	for _, d := range []string{abs, filepath.Join(abs, namesDir), filepath.Join(abs, cacheDir)} {
		// Readable by others: the VMM runs under a uid of its own.
		if err := os.MkdirAll(d, 0o755); err != nil { //nolint:gosec // G301: see above
			return nil, fmt.Errorf("open image store: %w", err)
		}
	}
	return &Store{dir: abs}, nil
}

// Dir returns the store's absolute path.
func (s *Store) Dir() string { return s.dir }

// List returns every image, sorted by name and then by age. An image with several names is returned once for each; an
// image without a name has an empty one. Damaged images are left out and returned as joined errors beside the rest.
func (s *Store) List() ([]Image, error) {
	names, err := s.names()
	if err != nil {
		return nil, err
	}
	references, err := s.references()
	if err != nil {
		return nil, err
	}
	pulled, err := s.pulled()
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	var out []Image
	var errs []error
	for _, e := range entries {
		digest, ok := digestOfDir(e.Name())
		if !ok {
			continue
		}
		img, err := s.load(digest)
		if core.CodeOf(err) == core.CodeImageNotFound {
			continue // removed while we looked
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		img.References = references[digest]
		_, img.Pulled = pulled[digest]
		named := false
		for name, d := range names {
			if d == digest {
				named = true
				img.Name = name
				out = append(out, img)
			}
		}
		if !named {
			out = append(out, img)
		}
	}
	slices.SortFunc(out, func(a, b Image) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), a.CreatedAt.Compare(b.CreatedAt), strings.Compare(string(a.Digest), string(b.Digest)))
	})
	return out, errors.Join(errs...)
}

// Get returns the image with the given name, digest, or beginning of a digest ("sha256:" and at least six hex digits).
// It fails with IMAGE_NOT_FOUND, or IMAGE_CORRUPT when a file is missing or has the wrong size.
func (s *Store) Get(ref string) (Image, error) {
	digest, name, err := s.resolve(ref)
	if err != nil {
		return Image{}, err
	}
	img, err := s.load(digest)
	img.Name = name
	return img, err
}

// load reads a published image. The error is IMAGE_NOT_FOUND if there is none, or if it is removed meanwhile.
func (s *Store) load(digest core.Digest) (Image, error) {
	dir := s.imageDir(digest)
	img, err := loadImage(dir, digest)
	if err == nil {
		return img, nil
	}
	if _, statErr := os.Lstat(dir); errors.Is(statErr, fs.ErrNotExist) {
		return Image{}, core.Errorf(core.NotFound, core.CodeImageNotFound, "image %s is not in the store; build it again", digest.Short())
	}
	return Image{}, err
}

// resolve finds the image that ref means. The name is empty when ref is a digest.
func (s *Store) resolve(ref string) (digest core.Digest, name string, err error) {
	notFound := core.Errorf(core.NotFound, core.CodeImageNotFound,
		"image %q does not exist; `coppice image ls` lists the images, `coppice image build` makes one", core.Clip(ref))
	hex, isDigest := strings.CutPrefix(ref, "sha256:")
	if !isDigest {
		if err := core.ValidateName("image", ref); err != nil {
			return "", "", err
		}
		digest, err := s.readName(ref)
		if errors.Is(err, fs.ErrNotExist) {
			return "", "", notFound
		}
		return digest, ref, err
	}
	if len(hex) < minPrefixLen || strings.Trim(hex, "0123456789abcdef") != "" {
		return "", "", core.Errorf(core.Invalid, core.CodeInvalidDigest,
			"%q is not a digest: write sha256: and at least %d lower-case hex digits", core.Clip(ref), minPrefixLen)
	}
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return "", "", fmt.Errorf("look for image: %w", err)
	}
	var found []core.Digest
	for _, e := range entries {
		if d, ok := digestOfDir(e.Name()); ok && strings.HasPrefix(d.Hex(), hex) {
			found = append(found, d)
		}
	}
	switch len(found) {
	case 0:
		return "", "", notFound
	case 1:
		return found[0], "", nil
	default:
		return "", "", core.Errorf(core.Invalid, core.CodeInvalidDigest, "%q is the beginning of %d digests; write more digits", core.Clip(ref), len(found))
	}
}

// Tag gives an image one more name, or moves an existing name to it.
func (s *Store) Tag(ctx context.Context, ref, name string) error {
	if err := core.ValidateName("image", name); err != nil {
		return err
	}
	unlock, err := s.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	img, err := s.Get(ref)
	if err != nil {
		return err
	}
	return s.writeName(name, img.Digest)
}

// Remove removes a name, and the image itself when it was the last one; given a digest, it removes the image and all
// its names. Cached parts of that image alone are removed too. The caller makes sure that no sandbox and no checkpoint
// needs the files.
func (s *Store) Remove(ctx context.Context, ref string) error {
	unlock, err := s.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	return s.remove(ctx, ref)
}

// remove is Remove for a caller that has the lock.
func (s *Store) remove(ctx context.Context, ref string) error {
	digest, name, err := s.resolve(ref)
	if err != nil {
		return err
	}
	names, err := s.names()
	if err != nil {
		return err
	}
	others := 0
	for n, d := range names {
		switch {
		case d != digest:
		case name == "" || n == name:
			if err := os.Remove(filepath.Join(s.dir, namesDir, n)); err != nil {
				return fmt.Errorf("remove image name %s: %w", n, err)
			}
		default:
			others++
		}
	}
	if err := atomicfile.SyncDir(filepath.Join(s.dir, namesDir)); err != nil {
		return err
	}
	if others > 0 {
		return nil
	}
	removed, _ := s.load(digest) // of a damaged one the layers are not known; they stay for a day
	if err := afterUnname.Hit(ctx); err != nil {
		return err
	}
	if err := s.discard(ctx, s.imageDir(digest)); err != nil {
		return fmt.Errorf("remove image %s: %w", digest.Short(), err)
	}
	return errors.Join(s.pruneCache(ctx), s.pruneLayers(removed.Recipe.Layers...), s.cleanTemp())
}

// Verify compares every byte of an image with image.json, and image.json with the digest. Its error IMAGE_CORRUPT names
// the file.
func (s *Store) Verify(ctx context.Context, img Image) error {
	fresh, err := s.load(img.Digest)
	if err != nil {
		return err
	}
	for _, name := range imageFiles() {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		got, err := HashFile(filepath.Join(fresh.Dir, name))
		if err != nil {
			return fmt.Errorf("verify image %s: %w", img.Digest.Short(), err)
		}
		if got != fresh.Files[name] {
			return corrupt(img.Digest, "%s has the digest %s instead of %s", name, got.Digest.Short(), fresh.Files[name].Digest.Short())
		}
	}
	return nil
}

func (s *Store) imageDir(d core.Digest) string { return filepath.Join(s.dir, imagePrefix+d.Hex()) }

func digestOfDir(name string) (core.Digest, bool) {
	hex, ok := strings.CutPrefix(name, imagePrefix)
	if !ok {
		return "", false
	}
	d, err := core.ParseDigest("sha256:" + hex)
	return d, err == nil
}

// names reads all names. One that was removed meanwhile is left out.
func (s *Store) names() (map[string]core.Digest, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, namesDir))
	if err != nil {
		return nil, fmt.Errorf("read image names: %w", err)
	}
	out := make(map[string]core.Digest, len(entries))
	for _, e := range entries {
		if core.ValidateName("image", e.Name()) != nil {
			continue // a temporary file of a writer, or a foreign file
		}
		d, err := s.readName(e.Name())
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		out[e.Name()] = d
	}
	return out, nil
}

func (s *Store) readName(name string) (core.Digest, error) {
	raw, err := os.ReadFile(filepath.Join(s.dir, namesDir, name))
	if err != nil {
		return "", fmt.Errorf("read image name %s: %w", name, err)
	}
	d, err := core.ParseDigest(strings.TrimSpace(string(raw)))
	if err != nil {
		return "", core.Wrapf(err, core.DataLoss, CodeImageCorrupt, "the file of the image name %s cannot be read; build the image again", name)
	}
	return d, nil
}

func (s *Store) writeName(name string, d core.Digest) error {
	if err := atomicfile.Write(filepath.Join(s.dir, namesDir, name), []byte(d+"\n"), 0o644); err != nil {
		return fmt.Errorf("write image name %s: %w", name, err)
	}
	return nil
}

// lockPoll is how often a waiting writer looks at the lock again: flock has no wait that a context can end.
const lockPoll = 100 * time.Millisecond

// lock takes the store's exclusive lock; the kernel gives it back when the process dies.
func (s *Store) lock(ctx context.Context) (unlock func(), err error) {
	f, err := lockFileAt(ctx, filepath.Join(s.dir, lockFile), unix.LOCK_EX)
	if err != nil {
		return nil, fmt.Errorf("wait for the lock of the image store: %w", err)
	}
	return func() { _ = f.Close() }, nil // closing the only descriptor gives the lock back
}
