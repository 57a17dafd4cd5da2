package controller

import (
	"context"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/internal/masterkey"
)

// SealedSecret is a value as it is kept: encrypted with a key of its own, which a master key has wrapped.
type SealedSecret struct {
	ID        string
	ProjectID core.ProjectID
	Master    string // key that has wrapped Key
	Key       []byte
	Box       []byte
}

// name is what a value is sealed under, so that a row is of no use in the place of another.
func (s SealedSecret) name() string { return "secret " + s.ID + " of project " + string(s.ProjectID) }

// SecretTx keeps what is secret.
type SecretTx interface {
	InsertSecret(ctx context.Context, s SealedSecret) error
	DeleteSecret(ctx context.Context, id string) error
	Secrets(ctx context.Context, ids []string) ([]SealedSecret, error)
	// OtherSecrets returns those whose keys another master key than that has wrapped.
	OtherSecrets(ctx context.Context, master string) ([]SealedSecret, error)
	// RewrapSecret replaces how a value's key is wrapped, if it is wrapped by old.
	RewrapSecret(ctx context.Context, s SealedSecret, old string) error
}

// sealSecret encrypts a value. Its key is wrapped outside of transactions: that may take a while.
func (c *Controller) sealSecret(ctx context.Context, project core.ProjectID, value []byte) (*SealedSecret, error) {
	w, err := c.wrapper()
	if err != nil {
		return nil, err
	}
	key := core.NewDataKey()
	aead, err := masterkey.New(key[:])
	if err != nil {
		return nil, err
	}
	s := &SealedSecret{ID: string(core.NewID[core.SecretID]()), ProjectID: project, Master: w.Current()}
	s.Box = aead.Seal(s.name(), value)
	s.Key, err = w.Wrap(ctx, s.name(), key)
	return s, err
}

// openSecret decrypts a value.
func (c *Controller) openSecret(ctx context.Context, s SealedSecret) ([]byte, error) {
	w, err := c.wrapper()
	if err != nil {
		return nil, err
	}
	key, err := w.Unwrap(ctx, s.Master, s.name(), s.Key)
	if err != nil {
		return nil, err
	}
	aead, err := masterkey.New(key[:])
	if err != nil {
		return nil, err
	}
	value, err := aead.Open(s.name(), s.Box)
	if err != nil {
		return nil, core.Wrapf(err, core.FailedPrecondition, core.CodeKeyUnavailable, "%s was changed in the database", s.name())
	}
	return value, nil
}

// openSecrets decrypts values, by their ids, and says of each that cannot be decrypted why.
func (c *Controller) openSecrets(ctx context.Context, ids []string) (opened map[string][]byte, failed map[string]error) {
	opened, failed = map[string][]byte{}, map[string]error{}
	if len(ids) == 0 {
		return opened, failed
	}
	rows, err := read(ctx, c, System(), func(tx Tx) ([]SealedSecret, error) { return tx.Secrets(ctx, ids) })
	if err != nil {
		for _, id := range ids {
			failed[id] = err
		}
	}
	for _, s := range rows {
		if value, err := c.openSecret(ctx, s); err == nil {
			opened[s.ID] = value
		} else {
			failed[s.ID] = err
		}
	}
	return opened, failed
}

func (c *Controller) secretSource() (SecretSource, error) {
	if c.cfg.Secrets == nil {
		return nil, core.Errorf(core.Unavailable, core.CodeSecretUnavailable, "vault_ref: this controller knows no place that secrets are in; start controllers with --vault-addr, or give the secret itself")
	}
	return c.cfg.Secrets, nil
}

func (c *Controller) readSource(ctx context.Context, project core.ProjectID, ref string) (grant.Secret, error) {
	source, err := c.secretSource()
	if err != nil {
		return grant.Secret{}, err
	}
	return source.Read(ctx, project, ref)
}

// rewrapSecrets does for values what rewrap does for keys of projects.
func (c *Controller) rewrapSecrets(ctx context.Context) error {
	w := c.cfg.Wrapper
	if w == nil {
		return nil
	}
	rows, err := read(ctx, c, System(), func(tx Tx) ([]SealedSecret, error) { return tx.OtherSecrets(ctx, w.Current()) })
	if err != nil {
		return err
	}
	for _, s := range rows {
		key, err := w.Unwrap(ctx, s.Master, s.name(), s.Key)
		if err != nil { // grants that need it say so
			c.log.WarnContext(ctx, "the key of a secret cannot be unwrapped", "secret_id", s.ID, "err", err)
			continue
		}
		old := s.Master
		s.Master = w.Current()
		if s.Key, err = w.Wrap(ctx, s.name(), key); err != nil {
			return err
		}
		if err := c.store.InTx(ctx, System(), func(tx Tx) error { return tx.RewrapSecret(ctx, s, old) }); err != nil {
			return err
		}
	}
	if len(rows) > 0 {
		c.log.InfoContext(ctx, "the keys of secrets are wrapped by another master key", "count", len(rows), "now", w.Current())
	}
	return nil
}
