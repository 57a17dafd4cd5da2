package tenancy

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
)

// keyring caches valid keys for a short time, so that not every request costs a query. It also knows what is under way for each
// key, so that this ends with the key. It keeps only valid keys, so guesses cannot fill it.
type keyring struct {
	// mu guards the fields below.
	mu     sync.Mutex
	byHash map[[32]byte]cachedKey
	busy   map[core.KeyID]map[*work]struct{}
	used   map[core.KeyID]time.Time // since the rows were last written
}

type cachedKey struct {
	key    model.Key
	before time.Duration // by the clock of leases
}

// work is something under way for a key.
type work struct{ cancel context.CancelCauseFunc }

const maxCachedKeys = 4096

func (k *keyring) get(hash [32]byte, clock time.Duration) (model.Key, bool) {
	now := time.Now()
	k.mu.Lock()
	defer k.mu.Unlock()
	c, ok := k.byHash[hash]
	if !ok || clock >= c.before || !c.key.ExpiresAt.IsZero() && !now.Before(c.key.ExpiresAt) {
		return model.Key{}, false
	}
	k.use(c.key.ID, now)
	return c.key, true
}

func (k *keyring) put(hash [32]byte, key model.Key, before time.Duration) {
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
	for w := range k.busy[id] {
		w.cancel(ErrKeyEnded)
	}
}

// busyKeys are the keys for which something is under way.
func (k *keyring) busyKeys() []core.KeyID {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Collect(maps.Keys(k.busy))
}

// begin notes that something is under way for a key. It ends with the key, by cancel. The returned function must be called when it is done.
func (k *keyring) begin(id core.KeyID, cancel context.CancelCauseFunc) (done func()) {
	w := &work{cancel}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.busy == nil {
		k.busy = map[core.KeyID]map[*work]struct{}{}
	}
	if k.busy[id] == nil {
		k.busy[id] = map[*work]struct{}{}
	}
	k.busy[id][w] = struct{}{}
	return func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		delete(k.busy[id], w)
		if len(k.busy[id]) == 0 {
			delete(k.busy, id)
		}
	}
}

// note records that a key was used now.
func (k *keyring) note(id core.KeyID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.use(id, time.Now())
}

// known reports whether a secret with this hash belonged to a valid key at the last look.
func (k *keyring) known(hash [32]byte) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	_, ok := k.byHash[hash]
	return ok
}
