package runner

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/sparse"
	"github.com/coppice-dev/coppice/runner/lazy"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// A checkpoint needs the root file system that its guest has mounted for as long as the checkpoint exists, even if the image is
// removed. So the runner keeps each root file system under a name of its own: as a hard link if possible, otherwise as a copy.
//
// All projects of a host share a root file system only if it is from an image that the operator put on that host. A root file system
// from the store is only what some runner claimed. It is kept by the digest of its content, and for one project. So a manifest with
// a false root file system harms only the checkpoint that it describes.

const rootSuffix = ".root"

// rootKey names a root file system on this host.
type rootKey string

// ownRoot is the key of an image of this host.
func ownRoot(d core.Digest) rootKey { return rootKey(d.Hex()) }

// storedRoot is the key of a root file system from the store: its project and the digest of its content.
func storedRoot(project core.ProjectID, tree *manifest.Tree) rootKey {
	return rootKey(storedPrefix + core.DigestOf([]byte(string(project)+" "+string(snapshotstore.Content(tree)))).Hex())
}

const storedPrefix = "stored-"

func (k rootKey) stored() bool { return strings.HasPrefix(string(k), storedPrefix) }

// rootKey is the key of the root file system of a checkpoint's guest.
func (r *checkpointRecord) rootKey() rootKey { return cmp.Or(r.Root, ownRoot(r.Image)) }

func (s shape) rootKey() rootKey { return cmp.Or(s.root, ownRoot(s.image)) }

func (r *Runner) rootsDir() string { return filepath.Join(r.cfg.DataDir, "roots") }

// rootName is the path of a root file system below the data directory.
func (r *Runner) rootName(k rootKey) string { return filepath.Join("roots", string(k)+rootSuffix) }

func (r *Runner) rootPath(k rootKey) string { return filepath.Join(r.cfg.DataDir, r.rootName(k)) }

// keepRoot makes sure that the runner has the root file system of an image of this host. It replaces a file that differs from the image.
// Machines that have the old file open keep it.
func (r *Runner) keepRoot(img images.Image) error {
	k := ownRoot(img.Digest)
	err := r.checkKept(k)
	switch {
	case err == nil:
		return nil
	case core.CodeOf(err) == core.CodeCheckpointCorrupt:
		r.cfg.Log.Warn("a root file system on this runner differs from its image and is replaced", "image", img.Digest.Short(), "err", err)
	case !errors.Is(err, os.ErrNotExist):
		return err
	}
	if err := r.placeRoot(img); err != nil {
		return fmt.Errorf("keep the root file system of image %s: %w", img.Digest.Short(), err)
	}
	return r.checkKept(k)
}

// checkKept verifies the file of a root file system.
func (r *Runner) checkKept(k rootKey) error {
	f, err := os.Open(r.rootPath(k))
	if err != nil {
		return err
	}
	return errors.Join(r.checkRoot(k, f), f.Close())
}

// placeRoot puts an image's root file system into the runner's data directory. It replaces an existing file.
func (r *Runner) placeRoot(img images.Image) error {
	path := r.rootPath(ownRoot(img.Digest))
	part := path + "." + rand.Text() + ".part" // several callers may do so at the same time
	err := os.Link(img.RootFS, part)
	if errors.Is(err, unix.EXDEV) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.EMLINK) {
		err = copyRoot(part, img.RootFS)
	}
	if err == nil {
		err = rootsPlaced.Hit(r.runCtx)
	}
	if err == nil {
		err = atomicfile.Rename(part, path)
	}
	return errors.Join(err, ignoreAbsent(os.Remove(part))) // rename does not remove it if both names are the same file
}

func copyRoot(to, from string) error {
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

// openRoot opens the root file system of a checkpoint's guest.
func (r *Runner) openRoot(k rootKey) (*os.File, error) {
	f, err := os.Open(r.rootPath(k))
	whole := err == nil
	for tries := 0; errors.Is(err, os.ErrNotExist) && tries < 2; tries++ { // it may become complete in between
		if f, err = r.lazy.OpenFile(rootImageID(k)); errors.Is(err, os.ErrNotExist) {
			f, err = os.Open(r.rootPath(k))
		}
	}
	if errors.Is(err, os.ErrNotExist) {
		return nil, core.Errorf(core.DataLoss, core.CodeCheckpointCorrupt, "the root file system %s is missing on this runner", r.rootName(k))
	}
	if err != nil || !whole {
		return f, err
	}
	if err := r.checkRoot(k, f); err != nil {
		return r.reopenRoot(k, errors.Join(err, f.Close()))
	}
	return f, nil
}

// reopenRoot opens a root file system again after its check has failed. This works if its image is on this host and replaces the file.
func (r *Runner) reopenRoot(k rootKey, bad error) (*os.File, error) {
	if core.CodeOf(bad) != core.CodeCheckpointCorrupt {
		return nil, bad
	}
	img, err := r.cfg.Images.Get("sha256:" + string(k))
	if err != nil {
		return nil, bad
	}
	defer r.holdRoots()() // a collection would remove the part of the new file
	if err := r.keepRoot(img); err != nil {
		return nil, err
	}
	return os.Open(r.rootPath(k))
}

// holdRoots keeps every root file system until release is called, because a new one exists before the checkpoint that needs it. It waits for a
// collection under way.
func (r *Runner) holdRoots() (release func()) {
	r.mu.Lock()
	r.awaitCollected()
	r.rootsHeld++
	r.mu.Unlock()
	return func() {
		r.mu.Lock()
		r.rootsHeld--
		r.mu.Unlock()
	}
}

// awaitCollected waits until no collection of root file systems is under way. The caller holds mu; awaitCollected unlocks it while it waits.
func (r *Runner) awaitCollected() {
	for r.collecting != nil {
		done := r.collecting
		r.mu.Unlock()
		<-done
		r.mu.Lock()
	}
}

// claimRoots reports whether nobody holds root file systems. If so, nobody can hold them until release is called.
func (r *Runner) claimRoots() (release func(), ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.awaitCollected()
	if r.rootsHeld > 0 {
		return nil, false
	}
	done := make(chan struct{})
	r.collecting = done
	return func() {
		r.mu.Lock()
		r.collecting = nil
		r.mu.Unlock()
		close(done)
	}, true
}

// collectRoots removes what no checkpoint and no sandbox needs.
func (r *Runner) collectRoots() error {
	// The claim comes before the question which ones are needed: earlier holders have published their checkpoints by now.
	release, ok := r.claimRoots()
	if !ok {
		return nil
	}
	defer release()
	entries, err := os.ReadDir(r.rootsDir())
	if err != nil {
		return err
	}
	wanted := make(map[rootKey]bool)
	for _, rec := range r.checkpoints.list() {
		wanted[rec.rootKey()] = true
	}
	for _, t := range r.checkpoints.listTrash() {
		wanted[t.rec.rootKey()] = true
	}
	r.mu.Lock()
	for _, s := range r.sandboxes {
		wanted[s.shape.rootKey()] = true
	}
	r.mu.Unlock()
	if err := rootsJudged.Hit(r.runCtx); err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if key, ok := strings.CutSuffix(e.Name(), rootSuffix); !ok || !wanted[rootKey(key)] {
			errs = append(errs, os.Remove(filepath.Join(r.rootsDir(), e.Name())))
		}
	}
	for _, k := range r.lazy.Roots() {
		if !wanted[rootKey(k)] {
			errs = append(errs, r.lazy.Drop(lazy.RootID(k)))
		}
	}
	return errors.Join(errs...)
}
