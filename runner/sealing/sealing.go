// Package sealing makes the checkpoints of a host durable: it uploads them to the store, one after the other, ancestors first. For a
// cluster without a store it writes a checkpoint as one file.
//
// A checkpoint is sealed when the controller has committed its manifest. A Sealer remembers which checkpoints of the host are sealed, and tries
// again what failed. Every message to the controller is fenced by the lease of the runner and the number of the attempt.
package sealing

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/failpoint"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/lazy"
	"github.com/coppice-dev/coppice/runner/room"
	"github.com/coppice-dev/coppice/runner/roots"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/envelope"
)

// The steps at which a test makes a runner fail or end.
var (
	afterBegin  = failpoint.New("seal.begun")     // the controller waits for an attempt
	afterWrite  = failpoint.New("seal.written")   // everything is in the store, the controller does not know
	afterCommit = failpoint.New("seal.committed") // the controller knows, this host does not
)

// Controller has the methods of the controller that a runner needs to upload checkpoints: the messages of runnerapi. They fail with
// Unavailable if the controller cannot be reached.
type Controller interface {
	BeginSeal(ctx context.Context, m runnerapi.BeginSeal) (runnerapi.SealBegun, error)
	CommitSeal(ctx context.Context, id core.CheckpointID, m runnerapi.CommitSeal) error
	FailSeal(ctx context.Context, id core.CheckpointID, m runnerapi.FailSeal) error
}

// Roots opens root file systems; roots.Store implements it.
type Roots interface {
	Open(k roots.Key) (*os.File, error)
}

// Bases opens the files of bases; memory.BaseStore implements it.
type Bases interface {
	OpenFile(id core.BaseID) (*os.File, error)
}

// Incomplete knows the images that machines use before they are complete; lazy.Images implements it.
type Incomplete interface {
	Has(id string) bool
	Missing(ids ...string) (some bool, problem error)
	Wake()
}

// Rehearsals runs a fork of a checkpoint before it is uploaded, to learn which memory a fork uses first.
type Rehearsals interface {
	Wanted(rec *checkpoints.Record) bool
	Rehearse(ctx context.Context, ckpt *checkpoints.Opened)
}

// Config has what a Sealer needs. Fields without a note are required.
type Config struct {
	DataDir     string
	Blobs       blob.Blobs                             // the store, with its keys; nil: there is none
	Keys        *envelope.Ring                         // gets the keys that the controller gives for an attempt
	Throttle    func(ctx context.Context, n int) error // is called before n bytes are sent; nil: no limit
	Checkpoints *checkpoints.Store
	Bases       Bases
	Roots       Roots
	Incomplete  Incomplete
	WorkingSets *lazy.WorkingSets
	Rehearsals  Rehearsals
	Room        *room.Room                       // space for exports
	Enter       func() (leave func(), err error) // the runner does not end before leave is called
	// WhileLeased returns a context that ends with ctx, or with the runner's lease. Fenced is its cause then.
	WhileLeased func(ctx context.Context) (context.Context, context.CancelFunc)
	Fenced      error
	Log         *slog.Logger
}

// Sealer uploads the checkpoints of one host.
type Sealer struct {
	cfg     Config
	queue   *queue
	exports chan struct{} // one element for each that is under way
}

// New finds out which checkpoints of this host are sealed, and removes what an earlier runner had packed for an export.
func New(cfg Config) *Sealer {
	if err := os.RemoveAll(filepath.Join(cfg.DataDir, exportsDir)); err != nil {
		cfg.Log.Warn("what an earlier runner packed for an export was not removed", "err", err)
	}
	return &Sealer{cfg: cfg, queue: newQueue(cfg.Checkpoints), exports: make(chan struct{}, maxExports)}
}

// Poke looks for checkpoints to upload.
func (s *Sealer) Poke() { s.queue.poke() }

// ImageArrived says that an image is complete. All checkpoints that lacked an image are tried again.
func (s *Sealer) ImageArrived() { s.queue.arrived() }

// IsSealed reports whether a checkpoint is in the store.
func (s *Sealer) IsSealed(id core.CheckpointID) bool { return s.queue.isSealed(id) }

// NoteSealed says that a checkpoint is in the store.
func (s *Sealer) NoteSealed(id core.CheckpointID) { s.queue.done(id) }

// Forget forgets a checkpoint that is removed from this host.
func (s *Sealer) Forget(id core.CheckpointID) { s.queue.forget(id) }

// Run uploads this host's new checkpoints to the store until ctx ends. epoch returns the runner's present lease. Without a lease nothing is
// written; when the lease ends, an upload under way stops. If there is no store, Run returns when ctx ends.
func (s *Sealer) Run(ctx context.Context, c Controller, epoch func() (int64, bool)) error {
	if s.cfg.Blobs == nil {
		<-ctx.Done()
		return nil
	}
	s.queue.mu.Lock()
	s.queue.runCtx = ctx
	s.queue.mu.Unlock()
	defer s.queue.beside.Wait()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		rec, wait := s.queue.next(s.cfg.Checkpoints.List(), time.Now())
		lease, leased := epoch()
		held, release := s.cfg.WhileLeased(ctx)
		leased = leased && held.Err() == nil
		if rec != nil && leased {
			s.one(held, c, lease, rec)
		}
		release()
		if rec != nil && leased {
			if ctx.Err() != nil {
				return nil
			}
			continue
		}
		if !leased {
			wait = firstRetry
		}
		if wait == 0 {
			wait = time.Hour
		}
		timer.Reset(wait)
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		case <-s.queue.wake:
		}
	}
}

// one uploads a checkpoint. If this fails, it is tried again later.
func (s *Sealer) one(ctx context.Context, c Controller, epoch int64, rec *checkpoints.Record) {
	begun := time.Now()
	attempt, out, err := s.attempt(ctx, c, epoch, rec)
	if cause := context.Cause(ctx); err != nil && cause != nil && !errors.Is(cause, context.Canceled) { // the lease has ended
		err = cause
	}
	log := s.cfg.Log.With("checkpoint_id", rec.ID, "duration_ms", core.Milliseconds(time.Since(begun)))
	switch {
	case err == nil && out != nil:
		log.InfoContext(ctx, "checkpoint sealed", "bytes", out.Stored, "dirty_bytes", out.Dirty)
		return
	case err == nil:
		return
	case errors.Is(err, s.cfg.Fenced):
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
	s.queue.later(rec.ID, time.Now(), errors.Is(err, errIncomplete))
	if attempt == 0 {
		return
	}
	report, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	fail := runnerapi.FailSeal{LeaseEpoch: epoch, Attempt: attempt, Problem: *runnerapi.ProblemOf(err)}
	if err := c.FailSeal(report, rec.ID, fail); err != nil { // no matter: the next attempt replaces this one
		log.InfoContext(ctx, "the controller was not told of an upload that failed", "err", err)
	}
}

// attempt returns the number of the attempt that it has begun; 0 if it has not begun one.
func (s *Sealer) attempt(ctx context.Context, c Controller, epoch int64, rec *checkpoints.Record) (attempt int64, _ *snapshotstore.Written, err error) {
	watch := core.NewStopwatch()
	if some, problem := s.lacks(rec); problem != nil {
		attempt, err := s.reportProblem(ctx, c, epoch, rec, problem)
		return attempt, nil, err
	} else if some || s.lateRehearsal(rec) {
		return 0, nil, errIncomplete
	}
	ckpt, err := s.cfg.Checkpoints.Open(rec.ID)
	if core.CodeOf(err) == core.CodeCheckpointNotFound {
		s.queue.forget(rec.ID)
		return 0, nil, nil
	}
	if err != nil {
		return 0, nil, err
	}
	defer func() { err = errors.Join(err, ckpt.Close()) }()
	rec = ckpt.Record
	begun, err := s.begin(ctx, c, epoch, rec)
	if core.CodeOf(err) == core.CodeStateConflict { // it is sealed already: the answer to the last commit was lost
		return 0, nil, s.mark(rec.ID, runnerapi.Stored{CheckpointID: rec.ID})
	}
	if err != nil {
		return 0, nil, err
	}
	if err := afterBegin.Hit(ctx); err != nil {
		return begun.Attempt, nil, err
	}
	out, err := s.upload(ctx, ckpt, begun)
	if err == nil {
		err = afterWrite.Hit(ctx)
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
	if err := s.commit(ctx, c, rec.ID, commit); err != nil {
		return begun.Attempt, nil, err
	}
	s.queue.keep(out.Snapshot)
	return begun.Attempt, out, errors.Join(afterCommit.Hit(ctx), s.mark(rec.ID, stored))
}

// commit tries a few times while no controller answers: if the attempt ended, everything that was uploaded would be lost. A repeated commit
// is no error.
func (s *Sealer) commit(ctx context.Context, c Controller, id core.CheckpointID, commit runnerapi.CommitSeal) error {
	for wait := firstRetry; ; wait *= 2 {
		err := c.CommitSeal(ctx, id, commit)
		category := core.CategoryOf(err)
		if category != core.Unavailable && category != core.TimedOut || core.CodeOf(err) == core.CodeRunnerLost || wait > lastCommitRetry {
			return err
		}
		s.cfg.Log.InfoContext(ctx, "the commit of a stored checkpoint failed and is tried again", "checkpoint_id", id, "err", err)
		select {
		case <-ctx.Done():
			return err
		case <-time.After(wait):
		}
	}
}

func (s *Sealer) begin(ctx context.Context, c Controller, epoch int64, rec *checkpoints.Record) (runnerapi.SealBegun, error) {
	return c.BeginSeal(ctx, runnerapi.BeginSeal{LeaseEpoch: epoch, CheckpointID: rec.ID, Ancestors: s.Ancestors(rec)})
}

// mark notes on this host that a checkpoint is in the store. If the note is lost, the runner asks the controller once more.
func (s *Sealer) mark(id core.CheckpointID, at runnerapi.Stored) error {
	s.queue.done(id)
	err := atomicfile.WriteJSON(s.cfg.Checkpoints.Path(id, checkpoints.SealedFile), at, 0o600)
	if errors.Is(err, os.ErrNotExist) { // it was deleted meanwhile
		return nil
	}
	return err
}

// Ancestors returns the ancestors of a checkpoint that are complete on this host, the nearest first.
func (s *Sealer) Ancestors(rec *checkpoints.Record) []core.CheckpointID {
	const most = 64
	var out []core.CheckpointID
	for id := rec.Parent; id != "" && len(out) < most; {
		parent, err := s.cfg.Checkpoints.Get(id)
		if err != nil {
			break
		}
		if parent.Base == rec.Base || !s.cfg.Incomplete.Has(string(parent.Base)) {
			out = append(out, id)
		}
		id = parent.Parent
	}
	return out
}

func (s *Sealer) upload(ctx context.Context, ckpt *checkpoints.Opened, begun runnerapi.SealBegun) (_ *snapshotstore.Written, err error) {
	key, err := keyOf(begun)
	if err != nil {
		return nil, err
	}
	s.cfg.Keys.Add(begun.Keys)
	src := &source{now: ckpt}
	defer func() { err = errors.Join(err, src.close()) }()
	var reference *snapshotstore.Snapshot
	if begun.Reference != nil {
		if src.before, err = s.cfg.Checkpoints.Open(begun.Reference.CheckpointID); err != nil {
			return nil, err // it was deleted here meanwhile; the next attempt uses another ancestor
		}
		if reference, err = s.Snapshot(ctx, *begun.Reference); err != nil {
			return nil, err
		}
	}
	images, err := s.sources(src, reference)
	if err != nil {
		return nil, err
	}
	h, err := s.header(ckpt, begun.ProjectID)
	if err != nil {
		return nil, err
	}
	return snapshotstore.Write(ctx, s.cfg.Blobs, begun.Prefix, h, reference, images, snapshotstore.Options{Dir: s.cfg.DataDir, Throttle: s.cfg.Throttle, Key: key})
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

// workingSet is the working set of a checkpoint. The capture of a template comes before every fork, so its working set may be known only now.
func (s *Sealer) workingSet(rec *checkpoints.Record) []byte {
	if rec.WorkingSet != nil || rec.HasDelta() {
		return rec.WorkingSet
	}
	return s.cfg.WorkingSets.Of(rec.Base).Pages
}
