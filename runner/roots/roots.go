// Package roots keeps the root file systems that guests have mounted.
//
// A checkpoint needs the root file system of its guest for as long as the checkpoint exists, even if the image is removed. So a Store keeps
// each root file system under a name of its own: as a hard link if possible, otherwise as a copy. It removes those that nothing needs.
//
// All projects of a host share a root file system only if it is from an image that the operator put on that host. A root file system
// from the object store is only what some runner claimed. It is kept by the digest of its content, and for one project. So a manifest with
// a false root file system harms only the checkpoint that it describes.
package roots

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/failpoint"
	"github.com/coppice-dev/coppice/internal/sparse"
	"github.com/coppice-dev/coppice/runner/lazy"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// The steps at which a test makes a runner fail or end.
var (
	judged = failpoint.New("roots.judged") // it is known which root file systems are not needed
	placed = failpoint.New("roots.placed") // a root file system is there under the name of a part
)

// Incomplete has the root file systems that machines use before they are complete; lazy.Images implements it.
type Incomplete interface {
	OpenFile(id string) (*os.File, error)
	Roots() []string
	Drop(id string) error
}

// Config says what a Store keeps. All fields are required.
type Config struct {
	DataDir string
	Images  *images.Store
	Lazy    Incomplete
	// Wanted returns the root file systems that checkpoints and sandboxes need at this moment.
	Wanted func() map[Key]bool
	Log    *slog.Logger
}

// Store has the root file systems of one host.
type Store struct {
	cfg Config
	ctx context.Context // the lifetime of the runner, for the failpoints
	dir string

	checks checks

	mu         sync.Mutex    // guards what follows
	held       int           // number of callers of Hold
	collecting chan struct{} // closed at the end of a collection; nil: none is under way
}

// New opens the root file systems of a host, below its data directory.
func New(ctx context.Context, cfg Config) (*Store, error) {
	s := &Store{cfg: cfg, ctx: ctx, dir: filepath.Join(cfg.DataDir, "roots")}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of root file systems: %w", err)
	}
	return s, nil
}

// Dir is the directory of all root file systems.
func (s *Store) Dir() string { return s.dir }

const suffix = ".root"

// Key names a root file system on this host.
type Key string

// Own is the key of an image of this host.
func Own(d core.Digest) Key { return Key(d.Hex()) }

// FromStore is the key of a root file system from the store: its project and the digest of its content.
func FromStore(project core.ProjectID, tree *manifest.Tree) Key {
	return Key(storedPrefix + core.DigestOf([]byte(string(project)+" "+string(snapshotstore.Content(tree)))).Hex())
}

const storedPrefix = "stored-"

// Stored reports whether the root file system is from the object store.
func (k Key) Stored() bool { return strings.HasPrefix(string(k), storedPrefix) }

// Name is the path of a root file system below the data directory.
func (s *Store) Name(k Key) string { return filepath.Join("roots", string(k)+suffix) }

// Path is the path of a root file system.
func (s *Store) Path(k Key) string { return filepath.Join(s.cfg.DataDir, s.Name(k)) }

// Keep makes sure that the runner has the root file system of an image of this host. It replaces a file that differs from the image.
// Machines that have the old file open keep it.
func (s *Store) Keep(img images.Image) error {
	k := Own(img.Digest)
	err := s.checkKept(k)
	switch {
	case err == nil:
		return nil
	case core.CodeOf(err) == core.CodeCheckpointCorrupt:
		s.cfg.Log.Warn("a root file system on this runner differs from its image and is replaced", "image", img.Digest.Short(), "err", err)
	case !errors.Is(err, os.ErrNotExist):
		return err
	}
	if err := s.place(img); err != nil {
		return fmt.Errorf("keep the root file system of image %s: %w", img.Digest.Short(), err)
	}
	return s.checkKept(k)
}

// checkKept verifies the file of a root file system.
func (s *Store) checkKept(k Key) error {
	f, err := os.Open(s.Path(k))
	if err != nil {
		return err
	}
	return errors.Join(s.check(k, f), f.Close())
}

// place puts an image's root file system into the runner's data directory. It replaces an existing file.
func (s *Store) place(img images.Image) error {
	path := s.Path(Own(img.Digest))
	part := path + "." + rand.Text() + ".part" // several callers may do so at the same time
	err := os.Link(img.RootFS, part)
	if errors.Is(err, unix.EXDEV) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.EMLINK) {
		err = copyFile(part, img.RootFS)
	}
	if err == nil {
		err = placed.Hit(s.ctx)
	}
	if err == nil {
		err = atomicfile.Rename(part, path)
	}
	if left := os.Remove(part); !errors.Is(left, os.ErrNotExist) { // rename does not remove it if both names are the same file
		err = errors.Join(err, left)
	}
	return err
}

func copyFile(to, from string) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o444) //nolint:gosec // G302: the VMM, another user, reads it
	if err != nil {
		return err
	}
	_, err = sparse.Clone(dst, src)
	return errors.Join(err, dst.Sync(), dst.Close())
}

// Open opens the root file system of a checkpoint's guest.
func (s *Store) Open(k Key) (*os.File, error) {
	f, err := os.Open(s.Path(k))
	whole := err == nil
	for tries := 0; errors.Is(err, os.ErrNotExist) && tries < 2; tries++ { // it may become complete in between
		if f, err = s.cfg.Lazy.OpenFile(lazy.RootID(string(k))); errors.Is(err, os.ErrNotExist) {
			f, err = os.Open(s.Path(k))
		}
	}
	if errors.Is(err, os.ErrNotExist) {
		return nil, core.Errorf(core.DataLoss, core.CodeCheckpointCorrupt, "the root file system %s is missing on this runner", s.Name(k))
	}
	if err != nil || !whole {
		return f, err
	}
	if err := s.check(k, f); err != nil {
		return s.reopen(k, errors.Join(err, f.Close()))
	}
	return f, nil
}

// reopen opens a root file system again after its check has failed. This works if its image is on this host and replaces the file.
func (s *Store) reopen(k Key, bad error) (*os.File, error) {
	if core.CodeOf(bad) != core.CodeCheckpointCorrupt {
		return nil, bad
	}
	img, err := s.cfg.Images.Get("sha256:" + string(k))
	if err != nil {
		return nil, bad
	}
	defer s.Hold()() // a collection would remove the part of the new file
	if err := s.Keep(img); err != nil {
		return nil, err
	}
	return os.Open(s.Path(k))
}

// Hold keeps every root file system until release is called, because a new one exists before the checkpoint that needs it. It waits for a
// collection under way.
func (s *Store) Hold() (release func()) {
	s.mu.Lock()
	s.awaitCollected()
	s.held++
	s.mu.Unlock()
	return func() {
		s.mu.Lock()
		s.held--
		s.mu.Unlock()
	}
}

// awaitCollected waits until no collection of root file systems is under way. The caller holds mu; awaitCollected unlocks it while it waits.
func (s *Store) awaitCollected() {
	for s.collecting != nil {
		done := s.collecting
		s.mu.Unlock()
		<-done
		s.mu.Lock()
	}
}

// claim reports whether nobody holds root file systems. If so, nobody can hold them until release is called.
func (s *Store) claim() (release func(), ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.awaitCollected()
	if s.held > 0 {
		return nil, false
	}
	done := make(chan struct{})
	s.collecting = done
	return func() {
		s.mu.Lock()
		s.collecting = nil
		s.mu.Unlock()
		close(done)
	}, true
}

// Collect removes what no checkpoint and no sandbox needs.
func (s *Store) Collect() error {
	// The claim comes before the question which ones are needed: earlier holders have published their checkpoints by now.
	release, ok := s.claim()
	if !ok {
		return nil
	}
	defer release()
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return err
	}
	wanted := s.cfg.Wanted()
	if err := judged.Hit(s.ctx); err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if key, ok := strings.CutSuffix(e.Name(), suffix); !ok || !wanted[Key(key)] {
			errs = append(errs, os.Remove(filepath.Join(s.dir, e.Name())))
		}
	}
	for _, k := range s.cfg.Lazy.Roots() {
		if !wanted[Key(k)] {
			errs = append(errs, s.cfg.Lazy.Drop(lazy.RootID(k)))
		}
	}
	return errors.Join(errs...)
}
