package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/egress/policy"
)

// intercept terminates the guest's TLS, with a certificate for the host.
func (b *sandbox) intercept(c *conn, t target) {
	b.mu.Lock()
	c.target, c.read = &t, true
	b.mu.Unlock()
	server := tls.Server(c, &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: []string{"h2", "http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			r := b.rules.Load()
			if r.leaves == nil {
				return nil, errEnded
			}
			return r.leaves.Of(t.host.Name())
		},
	})
	ctx, cancel := context.WithTimeout(b.ctx, b.s.cfg.FirstTime)
	defer cancel()
	if err := server.HandshakeContext(ctx); err != nil {
		if o, refused := b.decide(b.ctx, b.rules.Load(), core.Flow{Spoken: core.SpokenTLS, Port: t.port}, t.host, nil, nil); refused == nil {
			b.end(o, errNotTrusted)
		}
		reset(c.Conn)
		_ = c.Close()
		return
	}
	if !b.s.read.queue.put(server) {
		_ = c.Close()
	}
}

// The reasons why a request with a secret is ended.
var (
	errEnded       = deny("the grant has ended")
	errExpired     = deny("the grant has expired")
	errHeld        = deny("this host has grants, so it can be reached only over TLS that the proxy reads, and only while the proxy has the grants")
	errBudget      = deny("the grant's bytes are used up")
	errPlaceholder = deny("the request contains a placeholder in a place where no grant puts one")
	errEcho        = deny("the host's answer contains the secret")
	errEncoding    = deny("the host's answer has an encoding that the proxy cannot inspect")
	errPart        = deny("the host answered with a part, and the request did not ask for a part")
)

// ranges are the headers that ask for a part of an answer. A request with a secret always asks for the whole answer.
var ranges = []string{"Range", "If-Range", "Request-Range"}

// budget counts how much of a grant one sandbox has used.
type budget struct {
	bytes     *atomic.Int64 // used
	perMinute int
	rate      *rate.Limiter
}

// use is the use of a grant by a flow.
type use struct {
	grant  *grant.Grant
	budget *budget
}

// take counts bytes that passed. It fails when the grant allows no more.
func (u *use) take(n int) error {
	if u == nil {
		return nil
	}
	if used := u.budget.bytes.Add(int64(n)); u.grant.MaxBytes > 0 && used > u.grant.MaxBytes {
		return errBudget
	}
	return nil
}

func (b *sandbox) budget(g *grant.Grant) *budget {
	b.mu.Lock()
	defer b.mu.Unlock()
	x := b.budgets[g.ID]
	if x != nil && x.perMinute == g.PerMinute {
		return x
	}
	limit := rate.Inf
	if g.PerMinute > 0 {
		limit = rate.Every(time.Minute / time.Duration(g.PerMinute))
	}
	next := &budget{bytes: new(atomic.Int64), perMinute: g.PerMinute, rate: rate.NewLimiter(limit, g.PerMinute)}
	if x != nil {
		next.bytes = x.bytes
	}
	b.budgets[g.ID] = next
	return next
}

// brokered is the grant that a base URL names, and the rules that have it.
type brokered struct {
	id    string
	rules *rules
}

type brokeredKey struct{}

// brokeredOf returns the grant that the base URL of a request names.
func brokeredOf(r *http.Request) (named brokered, ok bool) {
	named, ok = r.Context().Value(brokeredKey{}).(brokered)
	return named, ok
}

// broker puts a secret into a request, if one is granted and the request has its placeholder. If the proxy cannot put a
// secret into a request, the request must not contain a placeholder.
func (b *sandbox) broker(under *rules, c *conn, r *http.Request, to target) (*use, error) {
	base, named := brokeredOf(r)
	mode := grant.ModeHeader
	switch {
	case named:
		mode = grant.ModeBaseURL
	case !c.read:
		if under.holds(to) {
			return nil, errHeld
		}
		if bad := grant.Find(r); bad != "" {
			return nil, deny(bad)
		}
		return nil, nil
	}
	if !under.set.Granted(to.granted(), mode) {
		return nil, errEnded
	}
	used, err := under.set.Use(r, to.granted(), mode, base.id, time.Now())
	if err != nil {
		return nil, deny(err.Error())
	}
	r.Header.Del("Accept-Encoding")          // the transport sets its own and decodes the answer
	r.Header.Del("Sec-WebSocket-Extensions") // compression is the only extension
	if used == nil {
		return nil, nil
	}
	for _, h := range ranges { // a secret that is split over partial answers would not be found
		r.Header.Del(h)
	}
	u := &use{used, b.budget(used)}
	if !u.budget.rate.Allow() {
		return nil, &denial{fmt.Sprintf("the grant %s allows %d requests a minute", used.ID, used.PerMinute), http.StatusTooManyRequests}
	}
	if used.MaxBytes > 0 && u.budget.bytes.Load() >= used.MaxBytes {
		return nil, errBudget
	}
	return u, nil
}

// serveBase serves a request to a base URL: it turns it into a request to the grant's host. It reports whether the
// request was for a base URL.
func (s *Server) serveBase(w http.ResponseWriter, r *http.Request) bool {
	rest, ok := strings.CutPrefix(r.URL.EscapedPath(), grant.BasePath)
	if !ok || r.URL.IsAbs() {
		return false
	}
	c, _ := r.Context().Value(connKey{}).(*conn)
	id, path, _ := strings.Cut(rest, "/")
	u := *r.URL
	var err error
	if u.RawPath = "/" + path; c != nil {
		u.Path, err = url.PathUnescape(u.RawPath)
	}
	if c == nil || err != nil {
		refuseRequest(w, r, http.StatusBadRequest, "the request's path cannot be read")
		return true
	}
	under := c.sandbox.rules.Load()
	t, ok := under.set.Base(id)
	if !ok {
		refuseRequest(w, r, http.StatusForbidden, "there is no grant "+id+" with a base URL")
		return true
	}
	const https = 443
	u.Scheme, u.Host = "https", t.Host.String()
	if t.Port != https {
		u.Host = policy.JoinHostPort(t.Host, t.Port)
	}
	out := r.WithContext(context.WithValue(r.Context(), brokeredKey{}, brokered{id, under}))
	out.URL, out.Host = &u, u.Host
	s.serveProxied(w, out)
	return true
}

// inspect checks the answer of a host with grants: the head now, the body while it arrives.
func (b *sandbox) inspect(o *openFlow, resp *http.Response) error {
	scan := b.rules.Load().set.Scanner(target{o.host, o.Port}.granted())
	if scan == nil { // the grants have ended meanwhile
		return errEnded
	}
	encoded := slices.ContainsFunc(resp.Header.Values("Content-Encoding"), func(e string) bool { return e != "" && !strings.EqualFold(e, "identity") })
	if encoded || resp.Header.Get("Sec-WebSocket-Extensions") != "" {
		return errEncoding
	}
	if resp.StatusCode == http.StatusPartialContent && resp.Request.Header.Get("Range") == "" {
		return errPart
	}
	if scan.InHeader(resp.Header) || scan.In(resp.Status) {
		return errEcho
	}
	resp.Body = inspected(resp.Body, &inspection{
		scan: scan, take: o.use.take, trailer: func() http.Header { return resp.Trailer }, found: errEcho,
		refuse: func(why error) { o.cancel(why) },
	})
	return nil
}

// isDenial reports whether an error is a refusal and not a failure.
func isDenial(err error) (*denial, bool) { return errors.AsType[*denial](err) }
