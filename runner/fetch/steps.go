package fetch

import (
	"context"
	"errors"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/sparse"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/lazy"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/pager"
	"github.com/coppice-dev/coppice/runner/room"
	"github.com/coppice-dev/coppice/runner/roots"
	"github.com/coppice-dev/coppice/runner/sealing"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/blob/peers"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// fetching is one fetch.
type fetching struct {
	*Fetcher

	at           runnerapi.Stored
	snapshot     *snapshotstore.Snapshot
	rec          *checkpoints.Record
	lazy         bool                    // the memory may be fetched later
	own          *images.Image           // the image of this host that has the guest's root file system; nil: the root file system is in the store
	near         *checkpoints.Opened     // an ancestor that is on this host; nil: there is none
	nearAt       runnerapi.Stored        // the place of the ancestor in the store
	nearSnapshot *snapshotstore.Snapshot // the maps of the ancestor
	will         fetchPlan
	room         *room.Reservation // disk space for the whole fetch
	dir          string
	watch        *core.Stopwatch
	mu           sync.Mutex // guards got
	got          snapshotstore.Fetched
}

// findNear finds the ancestor on this host that shares the most bytes. If the memory cannot be fetched later, it first fetches the root of the
// tree, because all checkpoints of the tree share the root's memory. It does not use an ancestor that is not what it should be, or a copy that
// nothing may use. Without an ancestor the fetch reads the whole checkpoint.
func (f *fetching) findNear(ctx context.Context, ancestors []runnerapi.Stored) error {
	if f.lazy {
		for _, at := range ancestors {
			if rec, err := f.cfg.Checkpoints.Get(at.CheckpointID); err != nil || rec.HasDelta() || f.cfg.Lazy.Has(string(rec.Base)) {
				continue
			}
			if done, err := f.useNear(ctx, at); done || err != nil {
				return err
			}
		}
		return nil
	}
	if len(ancestors) == 0 {
		return nil
	}
	_, err := f.useNear(ctx, ancestors[len(ancestors)-1])
	return err
}

// useNear opens an ancestor and its maps, and reports whether it can be used.
func (f *fetching) useNear(ctx context.Context, at runnerapi.Stored) (ok bool, err error) {
	unusable := func(err error) (bool, error) {
		switch {
		case core.CodeOf(err) == core.CodeManifestInvalid, errors.Is(err, errUnfit):
			f.metrics.ancestors.Inc()
			f.cfg.Log.WarnContext(ctx, "an ancestor is not used for a fetch", "checkpoint_id", f.rec.ID, "ancestor", at.CheckpointID, "err", err)
			return false, nil
		case f.lazy && core.CodeOf(err) == core.CodeCheckpointNotFound:
			return false, nil // it was removed meanwhile
		}
		return false, err
	}
	snapshot, err := f.cfg.Uploads.Snapshot(ctx, at)
	if err == nil {
		err = checkAncestor(snapshot.Header(), f.rec.Project, f.rec.Image)
	}
	if err != nil {
		return unusable(err)
	}
	var near *checkpoints.Opened
	if f.lazy {
		if near, err = f.cfg.Checkpoints.Open(at.CheckpointID); err == nil {
			if err = f.expect(ctx, near.Record, []runnerapi.Stored{at}, nil); err != nil {
				err = errors.Join(err, near.Close())
			}
		}
	} else {
		near, err = f.EnsureLocal(ctx, at.CheckpointID, []runnerapi.Stored{at}, nil)
	}
	if err != nil {
		return unusable(err)
	}
	f.near, f.nearAt, f.nearSnapshot = near, at, snapshot
	return true, nil
}

func (f *fetching) run(ctx context.Context) error {
	if err := afterBegin.Hit(ctx); err != nil {
		return err
	}
	// All run at the same time: each waits for the store, not for the others.
	group, ctx := errgroup.WithContext(ctx)
	for _, step := range []struct {
		name string
		do   func(context.Context) error
	}{{"state", f.small}, {"memory", f.memory}, {"disk", f.disk}, {"root_image", f.rootImage}} {
		group.Go(func() error {
			begun := time.Now()
			err := step.do(ctx)
			f.mu.Lock()
			f.watch.Add(step.name, time.Since(begun))
			f.mu.Unlock()
			return err
		})
	}
	return group.Wait()
}

// pages fetches runs of an image into emit. It counts the planned bytes as written. It counts no zeros, and a page that is read twice only once.
func (f *fetching) pages(ctx context.Context, runs iter.Seq[manifest.Run], emit func(off int64, b []byte) error) error {
	written := newPageCount()
	got, err := snapshotstore.Fetch(ctx, f.cfg.Blobs, written.data(runs), snapshotstore.FetchOptions{}, func(page int64, b []byte) error {
		if err := emit(page*manifest.PageSize, b); err != nil {
			return err
		}
		f.room.Wrote(written.count(page, len(b)))
		return nil
	})
	f.mu.Lock()
	defer f.mu.Unlock()
	f.got.Bytes, f.got.Requests, f.got.Pages = f.got.Bytes+got.Bytes, f.got.Requests+got.Requests, f.got.Pages+got.Pages
	return err
}

// small writes the images that fit into memory.
func (f *fetching) small(ctx context.Context) error {
	for name, file := range map[string]string{runnerapi.ImageState: checkpoints.StateFile, runnerapi.ImageSurvey: checkpoints.SurveyFile} {
		if tree := f.snapshot.Image(name); tree != nil {
			if err := f.file(ctx, tree, filepath.Join(f.dir, file), 0o600); err != nil {
				return err
			}
		}
	}
	return nil
}

// file writes a whole image to a new file, durably.
func (f *fetching) file(ctx context.Context, tree *manifest.Tree, path string, mode os.FileMode) error {
	to, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	if err = to.Truncate(tree.Size()); err == nil {
		err = f.fill(ctx, to, tree)
	}
	return errors.Join(err, to.Sync(), to.Close())
}

// fill writes an image into an empty file of the same size.
func (f *fetching) fill(ctx context.Context, to *os.File, tree *manifest.Tree) error {
	return f.pages(ctx, tree.Runs(), func(off int64, b []byte) error {
		_, err := to.WriteAt(b[:min(int64(len(b)), tree.Size()-off)], off)
		return err
	})
}

func (f *fetching) memory(ctx context.Context) error {
	return errors.Join(f.writeMemory(ctx), afterMemory.Hit(ctx))
}

// eagerDelta is the largest difference, in bytes, between a checkpoint's memory and a base on this host at which the memory is fetched as a
// delta before the first child starts. This costs less than a base of its own, which no sibling would share.
const eagerDelta = 16 << 20

// writeMemory makes a delta to the base of an ancestor on this host, or a base. A base is fetched now or later.
func (f *fetching) writeMemory(ctx context.Context) error {
	tree, changed := f.snapshot.Image(runnerapi.ImageMemory), f.will.changed
	switch {
	case f.will.later:
		return f.memoryLater(ctx, tree, f.will.near)
	case !f.will.near:
		base, err := f.cfg.Bases.Import(tree.Size(), func(to *os.File) error { return f.fill(ctx, to, tree) })
		f.rec.Base = base
		return err
	}
	f.rec.Base = f.near.Base
	var extents []memory.Extent
	for _, run := range changed {
		extents = append(extents, memory.Extent{Offset: run.Page * manifest.PageSize, Length: int64(run.Count) * manifest.PageSize})
	}
	delta, err := memory.CreateDelta(filepath.Join(f.dir, checkpoints.DeltaFile), tree.Size(), extents)
	if err != nil {
		return err
	}
	f.rec.DeltaBytes = delta.Bytes()
	if err := f.pages(ctx, slices.Values(changed), func(off int64, b []byte) error { return delta.WriteAt(b, off) }); err != nil {
		delta.Close()
		return err
	}
	return delta.Finish()
}

// memoryLater makes the pager serve the checkpoint's memory as a base and fetch it.
func (f *fetching) memoryLater(ctx context.Context, tree *manifest.Tree, near bool) error {
	f.rec.Base = core.NewID[core.BaseID]()
	im := &lazy.Image{Image: pager.Image{ID: string(f.rec.Base), Source: sourceOf(f.at, runnerapi.ImageMemory)}, Size: tree.Size(), To: f.cfg.Bases.Name(f.rec.Base)}
	im.Memory = true
	im.Reserve(f.room, f.will.memory)
	im.Peers = peers.From(ctx)
	im.Want = lazy.DecodeWorkingSet(f.rec.WorkingSet, tree.Pages())
	if near {
		seed := sourceOf(f.nearAt, runnerapi.ImageMemory)
		im.Seed, im.SeedBase, im.Compared = &seed, f.near.Base, seed.CheckpointID
	}
	return f.cfg.Lazy.Begin(ctx, im)
}

func sourceOf(at runnerapi.Stored, image string) pager.Source {
	return pager.Source{Manifest: sealing.RefOf(at), CheckpointID: at.CheckpointID, Image: image}
}

// disk makes the overlay. If possible it starts from an ancestor's overlay and shares extents with it.
func (f *fetching) disk(ctx context.Context) error {
	tree, path := f.snapshot.Image(runnerapi.ImageDisk), filepath.Join(f.dir, checkpoints.OverlayFile)
	to, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if f.near == nil {
		if err = to.Truncate(tree.Size()); err == nil {
			err = f.fill(ctx, to, tree)
		}
	} else {
		err = f.diskFromNear(ctx, to, tree)
	}
	if err == nil {
		f.rec.DiskBytes, err = sparse.Allocated(to)
	}
	return errors.Join(err, to.Sync(), to.Close())
}

func (f *fetching) diskFromNear(ctx context.Context, to *os.File, tree *manifest.Tree) error {
	if _, err := sparse.Clone(to, f.near.Overlay); err != nil {
		return err
	}
	if err := to.Truncate(tree.Size()); err != nil {
		return err
	}
	return f.pages(ctx, tree.Changed(f.nearSnapshot.Image(runnerapi.ImageDisk)), func(off int64, b []byte) error {
		b = b[:min(int64(len(b)), tree.Size()-off)]
		if allZeros(b) {
			return sparse.Zero(to, off, int64(len(b)))
		}
		_, err := to.WriteAt(b, off)
		return err
	})
}

func allZeros(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

// chooseRoot decides which root file system the guest gets: the one of an image of this host, or the one in the store.
func (f *fetching) chooseRoot() error {
	tree := f.snapshot.Image(runnerapi.ImageRoot)
	img, err := f.cfg.Images.Get(string(f.rec.Image))
	if core.CodeOf(err) == core.CodeImageNotFound {
		f.rec.Root = roots.FromStore(f.snapshot.Header().ProjectID, tree)
		return nil
	}
	if err != nil {
		return err
	}
	info, err := os.Stat(img.RootFS)
	if err != nil {
		return err
	}
	if info.Size() != tree.Size() {
		return core.Errorf(core.DataLoss, core.CodeManifestInvalid, "by the manifest of checkpoint %s the root file system of image %s has %d bytes, but it has %d",
			f.rec.ID, f.rec.Image.Short(), tree.Size(), info.Size())
	}
	f.own = &img
	return nil
}

// rootImage makes sure that the root file system of the guest is on this host, or will be.
func (f *fetching) rootImage(ctx context.Context) error {
	if f.own != nil {
		return f.cfg.Roots.Keep(*f.own)
	}
	key := f.rec.RootKey()
	path := f.cfg.Roots.Path(key)
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	if f.lazy {
		im := &lazy.Image{
			Image: pager.Image{ID: lazy.RootID(string(key)), Source: sourceOf(f.at, runnerapi.ImageRoot), Peers: peers.From(ctx)}, Size: f.snapshot.Image(runnerapi.ImageRoot).Size(), To: f.cfg.Roots.Name(key),
		}
		im.Reserve(f.room, f.will.root)
		return f.cfg.Lazy.Begin(ctx, im)
	}
	part, err := os.CreateTemp(f.cfg.Roots.Dir(), "*.part")
	if err != nil {
		return err
	}
	tree := f.snapshot.Image(runnerapi.ImageRoot)
	if err = errors.Join(part.Chmod(0o444), part.Truncate(tree.Size())); err == nil {
		err = f.fill(ctx, part, tree)
	}
	if err = errors.Join(err, part.Sync(), part.Close()); err == nil {
		err = atomicfile.Rename(part.Name(), path)
	}
	return errors.Join(err, os.RemoveAll(part.Name()))
}
