// Package router serves previews: it leads requests for <port>-<id>.<domain> to a port of a guest. It owns
// who gets in, what reaches the guest and what a guest may answer, and the connections to guests. It
// knows no database: package previews finds previews and judges tokens.
package router

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/openlimit"
	"github.com/coppice-dev/coppice/controller/previews"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/relay"
	"github.com/coppice-dev/coppice/internal/sandboxhost"
)

// Previews finds previews, judges their tokens and reaches their guests.
type Previews interface {
	// Recent returns what was found for a name a moment ago: a preview, or that there is none. It does not read the database.
	Recent(t sandboxhost.Target) (p previews.Preview, known bool, err error)
	// Lookup is Find for a request that was not let in yet.
	Lookup(ctx context.Context, t sandboxhost.Target) (previews.Preview, error)
	// Queue waits until another read may begin for such a request. leave must be called after the read.
	Queue(ctx context.Context) (leave func(), err error)
	Find(ctx context.Context, t sandboxhost.Target) (previews.Preview, error)
	Token(p previews.Preview, token string) bool
	Reach(ctx context.Context, p previews.Preview) (previews.Upstream, error)
	Used(u previews.Upstream)
}

// Keys judges API keys.
type Keys interface {
	Authenticate(ctx context.Context, secret string) (model.Key, error)
	// Known reports whether a secret was that of a valid key a moment ago.
	Known(secret string) bool
	// WithKey returns a context that ends with the key, and a function that must be called when the work is done.
	WithKey(ctx context.Context, key model.Key) (context.Context, context.CancelFunc)
}

// Config says what a router works with. Every field but Proxies is required.
type Config struct {
	Previews Previews
	Keys     Keys
	Domain   string         // the wildcard name
	Proxies  []netip.Prefix // that may say by X-Forwarded-For who the client is
	Log      *slog.Logger
}

// Router is a handler. Run must run beside it.
type Router struct {
	cfg       Config
	pool      pool
	places    places
	strangers *openlimit.Tree
}

// New makes a router.
func New(cfg Config) *Router {
	return &Router{cfg: cfg, places: places{open: map[*visit]struct{}{}}, strangers: openlimit.New(strangersPerSecond, strangersBurst)}
}

// The headers of this router. None of them reaches a guest.
const (
	headerKey     = "Coppice-Key"           // an API key, for a private preview
	headerToken   = "Coppice-Preview-Token" //nolint:gosec // G101: the name of the header with the token of a signed preview
	headerSandbox = "E2b-Sandbox-Id"
	headerPort    = "E2b-Sandbox-Port"
	headerTraffic = "E2b-Traffic-Access-Token"
)

// visit is an admitted request.
type visit struct {
	preview  previews.Preview
	upstream previews.Upstream
	target   sandboxhost.Target
	visitor  netip.Prefix
	end      context.CancelFunc
	since    time.Time
	traffic  traffic
}

// ServeHTTP serves a request.
func (r *Router) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	defer func() {
		p := recover()
		if p == nil {
			return
		}
		if p == http.ErrAbortHandler { //nolint:errorlint,err113 // it is compared by identity, as net/http does
			panic(p)
		}
		r.cfg.Log.ErrorContext(q.Context(), "request to a preview panicked", "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
		writeText(w, http.StatusInternalServerError, "something went wrong inside Coppice; the server's log has the cause")
	}()
	t, ok := target(q, r.cfg.Domain)
	if !ok {
		writeText(w, http.StatusMisdirectedRequest, "this server serves previews, and this name is not that of a preview")
		return
	}
	if !clean(q) {
		writeText(w, http.StatusBadRequest, "the request cannot be forwarded")
		return
	}
	if q.Header.Get("Service-Worker") != "" {
		writeText(w, http.StatusForbidden, "previews have no service workers: one would outlive the workspace's state that it came from")
		return
	}
	from := r.client(q)
	p, how, key, err := r.find(q, t, from)
	if err != nil {
		r.refuse(w, q, t, err)
		return
	}
	if how == byParameter && navigates(q) {
		keepToken(w, q)
		return
	}
	ctx, end := context.WithCancel(q.Context())
	defer end()
	if p.ExpiresAt != nil {
		var stop context.CancelFunc
		ctx, stop = context.WithDeadline(ctx, *p.ExpiresAt)
		defer stop()
	}
	if key.ID != "" {
		var release context.CancelFunc
		ctx, release = r.cfg.Keys.WithKey(ctx, key)
		defer release()
	}
	v := &visit{preview: p, target: t, visitor: visitor(from), end: end, since: time.Now()}
	leave, full := r.places.enter(v)
	if full {
		w.Header().Set("Retry-After", "1")
		writeText(w, http.StatusTooManyRequests, "this workspace, its project or your address has too many requests to previews at the same time")
		return
	}
	defer leave()
	up, err := r.cfg.Previews.Reach(ctx, p)
	if err != nil {
		r.unreachable(w, q, t, err)
		return
	}
	if up.Epoch() != p.Epoch { // a resume can take long; the preview may have been closed meanwhile
		now, err := r.cfg.Previews.Find(ctx, t)
		if err == nil && now.ID != p.ID {
			err = previews.Absent()
		}
		if err != nil {
			r.refuse(w, q, t, err)
			return
		}
	}
	r.places.reached(v, up)
	r.forward(w, q.WithContext(ctx), v)
}

// target finds the preview that a request is for: by the name of the host, or by E2B's headers where the host is this server.
func target(q *http.Request, domain string) (sandboxhost.Target, bool) {
	if t, ok := sandboxhost.Decode(q.Host, domain); ok {
		return t, true
	}
	if !sandboxhost.Bare(q.Host, domain) {
		return sandboxhost.Target{}, false
	}
	return sandboxhost.New(q.Header.Get(headerSandbox), q.Header.Get(headerPort))
}

// clean refuses what two servers may read in two ways. net/http has refused most of it. Only WebSockets may change the protocol of their
// connection; every other offer to do so is left out.
func clean(q *http.Request) bool {
	if up := q.Header.Values("Upgrade"); len(up) == 1 && (q.Method != http.MethodGet || q.ProtoMajor != 1 || !strings.EqualFold(up[0], "websocket")) {
		q.Header.Del("Upgrade")
	}
	if q.URL.Opaque != "" || !strings.HasPrefix(q.URL.Path, "/") && (q.Method != http.MethodOptions || q.URL.Path != "*") {
		return false
	}
	return q.Method != http.MethodConnect && len(q.Header[headerSandbox]) <= 1 && len(q.Header[headerPort]) <= 1 && len(q.TransferEncoding) <= 1 &&
		len(q.Header.Values("Upgrade")) <= 1
}

// unreachable answers a request that was admitted.
func (r *Router) unreachable(w http.ResponseWriter, q *http.Request, t sandboxhost.Target, err error) {
	if q.Context().Err() != nil {
		return
	}
	r.cfg.Log.InfoContext(q.Context(), "a preview was not reached", "workspace", t.ID, "port", t.Port, "code", core.CodeOf(err), "err", err)
	writeAbsent(w, q, t)
}

// refuse gives one answer to every request that does not get in: to a preview that does not exist and to one of somebody else. Its other
// answers depend on nothing but the address and the state of this server.
func (r *Router) refuse(w http.ResponseWriter, q *http.Request, t sandboxhost.Target, err error) {
	if q.Context().Err() != nil {
		return
	}
	if early, ok := errors.AsType[*tooManyError](err); ok {
		w.Header().Set("Retry-After", strconv.Itoa(max(1, int(early.wait.Seconds()))))
		writeText(w, http.StatusTooManyRequests, "this address has made too many requests that were refused; repeat the request later")
		return
	}
	if outage(err) {
		r.cfg.Log.WarnContext(q.Context(), "a request to a preview could not be checked", "err", err)
		w.Header().Set("Retry-After", "1")
		writeText(w, http.StatusServiceUnavailable, "the request cannot be checked now; repeat it later")
		return
	}
	writeAbsent(w, q, t)
}

// forward carries an admitted request to the guest.
func (r *Router) forward(w http.ResponseWriter, q *http.Request, v *visit) {
	transport, release := r.pool.take(v.upstream)
	defer release()
	q.Body = v.traffic.ofBody(q.Body)
	proxy := &httputil.ReverseProxy{
		Transport:     relay.Final(transport),
		FlushInterval: -1,
		ErrorLog:      slog.NewLogLogger(r.cfg.Log.Handler(), slog.LevelDebug),
		Rewrite: func(p *httputil.ProxyRequest) {
			p.SetURL(&url.URL{Scheme: "http", Host: "guest:" + strconv.Itoa(v.target.Port)})
			p.Out.Host = p.In.Host
			p.SetXForwarded()
			if from := r.client(p.In); from.IsValid() {
				p.Out.Header.Set("X-Forwarded-For", from.String())
			}
			hide(p.Out, p.In.URL.RawQuery)
		},
		ModifyResponse: func(res *http.Response) error {
			v.traffic.ofAnswer(res)
			return reduce(res, sandboxhost.Name(q.Host))
		},
		ErrorHandler: func(w http.ResponseWriter, q *http.Request, err error) {
			if errors.Is(err, context.Canceled) && q.Context().Err() != nil {
				panic(http.ErrAbortHandler)
			}
			r.cfg.Log.DebugContext(q.Context(), "a request to a preview has failed", "workspace", v.target.ID, "port", v.target.Port, "err", err)
			writeClosed(w, q, v.target)
		},
	}
	proxy.ServeHTTP(w, q)
}

// recheck is how often requests that go on are compared with their previews.
const recheck = 5 * time.Second

// Run ends requests whose preview has ended or has another epoch, and closes connections that nobody uses, until ctx ends.
func (r *Router) Run(ctx context.Context) error {
	tick := time.NewTicker(recheck)
	defer tick.Stop()
	defer r.pool.close()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			r.check(ctx, time.Now().Add(-recheck))
			r.pool.prune()
			r.strangers.Sweep(time.Now())
		}
	}
}

// check compares requests that began before a time with their previews.
func (r *Router) check(ctx context.Context, before time.Time) {
	for t, list := range r.places.since(before) {
		p, err := r.cfg.Previews.Find(ctx, t)
		if err != nil && core.CategoryOf(err) != core.NotFound {
			r.cfg.Log.WarnContext(ctx, "requests to a preview go on unchecked", "workspace", t.ID, "port", t.Port, "err", err)
		}
		for _, v := range list {
			switch {
			case core.CategoryOf(err) == core.NotFound, err == nil && (p.ID != v.preview.ID || v.upstream.Sandbox != "" && p.Epoch != v.preview.Epoch): // without a sandbox it waits for a resume
				v.end()
			case err == nil && v.upstream.Sandbox != "" && v.moves:
				r.cfg.Previews.Used(v.upstream)
			}
		}
	}
}
