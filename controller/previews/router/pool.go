package router

import (
	"context"
	"maps"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/controller/previews"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sandboxhost"
)

// The bounds of requests to previews at the same time, streams among them.
const (
	maxOfWorkspace = 128
	maxOfProject   = 512
	maxOfAll       = 4096
)

// places are the requests that are served now.
type places struct {
	mu   sync.Mutex // guards what follows
	open map[*visit]struct{}
	of   map[any]int // requests of a workspace or of a project, by its id
}

// enter counts a request, unless there are too many. leave must be called at its end.
func (p *places) enter(v *visit) (leave func(), full bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	workspace, project := v.preview.WorkspaceID, v.preview.ProjectID
	if len(p.open) >= maxOfAll || p.of[workspace] >= maxOfWorkspace || p.of[project] >= maxOfProject {
		return nil, true
	}
	if p.of == nil {
		p.of = map[any]int{}
	}
	p.open[v] = struct{}{}
	p.of[workspace]++
	p.of[project]++
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.open, v)
		for _, id := range []any{workspace, project} {
			if p.of[id]--; p.of[id] == 0 {
				delete(p.of, id)
			}
		}
	}, false
}

// reached records where a request goes.
func (p *places) reached(v *visit, up previews.Upstream) {
	p.mu.Lock()
	defer p.mu.Unlock()
	v.upstream, v.preview.Epoch = up, up.Epoch() // a resume has begun another epoch
}

// since returns copies of the requests that began before a time.
func (p *places) since(before time.Time) map[sandboxhost.Target][]visit {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := map[sandboxhost.Target][]visit{}
	for v := range p.open {
		if v.since.Before(before) {
			out[v.target] = append(out[v.target], *v)
		}
	}
	return out
}

// The bounds of connections to guests.
const (
	maxIdle        = 16 // of one port of a sandbox
	idleTime       = 30 * time.Second
	headerTime     = 5 * time.Minute // a guest may think for so long before it answers
	maxHeaderBytes = 64 << 10        // of an answer
)

// upstreamKey names a port of one incarnation of a sandbox: after a restore, no request uses a connection to the old one.
type upstreamKey struct {
	sandbox core.SandboxID
	port    int
}

// upstream has the connections to one port of one sandbox.
type upstream struct {
	*http.Transport
	users int
	used  time.Time
}

// pool has the connections to ports of sandboxes.
type pool struct {
	mu  sync.Mutex // guards all
	all map[upstreamKey]*upstream
}

// take returns the connections to a port. release must be called when the request has ended.
func (p *pool) take(up previews.Upstream) (rt http.RoundTripper, release func()) {
	key := upstreamKey{up.Sandbox, up.Port}
	p.mu.Lock()
	defer p.mu.Unlock()
	u, ok := p.all[key]
	if !ok {
		u = &upstream{Transport: &http.Transport{
			DialContext:         func(ctx context.Context, _, _ string) (net.Conn, error) { return up.Connect(ctx) },
			MaxIdleConnsPerHost: maxIdle, IdleConnTimeout: idleTime, DisableCompression: true,
			MaxResponseHeaderBytes: maxHeaderBytes, ResponseHeaderTimeout: headerTime,
		}}
		if p.all == nil {
			p.all = map[upstreamKey]*upstream{}
		}
		p.all[key] = u
	}
	u.users++
	return u.Transport, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		u.users--
		u.used = time.Now()
	}
}

// prune closes the connections that nobody has used for a while. Their number is bounded by the requests of that time.
func (p *pool) prune() { p.drop(time.Now().Add(-idleTime)) }

func (p *pool) close() { p.drop(time.Now().Add(time.Hour)) }

func (p *pool) drop(before time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.all, func(_ upstreamKey, u *upstream) bool {
		if u.users > 0 || u.used.After(before) {
			return false
		}
		u.CloseIdleConnections()
		return true
	})
}
