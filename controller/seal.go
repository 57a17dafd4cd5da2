package controller

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/envelope"
)

// SealAttempt is the newest attempt to seal a checkpoint. Only the runner that began it may end it.
type SealAttempt struct {
	Checkpoint core.CheckpointID
	Project    core.ProjectID
	RunnerID   core.RunnerID
	LeaseEpoch int64
	Attempt    int64
	State      SealState
	Prefix     string // of every key that it writes
	Problem    *core.Error
}

const (
	sealPoll    = 200 * time.Millisecond
	maxSealKeys = 1 << 20 // of one message
	maxBefore   = 4096    // ancestors that a runner may name
)

// StoreConfigured returns nil if checkpoints are sealed here, and UNSUPPORTED otherwise.
func (c *Controller) StoreConfigured() error {
	if c.cfg.Store == nil {
		return model.ErrNoStore
	}
	return nil
}

// BeginSeal permits a runner to upload a checkpoint that it captured. An earlier attempt ends, and the objects that it wrote are removed.
func (c *Controller) BeginSeal(ctx context.Context, runner core.RunnerID, in runnerapi.BeginSeal) (runnerapi.SealBegun, error) {
	if err := c.StoreConfigured(); err != nil {
		return runnerapi.SealBegun{}, err
	}
	if _, err := core.ParseID[core.CheckpointID](string(in.CheckpointID)); err != nil {
		return runnerapi.SealBegun{}, err
	}
	in.Ancestors = in.Ancestors[:min(len(in.Ancestors), maxBefore)]
	ctx = WithOrigin(ctx, Origin{Actor: string(runner), Action: "begin_seal"})
	begun, err := read(ctx, c, System(), func(tx Tx) (runnerapi.SealBegun, error) {
		if err := tx.HasLease(ctx, runner, in.LeaseEpoch); err != nil {
			return runnerapi.SealBegun{}, err
		}
		return tx.BeginSeal(ctx, runner, in)
	})
	if err != nil {
		return begun, err
	}
	if err := c.dataKeys.Give(ctx, &begun); err != nil { // users see why it is not sealed
		return runnerapi.SealBegun{}, errors.Join(err, c.FailSeal(ctx, runner, in.CheckpointID, runnerapi.FailSeal{
			LeaseEpoch: in.LeaseEpoch, Attempt: begun.Attempt, Problem: *runnerapi.ProblemOf(err),
		}))
	}
	return begun, nil
}

// CommitSeal makes a checkpoint sealed. A repeated commit is no error.
func (c *Controller) CommitSeal(ctx context.Context, runner core.RunnerID, id core.CheckpointID, in runnerapi.CommitSeal) error {
	if err := c.StoreConfigured(); err != nil {
		return err
	}
	if len(in.Written) > maxSealKeys || len(in.Needs) > maxSealKeys {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "checkpoint %s has %d objects and needs %d; at most %d can be taken", id, len(in.Written), len(in.Needs), maxSealKeys)
	}
	ctx = WithOrigin(ctx, Origin{Actor: string(runner), Action: "commit_seal"})
	sealed := false
	err := c.checkManifest(ctx, runner, id, in)
	if err != nil {
		c.leftBehind(ctx, runner, id, in.Attempt, err)
		return err
	}
	err = c.store.InTx(ctx, System(), func(tx Tx) error {
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
		case at.RunnerID != runner || at.LeaseEpoch != in.LeaseEpoch || at.Attempt != in.Attempt || at.State != SealUploading:
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
		c.leftBehind(ctx, runner, id, in.Attempt, err)
	}
	if err != nil || !sealed {
		return err
	}
	c.metrics.timings("seal", in.Timings)
	c.metrics.seals.WithLabelValues("sealed").Inc()
	c.metrics.stored.Add(float64(in.StoredBytes))
	c.feed.hint()
	c.log.InfoContext(ctx, "checkpoint sealed", "checkpoint_id", id, "runner_id", runner, "attempt", in.Attempt, "bytes", in.StoredBytes, "objects", len(in.Written))
	return nil
}

// FailSeal gives an attempt up. It is no error if the attempt was given up before.
func (c *Controller) FailSeal(ctx context.Context, runner core.RunnerID, id core.CheckpointID, in runnerapi.FailSeal) error {
	ctx = WithOrigin(ctx, Origin{Actor: string(runner), Action: "fail_seal"})
	problem := core.Errorf(in.Problem.Category, in.Problem.Code, "%s", clipTail(in.Problem.Message))
	if problem.Code == "" || problem.Category == "" {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "problem: a failed seal must say why")
	}
	failed := false
	err := c.store.InTx(ctx, System(), func(tx Tx) error {
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
		case at.State == SealFailed:
			return nil
		}
		failed = true
		return tx.FailSeal(ctx, at, problem)
	})
	if err != nil {
		c.leftBehind(ctx, runner, id, in.Attempt, err)
	}
	if err == nil && failed {
		c.metrics.seals.WithLabelValues("failed").Inc()
		c.log.WarnContext(ctx, "checkpoint not sealed", "checkpoint_id", id, "runner_id", runner, "attempt", in.Attempt, "code", problem.Code, "err", problem)
	}
	return err
}

// leftBehind records that an attempt may have written objects after its end. It is called when the end of an attempt is refused because the
// attempt had ended before. The objects may have been removed already.
func (c *Controller) leftBehind(ctx context.Context, runner core.RunnerID, id core.CheckpointID, attempt int64, refusal error) {
	switch core.CodeOf(refusal) {
	case core.CodeStateConflict, core.CodeCheckpointNotFound, core.CodeRunnerLost:
	default:
		return
	}
	if err := c.store.InTx(ctx, System(), func(tx Tx) error { return tx.LeaveDebris(ctx, runner, id, attempt) }); err != nil {
		c.log.WarnContext(ctx, "objects that an attempt to seal may have left were not recorded", "checkpoint_id", id, "attempt", attempt, "err", err)
	}
}

func replaced(id core.CheckpointID, attempt int64) error {
	return core.Errorf(core.Conflict, core.CodeStateConflict, "attempt %d to seal checkpoint %s was given up or replaced by another", attempt, id)
}

// checkCommit refuses a commit that does not fit the attempt.
func checkCommit(at SealAttempt, in runnerapi.CommitSeal) error {
	bad := func(format string, a ...any) error {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "seal of checkpoint "+string(at.Checkpoint)+": "+format, a...)
	}
	if in.Stored.CheckpointID != at.Checkpoint {
		return bad("it is of another checkpoint, %s", core.Clip(string(in.Stored.CheckpointID)))
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

// checkEncrypted refuses objects in clear that must be encrypted: the project encrypts since the attempt began, or the runner is too old to
// encrypt.
func checkEncrypted(ctx context.Context, tx Tx, at SealAttempt, in runnerapi.CommitSeal) error {
	if at.Project == SystemProject {
		return nil
	}
	p, err := tx.Project(ctx, at.Project)
	if err != nil || p.Encryption == EncryptionNone {
		return err
	}
	for _, o := range in.Written {
		if !envelope.Encrypted(o.Key) {
			return core.Errorf(core.Invalid, core.CodeInvalidField, "seal of checkpoint %s: object %s is in clear and project %s encrypts; the next attempt does, unless the runner is of an older version", at.Checkpoint, o.Key, p.ID)
		}
	}
	return nil
}

// abandonSeals ends the attempts of runners that have lost their lease since they began: these runners continue none of them.
func (c *Controller) abandonSeals(ctx context.Context) error {
	list, err := read(ctx, c, System(), func(tx Tx) ([]core.CheckpointID, error) { return tx.AbandonSeals(ctx) })
	for _, id := range list {
		c.metrics.seals.WithLabelValues("lost").Inc()
		c.log.InfoContext(ctx, "seal given up with its runner's lease", "checkpoint_id", id)
	}
	return err
}

// SealedCheckpoint waits until a checkpoint is sealed and returns it. It returns the checkpoint in its present state if the time is over, or if
// the checkpoint will never be sealed.
func (c *Controller) SealedCheckpoint(ctx context.Context, project core.ProjectID, id core.CheckpointID, wait time.Duration) (Checkpoint, error) {
	if err := c.StoreConfigured(); err != nil {
		return Checkpoint{}, err
	}
	until := time.Now().Add(wait)
	for {
		cp, err := c.Checkpoint(ctx, project, id)
		if err != nil || !cp.State.CanBecome(core.CheckpointSealed) && cp.State != core.CheckpointCapturing || time.Now().After(until) {
			return cp, err
		}
		if err := pace.Pause(ctx, sealPoll); err != nil {
			return cp, err
		}
	}
}

// queued gives captured checkpoints without an upload the state that says that a runner will upload them.
func (c *Controller) queued(list ...*Checkpoint) {
	for _, cp := range list {
		if c.cfg.Store != nil && cp != nil && cp.State == core.CheckpointCaptured && cp.Seal == nil {
			cp.Seal = &Seal{State: SealQueued}
		}
	}
}
