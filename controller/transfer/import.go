package transfer

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/failpoint"
	"github.com/coppice-dev/coppice/internal/pace"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// importLease is how long an import stays valid after its last renewal. The grace of the store must be longer.
const importLease = time.Minute

// ErrImportLost says that an import was given up because it was not renewed in time.
var ErrImportLost = core.Errorf(core.Unavailable, core.CodeDatabaseUnavailable, "the import was given up: the database could not be reached for too long; repeat it")

// Where a controller may be killed while it imports.
var (
	importBegun   = failpoint.New("controller.import_begun")   // the row is there, no object is
	importWritten = failpoint.New("controller.import_written") // every object is there, the checkpoint's row is not
)

// importing is one import.
type importing struct {
	t       *Transfers
	project core.ProjectID
	file    *snapshotstore.Import
	row     model.Checkpoint // the row that will be inserted
	record  json.RawMessage  // of its manifest
	prefix  string
}

// ImportCheckpoint reads an exported checkpoint and makes it a checkpoint of the project, without a parent. IMPORT_INVALID says what is wrong
// with a file. If it fails, there is no checkpoint, and the stored objects are removed like those of any failed attempt.
func (t *Transfers) ImportCheckpoint(ctx context.Context, project core.ProjectID, name string, body io.Reader) (model.Checkpoint, error) {
	if err := t.configured(); err != nil {
		return model.Checkpoint{}, err
	}
	leave, err := enter(t.imports, "imports")
	if err != nil {
		return model.Checkpoint{}, err
	}
	defer leave()
	im := &importing{t: t, project: project}
	if im.file, err = snapshotstore.ReadImport(body); err != nil {
		return model.Checkpoint{}, err
	}
	if err := im.describe(name); err != nil {
		return model.Checkpoint{}, err
	}
	if claim := request.ClaimOf(ctx); claim != nil { // the content of the file is part of the request
		claim.Hash = sha256.Sum256(slices.Concat(claim.Hash[:], []byte(im.file.Digest)))
	}
	im.prefix, err = inProject(ctx, t.store, project, func(tx Tx) (string, error) {
		if err := request.Bind(ctx, tx, project, string(im.row.ID)); err != nil {
			return "", err
		}
		return tx.BeginImport(ctx, project, im.row.ID, importLease)
	})
	if again, ok := errors.AsType[*request.RepeatError](err); ok {
		return t.repeatImport(ctx, project, again.Use)
	}
	if err != nil {
		return model.Checkpoint{}, err
	}
	cp, err := im.run(ctx)
	if err != nil {
		return model.Checkpoint{}, im.giveUp(ctx, err)
	}
	t.cfg.Imported(cp.StoredBytes)
	t.cfg.Log.InfoContext(ctx, "checkpoint imported", "checkpoint_id", cp.ID, "bytes", cp.StoredBytes)
	return cp, nil
}

func (t *Transfers) repeatImport(ctx context.Context, project core.ProjectID, use request.KeyUse) (model.Checkpoint, error) {
	if use.Answer == nil {
		return model.Checkpoint{}, request.InProgress("the first request with this idempotency key imports %s, and has not ended; repeat yours later", use.Object)
	}
	cp, err := t.checkpoint(ctx, project, core.CheckpointID(use.Object))
	if err == nil {
		request.ClaimOf(ctx).SetReplayed(true)
	}
	return cp, err
}

// giveUp ends an import that failed, and frees the key of its request, so that a repeat of the
// request begins again. It removes at once what the import has stored: nothing reads these objects,
// and no quota counts them, so a tenant could pile them up with files that fail at their last byte.
func (im *importing) giveUp(ctx context.Context, failure error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	committed := false
	err := im.t.store.InProject(ctx, im.project, func(tx Tx) (err error) {
		committed, err = tx.EndImport(ctx, im.project, im.row.ID)
		if err != nil || committed {
			return err
		}
		return request.ClaimOf(ctx).Release(ctx, tx, im.project, string(im.row.ID))
	})
	switch {
	case err != nil: // its lease ends
		im.t.cfg.Log.WarnContext(ctx, "an import that failed was not ended", "checkpoint_id", im.row.ID, "err", err)
	case !committed:
		im.removeStored(ctx)
	}
	return failure
}

// removeTime is how long a failed import tries to remove what it has stored, while it keeps its place among the imports under way.
const removeTime = 30 * time.Second

// removeStored removes the objects of an import that can no longer be committed. Its prefix stays listed as debris, so a later collection
// removes what this one could not.
func (im *importing) removeStored(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTime)
	defer cancel()
	if err := im.t.cfg.Remove(ctx, im.prefix); err != nil {
		im.t.cfg.Log.WarnContext(ctx, "the objects of a failed import were not removed; the collection of garbage removes them later", "checkpoint_id", im.row.ID, "err", err)
	}
}

// errRehearsed ends a transaction that was only a trial.
var errRehearsed = errors.New("this would have been committed")

func (im *importing) run(ctx context.Context) (model.Checkpoint, error) {
	if err := importBegun.Hit(ctx); err != nil {
		return model.Checkpoint{}, err
	}
	// A problem with the row is reported before all the bytes have arrived.
	err := im.t.store.InProject(ctx, im.project, func(tx Tx) error {
		stored := runnerapi.Stored{CheckpointID: im.row.ID, Manifest: im.prefix + "manifest", Digest: im.file.Digest, Bytes: 1}
		_, err := tx.CommitImport(ctx, im.row, runnerapi.CommitSeal{Stored: stored, Written: []runnerapi.StoredObject{{Key: stored.Manifest, Bytes: 1}}})
		if err == nil {
			err = errRehearsed
		}
		return err
	})
	if !errors.Is(err, errRehearsed) {
		return model.Checkpoint{}, err
	}
	out, err := im.store(ctx)
	if err == nil {
		err = importWritten.Hit(ctx)
	}
	if err != nil {
		return model.Checkpoint{}, err
	}
	in := runnerapi.CommitSeal{
		Stored: runnerapi.Stored{CheckpointID: im.row.ID, Manifest: out.Manifest.Key, Digest: out.Manifest.Digest, Bytes: out.Manifest.Bytes},
		Needs:  out.Needs, StoredBytes: out.Stored,
	}
	for _, o := range out.Objects {
		in.Written = append(in.Written, runnerapi.StoredObject{Key: o.Key, Bytes: o.Bytes})
	}
	return inProject(ctx, im.t.store, im.project, func(tx Tx) (model.Checkpoint, error) {
		cp, err := tx.CommitImport(ctx, im.row, in)
		if err != nil {
			return cp, err
		}
		return cp, request.ClaimOf(ctx).Answer(ctx, tx, im.project, string(cp.ID), cp.ID)
	})
}

// store writes the objects under the lease.
func (im *importing) store(ctx context.Context) (*snapshotstore.Written, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	renewed := make(chan struct{})
	go func() {
		defer close(renewed)
		im.renew(ctx, cancel)
	}()
	defer func() {
		cancel(nil)
		<-renewed
	}()
	key, err := im.t.cfg.Keys.Attempt(ctx, im.project, im.prefix)
	if err != nil {
		return nil, err
	}
	out, err := im.file.Store(ctx, im.t.cfg.Blobs, im.prefix, key, manifest.Header{
		ProjectID: im.project, CheckpointID: im.row.ID, CapturedAt: im.file.Manifest.CapturedAt, GuestImage: im.row.Image.Digest, Class: im.file.Manifest.Class,
		Resources: im.row.Resources, Record: im.record,
	})
	if err != nil && errors.Is(context.Cause(ctx), ErrImportLost) {
		err = ErrImportLost
	}
	return out, err
}

// renew keeps the lease until ctx ends, or ends it when the lease is over by this process's clock.
func (im *importing) renew(ctx context.Context, lost context.CancelCauseFunc) {
	last := im.t.cfg.Clock()
	for pace.Pause(ctx, importLease/6) == nil {
		began := im.t.cfg.Clock()
		attempt, cancel := context.WithTimeout(ctx, importLease/6)
		err := im.t.store.InProject(attempt, im.project, func(tx Tx) error { return tx.RenewImport(attempt, im.row.ID, importLease) })
		cancel()
		switch {
		case err == nil:
			last = began
		case errors.Is(err, ErrImportLost) || im.t.cfg.Clock()-last > importLease/2:
			lost(ErrImportLost)
			return
		}
	}
}

// AbandonImports ends the imports of controllers that have died.
func (t *Transfers) AbandonImports(ctx context.Context) error {
	var list []core.CheckpointID
	err := t.store.InSystem(ctx, func(tx Tx) (err error) {
		list, err = tx.AbandonImports(ctx)
		return err
	})
	for _, id := range list {
		t.cfg.Log.InfoContext(ctx, "import given up with its controller", "checkpoint_id", id)
	}
	return err
}
