// Package dir keeps the objects of a store as files below a directory: for one host, for hosts that
// share a network file system with hard links, and for tests.
//
// An object is written beside the others, synced, and linked to its place. The link fails if there
// is an object already. Then the directories above it are synced. So whatever dies in the middle,
// the object is complete or absent, and no object is ever overwritten. A death may leave files in
// .tmp, where Sweep finds them.
package dir

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"syscall"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

const (
	temporary = ".tmp" // cannot be a key: no key begins with a dot
	dirMode   = 0o700
	fileMode  = 0o600
	chunk     = 1 << 20 // bytes copied between two checks of the context
	// linkAttempts bounds how often a Put creates its directory again after a concurrent Delete has removed it as
	// empty.
	linkAttempts = 100
)

// Store is a directory of objects. Symbolic links cannot lead out of it, and a symbolic link in the place of an object
// is not an object.
type Store struct {
	path string
	root *os.Root
}

var _ blob.Blobs = (*Store)(nil)

// Open opens the store in a directory, which it creates if it is missing; its parent must exist.
func Open(dir string) (*Store, error) {
	if !filepath.IsAbs(dir) {
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "the store's directory %q must be an absolute path", core.Clip(dir))
	}
	s := &Store{path: filepath.Clean(dir)}
	if err := os.Mkdir(s.path, dirMode); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, s.mapError("make", err)
	}
	root, err := os.OpenRoot(s.path)
	if err != nil {
		return nil, s.mapError("open", err)
	}
	s.root = root
	if err := root.Mkdir(temporary, dirMode); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, errors.Join(s.mapError("open", err), root.Close())
	}
	return s, nil
}

// Close closes the directory. It must be the last call.
func (s *Store) Close() error { return s.root.Close() }

// Put implements blob.Blobs.
func (s *Store) Put(ctx context.Context, key string, body io.ReaderAt, size int64, digest core.Digest) error {
	if err := blob.CheckPut(key, size, digest); err != nil {
		return err
	}
	switch err := s.compare(ctx, key, size, digest); {
	case errors.Is(err, blob.ErrNotFound):
	default:
		return err
	}
	tmp, err := s.write(ctx, key, body, size, digest)
	if err != nil {
		return err
	}
	err = s.link(ctx, tmp, key)
	if errors.Is(err, errTaken) {
		err = s.compare(ctx, key, size, digest)
		if errors.Is(err, blob.ErrNotFound) { // removed meanwhile, or not an object
			err = s.mapError("put "+key, errTaken)
		}
	}
	return errors.Join(err, s.remove(tmp))
}

// write writes the bytes to a temporary file, syncs it and returns its name. It fails if they do not have the digest.
func (s *Store) write(ctx context.Context, key string, body io.ReaderAt, size int64, digest core.Digest) (string, error) {
	name := path.Join(temporary, rand.Text())
	f, err := s.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, fileMode)
	if err != nil {
		return "", s.mapError("put "+key, err)
	}
	sum := sha256.New()
	given := &source{r: io.NewSectionReader(body, 0, size)}
	err = copyAll(ctx, io.MultiWriter(f, sum), given, size)
	switch {
	case given.err != nil:
		err = fmt.Errorf("read the bytes of object %s: %w", key, err)
	case err != nil:
		err = s.mapError("put "+key, err)
	case digestOf(sum) != digest:
		err = blob.WrongDigest(key, digestOf(sum), digest)
	default:
		err = s.mapError("put "+key, f.Sync())
	}
	err = errors.Join(err, f.Close())
	if err != nil {
		return "", errors.Join(err, s.remove(name))
	}
	return name, nil
}

// source remembers the error of a caller's body, to tell it from an error of the store.
type source struct {
	r   io.Reader
	err error
}

// Read implements io.Reader.
func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil {
		s.err = err
	}
	return n, err
}

var errTaken = errors.New("the key exists already")

// link gives a written file its key; errTaken if the key exists.
func (s *Store) link(ctx context.Context, tmp, key string) error {
	err := fs.ErrNotExist
	for i := 0; errors.Is(err, fs.ErrNotExist) && i < linkAttempts; i++ {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		err = s.root.MkdirAll(path.Dir(key), dirMode)
		if errors.Is(err, fs.ErrExist) && !s.belowObject(key) { // the directory existed and was removed meanwhile
			err = fs.ErrNotExist
			continue
		}
		if errors.Is(err, syscall.ENOTDIR) || errors.Is(err, fs.ErrExist) {
			return core.Wrapf(err, core.Invalid, core.CodeInvalidName, "object %s cannot be below another object", key)
		}
		if err == nil {
			err = s.root.Link(tmp, key)
		}
	}
	if errors.Is(err, fs.ErrExist) {
		return errTaken
	}
	if err != nil {
		return s.mapError("put "+key, err)
	}
	return s.sync(path.Dir(key))
}

// belowObject reports whether a directory of the key is an object, or something else that is not a directory.
func (s *Store) belowObject(key string) bool {
	for dir := path.Dir(key); dir != "."; dir = path.Dir(dir) {
		if info, err := s.root.Lstat(dir); err == nil && !info.IsDir() {
			return true
		}
	}
	return false
}

// sync makes the names in a directory durable, and the name of the directory itself. It also syncs the directories
// above when another process made them: that process may not have synced them yet.
func (s *Store) sync(dir string) error {
	for {
		f, err := s.root.Open(dir)
		if err == nil {
			err = errors.Join(f.Sync(), f.Close())
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // removed with everything in it
			return s.mapError("sync "+dir, err)
		}
		if dir == "." {
			return nil
		}
		dir = path.Dir(dir)
	}
}

// compare returns nil if an object has exactly these bytes and is durable, otherwise blob.ErrExists or
// blob.ErrNotFound.
func (s *Store) compare(ctx context.Context, key string, size int64, digest core.Digest) error {
	f, info, err := s.open(key)
	if err != nil {
		return err
	}
	defer f.Close()
	if info.Size() != size {
		return blob.Exists(key)
	}
	sum := sha256.New()
	if err := copyAll(ctx, sum, f, size); err != nil {
		return s.mapError("read "+key, err)
	}
	if digestOf(sum) != digest {
		return blob.Exists(key)
	}
	return s.sync(path.Dir(key))
}

// open opens an object's file.
func (s *Store) open(key string) (*os.File, fs.FileInfo, error) {
	if _, err := s.lstat(key); err != nil {
		return nil, nil, err
	}
	f, err := s.root.Open(key)
	if err != nil {
		return nil, nil, s.mapMissing(key, err)
	}
	info, err := f.Stat()
	if err != nil {
		return nil, nil, errors.Join(s.mapError("read "+key, err), f.Close())
	}
	return f, info, nil
}

func (s *Store) lstat(key string) (fs.FileInfo, error) {
	info, err := s.root.Lstat(key)
	if err != nil {
		return nil, s.mapMissing(key, err)
	}
	if !info.Mode().IsRegular() {
		return nil, blob.NotFound(key)
	}
	return info, nil
}

// Get implements blob.Blobs.
func (s *Store) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	if err := blob.CheckGet(key, off, n); err != nil {
		return nil, err
	}
	f, info, err := s.open(key)
	if err != nil {
		return nil, err
	}
	n = max(0, min(n, info.Size()-off))
	return &reader{ctx: ctx, store: s, key: key, file: f, section: io.NewSectionReader(f, off, n), left: n}, nil
}

// reader is the body of a Get.
type reader struct {
	ctx     context.Context // the context of the Get, also for reads of its body
	store   *Store
	key     string
	file    *os.File
	section *io.SectionReader
	left    int64
}

// Read implements io.Reader.
func (r *reader) Read(p []byte) (int, error) {
	if r.ctx.Err() != nil {
		return 0, context.Cause(r.ctx)
	}
	n, err := r.section.Read(p)
	r.left -= int64(n)
	switch {
	case errors.Is(err, io.EOF) && r.left > 0: // the file has become shorter
		err = r.store.mapError("read "+r.key, io.ErrUnexpectedEOF)
	case err != nil && !errors.Is(err, io.EOF):
		err = r.store.mapError("read "+r.key, err)
	}
	return n, err
}

// Close implements io.Closer.
func (r *reader) Close() error { return r.file.Close() }

// Stat implements blob.Blobs.
func (s *Store) Stat(_ context.Context, key string) (blob.Info, error) {
	if err := blob.CheckKey(key); err != nil {
		return blob.Info{}, err
	}
	info, err := s.lstat(key)
	if err != nil {
		return blob.Info{}, err
	}
	return blob.Info{Key: key, Size: info.Size(), Modified: info.ModTime()}, nil
}

// Delete implements blob.Blobs. It also removes directories that become empty.
func (s *Store) Delete(ctx context.Context, keys ...string) error {
	for _, key := range keys {
		if err := blob.CheckKey(key); err != nil {
			return err
		}
	}
	changed := map[string]bool{}
	for _, key := range keys {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if _, err := s.lstat(key); errors.Is(err, blob.ErrNotFound) {
			continue
		}
		if err := s.remove(key); err != nil {
			return err
		}
		changed[path.Dir(key)] = true
	}
	for dir := range changed {
		if err := s.sync(dir); err != nil {
			return err
		}
		for ; dir != "."; dir = path.Dir(dir) {
			if s.root.Remove(dir) != nil { // not empty
				break
			}
		}
	}
	return nil
}

// Sweep implements blob.Blobs, by the clock of the file system.
func (s *Store) Sweep(ctx context.Context, before time.Time) error {
	names, err := s.names(temporary)
	if err != nil {
		return err
	}
	for _, name := range names {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		name = path.Join(temporary, name)
		info, err := s.root.Lstat(name)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case err != nil:
			return s.mapError("sweep", err)
		case !info.ModTime().Before(before):
			continue
		}
		if err := s.remove(name); err != nil {
			return err
		}
	}
	return nil
}

// remove removes a file; a missing file is not an error.
func (s *Store) remove(name string) error {
	if err := s.root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return s.mapError("remove "+name, err)
	}
	return nil
}

func (s *Store) mapMissing(key string, err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return blob.NotFound(key)
	}
	return s.mapError("read "+key, err)
}

// mapError is the only place that maps errors of the system to the contract's.
func (s *Store) mapError(doing string, err error) error {
	var known *core.Error
	switch {
	case err == nil, errors.As(err, &known), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return core.Wrapf(err, core.Exhausted, core.CodeDiskFull, "the store's directory %s is full: %s; give it more room", s.path, doing)
	default:
		return core.Wrapf(err, core.Unavailable, core.CodeStoreUnavailable, "the store's directory %s cannot be used: %s", s.path, doing)
	}
}

// copyAll copies n bytes. If there are fewer, the error is io.ErrUnexpectedEOF.
func copyAll(ctx context.Context, w io.Writer, r io.Reader, n int64) error {
	buf := make([]byte, min(n, chunk))
	for n > 0 {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		part := buf[:min(n, int64(len(buf)))]
		if _, err := io.ReadFull(r, part); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
		if _, err := w.Write(part); err != nil {
			return err
		}
		n -= int64(len(part))
	}
	return nil
}

func digestOf(h hash.Hash) core.Digest {
	return core.Digest("sha256:" + hex.EncodeToString(h.Sum(nil)))
}
