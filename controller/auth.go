package controller

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
)

// ErrKeyEnded ends the work that is under way for a key that was revoked or has expired.
var ErrKeyEnded = core.Errorf(core.Unauthenticated, core.CodeUnauthenticated, "the API key is not known, has expired or was revoked")

// keyring caches valid keys for a short time, so that not every request costs a query. It also knows what is under way for each
// key, so that this ends with the key. It keeps only valid keys, so guesses cannot fill it.
type keyring struct {
	// mu guards the fields below.
	mu     sync.Mutex
	byHash map[[32]byte]cachedKey
	held   map[core.KeyID]map[*hold]struct{}
	used   map[core.KeyID]time.Time // since the rows were last written
}

type cachedKey struct {
	key    Key
	before time.Duration // by the clock of leases
}

// hold is something under way for a key.
type hold struct{ cancel context.CancelCauseFunc }

const maxCachedKeys = 4096

func (k *keyring) get(hash [32]byte, clock time.Duration) (Key, bool) {
	now := time.Now()
	k.mu.Lock()
	defer k.mu.Unlock()
	c, ok := k.byHash[hash]
	if !ok || clock >= c.before || !c.key.ExpiresAt.IsZero() && !now.Before(c.key.ExpiresAt) {
		return Key{}, false
	}
	k.use(c.key.ID, now)
	return c.key, true
}

func (k *keyring) put(hash [32]byte, key Key, before time.Duration) {
	now := time.Now()
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.byHash == nil || len(k.byHash) >= maxCachedKeys {
		k.byHash = map[[32]byte]cachedKey{}
	}
	k.byHash[hash] = cachedKey{key, before}
	k.use(key.ID, now)
}

// use needs mu.
func (k *keyring) use(id core.KeyID, at time.Time) {
	if k.used == nil {
		k.used = map[core.KeyID]time.Time{}
	}
	k.used[id] = at
}

// takeUsed returns which keys were used since it was last called.
func (k *keyring) takeUsed() map[core.KeyID]time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	used := k.used
	k.used = nil
	return used
}

// drop forgets a key and ends what is under way for it.
func (k *keyring) drop(id core.KeyID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	maps.DeleteFunc(k.byHash, func(_ [32]byte, c cachedKey) bool { return c.key.ID == id })
	for h := range k.held[id] {
		h.cancel(ErrKeyEnded)
	}
}

func (k *keyring) heldKeys() []core.KeyID {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Collect(maps.Keys(k.held))
}

// WithKey returns a context that ends with the key, at most some seconds after it was revoked at another controller.
// The returned function must be called when the work is done.
func (c *Controller) WithKey(ctx context.Context, key Key) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(request.WithKey(ctx, key))
	h := &hold{cancel}
	stop := func() {}
	if !key.ExpiresAt.IsZero() {
		ctx, stop = context.WithDeadlineCause(ctx, key.ExpiresAt, ErrKeyEnded)
	}
	k := &c.keys
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.held == nil {
		k.held = map[core.KeyID]map[*hold]struct{}{}
	}
	if k.held[key.ID] == nil {
		k.held[key.ID] = map[*hold]struct{}{}
	}
	k.held[key.ID][h] = struct{}{}
	return ctx, func() {
		stop()
		cancel(nil)
		k.mu.Lock()
		defer k.mu.Unlock()
		delete(k.held[key.ID], h)
		if len(k.held[key.ID]) == 0 {
			delete(k.held, key.ID)
		}
	}
}

const keyUseInterval = 5 * time.Second // between writes of when keys were used

// keyLoop ends what is under way for keys that were revoked elsewhere, in case the notification was lost. It also records when keys
// were used.
func (c *Controller) keyLoop(ctx context.Context) {
	var wrote time.Time
	pace.Every(ctx, c.cfg.LoopInterval, nil, func() {
		c.limits.sweep(time.Now())
		var used map[core.KeyID]time.Time
		if time.Since(wrote) >= keyUseInterval {
			used, wrote = c.keys.takeUsed(), time.Now()
		}
		held := c.keys.heldKeys()
		if len(used) == 0 && len(held) == 0 {
			return
		}
		ended, err := read(ctx, c, System(), func(tx Tx) ([]core.KeyID, error) {
			if len(used) > 0 {
				if err := tx.UseKeys(ctx, used); err != nil {
					return nil, err
				}
			}
			return tx.EndedKeys(ctx, held)
		})
		if err != nil && ctx.Err() == nil {
			c.log.DebugContext(ctx, "keys were not checked", "err", err)
		}
		for _, id := range ended {
			c.keys.drop(id)
		}
	})
}

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
func (c *Controller) Authenticate(ctx context.Context, secret string) (Key, error) {
	if !wellFormed(secret) {
		return Key{}, ErrKeyEnded
	}
	hash := sha256.Sum256([]byte(secret))
	if key, ok := c.keys.get(hash, c.cfg.Clock()); ok {
		return key, nil
	}
	began := c.cfg.Clock()
	key, err := read(ctx, c, System(), func(tx Tx) (Key, error) { return tx.KeyByHash(ctx, hash) })
	if err != nil {
		return Key{}, err
	}
	c.keys.put(hash, key, began+c.cfg.KeyCache)
	return key, nil
}

// ValidKey returns a key for which a part of this process acts, unless the key has ended. Nothing is cached: a revocation counts at
// once.
func (c *Controller) ValidKey(ctx context.Context, id core.KeyID) (Key, error) {
	if _, err := core.ParseID[core.KeyID](string(id)); err != nil {
		return Key{}, ErrKeyEnded
	}
	key, err := read(ctx, c, System(), func(tx Tx) (Key, error) {
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
		return Key{}, ErrKeyEnded
	}
	if err == nil {
		c.keys.mu.Lock()
		c.keys.use(id, time.Now())
		c.keys.mu.Unlock()
	}
	return key, err
}

// Known reports whether a secret belonged to a valid key at the last look. The key may have ended since.
func (c *Controller) Known(secret string) bool {
	c.keys.mu.Lock()
	defer c.keys.mu.Unlock()
	_, ok := c.keys.byHash[sha256.Sum256([]byte(secret))]
	return ok
}

// The lifetime of a key if the request does not give one, and the longest one.
const (
	DefaultKeyTTL = 90 * 24 * time.Hour
	MaxKeyTTL     = 5 * 365 * 24 * time.Hour
)

// CreateKey makes a key and returns its secret, which is kept nowhere. The new key can do no more than the asking key, and lives no
// longer. Without scopes, it gets all scopes of the asking key that concern one project, except core.NamedScopes.
func (c *Controller) CreateKey(ctx context.Context, actor Key, project core.ProjectID, name string, scopes []core.KeyScope, ttl time.Duration) (Key, string, error) {
	if len(scopes) == 0 {
		scopes = slices.DeleteFunc(slices.Clone(core.ProjectScopes), func(s core.KeyScope) bool {
			return slices.Contains(core.NamedScopes, s) || core.MissingScope(actor.Scopes, s) != ""
		})
	}
	if missing := core.MissingScope(actor.Scopes, scopes...); missing != "" {
		return Key{}, "", core.Errorf(core.PermissionDenied, core.CodePermissionDenied, "a key cannot give away the scope %s that it does not have", missing)
	}
	if ttl == 0 {
		ttl = DefaultKeyTTL
	}
	id := core.NewID[core.KeyID]()
	prefix, secret := newSecret(id)
	slices.Sort(scopes)
	key := Key{
		ID: id, ProjectID: project, Name: name, Prefix: prefix, Hash: sha256.Sum256([]byte(secret)), Scopes: slices.Compact(scopes), Parent: actor.ID,
	}
	made, err := read(ctx, c, reachOf(actor), func(tx Tx) (Key, error) {
		if err := request.Bind(ctx, tx, project, string(id)); err != nil {
			return Key{}, err
		}
		if _, err := tx.Project(ctx, project); err != nil {
			return Key{}, err
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
func (c *Controller) Key(ctx context.Context, actor Key, id core.KeyID) (Key, error) {
	return read(ctx, c, reachOf(actor), func(tx Tx) (Key, error) { return tx.Key(ctx, id) })
}

// Keys lists those of a project, newest first, ended ones too.
func (c *Controller) Keys(ctx context.Context, actor Key, project core.ProjectID, p Page) ([]Key, error) {
	return read(ctx, c, reachOf(actor), func(tx Tx) ([]Key, error) {
		if _, err := tx.Project(ctx, project); err != nil {
			return nil, err
		}
		return tx.Keys(ctx, project, p)
	})
}

// RevokeKey ends a key, the keys that were made with it, and what is under way for them. A key cannot end one that can do more.
func (c *Controller) RevokeKey(ctx context.Context, actor Key, id core.KeyID) error {
	_, err := read(ctx, c, reachOf(actor), func(tx Tx) (any, error) {
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

// WithRequestID marks a context with the id of the request that it serves; operations that it starts carry it.
func WithRequestID(ctx context.Context, id string) context.Context {
	return core.WithRequestID(ctx, id)
}

func requestID(ctx context.Context) string { return core.RequestIDOf(ctx) }
