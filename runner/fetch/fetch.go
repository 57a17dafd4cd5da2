// Package fetch brings checkpoints from the store to a host, and gives up its copies when their disk space is needed.
//
// A fetched checkpoint is a copy: it can be fetched again. All data from the store is verified before it is used. The rows of the controller
// decide what a checkpoint is: a manifest, an ancestor and a copy that is already on the host must agree with them.
package fetch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/failpoint"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/hostlimit"
	"github.com/coppice-dev/coppice/runner/lazy"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/room"
	"github.com/coppice-dev/coppice/runner/roots"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

// The steps at which a test makes a runner fail or end.
var (
	afterBegin  = failpoint.New("fetch.begun")   // there is a directory for it
	afterMemory = failpoint.New("fetch.memory")  // there is a base that no record names, or a delta
	afterWrite  = failpoint.New("fetch.written") // the files are durable, under another name
)

// Uploads knows which checkpoints of this host are in the store; sealing.Sealer implements it.
type Uploads interface {
	// Snapshot opens a manifest that the controller named.
	Snapshot(ctx context.Context, at runnerapi.Stored) (*snapshotstore.Snapshot, error)
	// Ancestors are the ancestors of a checkpoint that its upload may refer to.
	Ancestors(rec *checkpoints.Record) []core.CheckpointID
	IsSealed(id core.CheckpointID) bool
	NoteSealed(id core.CheckpointID)
	Forget(id core.CheckpointID)
}

// Use is what a sandbox of this host uses.
type Use struct {
	Checkpoint core.CheckpointID
	Base       core.BaseID
	Root       roots.Key
}

// Config has what a Fetcher needs. Fields without a note are required.
type Config struct {
	DataDir     string
	Blobs       blob.Blobs // the store, with its keys; nil: there is none
	Copies      int64      // how many bytes fetched checkpoints may take; 0: no bound
	Images      *images.Store
	Checkpoints *checkpoints.Store
	Bases       *memory.BaseStore
	Roots       *roots.Store
	Lazy        *lazy.Images
	Room        *room.Room
	Uploads     Uploads
	// Compatible refuses a checkpoint of another class than the runner's.
	Compatible func(c runnerapi.Checkpoint) error
	// Sandboxes returns what the living sandboxes use.
	Sandboxes func() []Use
	// Wake reports to the controller at once.
	Wake     func()
	Life     context.Context //nolint:containedctx // the lifetime of the runner
	Stopping error           // the error of work that the end of the runner interrupts
	Log      *slog.Logger
}

// Fetcher brings checkpoints to one host.
type Fetcher struct {
	cfg      Config
	metrics  metrics
	readings readings
}

// New returns a Fetcher that fetches nothing yet.
func New(cfg Config) *Fetcher { return &Fetcher{cfg: cfg, metrics: newMetrics()} }

// fetch fetches a checkpoint from the store, unless it is on this host. From then on it is one of the host's checkpoints. All data from the
// store is verified before it is used. The first of sources is the checkpoint's place in the store, the others are the places of ancestors,
// and the last one is the root of its tree. The root is fetched first: its memory becomes the base that all checkpoints of the tree share on
// this host. want has the fields that the manifest must have; it is nil if they are not known.
func (f *Fetcher) fetch(ctx context.Context, id core.CheckpointID, sources []runnerapi.Stored, want *runnerapi.Expected) error {
	if _, err := f.cfg.Checkpoints.Find(id); err == nil || len(sources) == 0 || sources[0].CheckpointID != id || f.cfg.Blobs == nil {
		return nil // it is here; if it is not, open reports that
	}
	_, err := f.cfg.Checkpoints.Once(ctx, id, func() (*checkpoints.Record, error) {
		rec, err := f.fetchNow(context.WithoutCancel(ctx), sources, want)
		if err != nil {
			return nil, hostlimit.Explain(fmt.Errorf("fetch checkpoint %s: %w", id, err), fmt.Sprintf("checkpoint %s was not fetched from the store", id))
		}
		return rec, nil
	})
	return err
}

func (f *Fetcher) fetchNow(ctx context.Context, sources []runnerapi.Stored, want *runnerapi.Expected) (_ *checkpoints.Record, err error) {
	watch := core.NewStopwatch()
	at := sources[0]
	defer f.Reading(sources)()
	f.cfg.Wake()
	snapshot, err := f.cfg.Uploads.Snapshot(ctx, at)
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
	if err := f.cfg.Compatible(rec.Checkpoint); err != nil { // checked before anything is written
		return nil, err
	}
	watch.Lap("manifest")
	w := fetching{Fetcher: f, at: at, snapshot: snapshot, rec: rec, lazy: f.cfg.Lazy.Ready(ctx), watch: watch}
	if err := w.chooseRoot(); err != nil {
		return nil, err
	}
	if err := w.findNear(ctx, sources[1:]); err != nil {
		return nil, err
	}
	if w.near != nil {
		defer func() { err = errors.Join(err, w.near.Close()) }()
		watch.Lap("near")
	}
	if err := w.plan(); err != nil {
		return nil, err
	}
	if w.room, err = f.Reserve(ctx, rec.ID, w.will.bytes()); err != nil {
		return nil, err
	}
	defer w.room.Release()
	if w.dir, err = f.cfg.Checkpoints.Begin(rec.ID); err != nil {
		return nil, err
	}
	release := f.cfg.Checkpoints.HoldBases()
	defer f.cfg.Roots.Hold()()
	err = w.run(ctx)
	if err == nil {
		err = afterWrite.Hit(ctx)
	}
	if err == nil {
		rec.Timings = append(rec.Timings, watch.Timings()...)
		f.cfg.Uploads.NoteSealed(rec.ID) // before others see it, or it would be sealed again and its note overwritten
		err = errors.Join(atomicfile.WriteJSON(filepath.Join(w.dir, checkpoints.SealedFile), at, 0o600), f.cfg.Checkpoints.Publish(w.dir, rec))
	}
	if err = errors.Join(err, release()); err != nil {
		if _, there := f.cfg.Checkpoints.Get(rec.ID); there != nil {
			f.cfg.Uploads.Forget(rec.ID)
		}
		return nil, errors.Join(err, os.RemoveAll(w.dir))
	}
	f.cfg.Log.InfoContext(ctx, "checkpoint fetched from the store", "checkpoint_id", rec.ID, "bytes", w.got.Bytes, "requests", w.got.Requests)
	return rec, nil
}

// recordOf is the record that a manifest describes, without the fields that depend on the host.
func recordOf(s *snapshotstore.Snapshot) (*checkpoints.Record, error) {
	h := s.Header()
	bad := func(what string) error {
		return core.Errorf(core.DataLoss, core.CodeManifestInvalid, "the manifest of checkpoint %s has no valid description of %s", h.CheckpointID, what)
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
		return nil, bad("its guest")
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
