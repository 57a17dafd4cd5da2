package runner

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/pager"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/envelope"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// Sealing has the methods of the controller that a runner needs to upload checkpoints: the messages of runnerapi. They fail with
// Unavailable if the controller cannot be reached.
type Sealing interface {
	BeginSeal(ctx context.Context, m runnerapi.BeginSeal) (runnerapi.SealBegun, error)
	CommitSeal(ctx context.Context, id core.CheckpointID, m runnerapi.CommitSeal) error
	FailSeal(ctx context.Context, id core.CheckpointID, m runnerapi.FailSeal) error
}

// StoreConfig says where checkpoints are made durable.
type StoreConfig struct {
	Blobs blob.Blobs // nil: nowhere
	// Copies is how many bytes fetched checkpoints may take, not counting those that were captured here; 0: no bound.
	Copies int64
	// Floor is how many bytes of the disk no fetch may take; 0: a sixteenth of it, at most 4 GiB.
	Floor int64
	// Cached has the objects of the store that the host keeps, for other runners; nil: none.
	Cached func(key string, off, n int64) ([]byte, bool)
	// Throttle is asked before n bytes are sent; nil: never.
	Throttle func(ctx context.Context, n int) error
	// Pager serves images that are not complete, so that machines need not wait for them; nil: there is none. With Whole, checkpoints are
	// fetched whole although there is a pager.
	Pager *pager.Process
	Whole bool
}

// The images of a checkpoint in the store.
const (
	imageMemory = runnerapi.ImageMemory
	imageDisk   = runnerapi.ImageDisk
	imageState  = runnerapi.ImageState
	imageSurvey = runnerapi.ImageSurvey
	imageRoot   = runnerapi.ImageRoot
)

// snapshot opens a manifest that the controller named.
func (r *Runner) snapshot(ctx context.Context, at runnerapi.Stored) (*snapshotstore.Snapshot, error) {
	r.seals.mu.Lock()
	for _, s := range r.seals.recent {
		if s.Ref().Digest == at.Digest && s.Ref().Key == at.Manifest {
			r.seals.mu.Unlock()
			return s, nil
		}
	}
	r.seals.mu.Unlock()
	s, err := snapshotstore.OpenChecked(ctx, r.blobs, refOf(at), func(h manifest.Header) error {
		if h.CheckpointID != at.CheckpointID {
			return core.Errorf(core.DataLoss, core.CodeManifestInvalid, "the manifest of checkpoint %s is that of %s", at.CheckpointID, h.CheckpointID)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	r.seals.keep(s)
	return s, nil
}

// Seal uploads this host's new checkpoints to the store until ctx ends. epoch returns the runner's present lease. Without a lease nothing is
// written; when the lease ends, an upload under way stops. If there is no store, Seal returns at once.
func (r *Runner) Seal(ctx context.Context, c Sealing, epoch func() (int64, bool)) error {
	if r.cfg.Store.Blobs == nil {
		<-ctx.Done()
		return nil
	}
	r.seals.mu.Lock()
	r.seals.runCtx = ctx
	r.seals.mu.Unlock()
	defer r.seals.beside.Wait()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		rec, wait := r.seals.next(r.checkpoints.List(), time.Now())
		lease, leased := epoch()
		held, release := r.whileLeased(ctx)
		leased = leased && held.Err() == nil
		if rec != nil && leased {
			r.sealOne(held, c, lease, rec)
		}
		release()
		if rec != nil && leased {
			if ctx.Err() != nil {
				return nil
			}
			continue
		}
		if !leased {
			wait = firstSealRetry
		}
		if wait == 0 {
			wait = time.Hour
		}
		timer.Reset(wait)
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		case <-r.seals.wake:
		}
	}
}

// sealOne uploads a checkpoint. If this fails, it is tried again later.
func (r *Runner) sealOne(ctx context.Context, c Sealing, epoch int64, rec *checkpoints.Record) {
	begun := time.Now()
	attempt, out, err := r.sealAttempt(ctx, c, epoch, rec)
	if cause := context.Cause(ctx); err != nil && cause != nil && !errors.Is(cause, context.Canceled) { // the lease has ended
		err = cause
	}
	log := r.cfg.Log.With("checkpoint_id", rec.ID, "duration_ms", core.Milliseconds(time.Since(begun)))
	switch {
	case err == nil && out != nil:
		log.InfoContext(ctx, "checkpoint sealed", "bytes", out.Stored, "dirty_bytes", out.Dirty)
		return
	case err == nil:
		return
	case errors.Is(err, errFenced):
		log.InfoContext(ctx, "an upload was stopped because the runner's lease has ended")
	case ctx.Err() != nil: // the runner stops
	case errors.Is(err, errIncomplete):
		log.DebugContext(ctx, "checkpoint is not complete and is sealed later")
	case core.CodeOf(err) == core.CodeCheckpointNotFound: // it is being deleted; the controller will tell this runner soon
		log.DebugContext(ctx, "checkpoint was deleted before it was sealed")
	case core.CodeOf(err) == core.CodeCheckpointNotReady: // the controller does not have the answer to the capture yet
		log.DebugContext(ctx, "checkpoint is not recorded yet and is sealed later")
	default:
		log.WarnContext(ctx, "checkpoint was not sealed and is tried again", "err", err)
	}
	r.seals.later(rec.ID, time.Now(), errors.Is(err, errIncomplete))
	if attempt == 0 {
		return
	}
	tell, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	fail := runnerapi.FailSeal{LeaseEpoch: epoch, Attempt: attempt, Problem: *runnerapi.ProblemOf(err)}
	if err := c.FailSeal(tell, rec.ID, fail); err != nil { // no matter: the next attempt replaces this one
		log.InfoContext(ctx, "the controller was not told of an upload that failed", "err", err)
	}
}

// sealAttempt returns the number of the attempt that it has begun; 0 if it has not begun one.
func (r *Runner) sealAttempt(ctx context.Context, c Sealing, epoch int64, rec *checkpoints.Record) (attempt int64, _ *snapshotstore.Written, err error) {
	watch := core.NewStopwatch()
	if some, problem := r.lacks(rec); problem != nil {
		attempt, err := r.reportProblem(ctx, c, epoch, rec, problem)
		return attempt, nil, err
	} else if some || r.lateRehearsal(rec) {
		return 0, nil, errIncomplete
	}
	ckpt, err := r.checkpoints.Open(rec.ID)
	if core.CodeOf(err) == core.CodeCheckpointNotFound {
		r.seals.forget(rec.ID)
		return 0, nil, nil
	}
	if err != nil {
		return 0, nil, err
	}
	defer func() { err = errors.Join(err, ckpt.Close()) }()
	rec = ckpt.Record
	begun, err := r.beginSeal(ctx, c, epoch, rec)
	if core.CodeOf(err) == core.CodeStateConflict { // it is sealed already: the answer to the last commit was lost
		return 0, nil, r.markSealed(rec.ID, runnerapi.Stored{CheckpointID: rec.ID})
	}
	if err != nil {
		return 0, nil, err
	}
	if err := sealBegun.Hit(ctx); err != nil {
		return begun.Attempt, nil, err
	}
	out, err := r.upload(ctx, ckpt, begun)
	if err == nil {
		err = sealWritten.Hit(ctx)
	}
	if err != nil {
		return begun.Attempt, nil, err
	}
	watch.Lap("upload")
	stored := runnerapi.Stored{CheckpointID: rec.ID, Manifest: out.Manifest.Key, Digest: out.Manifest.Digest, Bytes: out.Manifest.Bytes}
	commit := runnerapi.CommitSeal{
		LeaseEpoch: epoch, Attempt: begun.Attempt, Stored: stored, Needs: out.Needs, StoredBytes: out.Stored, Timings: watch.Timings(),
	}
	for _, o := range out.Objects {
		commit.Written = append(commit.Written, runnerapi.StoredObject{Key: o.Key, Bytes: o.Bytes})
	}
	if err := r.commitSeal(ctx, c, rec.ID, commit); err != nil {
		return begun.Attempt, nil, err
	}
	r.seals.keep(out.Snapshot)
	return begun.Attempt, out, errors.Join(sealCommitted.Hit(ctx), r.markSealed(rec.ID, stored))
}

// commitSeal tries a few times while no controller answers: if the attempt ended, everything that was uploaded would be lost. A repeated commit
// is no error.
func (r *Runner) commitSeal(ctx context.Context, c Sealing, id core.CheckpointID, commit runnerapi.CommitSeal) error {
	for wait := firstSealRetry; ; wait *= 2 {
		err := c.CommitSeal(ctx, id, commit)
		category := core.CategoryOf(err)
		if category != core.Unavailable && category != core.TimedOut || core.CodeOf(err) == core.CodeRunnerLost || wait > lastCommitRetry {
			return err
		}
		r.cfg.Log.InfoContext(ctx, "the commit of a stored checkpoint failed and is tried again", "checkpoint_id", id, "err", err)
		select {
		case <-ctx.Done():
			return err
		case <-time.After(wait):
		}
	}
}

func (r *Runner) beginSeal(ctx context.Context, c Sealing, epoch int64, rec *checkpoints.Record) (runnerapi.SealBegun, error) {
	return c.BeginSeal(ctx, runnerapi.BeginSeal{LeaseEpoch: epoch, CheckpointID: rec.ID, Ancestors: r.ancestors(rec)})
}

// markSealed notes on this host that a checkpoint is in the store. If the note is lost, the runner asks the controller once more.
func (r *Runner) markSealed(id core.CheckpointID, at runnerapi.Stored) error {
	r.seals.done(id)
	err := atomicfile.WriteJSON(r.checkpoints.Path(id, checkpoints.SealedFile), at, 0o600)
	if errors.Is(err, os.ErrNotExist) { // it was deleted meanwhile
		return nil
	}
	return err
}

// ancestors returns the ancestors of a checkpoint that are complete on this host, the nearest first.
func (r *Runner) ancestors(rec *checkpoints.Record) []core.CheckpointID {
	const most = 64
	var out []core.CheckpointID
	for id := rec.Parent; id != "" && len(out) < most; {
		parent, err := r.checkpoints.Get(id)
		if err != nil {
			break
		}
		if parent.Base == rec.Base || !r.lazy.Has(string(parent.Base)) {
			out = append(out, id)
		}
		id = parent.Parent
	}
	return out
}

func (r *Runner) upload(ctx context.Context, ckpt *checkpoints.Opened, begun runnerapi.SealBegun) (_ *snapshotstore.Written, err error) {
	key, err := keyOf(begun)
	if err != nil {
		return nil, err
	}
	r.keys.Add(begun.Keys)
	src := &sealSource{now: ckpt}
	defer func() { err = errors.Join(err, src.close()) }()
	var reference *snapshotstore.Snapshot
	if begun.Reference != nil {
		if src.before, err = r.checkpoints.Open(begun.Reference.CheckpointID); err != nil {
			return nil, err // it was deleted here meanwhile; the next attempt uses another ancestor
		}
		if reference, err = r.snapshot(ctx, *begun.Reference); err != nil {
			return nil, err
		}
	}
	images, err := r.sources(src, reference)
	if err != nil {
		return nil, err
	}
	record, err := json.Marshal(storedRecord{
		DeltaBytes: ckpt.DeltaBytes, DiskBytes: ckpt.DiskBytes, DeviceStateBytes: ckpt.DeviceStateBytes, PauseMS: ckpt.PauseMS, Timings: ckpt.Timings,
		ParentReseal: ckpt.ParentReseal, Processes: ckpt.Processes, WorkingSet: r.workingSet(ckpt.Record),
	})
	if err != nil {
		return nil, err
	}
	h := manifest.Header{
		ProjectID: begun.ProjectID, CheckpointID: ckpt.ID, Parent: ckpt.Parent, CapturedAt: ckpt.CreatedAt.UTC().Format(time.RFC3339Nano), GuestImage: ckpt.Image,
		Class: ckpt.Class.Fields(), Resources: ckpt.Resources, Record: record,
	}
	return snapshotstore.Write(ctx, r.blobs, begun.Prefix, h, reference, images, snapshotstore.Options{Dir: r.cfg.DataDir, Throttle: r.cfg.Store.Throttle, Key: key})
}

// keyOf is the key of an attempt; nil if nothing has to be encrypted.
func keyOf(begun runnerapi.SealBegun) (*envelope.Key, error) {
	if begun.KeyVersion == 0 {
		return nil, nil //nolint:nilnil // there is none, which is no error
	}
	if begun.Key == nil {
		return nil, core.Errorf(core.FailedPrecondition, core.CodeKeyUnavailable, "attempt %d must be encrypted, but the controller has given no key for it", begun.Attempt)
	}
	return envelope.NewKey(*begun.Key, begun.KeyVersion), nil
}

type storedRecord = runnerapi.StoredRecord
