package arrakis

import (
	"context"
	"sync"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// maxTransfers is how many requests with files of one key are served at the same time, because their bytes are in memory. More wait.
const maxTransfers = 8

// transfers are the requests with files, by key.
type transfers struct {
	mu   sync.Mutex // guards keys
	keys map[coppice.KeyID]*line
}

// line has the places of a key, and counts who has one or waits for one.
type line struct {
	places chan struct{}
	users  int
}

// enter waits for a place. The returned function gives it back.
func (t *transfers) enter(ctx context.Context, key coppice.KeyID) (leave func(), err error) {
	t.mu.Lock()
	if t.keys == nil {
		t.keys = map[coppice.KeyID]*line{}
	}
	l := t.keys[key]
	if l == nil {
		l = &line{places: make(chan struct{}, maxTransfers)}
		t.keys[key] = l
	}
	l.users++
	t.mu.Unlock()
	gone := func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(t.keys, key)
		}
	}
	select {
	case l.places <- struct{}{}:
		return func() { <-l.places; gone() }, nil
	case <-ctx.Done():
		gone()
		return nil, context.Cause(ctx)
	}
}
