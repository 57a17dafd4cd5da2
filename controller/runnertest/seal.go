package runnertest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/fakeguest"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/envelope"
	format "github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// Sealer is the controller, for a runner that seals.
type Sealer interface {
	BeginSeal(ctx context.Context, runner core.RunnerID, in runnerapi.BeginSeal) (runnerapi.SealBegun, error)
	CommitSeal(ctx context.Context, runner core.RunnerID, id core.CheckpointID, in runnerapi.CommitSeal) error
	FailSeal(ctx context.Context, runner core.RunnerID, id core.CheckpointID, in runnerapi.FailSeal) error
}

// manifest is what the fake keeps of a checkpoint in a store, as the record of a manifest without maps: itself, and which objects a restore
// reads.
type manifest struct {
	Checkpoint runnerapi.Checkpoint `json:"checkpoint"`
	Needs      []string             `json:"needs"` // this one is not among them
	Bytes      []int64              `json:"bytes"` // of each of them
}

// sealedWith is the key of each manifest that a fake has encrypted.
var sealedWith sync.Map

// Upload is an attempt to seal a checkpoint, in the steps that a test may stop between.
type Upload struct {
	runner *Runner
	to     Sealer
	store  blob.Blobs
	id     core.CheckpointID
	Commit runnerapi.CommitSeal
	Begun  runnerapi.SealBegun
	Change func(*format.Header) // of the manifest before it is written; nil: it says the truth
}

// BeginSeal asks for leave to upload a checkpoint that the fake holds. It names what it holds of the checkpoint's ancestors.
func (r *Runner) BeginSeal(ctx context.Context, to Sealer, store blob.Blobs, epoch int64, id core.CheckpointID) (*Upload, error) {
	cp, ok := r.held(id)
	if !ok {
		return nil, fmt.Errorf("the fake has no checkpoint %s", id)
	}
	in := runnerapi.BeginSeal{LeaseEpoch: epoch, CheckpointID: id}
	for at, ok := r.held(cp.Parent); ok; at, ok = r.held(at.Parent) {
		in.Ancestors = append(in.Ancestors, at.ID)
	}
	begun, err := to.BeginSeal(ctx, r.cfg.ID, in)
	if err != nil {
		return nil, err
	}
	return &Upload{runner: r, to: to, store: store, id: id, Begun: begun, Commit: runnerapi.CommitSeal{
		LeaseEpoch: epoch, Attempt: begun.Attempt, Stored: runnerapi.Stored{CheckpointID: id}, Timings: []core.Timing{{Stage: "upload", DurationMS: 1}},
	}}, nil
}

func (u *Upload) put(ctx context.Context, name string, b []byte) error {
	if u.Begun.KeyVersion > 0 { // the fake does not encrypt, but says that it does
		name = envelope.NewKey(*u.Begun.Key, u.Begun.KeyVersion).Name(name)
	}
	key := u.Begun.Prefix + name
	if err := u.store.Put(ctx, key, bytes.NewReader(b), int64(len(b)), core.DigestOf(b)); err != nil {
		return err
	}
	u.Commit.Written = append(u.Commit.Written, runnerapi.StoredObject{Key: key, Bytes: int64(len(b))})
	return nil
}

// Held is what the fake knows of a checkpoint that it holds.
func (r *Runner) Held(id core.CheckpointID) (runnerapi.Checkpoint, bool) { return r.held(id) }

// Write puts the attempt's objects: what its reference needs is not written again, unless drop says which of that it can do without.
func (u *Upload) Write(ctx context.Context, drop func(key string) bool) error {
	cp, _ := u.runner.held(u.id)
	m := manifest{Checkpoint: cp}
	if u.Begun.Reference != nil {
		before, err := readManifest(ctx, u.store, *u.Begun.Reference)
		if err != nil {
			return err
		}
		for i, key := range before.Needs {
			if drop == nil || !drop(key) {
				m.Needs, m.Bytes = append(m.Needs, key), append(m.Bytes, before.Bytes[i])
			}
		}
	}
	for _, name := range []string{"pack-0", "pack-1"} {
		if err := u.put(ctx, name, []byte(name+" of "+string(cp.ID))); err != nil {
			return err
		}
		last := u.Commit.Written[len(u.Commit.Written)-1]
		m.Needs, m.Bytes = append(m.Needs, last.Key), append(m.Bytes, last.Bytes)
	}
	b, err := u.encode(m)
	if err != nil {
		return err
	}
	if u.Begun.KeyVersion > 0 {
		key := envelope.NewKey(*u.Begun.Key, u.Begun.KeyVersion)
		name := u.Begun.Prefix + key.Name("manifest")
		sealedWith.Store(name, key)
		b = key.Encrypt(nil, b, []byte(name))
	}
	if err := u.put(ctx, "manifest", b); err != nil {
		return err
	}
	u.Commit.Stored.Manifest, u.Commit.Stored.Digest, u.Commit.Stored.Bytes = u.Commit.Written[len(u.Commit.Written)-1].Key, core.DigestOf(b), int64(len(b))
	u.Commit.Needs = m.Needs
	return nil
}

// encode writes the manifest as a real one, as far as the controller reads it.
func (u *Upload) encode(m manifest) ([]byte, error) {
	record, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	cp := m.Checkpoint
	h := format.Header{
		ProjectID: u.Begun.ProjectID, CheckpointID: u.id, Parent: cp.Parent, CapturedAt: cp.CreatedAt.UTC().Format(time.RFC3339Nano), GuestImage: cp.Image,
		Class: cp.Class.Fields(), Resources: cp.Resources, Record: record,
	}
	for i, key := range m.Needs {
		h.Objects = append(h.Objects, format.Object{Key: key, Bytes: m.Bytes[i]})
	}
	slices.SortFunc(h.Objects, func(a, b format.Object) int { return strings.Compare(a.Key, b.Key) })
	if u.Change != nil {
		u.Change(&h)
	}
	return format.Encode(h, nil)
}

// End commits the attempt, and Fail gives it up.
func (u *Upload) End(ctx context.Context) error {
	return u.to.CommitSeal(ctx, u.runner.cfg.ID, u.id, u.Commit)
}

// Fail gives the attempt up.
func (u *Upload) Fail(ctx context.Context, problem error) error {
	return u.to.FailSeal(ctx, u.runner.cfg.ID, u.id, runnerapi.FailSeal{
		LeaseEpoch: u.Commit.LeaseEpoch, Attempt: u.Commit.Attempt, Problem: *runnerapi.ProblemOf(problem),
	})
}

// Seal uploads a checkpoint that the fake holds.
func (r *Runner) Seal(ctx context.Context, to Sealer, store blob.Blobs, epoch int64, id core.CheckpointID) error {
	u, err := r.BeginSeal(ctx, to, store, epoch, id)
	if err != nil {
		return err
	}
	if err := u.Write(ctx, nil); err != nil {
		return err
	}
	return u.End(ctx)
}

// Restorable reports whether everything that a restore of a sealed checkpoint reads is in the store.
func Restorable(ctx context.Context, store blob.Blobs, at runnerapi.Stored) error {
	_, err := fetch(ctx, store, at)
	return err
}

func fetch(ctx context.Context, store blob.Blobs, at runnerapi.Stored) (runnerapi.Checkpoint, error) {
	m, err := readManifest(ctx, store, at)
	if err != nil {
		return runnerapi.Checkpoint{}, err
	}
	for _, key := range m.Needs {
		if _, err := store.Stat(ctx, key); errors.Is(err, blob.ErrNotFound) {
			return runnerapi.Checkpoint{}, core.Wrapf(err, core.DataLoss, core.CodeCheckpointIncomplete, "checkpoint %s needs object %s, which is not in the store", at.CheckpointID, key)
		} else if err != nil {
			return runnerapi.Checkpoint{}, err
		}
	}
	return m.Checkpoint, nil
}

func readManifest(ctx context.Context, store blob.Blobs, at runnerapi.Stored) (manifest, error) {
	var m manifest
	body, err := store.Get(ctx, at.Manifest, 0, at.Bytes)
	if errors.Is(err, blob.ErrNotFound) {
		return m, core.Wrapf(err, core.DataLoss, core.CodeCheckpointIncomplete, "the manifest of checkpoint %s is not in the store", at.CheckpointID)
	}
	if err != nil {
		return m, err
	}
	b, err := io.ReadAll(body)
	if err = errors.Join(err, body.Close()); err != nil {
		return m, err
	}
	if core.DigestOf(b) != at.Digest {
		return m, core.Errorf(core.DataLoss, core.CodeCheckpointCorrupt, "the manifest of checkpoint %s is another", at.CheckpointID)
	}
	if key, ok := sealedWith.Load(at.Manifest); ok {
		if b, err = key.(*envelope.Key).Decrypt(nil, b, []byte(at.Manifest)); err != nil { //nolint:forcetypeassert // it holds nothing else
			return m, err
		}
	}
	h, err := format.DecodeHeader(b)
	if err != nil {
		return m, err
	}
	return m, json.Unmarshal(h.Record, &m)
}

// take makes a checkpoint that is in the store one that the fake holds.
func (r *Runner) take(ctx context.Context, in runnerapi.Fork) error {
	r.mu.Lock()
	cp, held := r.checkpoints[in.CheckpointID]
	mine := held && (!in.Verify || cp.manifest != "")
	r.mu.Unlock()
	if mine {
		if want := in.Expected; want != nil && cp.Parent != "" && want.Parent != cp.Parent { // what Adopt has made has none
			return core.Errorf(core.DataLoss, core.CodeManifestInvalid, "the manifest of checkpoint %s has another parent than the controller's row, so it is refused", in.CheckpointID)
		}
		return nil
	}
	if r.cfg.Store == nil && r.cfg.Fetch == nil || len(in.Sources) == 0 || in.Sources[0].CheckpointID != in.CheckpointID {
		return core.Errorf(core.NotFound, core.CodeCheckpointNotFound, "this runner has no checkpoint %s", in.CheckpointID)
	}
	if err := r.pass(ctx, PointFetch, string(in.CheckpointID)); err != nil {
		return err
	}
	read := func() (runnerapi.Checkpoint, error) { return fetch(ctx, r.cfg.Store, in.Sources[0]) }
	if r.cfg.Fetch != nil {
		read = func() (runnerapi.Checkpoint, error) { return r.cfg.Fetch(ctx, r.cfg.ID, in.Sources[0]) }
	}
	got, err := read()
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.checkpoints[got.ID] = &checkpoint{Checkpoint: got, guest: fakeguest.NewState(), manifest: in.Sources[0].Digest}
	return nil
}
