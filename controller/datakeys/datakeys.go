// Package datakeys owns the keys with which checkpoints of a project are encrypted in the store. The
// database keeps them wrapped by a master key. The package makes them, unwraps them for runners and
// for the controller's own reads, and wraps them again when the master key changes.
package datakeys

import (
	"context"
	"fmt"
	"log/slog"
	"strings"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/secretstore"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/envelope"
)

// Patch changes how data that a project stores from now on is encrypted; zero fields change nothing.
type Patch struct {
	Mode model.Encryption
	// KeyVersion is the wanted version: the present version plus one makes another key, and the present version changes nothing.
	KeyVersion int64
}

// Wrapper wraps the keys of projects, so that a reader of the database cannot use them. It may be a file of keys, or a service elsewhere. It is
// safe for concurrent use.
type Wrapper interface {
	// Current names the master key that Wrap uses.
	Current() string
	// Wrap encrypts a key under a name.
	Wrap(ctx context.Context, name string, key core.DataKey) ([]byte, error)
	// Unwrap decrypts a key that Wrap encrypted under that name when master was the current master key. It fails with KEY_UNAVAILABLE if
	// it cannot, now or ever.
	Unwrap(ctx context.Context, master, name string, wrapped []byte) (core.DataKey, error)
}

// ProjectKey is the wrapped key of a project, as the database keeps it.
type ProjectKey struct {
	ProjectID core.ProjectID
	Version   int64
	Master    string // the master key that has wrapped it
	Wrapped   []byte
}

// name is part of the encryption of a key, so that a row cannot replace another one.
func (k ProjectKey) name() string { return fmt.Sprintf("key %d of project %s", k.Version, k.ProjectID) }

// Store runs transactions that see the keys of all projects. Package controller/postgres has the methods of Tx.
type Store interface {
	// InSystem runs fn in a transaction and commits when it returns nil.
	InSystem(ctx context.Context, fn func(Tx) error) error
}

// Tx keeps keys of projects.
type Tx interface {
	// Project finds neither the system's project nor a deleted one.
	Project(ctx context.Context, id core.ProjectID) (model.Project, error)
	// ProjectKeys returns all keys of some projects.
	ProjectKeys(ctx context.Context, projects []core.ProjectID) ([]ProjectKey, error)
	// OtherProjectKeys returns the keys that another master key has wrapped.
	OtherProjectKeys(ctx context.Context, master string) ([]ProjectKey, error)
	// RewrapProjectKey replaces the wrapped form of a key, if the master key old has wrapped it.
	RewrapProjectKey(ctx context.Context, k ProjectKey, old string) error
	// EncryptedNeeds returns one object of each attempt that has written encrypted objects for these checkpoints.
	EncryptedNeeds(ctx context.Context, ids []core.CheckpointID) ([]string, error)
}

// ChangeTx is what Change needs of the transaction that changes a project.
type ChangeTx interface {
	SetEncryption(ctx context.Context, id core.ProjectID, e model.Encryption) error
	// InsertProjectKey adds the next version. It fails with STATE_CONFLICT if that version exists.
	InsertProjectKey(ctx context.Context, k ProjectKey) error
}

// Keeper makes and unwraps keys. It is safe for concurrent use.
type Keeper struct {
	wrapper Wrapper    // nil: no key can be used
	blobs   blob.Blobs // the store, whose objects are encrypted; nil: there is none
	store   Store
	log     *slog.Logger
}

// New makes a keeper.
func New(wrapper Wrapper, blobs blob.Blobs, store Store, log *slog.Logger) *Keeper {
	return &Keeper{wrapper: wrapper, blobs: blobs, store: store, log: log}
}

func inSystem[T any](ctx context.Context, store Store, query func(Tx) (T, error)) (out T, err error) {
	err = store.InSystem(ctx, func(tx Tx) (err error) {
		out, err = query(tx)
		return err
	})
	return out, err
}

func (k *Keeper) master() (Wrapper, error) {
	if k.wrapper == nil {
		return nil, secretstore.ErrNoMasterKey
	}
	return k.wrapper, nil
}

// Fresh makes the key that a project needs for a change; nil for none.
func (k *Keeper) Fresh(ctx context.Context, p model.Project, e Patch) (*ProjectKey, error) {
	mode := p.Encryption
	if e.Mode != "" {
		mode = e.Mode
	}
	next := max(p.KeyVersion, 1)
	if e.KeyVersion != 0 {
		next = e.KeyVersion
	}
	switch {
	case mode != model.EncryptionNone && mode != model.EncryptionEnvelope:
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "encryption: it must be %s or %s", model.EncryptionNone, model.EncryptionEnvelope)
	case mode == model.EncryptionNone && e.KeyVersion == 0:
		return nil, nil //nolint:nilnil // it needs none
	case mode == model.EncryptionNone:
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "key_version: the project does not encrypt; give encryption: %s too", model.EncryptionEnvelope)
	case next == p.KeyVersion:
		_, err := k.master()
		return nil, err
	case next != p.KeyVersion+1:
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "key_version: the newest key of the project is %d; give %d to have another made", p.KeyVersion, p.KeyVersion+1)
	}
	w, err := k.master()
	if err != nil {
		return nil, err
	}
	fresh := ProjectKey{ProjectID: p.ID, Version: next, Master: w.Current()}
	fresh.Wrapped, err = w.Wrap(ctx, fresh.name(), core.NewDataKey())
	return &fresh, err
}

// Change changes how a project's data is encrypted.
func Change(ctx context.Context, tx ChangeTx, id core.ProjectID, e Patch, fresh *ProjectKey) error {
	if fresh != nil {
		if err := tx.InsertProjectKey(ctx, *fresh); err != nil {
			return err
		}
	}
	if e.Mode == "" {
		return nil
	}
	return tx.SetEncryption(ctx, id, e.Mode)
}

// projectKey names one key.
type projectKey struct {
	project core.ProjectID
	version int64
}

// unwrap unwraps keys of projects. KEY_UNAVAILABLE says which key is not available, and why.
func (k *Keeper) unwrap(ctx context.Context, wanted map[projectKey]bool) (map[projectKey]core.DataKey, error) {
	w, err := k.master()
	if err != nil {
		return nil, err
	}
	projects := make(map[core.ProjectID]bool)
	for id := range wanted {
		projects[id.project] = true
	}
	var ids []core.ProjectID
	for id := range projects {
		ids = append(ids, id)
	}
	rows, err := inSystem(ctx, k.store, func(tx Tx) ([]ProjectKey, error) { return tx.ProjectKeys(ctx, ids) })
	if err != nil {
		return nil, err
	}
	out := make(map[projectKey]core.DataKey, len(wanted))
	for _, row := range rows {
		id := projectKey{row.ProjectID, row.Version}
		if !wanted[id] {
			continue
		}
		if out[id], err = w.Unwrap(ctx, row.Master, row.name(), row.Wrapped); err != nil {
			return nil, err
		}
	}
	for id := range wanted {
		if _, there := out[id]; !there {
			return nil, core.Errorf(core.FailedPrecondition, core.CodeKeyUnavailable, "key %d of project %s was destroyed; data that is encrypted with it can no longer be read", id.version, id.project)
		}
	}
	return out, nil
}

// Of returns the keys of encrypted objects, by the prefixes of their attempts.
func (k *Keeper) Of(ctx context.Context, objects []string) (runnerapi.Keys, error) {
	if len(objects) == 0 {
		return nil, nil
	}
	wanted := make(map[projectKey]bool)
	of := make(map[string]projectKey, len(objects))
	for _, object := range objects {
		version, ok := envelope.Version(object)
		parts := strings.Split(object, "/")
		if !ok || len(parts) != 5 {
			return nil, core.Errorf(core.Internal, core.CodeInternal, "object %s is not encrypted with a key of a project", core.Clip(object))
		}
		id := projectKey{core.ProjectID(parts[1]), version}
		wanted[id], of[envelope.Prefix(object)] = true, id
	}
	keys, err := k.unwrap(ctx, wanted)
	if err != nil {
		return nil, err
	}
	out := make(runnerapi.Keys, len(of))
	for prefix, id := range of {
		out[prefix] = envelope.Derive(keys[id], prefix)
	}
	return out, nil
}

// For returns the keys of all objects that these checkpoints need. It asks for nothing if all of them are unencrypted.
func (k *Keeper) For(ctx context.Context, sealed ...runnerapi.Stored) (runnerapi.Keys, error) {
	var ids []core.CheckpointID
	for _, s := range sealed {
		if envelope.Encrypted(s.Manifest) { // an unencrypted checkpoint needs no encrypted objects
			ids = append(ids, s.CheckpointID)
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	objects, err := inSystem(ctx, k.store, func(tx Tx) ([]string, error) { return tx.EncryptedNeeds(ctx, ids) })
	if err != nil {
		return nil, err
	}
	return k.Of(ctx, objects)
}

// Store is the store with the keys of the objects that these checkpoints need.
func (k *Keeper) Store(ctx context.Context, sealed ...runnerapi.Stored) (blob.Blobs, error) {
	keys, err := k.For(ctx, sealed...)
	if err != nil {
		return nil, err
	}
	return envelope.With(k.blobs, envelope.NewRing(keys)), nil
}

// Attempt returns the key of an attempt; nil if the project does not encrypt.
func (k *Keeper) Attempt(ctx context.Context, project core.ProjectID, prefix string) (*envelope.Key, error) {
	p, err := inSystem(ctx, k.store, func(tx Tx) (model.Project, error) { return tx.Project(ctx, project) })
	if err != nil || p.Encryption == model.EncryptionNone {
		return nil, err
	}
	id := projectKey{p.ID, p.KeyVersion}
	keys, err := k.unwrap(ctx, map[projectKey]bool{id: true})
	if err != nil {
		return nil, err
	}
	return envelope.NewKey(envelope.Derive(keys[id], prefix), id.version), nil
}

// Give adds to an attempt the keys that it needs.
func (k *Keeper) Give(ctx context.Context, begun *runnerapi.SealBegun) error {
	if begun.KeyVersion == 0 {
		return nil
	}
	id := projectKey{begun.ProjectID, begun.KeyVersion}
	keys, err := k.unwrap(ctx, map[projectKey]bool{id: true})
	if err != nil {
		return err
	}
	key := envelope.Derive(keys[id], begun.Prefix)
	begun.Key = &key
	if begun.Reference != nil {
		begun.Keys, err = k.For(ctx, *begun.Reference)
	}
	return err
}

// Rewrap wraps keys that another master key has wrapped with the current one. After that the other master key is no longer needed.
func (k *Keeper) Rewrap(ctx context.Context) error {
	w := k.wrapper
	if w == nil {
		return nil
	}
	rows, err := inSystem(ctx, k.store, func(tx Tx) ([]ProjectKey, error) { return tx.OtherProjectKeys(ctx, w.Current()) })
	if err != nil {
		return err
	}
	for _, row := range rows {
		key, err := w.Unwrap(ctx, row.Master, row.name(), row.Wrapped)
		if err != nil { // reads of data that is encrypted with this key fail and report it
			k.log.WarnContext(ctx, "a project's key cannot be unwrapped", "project_id", row.ProjectID, "version", row.Version, "err", err)
			continue
		}
		old := row.Master
		row.Master = w.Current()
		if row.Wrapped, err = w.Wrap(ctx, row.name(), key); err != nil {
			return err
		}
		if err := k.store.InSystem(ctx, func(tx Tx) error { return tx.RewrapProjectKey(ctx, row, old) }); err != nil {
			return err
		}
		k.log.InfoContext(ctx, "the current master key has wrapped a project's key", "project_id", row.ProjectID, "version", row.Version, "before", old, "now", row.Master)
	}
	return nil
}
