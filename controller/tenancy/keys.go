package tenancy

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
)

// ErrKeyEnded ends the work that is under way for a key that was revoked or has expired.
var ErrKeyEnded = core.Errorf(core.Unauthenticated, core.CodeUnauthenticated, "the API key is not known, has expired or was revoked")

// KeyTx keeps API keys.
type KeyTx interface {
	// EnsureKey stores a key unless there is one with the same secret.
	EnsureKey(ctx context.Context, key model.Key) error
	// KeyByHash finds a key that is neither revoked nor expired; UNAUTHENTICATED otherwise.
	KeyByHash(ctx context.Context, hash [32]byte) (model.Key, error)
	// InsertKey stores a key that lives for ttl and no longer than its parent; UNAUTHENTICATED when that one has ended.
	InsertKey(ctx context.Context, key model.Key, ttl time.Duration) (model.Key, error)
	Key(ctx context.Context, id core.KeyID) (model.Key, error)
	Keys(ctx context.Context, project core.ProjectID, p model.Page) ([]model.Key, error)
	// RevokeKey ends a key and those that were made of it, and tells all controllers when the transaction commits. To
	// revoke one that is revoked is no error.
	RevokeKey(ctx context.Context, id core.KeyID) error
	// EndedKeys returns those of the given keys that are revoked or have expired.
	EndedKeys(ctx context.Context, ids []core.KeyID) ([]core.KeyID, error)
	// UseKeys records when keys were last used.
	UseKeys(ctx context.Context, at map[core.KeyID]time.Time) error
}

// WithKey returns a context that ends with the key, at most some seconds after it was revoked at another controller.
// The returned function must be called when the work is done.
func (m *Manager) WithKey(ctx context.Context, key model.Key) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(request.WithKey(ctx, key))
	stop := func() {}
	if !key.ExpiresAt.IsZero() {
		ctx, stop = context.WithDeadlineCause(ctx, key.ExpiresAt, ErrKeyEnded)
	}
	done := m.keys.begin(key.ID, cancel)
	return ctx, func() {
		stop()
		cancel(nil)
		done()
	}
}

const keyUseInterval = 5 * time.Second // between writes of when keys were used

// Run ends what is under way for keys that were revoked elsewhere, in case the notification was lost. It also records when keys
// were used.
func (m *Manager) Run(ctx context.Context) {
	var wrote time.Time
	pace.Every(ctx, m.cfg.Interval, nil, func() {
		var used map[core.KeyID]time.Time
		if time.Since(wrote) >= keyUseInterval {
			used, wrote = m.keys.takeUsed(), time.Now()
		}
		busy := m.keys.busyKeys()
		if len(used) == 0 && len(busy) == 0 {
			return
		}
		ended, err := query(ctx, m, model.System(), func(tx Tx) ([]core.KeyID, error) {
			if len(used) > 0 {
				if err := tx.UseKeys(ctx, used); err != nil {
					return nil, err
				}
			}
			return tx.EndedKeys(ctx, busy)
		})
		if err != nil && ctx.Err() == nil {
			m.cfg.Log.DebugContext(ctx, "keys were not checked", "err", err)
		}
		for _, id := range ended {
			m.keys.drop(id)
		}
	})
}

// KeyEnded forgets a key that was revoked at another controller, and ends what is under way for it.
func (m *Manager) KeyEnded(id core.KeyID) { m.keys.drop(id) }

// A key has the form cpk_<the random part of its id>_<secret>, so that scanners recognise a leaked key and people see which key it is.
const (
	keyPrefix   = "cpk_"
	keyIDPrefix = "key_"
	secretBytes = 32
	maxSecret   = 512
)

var secretEncoding = base32.NewEncoding("0123456789abcdefghjkmnpqrstvwxyz").WithPadding(base32.NoPadding)

func newSecret(id core.KeyID) (prefix, secret string) {
	var b [secretBytes]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand ends the program instead
	prefix = keyPrefix + strings.TrimPrefix(string(id), keyIDPrefix)
	return prefix, prefix + "_" + secretEncoding.EncodeToString(b[:])
}

// wellFormed refuses a text that cannot be a key, before the database is asked. A bootstrap key may have any form.
func wellFormed(secret string) bool {
	rest, ours := strings.CutPrefix(secret, keyPrefix)
	if !ours {
		return secret != "" && len(secret) <= maxSecret
	}
	body, tail, _ := strings.Cut(rest, "_")
	if _, err := core.ParseID[core.KeyID](keyIDPrefix + body); err != nil {
		return false
	}
	raw, err := secretEncoding.DecodeString(tail)
	return err == nil && len(raw) == secretBytes
}

// Authenticate finds the key of a secret. Every wrong secret gives the same UNAUTHENTICATED.
func (m *Manager) Authenticate(ctx context.Context, secret string) (model.Key, error) {
	if !wellFormed(secret) {
		return model.Key{}, ErrKeyEnded
	}
	hash := sha256.Sum256([]byte(secret))
	if key, ok := m.keys.get(hash, m.cfg.Clock()); ok {
		return key, nil
	}
	began := m.cfg.Clock()
	key, err := query(ctx, m, model.System(), func(tx Tx) (model.Key, error) { return tx.KeyByHash(ctx, hash) })
	if err != nil {
		return model.Key{}, err
	}
	m.keys.put(hash, key, began+m.cfg.KeyCache)
	return key, nil
}

// ValidKey returns a key for which a part of this process acts, unless the key has ended. Nothing is cached: a revocation counts at
// once.
func (m *Manager) ValidKey(ctx context.Context, id core.KeyID) (model.Key, error) {
	if _, err := core.ParseID[core.KeyID](string(id)); err != nil {
		return model.Key{}, ErrKeyEnded
	}
	key, err := query(ctx, m, model.System(), func(tx Tx) (model.Key, error) {
		key, err := tx.Key(ctx, id)
		if err != nil {
			return key, err
		}
		ended, err := tx.EndedKeys(ctx, []core.KeyID{id})
		if err == nil && len(ended) > 0 {
			err = ErrKeyEnded
		}
		return key, err
	})
	if core.CategoryOf(err) == core.NotFound {
		return model.Key{}, ErrKeyEnded
	}
	if err == nil {
		m.keys.note(id)
	}
	return key, err
}

// Known reports whether a secret belonged to a valid key at the last look. The key may have ended since.
func (m *Manager) Known(secret string) bool {
	return m.keys.known(sha256.Sum256([]byte(secret)))
}

// defaultKeyTTL is the lifetime of a key if the request does not give one. The contract has the longest one.
const defaultKeyTTL = 90 * 24 * time.Hour

// CreateKey makes a key and returns its secret, which is not stored. The new key has no more rights than the asking key, and does
// not outlive it. Without scopes, it gets all scopes of the asking key that concern one project, except core.NamedScopes.
func (m *Manager) CreateKey(ctx context.Context, actor model.Key, project core.ProjectID, name string, scopes []core.KeyScope, ttl time.Duration) (model.Key, string, error) {
	if len(scopes) == 0 {
		scopes = slices.DeleteFunc(slices.Clone(core.ProjectScopes), func(s core.KeyScope) bool {
			return slices.Contains(core.NamedScopes, s) || core.MissingScope(actor.Scopes, s) != ""
		})
	}
	if missing := core.MissingScope(actor.Scopes, scopes...); missing != "" {
		return model.Key{}, "", core.Errorf(core.PermissionDenied, core.CodePermissionDenied, "a key cannot give away the scope %s that it does not have", missing)
	}
	if ttl == 0 {
		ttl = defaultKeyTTL
	}
	id := core.NewID[core.KeyID]()
	prefix, secret := newSecret(id)
	slices.Sort(scopes)
	key := model.Key{
		ID: id, ProjectID: project, Name: name, Prefix: prefix, Hash: sha256.Sum256([]byte(secret)), Scopes: slices.Compact(scopes), Parent: actor.ID,
	}
	made, err := query(ctx, m, reachOf(actor), func(tx Tx) (model.Key, error) {
		if err := request.Bind(ctx, tx, project, string(id)); err != nil {
			return model.Key{}, err
		}
		if _, err := tx.Project(ctx, project); err != nil {
			return model.Key{}, err
		}
		return tx.InsertKey(ctx, key, ttl)
	})
	if again, ok := errors.AsType[*request.RepeatError](err); ok {
		err = core.Errorf(core.Conflict, core.CodeIdempotencySecretShown,
			"the first request with this idempotency key made %s, whose secret was shown once and is kept nowhere; if it did not arrive, revoke that key and make another", again.Use.Object)
	}
	return made, secret, err
}

// Key returns one.
func (m *Manager) Key(ctx context.Context, actor model.Key, id core.KeyID) (model.Key, error) {
	return query(ctx, m, reachOf(actor), func(tx Tx) (model.Key, error) { return tx.Key(ctx, id) })
}

// Keys lists those of a project, newest first, ended ones too.
func (m *Manager) Keys(ctx context.Context, actor model.Key, project core.ProjectID, p model.Page) ([]model.Key, error) {
	return query(ctx, m, reachOf(actor), func(tx Tx) ([]model.Key, error) {
		if _, err := tx.Project(ctx, project); err != nil {
			return nil, err
		}
		return tx.Keys(ctx, project, p)
	})
}

// RevokeKey ends a key, the keys that were made with it, and what is under way for them. A key cannot end one that can do more.
func (m *Manager) RevokeKey(ctx context.Context, actor model.Key, id core.KeyID) error {
	_, err := query(ctx, m, reachOf(actor), func(tx Tx) (any, error) {
		key, err := tx.Key(ctx, id)
		if err != nil {
			return nil, err
		}
		if missing := core.MissingScope(actor.Scopes, key.Scopes...); missing != "" {
			return nil, core.Errorf(core.PermissionDenied, core.CodePermissionDenied, "key %s has the scope %s; only a key that has it too can revoke it", id, missing)
		}
		return nil, tx.RevokeKey(ctx, id)
	})
	return err
}
