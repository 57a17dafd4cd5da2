package router

import (
	"context"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/controller/previews"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sandboxhost"
)

// The bounds of requests to previews at the same time, streams among them. One visitor gets half of what a workspace or a project has, and a
// quarter of what there is.
const (
	maxOfWorkspace = 128
	maxOfProject   = 512
	maxOfAll       = 4096

	maxOfVisitor            = maxOfAll / 4
	maxOfVisitorOfWorkspace = maxOfWorkspace / 2
	maxOfVisitorOfProject   = maxOfProject / 2
)

// places are the requests that are served now.
type places struct {
	mu   sync.Mutex // guards what follows
	open map[*visit]struct{}
	of   map[any]int // requests of a share, by what has it
}

// The shares of a visitor.
type (
	ofWorkspace struct {
		visitor   netip.Prefix
		workspace core.WorkspaceID
	}
	ofProject struct {
		visitor netip.Prefix
		project core.ProjectID
	}
)

// shares are what a request takes a place of, and how many places each has.
func (v *visit) shares() map[any]int {
	workspace, project := v.preview.WorkspaceID, v.preview.ProjectID
	return map[any]int{
		workspace: maxOfWorkspace, project: maxOfProject, v.visitor: maxOfVisitor,
		ofWorkspace{v.visitor, workspace}: maxOfVisitorOfWorkspace, ofProject{v.visitor, project}: maxOfVisitorOfProject,
	}
}

// enter counts a request, unless there are too many. leave must be called at its end.
func (p *places) enter(v *visit) (leave func(), full bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	shares := v.shares()
	if len(p.open) >= maxOfAll {
		return nil, true
	}
	for share, most := range shares {
		if p.of[share] >= most {
			return nil, true
		}
	}
	if p.of == nil {
		p.of = map[any]int{}
	}
	p.open[v] = struct{}{}
	for share := range shares {
		p.of[share]++
	}
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.open, v)
		for share := range shares {
			if p.of[share]--; p.of[share] == 0 {
				delete(p.of, share)
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

// look is what a request is at one moment.
type look struct {
	preview  previews.Preview
	upstream previews.Upstream
	end      context.CancelFunc
	moves    bool // it was in use since the last look
}

// since looks at the requests that began before a time.
func (p *places) since(before time.Time) map[sandboxhost.Target][]look {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := map[sandboxhost.Target][]look{}
	for v := range p.open {
		if v.since.Before(before) {
			out[v.target] = append(out[v.target], look{v.preview, v.upstream, v.end, v.traffic.moves()})
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
