package runner

import (
	"context"
	"errors"
	"fmt"
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
	"github.com/coppice-dev/coppice/runner/hostlimit"
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

// fetch fetches a checkpoint from the store, unless it is on this host. From then on it is one of the host's checkpoints. All data from the
// store is verified before it is used. The first of sources is the checkpoint's place in the store, the others are the places of ancestors,
// and the last one is the root of its tree. The root is fetched first: its memory becomes the base that all checkpoints of the tree share on
// this host. want is what the manifest must say; it is nil if this is not known.
func (r *Runner) fetch(ctx context.Context, id core.CheckpointID, sources []runnerapi.Stored, want *runnerapi.Expected) error {
	if _, err := r.checkpoints.Find(id); err == nil || len(sources) == 0 || sources[0].CheckpointID != id || r.cfg.Store.Blobs == nil {
		return nil // it is here; if it is not, open reports that
	}
	_, err := r.checkpoints.Once(ctx, id, func() (*checkpoints.Record, error) {
		rec, err := r.fetchNow(context.WithoutCancel(ctx), sources, want)
		if err != nil {
			return nil, hostlimit.Explain(fmt.Errorf("fetch checkpoint %s: %w", id, err), fmt.Sprintf("checkpoint %s was not fetched from the store", id))
		}
		return rec, nil
	})
	return err
}

func (r *Runner) fetchNow(ctx context.Context, sources []runnerapi.Stored, want *runnerapi.Expected) (_ *checkpoints.Record, err error) {
	watch := core.NewStopwatch()
	at := sources[0]
	defer r.fetching.begin(sources)()
	r.wake()
	snapshot, err := r.seals.Snapshot(ctx, at)
	if err == nil && want != nil {
		err = snapshot.Header().Check(claimOf(at.CheckpointID, *want))
	}
	if err != nil {
		return nil, err
	}
	rec, err := recordOf(snapshot)
	if err != nil {
		return nil, err
	}
	rec.Fetched = true
	if err := r.compatible(rec.Checkpoint); err != nil { // checked before anything is written
		return nil, err
	}
	watch.Lap("manifest")
	f := fetching{r: r, at: at, snapshot: snapshot, rec: rec, lazy: r.lazy.Ready(ctx), watch: watch}
	if err := f.chooseRoot(); err != nil {
		return nil, err
	}
	if err := f.findNear(ctx, sources[1:]); err != nil {
		return nil, err
	}
	if f.near != nil {
		defer func() { err = errors.Join(err, f.near.Close()) }()
		watch.Lap("near")
	}
	if err := f.plan(); err != nil {
		return nil, err
	}
	if f.room, err = r.makeRoom(ctx, rec.ID, f.will.bytes()); err != nil {
		return nil, err
	}
	defer f.room.Release()
	if f.dir, err = r.checkpoints.Begin(rec.ID); err != nil {
		return nil, err
	}
	release := r.checkpoints.HoldBases()
	defer r.roots.Hold()()
	err = f.run(ctx)
	if err == nil {
		err = fetchWritten.Hit(ctx)
	}
	if err == nil {
		rec.Timings = append(rec.Timings, watch.Timings()...)
		r.seals.NoteSealed(rec.ID) // before others see it, or it would be sealed again and its note overwritten
		err = errors.Join(atomicfile.WriteJSON(filepath.Join(f.dir, checkpoints.SealedFile), at, 0o600), r.checkpoints.Publish(f.dir, rec))
	}
	if err = errors.Join(err, release()); err != nil {
		if _, there := r.checkpoints.Get(rec.ID); there != nil {
			r.seals.Forget(rec.ID)
		}
		return nil, errors.Join(err, os.RemoveAll(f.dir))
	}
	r.cfg.Log.InfoContext(ctx, "checkpoint fetched from the store", "checkpoint_id", rec.ID, "bytes", f.got.Bytes, "requests", f.got.Requests)
	return rec, nil
}

// recordOf is the record that a manifest describes, without the fields that depend on the host.
func recordOf(s *snapshotstore.Snapshot) (*checkpoints.Record, error) {
	h := s.Header()
	bad := func(what string) error {
		return core.Errorf(core.DataLoss, core.CodeManifestInvalid, "the manifest of checkpoint %s says nothing usable of %s", h.CheckpointID, what)
	}
	for _, name := range []string{runnerapi.ImageMemory, runnerapi.ImageDisk, runnerapi.ImageState, runnerapi.ImageRoot} {
		if s.Image(name) == nil {
			return nil, bad(name)
		}
	}
	if s.Image(runnerapi.ImageMemory).Size() != int64(h.Resources.MemoryMiB)<<20 {
		return nil, bad("its memory")
	}
	if n := s.Image(runnerapi.ImageDisk).Size(); n >= int64(h.Resources.DiskGiB+1)<<30 {
		return nil, bad("its disk")
	}
	if n := s.Image(runnerapi.ImageRoot).Size(); n < 1 || n > runnerapi.MaxRoot {
		return nil, bad("its root file system")
	}
	if n := s.Image(runnerapi.ImageState).Size(); n < 1 || n > runnerapi.MaxDeviceState {
		return nil, bad("its device state")
	}
	if said := s.Image(runnerapi.ImageSurvey); said != nil && said.Size() > runnerapi.MaxDeviceState {
		return nil, bad("what its guest was")
	}
	captured, err := time.Parse(time.RFC3339Nano, h.CapturedAt)
	if err != nil {
		return nil, bad("its time")
	}
	if _, err := core.ParseDigest(string(h.GuestImage)); err != nil {
		return nil, bad("its image")
	}
	more, _, err := runnerapi.DecodeRecord(h.Record)
	if err != nil {
		return nil, bad("its capture")
	}
	return &checkpoints.Record{Checkpoint: runnerapi.Checkpoint{
		ID: h.CheckpointID, Parent: h.Parent, Image: h.GuestImage, Class: runnerapi.ClassOf(h.Class), Resources: h.Resources, CreatedAt: captured,
		DeviceStateBytes: s.Image(runnerapi.ImageState).Size(), PauseMS: more.PauseMS, Timings: more.Timings, ParentReseal: more.ParentReseal, Processes: more.Processes,
	}, Project: h.ProjectID, WorkingSet: more.WorkingSet}, nil
}

// fetching is one fetch.
type fetching struct {
	r            *Runner
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
			if rec, err := f.r.checkpoints.Get(at.CheckpointID); err != nil || rec.HasDelta() || f.r.lazy.Has(string(rec.Base)) {
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
			f.r.metrics.ancestors.Inc()
			f.r.cfg.Log.WarnContext(ctx, "an ancestor is not used for a fetch", "checkpoint_id", f.rec.ID, "ancestor", at.CheckpointID, "err", err)
			return false, nil
		case f.lazy && core.CodeOf(err) == core.CodeCheckpointNotFound:
			return false, nil // it was removed meanwhile
		}
		return false, err
	}
	snapshot, err := f.r.seals.Snapshot(ctx, at)
	if err == nil {
		err = checkAncestor(snapshot.Header(), f.rec.Project, f.rec.Image)
	}
	if err != nil {
		return unusable(err)
	}
	var near *checkpoints.Opened
	if f.lazy {
		if near, err = f.r.checkpoints.Open(at.CheckpointID); err == nil {
			if err = f.r.expect(ctx, near.Record, []runnerapi.Stored{at}, nil); err != nil {
				err = errors.Join(err, near.Close())
			}
		}
	} else {
		near, err = f.r.bring(ctx, at.CheckpointID, []runnerapi.Stored{at}, nil)
	}
	if err != nil {
		return unusable(err)
	}
	f.near, f.nearAt, f.nearSnapshot = near, at, snapshot
	return true, nil
}

func (f *fetching) run(ctx context.Context) error {
	if err := fetchBegun.Hit(ctx); err != nil {
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
	got, err := snapshotstore.Fetch(ctx, f.r.blobs, written.data(runs), snapshotstore.FetchOptions{}, func(page int64, b []byte) error {
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
	return errors.Join(f.writeMemory(ctx), fetchMemory.Hit(ctx))
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
		base, err := f.r.bases.Import(tree.Size(), func(to *os.File) error { return f.fill(ctx, to, tree) })
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
	im := &lazy.Image{Image: pager.Image{ID: string(f.rec.Base), Source: sourceOf(f.at, runnerapi.ImageMemory)}, Size: tree.Size(), To: f.r.bases.Name(f.rec.Base)}
	im.Memory = true
	im.Reserve(f.room, f.will.memory)
	im.Peers = peers.From(ctx)
	im.Want = lazy.DecodeWorkingSet(f.rec.WorkingSet, tree.Pages())
	if near {
		seed := sourceOf(f.nearAt, runnerapi.ImageMemory)
		im.Seed, im.SeedBase, im.Compared = &seed, f.near.Base, seed.CheckpointID
	}
	return f.r.lazy.Begin(ctx, im)
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
	img, err := f.r.cfg.Images.Get(string(f.rec.Image))
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
		return f.r.roots.Keep(*f.own)
	}
	key := f.rec.RootKey()
	path := f.r.roots.Path(key)
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	if f.lazy {
		im := &lazy.Image{
			Image: pager.Image{ID: rootImageID(key), Source: sourceOf(f.at, runnerapi.ImageRoot), Peers: peers.From(ctx)}, Size: f.snapshot.Image(runnerapi.ImageRoot).Size(), To: f.r.roots.Name(key),
		}
		im.Reserve(f.room, f.will.root)
		return f.r.lazy.Begin(ctx, im)
	}
	part, err := os.CreateTemp(f.r.roots.Dir(), "*.part")
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
