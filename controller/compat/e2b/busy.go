package e2b

import (
	"net/http"
	"sync"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// maxRequests bounds the requests of one key to daemons and ports of sandboxes at the same time.
const maxRequests = 64

// busy counts the requests of keys.
type busy struct {
	mu sync.Mutex // guards n
	n  map[coppice.KeyID]int
}

// enter counts a request, unless the key has as many as it may have. The returned function must be called when the request has ended.
func (b *busy) enter(key coppice.KeyID) (leave func(), f *shared.StatusError) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.n[key] >= maxRequests {
		return nil, shared.Failf(http.StatusTooManyRequests, "this key has %d requests to sandboxes at the same time, the maximum; repeat the request later", maxRequests)
	}
	if b.n == nil {
		b.n = map[coppice.KeyID]int{}
	}
	b.n[key]++
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.n[key]--; b.n[key] == 0 {
			delete(b.n, key)
		}
	}, nil
}
