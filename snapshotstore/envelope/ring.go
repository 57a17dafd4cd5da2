package envelope

import (
	"context"
	"maps"
	"sync"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

// Ring has the keys that a process was given, only in memory. It is safe for concurrent use; the zero Ring is empty.
type Ring struct {
	mu      sync.RWMutex
	keys    map[string]*Key         // by the prefix of the attempt's objects
	secrets map[string]core.DataKey // likewise
}

// NewRing makes a ring from keys by the prefixes of their objects.
func NewRing(keys map[string]core.DataKey) *Ring {
	r := new(Ring)
	r.Add(keys)
	return r
}

// Add adds keys.
func (r *Ring) Add(keys map[string]core.DataKey) {
	if len(keys) == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.keys == nil {
		r.keys, r.secrets = make(map[string]*Key), make(map[string]core.DataKey)
	}
	for prefix, secret := range keys {
		r.keys[prefix], r.secrets[prefix] = NewKey(secret, 0), secret
	}
}

// Keys returns all keys, to give them to another process.
func (r *Ring) Keys() map[string]core.DataKey {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return maps.Clone(r.secrets)
}

// of returns the key of an encrypted object; nil if the ring does not have it.
func (r *Ring) of(object string) *Key {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.keys[Prefix(object)]
}

// keyed is a store together with keys.
type keyed struct {
	blob.Blobs
	ring *Ring
}

// Forget implements blob.Forgetter.
func (k *keyed) Forget(ctx context.Context, key string, off, n int64) {
	blob.Forget(ctx, k.Blobs, key, off, n)
}

// With returns a store together with keys for it. The store returns bytes as they are stored; KeyOf finds the key that
// opens them.
func With(blobs blob.Blobs, ring *Ring) blob.Blobs {
	if blobs == nil {
		return nil
	}
	return &keyed{blobs, ring}
}

// KeyOf returns the key of an object of a store, nil for an unencrypted object. KEY_UNAVAILABLE if the store came
// without that key.
func KeyOf(blobs blob.Blobs, object string) (*Key, error) {
	if !Encrypted(object) {
		return nil, nil //nolint:nilnil // an unencrypted object needs no key
	}
	if k, ok := blobs.(*keyed); ok {
		if key := k.ring.of(object); key != nil {
			return key, nil
		}
	}
	return nil, core.Errorf(core.FailedPrecondition, core.CodeKeyUnavailable, "object %s is encrypted, and its key is not here", object)
}
