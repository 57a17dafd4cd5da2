package secretstore

import (
	"context"
	"log/slog"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/masterkey"
)

// Secret is a value in the form that the database keeps. It is encrypted with a key of its own, and a master key has wrapped that key.
type Secret struct {
	ID        string
	ProjectID core.ProjectID
	Master    string // the master key that has wrapped Key
	Key       []byte
	Encrypted []byte
}

// name is part of the encryption of a value, so that a row cannot replace another one.
func (s Secret) name() string { return "secret " + s.ID + " of project " + string(s.ProjectID) }

// Wrapper wraps the keys of secrets with a master key. It is safe for concurrent use.
type Wrapper interface {
	// Current names the master key that Wrap uses.
	Current() string
	// Wrap encrypts a key under a name.
	Wrap(ctx context.Context, name string, key core.DataKey) ([]byte, error)
	// Unwrap decrypts a key that Wrap encrypted under that name when master was the current master key. It fails with KEY_UNAVAILABLE if it
	// cannot.
	Unwrap(ctx context.Context, master, name string, wrapped []byte) (core.DataKey, error)
}

// Store runs transactions that see the secrets of all projects. Package controller/postgres has the methods of Tx.
type Store interface {
	// InSystem runs fn in a transaction and commits when it returns nil.
	InSystem(ctx context.Context, fn func(Tx) error) error
}

// Tx keeps secrets and authorities.
type Tx interface {
	InsertSecret(ctx context.Context, s Secret) error
	DeleteSecret(ctx context.Context, id string) error
	Secrets(ctx context.Context, ids []string) ([]Secret, error)
	// OtherSecrets returns the secrets whose keys another master key has wrapped.
	OtherSecrets(ctx context.Context, master string) ([]Secret, error)
	// RewrapSecret replaces the wrapped key of a value, if the master key old has wrapped it.
	RewrapSecret(ctx context.Context, s Secret, old string) error
	// Authority returns the authority of a project. It fails with NOT_FOUND while the project has none.
	Authority(ctx context.Context, project core.ProjectID) (Authority, error)
	// InsertAuthority gives a project its authority, unless it has one. It returns the authority that the project then has.
	InsertAuthority(ctx context.Context, a Authority) (Authority, error)
}

// ErrNoMasterKey says that nothing can be encrypted or decrypted without a master key.
var ErrNoMasterKey error = core.Errorf(core.FailedPrecondition, core.CodeKeyUnavailable,
	"this controller has no master key, so nothing can be encrypted or decrypted; start controllers with --master-key-file")

// Keeper encrypts and decrypts secrets. It is safe for concurrent use.
type Keeper struct {
	wrapper     Wrapper
	store       Store
	log         *slog.Logger
	authorities authorities
}

// New makes a keeper. Without a wrapper it encrypts and decrypts nothing.
func New(wrapper Wrapper, store Store, log *slog.Logger) *Keeper {
	return &Keeper{wrapper: wrapper, store: store, log: log}
}

// Encrypt encrypts a value. It must not be called in a transaction, because wrapping the key may take a while.
func (k *Keeper) Encrypt(ctx context.Context, project core.ProjectID, value []byte) (*Secret, error) {
	if k.wrapper == nil {
		return nil, ErrNoMasterKey
	}
	key := core.NewDataKey()
	dataKey, err := masterkey.New(key[:])
	if err != nil {
		return nil, err
	}
	s := &Secret{ID: string(core.NewID[core.SecretID]()), ProjectID: project, Master: k.wrapper.Current()}
	s.Encrypted = dataKey.Encrypt(s.name(), value)
	s.Key, err = k.wrapper.Wrap(ctx, s.name(), key)
	return s, err
}

// decrypt decrypts one value.
func (k *Keeper) decrypt(ctx context.Context, s Secret) ([]byte, error) {
	if k.wrapper == nil {
		return nil, ErrNoMasterKey
	}
	key, err := k.wrapper.Unwrap(ctx, s.Master, s.name(), s.Key)
	if err != nil {
		return nil, err
	}
	dataKey, err := masterkey.New(key[:])
	if err != nil {
		return nil, err
	}
	value, err := dataKey.Decrypt(s.name(), s.Encrypted)
	if err != nil {
		return nil, core.Wrapf(err, core.FailedPrecondition, core.CodeKeyUnavailable, "%s was changed in the database", s.name())
	}
	return value, nil
}

// Decrypt returns the values of secrets by their ids, and the error of each secret that it cannot decrypt.
func (k *Keeper) Decrypt(ctx context.Context, ids []string) (opened map[string][]byte, failed map[string]error) {
	opened, failed = map[string][]byte{}, map[string]error{}
	if len(ids) == 0 {
		return opened, failed
	}
	var rows []Secret
	err := k.store.InSystem(ctx, func(tx Tx) (err error) {
		rows, err = tx.Secrets(ctx, ids)
		return err
	})
	if err != nil {
		for _, id := range ids {
			failed[id] = err
		}
	}
	for _, s := range rows {
		if value, err := k.decrypt(ctx, s); err == nil {
			opened[s.ID] = value
		} else {
			failed[s.ID] = err
		}
	}
	return opened, failed
}

// Rewrap wraps the keys of all secrets with the current master key.
func (k *Keeper) Rewrap(ctx context.Context) error {
	w := k.wrapper
	if w == nil {
		return nil
	}
	var rows []Secret
	err := k.store.InSystem(ctx, func(tx Tx) (err error) {
		rows, err = tx.OtherSecrets(ctx, w.Current())
		return err
	})
	if err != nil {
		return err
	}
	for _, s := range rows {
		key, err := w.Unwrap(ctx, s.Master, s.name(), s.Key)
		if err != nil { // grants that need the secret report it
			k.log.WarnContext(ctx, "the key of a secret cannot be unwrapped", "secret_id", s.ID, "err", err)
			continue
		}
		old := s.Master
		s.Master = w.Current()
		if s.Key, err = w.Wrap(ctx, s.name(), key); err != nil {
			return err
		}
		if err := k.store.InSystem(ctx, func(tx Tx) error { return tx.RewrapSecret(ctx, s, old) }); err != nil {
			return err
		}
	}
	if len(rows) > 0 {
		k.log.InfoContext(ctx, "the current master key has wrapped the keys of secrets", "count", len(rows), "now", w.Current())
	}
	return nil
}
