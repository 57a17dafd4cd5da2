package controller

import (
	"context"
	"fmt"
	"strings"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/secretstore"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/envelope"
)

// EncryptionPatch changes how data that a project stores from now on is encrypted; zero fields change nothing.
type EncryptionPatch struct {
	Mode Encryption
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

// ProjectKeyTx keeps keys of projects.
type ProjectKeyTx interface {
	SetEncryption(ctx context.Context, id core.ProjectID, e Encryption) error
	// InsertProjectKey adds the next version. It fails with STATE_CONFLICT if that version exists.
	InsertProjectKey(ctx context.Context, k ProjectKey) error
	// ProjectKeys returns all keys of some projects.
	ProjectKeys(ctx context.Context, projects []core.ProjectID) ([]ProjectKey, error)
	// OtherProjectKeys returns the keys that another master key has wrapped.
	OtherProjectKeys(ctx context.Context, master string) ([]ProjectKey, error)
	// RewrapProjectKey replaces the wrapped form of a key, if the master key old has wrapped it.
	RewrapProjectKey(ctx context.Context, k ProjectKey, old string) error
	// EncryptedNeeds returns one object of each attempt that has written encrypted objects for these checkpoints.
	EncryptedNeeds(ctx context.Context, ids []core.CheckpointID) ([]string, error)
}

func (c *Controller) wrapper() (Wrapper, error) {
	if c.cfg.Wrapper == nil {
		return nil, secretstore.ErrNoMasterKey
	}
	return c.cfg.Wrapper, nil
}

// freshKey makes the key that a project needs for a change; nil for none.
func (c *Controller) freshKey(ctx context.Context, p Project, e EncryptionPatch) (*ProjectKey, error) {
	mode := p.Encryption
	if e.Mode != "" {
		mode = e.Mode
	}
	next := max(p.KeyVersion, 1)
	if e.KeyVersion != 0 {
		next = e.KeyVersion
	}
	switch {
	case mode != EncryptionNone && mode != EncryptionEnvelope:
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "encryption: it must be %s or %s", EncryptionNone, EncryptionEnvelope)
	case mode == EncryptionNone && e.KeyVersion == 0:
		return nil, nil //nolint:nilnil // it needs none
	case mode == EncryptionNone:
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "key_version: the project does not encrypt; give encryption: %s too", EncryptionEnvelope)
	case next == p.KeyVersion:
		_, err := c.wrapper()
		return nil, err
	case next != p.KeyVersion+1:
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "key_version: the newest key of the project is %d; give %d to have another made", p.KeyVersion, p.KeyVersion+1)
	}
	w, err := c.wrapper()
	if err != nil {
		return nil, err
	}
	fresh := ProjectKey{ProjectID: p.ID, Version: next, Master: w.Current()}
	fresh.Wrapped, err = w.Wrap(ctx, fresh.name(), core.NewDataKey())
	return &fresh, err
}

// encrypt changes how a project's data is encrypted.
func encrypt(ctx context.Context, tx Tx, id core.ProjectID, e EncryptionPatch, fresh *ProjectKey) error {
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

// projectKeys unwraps keys of projects. KEY_UNAVAILABLE says which key is not available, and why.
func (c *Controller) projectKeys(ctx context.Context, wanted map[projectKey]bool) (map[projectKey]core.DataKey, error) {
	w, err := c.wrapper()
	if err != nil {
		return nil, err
	}
	projects := make(map[core.ProjectID]bool)
	for k := range wanted {
		projects[k.project] = true
	}
	var ids []core.ProjectID
	for id := range projects {
		ids = append(ids, id)
	}
	rows, err := read(ctx, c, System(), func(tx Tx) ([]ProjectKey, error) { return tx.ProjectKeys(ctx, ids) })
	if err != nil {
		return nil, err
	}
	out := make(map[projectKey]core.DataKey, len(wanted))
	for _, row := range rows {
		k := projectKey{row.ProjectID, row.Version}
		if !wanted[k] {
			continue
		}
		if out[k], err = w.Unwrap(ctx, row.Master, row.name(), row.Wrapped); err != nil {
			return nil, err
		}
	}
	for k := range wanted {
		if _, there := out[k]; !there {
			return nil, core.Errorf(core.FailedPrecondition, core.CodeKeyUnavailable, "key %d of project %s was destroyed, and what is encrypted with it cannot be read any more", k.version, k.project)
		}
	}
	return out, nil
}

// keysOf returns the keys of encrypted objects, by the prefixes of their attempts.
func (c *Controller) keysOf(ctx context.Context, objects []string) (runnerapi.Keys, error) {
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
		k := projectKey{core.ProjectID(parts[1]), version}
		wanted[k], of[envelope.Prefix(object)] = true, k
	}
	keys, err := c.projectKeys(ctx, wanted)
	if err != nil {
		return nil, err
	}
	out := make(runnerapi.Keys, len(of))
	for prefix, k := range of {
		out[prefix] = envelope.Derive(keys[k], prefix)
	}
	return out, nil
}

// keysFor returns the keys of all objects that these checkpoints need. It asks for nothing if all of them are sealed in clear.
func (c *Controller) keysFor(ctx context.Context, sealed ...runnerapi.Stored) (runnerapi.Keys, error) {
	var ids []core.CheckpointID
	for _, s := range sealed {
		if envelope.Encrypted(s.Manifest) { // a checkpoint in clear needs no encrypted objects
			ids = append(ids, s.CheckpointID)
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	objects, err := read(ctx, c, System(), func(tx Tx) ([]string, error) { return tx.EncryptedNeeds(ctx, ids) })
	if err != nil {
		return nil, err
	}
	return c.keysOf(ctx, objects)
}

// storeFor is the store with the keys of the objects that these checkpoints need.
func (c *Controller) storeFor(ctx context.Context, sealed ...runnerapi.Stored) (blob.Blobs, error) {
	keys, err := c.keysFor(ctx, sealed...)
	if err != nil {
		return nil, err
	}
	return envelope.With(c.cfg.Store, envelope.NewRing(keys)), nil
}

// attemptKey returns the key of an attempt; nil if the project does not encrypt.
func (c *Controller) attemptKey(ctx context.Context, project core.ProjectID, prefix string) (*envelope.Key, error) {
	p, err := read(ctx, c, System(), func(tx Tx) (Project, error) { return tx.Project(ctx, project) })
	if err != nil || p.Encryption == EncryptionNone {
		return nil, err
	}
	k := projectKey{p.ID, p.KeyVersion}
	keys, err := c.projectKeys(ctx, map[projectKey]bool{k: true})
	if err != nil {
		return nil, err
	}
	return envelope.NewKey(envelope.Derive(keys[k], prefix), k.version), nil
}

// giveKeys adds to an attempt the keys that it needs.
func (c *Controller) giveKeys(ctx context.Context, begun *runnerapi.SealBegun) error {
	if begun.KeyVersion == 0 {
		return nil
	}
	k := projectKey{begun.ProjectID, begun.KeyVersion}
	keys, err := c.projectKeys(ctx, map[projectKey]bool{k: true})
	if err != nil {
		return err
	}
	key := envelope.Derive(keys[k], begun.Prefix)
	begun.Key = &key
	if begun.Reference != nil {
		begun.Keys, err = c.keysFor(ctx, *begun.Reference)
	}
	return err
}

// rewrap wraps keys that another master key has wrapped with the current one. After that the other master key is no longer needed.
func (c *Controller) rewrap(ctx context.Context) error {
	w := c.cfg.Wrapper
	if w == nil {
		return nil
	}
	rows, err := read(ctx, c, System(), func(tx Tx) ([]ProjectKey, error) { return tx.OtherProjectKeys(ctx, w.Current()) })
	if err != nil {
		return err
	}
	for _, row := range rows {
		key, err := w.Unwrap(ctx, row.Master, row.name(), row.Wrapped)
		if err != nil { // reads of data that is encrypted with this key fail and report it
			c.log.WarnContext(ctx, "a project's key cannot be unwrapped", "project_id", row.ProjectID, "version", row.Version, "err", err)
			continue
		}
		old := row.Master
		row.Master = w.Current()
		if row.Wrapped, err = w.Wrap(ctx, row.name(), key); err != nil {
			return err
		}
		if err := c.store.InTx(ctx, System(), func(tx Tx) error { return tx.RewrapProjectKey(ctx, row, old) }); err != nil {
			return err
		}
		c.log.InfoContext(ctx, "the current master key has wrapped a project's key", "project_id", row.ProjectID, "version", row.Version, "before", old, "now", row.Master)
	}
	return nil
}
