// Package peers asks other hosts for their cached bytes of a store's objects before it asks the
// store. It is a blob.Blobs in front of another one.
//
// The context of a read names the peers. A peer has a short time to answer. A peer that was too
// slow or unreachable is not asked for a while. No peer is trusted: a reader compares digests, and
// reports wrong bytes with Forget. Then that object is read from the store, and the peer that sent
// it is no longer asked.
package peers

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

// MaxRange is the largest range in a request to a peer, in bytes.
const MaxRange = 4 << 20

const (
	// A range must arrive within patience, plus a millisecond for each pace bytes.
	patience = 300 * time.Millisecond
	pace     = 16 << 10
	// avoided is the time for which a peer is not asked after a failure. distrusted is that time after it gave wrong
	// bytes; for the same time, the object is read only from the store.
	avoided    = 15 * time.Second
	distrusted = 10 * time.Minute
	// asked is the maximum number of peers that are asked for one range.
	asked = 2
	// remembered bounds the number of objects in the maps below.
	remembered = 4096
)

// Peer is a host that may have objects in its cache.
type Peer struct {
	ID       core.RunnerID `json:"id"`
	Endpoint string        `json:"endpoint"` // https://host:port
}

// Asker asks a peer for a range of an object. blob.ErrNotFound if the peer does not have all of it; fewer bytes if the
// object ends before.
type Asker interface {
	Ask(ctx context.Context, peer Peer, key string, off, n int64) ([]byte, error)
}

type contextKey struct{}

// With names the peers, best first, that reads under the returned context may ask.
func With(ctx context.Context, list []Peer) context.Context {
	return context.WithValue(ctx, contextKey{}, list)
}

// From returns the peers that With named.
func From(ctx context.Context) []Peer {
	list, _ := ctx.Value(contextKey{}).([]Peer)
	return list
}

// Store asks peers before it asks the store behind it.
type Store struct {
	blob.Blobs // the store behind

	ask   Asker
	log   *slog.Logger
	count metrics

	mu     sync.Mutex // guards the fields below
	banned map[core.RunnerID]time.Time
	served map[string]core.RunnerID // the peer that last gave a part of an object
	doubt  map[string]time.Time     // objects that are read only from the store until this time
	absent map[lack]time.Time
}

type lack struct {
	peer core.RunnerID
	key  string
}

type metrics struct{ served, bytes, absent, failed, wrong atomic.Int64 }

var (
	_ blob.Blobs     = (*Store)(nil)
	_ blob.Forgetter = (*Store)(nil)
)

// New puts peers in front of a store. to may be nil: then the metrics are not registered.
func New(behind blob.Blobs, ask Asker, log *slog.Logger, to prometheus.Registerer) (*Store, error) {
	s := &Store{
		Blobs: behind, ask: ask, log: log,
		banned: map[core.RunnerID]time.Time{}, served: map[string]core.RunnerID{}, doubt: map[string]time.Time{}, absent: map[lack]time.Time{},
	}
	if to == nil {
		return s, nil
	}
	for _, c := range []struct {
		name, help string
		count      *atomic.Int64
	}{
		{"served_total", "Reads that another runner answered.", &s.count.served},
		{"bytes_total", "Bytes that other runners gave.", &s.count.bytes},
		{"absent_total", "Reads for which a runner was asked and did not have the bytes.", &s.count.absent},
		{"failed_total", "Reads for which a runner was too slow or could not be reached.", &s.count.failed},
		{"wrong_total", "Objects for which a runner gave wrong bytes.", &s.count.wrong},
	} {
		value := func() float64 { return float64(c.count.Load()) }
		if err := to.Register(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "coppice_peer_" + c.name, Help: c.help}, value)); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// Get implements blob.Blobs.
func (s *Store) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	list := From(ctx)
	if len(list) == 0 || n == 0 || n > MaxRange || blob.CheckGet(key, off, n) != nil {
		return s.Blobs.Get(ctx, key, off, n)
	}
	for _, p := range s.choose(list, key) {
		b, err := s.from(ctx, p, key, off, n)
		if err == nil {
			return io.NopCloser(bytes.NewReader(b)), nil
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
	}
	return s.Blobs.Get(ctx, key, off, n)
}

// choose returns the peers that may have an object and are not avoided.
func (s *Store) choose(list []Peer, key string) []Peer {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if now.Before(s.doubt[key]) {
		return nil
	}
	list = slices.DeleteFunc(slices.Clone(list), func(p Peer) bool { return now.Before(s.banned[p.ID]) || now.Before(s.absent[lack{p.ID, key}]) })
	return list[:min(asked, len(list))]
}

func (s *Store) from(ctx context.Context, p Peer, key string, off, n int64) ([]byte, error) {
	short, cancel := context.WithTimeout(ctx, patience+time.Duration(n/pace)*time.Millisecond)
	defer cancel()
	b, err := s.ask.Ask(short, p, key, off, n)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err == nil:
		s.count.served.Add(1)
		s.count.bytes.Add(int64(len(b)))
		note(s.served, key, p.ID)
	case errors.Is(err, blob.ErrNotFound):
		s.count.absent.Add(1)
		note(s.absent, lack{p.ID, key}, time.Now().Add(avoided))
	case ctx.Err() == nil:
		s.count.failed.Add(1)
		note(s.banned, p.ID, time.Now().Add(avoided))
		s.log.DebugContext(ctx, "a runner did not deliver an object and is not asked for a while", "peer", p.ID, "object", key, "err", err)
	}
	return b, err
}

// Forget implements blob.Forgetter.
func (s *Store) Forget(ctx context.Context, key string, off, n int64) {
	s.mu.Lock()
	by, known := s.served[key]
	delete(s.served, key)
	note(s.doubt, key, time.Now().Add(distrusted))
	if known {
		s.count.wrong.Add(1)
		note(s.banned, by, time.Now().Add(distrusted))
	}
	s.mu.Unlock()
	if known {
		s.log.WarnContext(ctx, "a runner delivered wrong bytes of an object; the object is read from the store, and that runner is not asked for a while", "peer", by, "object", key)
	}
	blob.Forget(ctx, s.Blobs, key, off, n)
}

// note adds an entry and keeps a map small: a forgotten entry costs only one more request.
func note[K comparable, V any](m map[K]V, k K, v V) {
	if len(m) >= remembered {
		clear(m)
	}
	m[k] = v
}
