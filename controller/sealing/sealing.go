// Package sealing owns the uploads of captured checkpoints to the store. A runner asks for an attempt,
// writes below its prefix, and commits. Every message is fenced by the runner's lease and by the
// attempt. Before a commit the package compares the manifest in the store with the checkpoint's row,
// because other runners believe what was committed.
package sealing

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/datakeys"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/envelope"
)

// Attempt is the newest attempt to seal a checkpoint. Only the runner that began it may end it.
type Attempt struct {
	Checkpoint core.CheckpointID
	Project    core.ProjectID
	RunnerID   core.RunnerID
	LeaseEpoch int64
	Attempt    int64
	State      model.SealState
	Prefix     string // of every key that it writes
	Problem    *core.Error
}

const (
	sealPoll    = 200 * time.Millisecond
	maxSealKeys = 1 << 20 // of one message
	maxBefore   = 4096    // ancestors that a runner may name
)

// Store runs transactions. Package controller/postgres has the methods of Tx.
type Store interface {
	// InProject runs fn in a transaction of a project and commits when it returns nil.
	InProject(ctx context.Context, project core.ProjectID, fn func(Tx) error) error
	// InSystem runs fn in a transaction that sees all projects.
	InSystem(ctx context.Context, fn func(Tx) error) error
}

// Tx keeps the uploads of checkpoints to the store.
type Tx interface {
	// HasLease returns nil when the runner's present lease has this epoch; RUNNER_LOST otherwise.
	HasLease(ctx context.Context, runner core.RunnerID, epoch int64) error
	// BeginSeal begins an attempt and ends the one before. From now on until the attempt is given up, the checkpoint needs all objects that
	// the reference needs. It fails with CHECKPOINT_NOT_FOUND if the checkpoint is deleted, with CHECKPOINT_NOT_READY while it is being
	// captured, with STATE_CONFLICT if and only if it is sealed, and with PERMISSION_DENIED if it belongs to another runner.
	BeginSeal(ctx context.Context, runner core.RunnerID, in runnerapi.BeginSeal) (runnerapi.SealBegun, error)
	// LockSeal returns the newest attempt and its checkpoint. Neither changes until the transaction ends. It fails with CHECKPOINT_NOT_FOUND
	// if the checkpoint is deleted. The attempt of a sealed checkpoint is the zero value.
	LockSeal(ctx context.Context, id core.CheckpointID) (Attempt, model.Checkpoint, error)
	// CommitSeal makes a checkpoint sealed. LockSeal must have returned its attempt. It fails with INVALID_FIELD if the checkpoint needs an
	// object that the attempt has not written and that its reference did not need.
	CommitSeal(ctx context.Context, at Attempt, in runnerapi.CommitSeal) error
	FailSeal(ctx context.Context, at Attempt, why *core.Error) error
	// LeaveDebris records that an attempt of a runner may have written since it ended without a commit. It does nothing for any other attempt.
	LeaveDebris(ctx context.Context, runner core.RunnerID, id core.CheckpointID, attempt int64) error
	// AbandonSeals gives up the attempts of runners that have another lease by now, and returns the checkpoints of these attempts.
	AbandonSeals(ctx context.Context) ([]core.CheckpointID, error)
	// Checkpoint does not find pruned checkpoints, and Project neither the system's project nor a deleted one.
	Checkpoint(ctx context.Context, id core.CheckpointID) (model.Checkpoint, error)
	Project(ctx context.Context, id core.ProjectID) (model.Project, error)
}

// Config says what a sealer works with.
type Config struct {
	Blobs blob.Blobs // the store; nil: nothing is sealed
	Keys  *datakeys.Keeper
	Log   *slog.Logger

	Sealed func(bytes int64, timings []core.Timing) // hears of each checkpoint that was sealed
	Ended  func(outcome string)                     // hears of each other attempt that has ended: failed, lost
}

// Sealer admits uploads and their commits. It is safe for concurrent use.
type Sealer struct {
	cfg       Config
	store     Store
	manifests chan struct{} // one element for each check of a manifest under way
}

// New makes a sealer. It starts nothing.
func New(cfg Config, store Store) *Sealer {
	return &Sealer{cfg: cfg, store: store, manifests: make(chan struct{}, maxManifests)}
}

// StoreConfigured returns nil if checkpoints are sealed here, and UNSUPPORTED otherwise.
func (s *Sealer) StoreConfigured() error {
	if s.cfg.Blobs == nil {
		return model.ErrNoStore
	}
	return nil
}

// BeginSeal permits a runner to upload a checkpoint that it captured. An earlier attempt ends, and the objects that it wrote are removed.
func (s *Sealer) BeginSeal(ctx context.Context, runner core.RunnerID, in runnerapi.BeginSeal) (runnerapi.SealBegun, error) {
	if err := s.StoreConfigured(); err != nil {
		return runnerapi.SealBegun{}, err
	}
	if _, err := core.ParseID[core.CheckpointID](string(in.CheckpointID)); err != nil {
		return runnerapi.SealBegun{}, err
	}
	in.Ancestors = in.Ancestors[:min(len(in.Ancestors), maxBefore)]
	ctx = request.WithOrigin(ctx, request.Origin{Actor: string(runner), Action: "begin_seal"})
	var begun runnerapi.SealBegun
	err := s.store.InSystem(ctx, func(tx Tx) (err error) {
		if err := tx.HasLease(ctx, runner, in.LeaseEpoch); err != nil {
			return err
		}
		begun, err = tx.BeginSeal(ctx, runner, in)
		return err
	})
	if err != nil {
		return begun, err
	}
	if err := s.cfg.Keys.Give(ctx, &begun); err != nil { // users see why it is not sealed
		return runnerapi.SealBegun{}, errors.Join(err, s.FailSeal(ctx, runner, in.CheckpointID, runnerapi.FailSeal{
			LeaseEpoch: in.LeaseEpoch, Attempt: begun.Attempt, Problem: *runnerapi.ProblemOf(err),
		}))
	}
	return begun, nil
}

// CommitSeal makes a checkpoint sealed. A repeated commit is no error.
func (s *Sealer) CommitSeal(ctx context.Context, runner core.RunnerID, id core.CheckpointID, in runnerapi.CommitSeal) error {
	if err := s.StoreConfigured(); err != nil {
		return err
	}
	if len(in.Written) > maxSealKeys || len(in.Needs) > maxSealKeys {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "checkpoint %s has %d objects and needs %d; at most %d can be taken", id, len(in.Written), len(in.Needs), maxSealKeys)
	}
	ctx = request.WithOrigin(ctx, request.Origin{Actor: string(runner), Action: "commit_seal"})
	sealed := false
	err := s.checkManifest(ctx, runner, id, in)
	if err != nil {
		s.leftBehind(ctx, runner, id, in.Attempt, err)
		return err
	}
	err = s.store.InSystem(ctx, func(tx Tx) error {
		sealed = false
		if err := tx.HasLease(ctx, runner, in.LeaseEpoch); err != nil {
			return err
		}
		at, cp, err := tx.LockSeal(ctx, id)
		switch {
		case err != nil:
			return err
		case cp.State == core.CheckpointSealed && *cp.Stored == in.Stored:
			return nil
		case at.RunnerID != runner || at.LeaseEpoch != in.LeaseEpoch || at.Attempt != in.Attempt || at.State != model.SealUploading:
			return replaced(id, in.Attempt)
		}
		if err := checkCommit(at, in); err != nil {
			return err
		}
		if err := checkEncrypted(ctx, tx, at, in); err != nil {
			return err
		}
		in.StoredBytes = 0
		for _, o := range in.Written {
			in.StoredBytes += o.Bytes
		}
		sealed = true
		return tx.CommitSeal(ctx, at, in)
	})
	if err != nil {
		s.leftBehind(ctx, runner, id, in.Attempt, err)
	}
	if err != nil || !sealed {
		return err
	}
	s.cfg.Sealed(in.StoredBytes, in.Timings)
	s.cfg.Log.InfoContext(ctx, "checkpoint sealed", "checkpoint_id", id, "runner_id", runner, "attempt", in.Attempt, "bytes", in.StoredBytes, "objects", len(in.Written))
	return nil
}

// FailSeal gives an attempt up. It is no error if the attempt was given up before.
func (s *Sealer) FailSeal(ctx context.Context, runner core.RunnerID, id core.CheckpointID, in runnerapi.FailSeal) error {
	ctx = request.WithOrigin(ctx, request.Origin{Actor: string(runner), Action: "fail_seal"})
	problem := core.Errorf(in.Problem.Category, in.Problem.Code, "%s", core.ClipTail(in.Problem.Message))
	if problem.Code == "" || problem.Category == "" {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "problem: a failed seal must say why")
	}
	failed := false
	err := s.store.InSystem(ctx, func(tx Tx) error {
		failed = false
		if err := tx.HasLease(ctx, runner, in.LeaseEpoch); err != nil {
			return err
		}
		at, _, err := tx.LockSeal(ctx, id)
		switch {
		case err != nil:
			return err
		case at.RunnerID != runner || at.LeaseEpoch != in.LeaseEpoch || at.Attempt != in.Attempt:
			return replaced(id, in.Attempt)
		case at.State == model.SealFailed:
			return nil
		}
		failed = true
		return tx.FailSeal(ctx, at, problem)
	})
	if err != nil {
		s.leftBehind(ctx, runner, id, in.Attempt, err)
	}
	if err == nil && failed {
		s.cfg.Ended("failed")
		s.cfg.Log.WarnContext(ctx, "checkpoint not sealed", "checkpoint_id", id, "runner_id", runner, "attempt", in.Attempt, "code", problem.Code, "err", problem)
	}
	return err
}

// leftBehind records that an attempt may have written objects after its end. It is called when the end of an attempt is refused because the
// attempt had ended before. The objects may have been removed already.
func (s *Sealer) leftBehind(ctx context.Context, runner core.RunnerID, id core.CheckpointID, attempt int64, refusal error) {
	switch core.CodeOf(refusal) {
	case core.CodeStateConflict, core.CodeCheckpointNotFound, core.CodeRunnerLost:
	default:
		return
	}
	if err := s.store.InSystem(ctx, func(tx Tx) error { return tx.LeaveDebris(ctx, runner, id, attempt) }); err != nil {
		s.cfg.Log.WarnContext(ctx, "objects that an attempt to seal may have left were not recorded", "checkpoint_id", id, "attempt", attempt, "err", err)
	}
}

func replaced(id core.CheckpointID, attempt int64) error {
	return core.Errorf(core.Conflict, core.CodeStateConflict, "attempt %d to seal checkpoint %s was given up or replaced by another", attempt, id)
}

// checkCommit refuses a commit that does not fit the attempt.
func checkCommit(at Attempt, in runnerapi.CommitSeal) error {
	bad := func(format string, a ...any) error {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "seal of checkpoint "+string(at.Checkpoint)+": "+format, a...)
	}
	if in.Stored.CheckpointID != at.Checkpoint {
		return bad("it belongs to another checkpoint, %s", core.Clip(string(in.Stored.CheckpointID)))
	}
	if _, err := core.ParseDigest(string(in.Stored.Digest)); err != nil {
		return err
	}
	written := make(map[string]int64, len(in.Written))
	for _, o := range in.Written {
		_, twice := written[o.Key]
		if !blob.ValidKey(o.Key) || !strings.HasPrefix(o.Key, at.Prefix) || o.Bytes < 0 || twice {
			return bad("object %q of %d bytes is not one of attempt %d", core.Clip(o.Key), o.Bytes, at.Attempt)
		}
		written[o.Key] = o.Bytes
	}
	if bytes, ok := written[in.Stored.Manifest]; !ok || bytes != in.Stored.Bytes || bytes == 0 {
		return bad("its manifest %q of %d bytes is not among what was written", core.Clip(in.Stored.Manifest), in.Stored.Bytes)
	}
	return nil
}

// checkEncrypted refuses unencrypted objects that must be encrypted: the project encrypts since the attempt began, or the runner is too old to
// encrypt.
func checkEncrypted(ctx context.Context, tx Tx, at Attempt, in runnerapi.CommitSeal) error {
	if at.Project == core.SystemProject {
		return nil
	}
	p, err := tx.Project(ctx, at.Project)
	if err != nil || p.Encryption == model.EncryptionNone {
		return err
	}
	for _, o := range in.Written {
		if !envelope.Encrypted(o.Key) {
			return core.Errorf(core.Invalid, core.CodeInvalidField, "seal of checkpoint %s: object %s is unencrypted, but project %s encrypts; the next attempt encrypts, unless the runner is of an older version", at.Checkpoint, o.Key, p.ID)
		}
	}
	return nil
}

// Abandon ends the attempts of runners that have lost their lease since they began: these runners continue none of them.
func (s *Sealer) Abandon(ctx context.Context) error {
	var list []core.CheckpointID
	err := s.store.InSystem(ctx, func(tx Tx) (err error) {
		list, err = tx.AbandonSeals(ctx)
		return err
	})
	for _, id := range list {
		s.cfg.Ended("lost")
		s.cfg.Log.InfoContext(ctx, "seal given up with its runner's lease", "checkpoint_id", id)
	}
	return err
}

// SealedCheckpoint waits until a checkpoint is sealed and returns it. It returns the checkpoint in its present state if the time is over, or if
// the checkpoint will never be sealed.
func (s *Sealer) SealedCheckpoint(ctx context.Context, project core.ProjectID, id core.CheckpointID, wait time.Duration) (model.Checkpoint, error) {
	if err := s.StoreConfigured(); err != nil {
		return model.Checkpoint{}, err
	}
	until := time.Now().Add(wait)
	for {
		var cp model.Checkpoint
		err := s.store.InProject(ctx, project, func(tx Tx) (err error) {
			cp, err = tx.Checkpoint(ctx, id)
			return err
		})
		s.ShowQueued(&cp)
		if err != nil || !cp.State.CanBecome(core.CheckpointSealed) && cp.State != core.CheckpointCapturing || time.Now().After(until) {
			return cp, err
		}
		if err := pace.Pause(ctx, sealPoll); err != nil {
			return cp, err
		}
	}
}

// ShowQueued gives captured checkpoints without an upload the state that says that a runner will upload them.
func (s *Sealer) ShowQueued(list ...*model.Checkpoint) {
	for _, cp := range list {
		if s.cfg.Blobs != nil && cp != nil && cp.State == core.CheckpointCaptured && cp.Seal == nil {
			cp.Seal = &model.Seal{State: model.SealQueued}
		}
	}
}
