package arrakis

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	"github.com/coppice-dev/coppice/internal/inprocess"
	"github.com/coppice-dev/coppice/internal/sandboxhost"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// Config has what the layer needs.
type Config struct {
	API http.Handler // the REST API

	// Key is the API key for requests without one. Then the layer serves only this host. Empty: every request needs a key.
	Key string

	Image      string // of new VMs; empty: the REST API's default
	Ports      []Port // forwarded in each VM
	OpenEgress bool   // new VMs reach everything, as those of Arrakis do; otherwise nothing
	Log        *slog.Logger
}

// Port is a port of a VM that the runner's host forwards.
type Port struct {
	Guest       int
	Description string
}

// layer is the handler.
type layer struct {
	Config
	routes    *http.ServeMux
	transfers transfers
}

// New returns the handler of the layer.
func New(cfg Config) (http.Handler, error) {
	if cfg.API == nil || cfg.Log == nil {
		return nil, errors.New("the layer for Arrakis' clients needs API and Log")
	}
	if len(cfg.Ports) > maxPorts {
		return nil, fmt.Errorf("the layer for Arrakis' clients can forward %d ports of a VM, not %d", maxPorts, len(cfg.Ports))
	}
	l := &layer{Config: cfg}
	l.routes = l.mux()
	return l, nil
}

// ServeHTTP answers every request of the listener, also those that fail or panic, in Arrakis' form.
func (l *layer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	defer shared.Recover(r, l.Log, func(f *shared.StatusError) { writeFailure(w, f) })
	shared.Hurry(w, r)
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if f := l.foreign(r); f != nil {
		writeFailure(w, f)
		return
	}
	l.route(w, r)
}

// foreign refuses requests of web pages. Without keys, it also refuses requests that do not come from this host for this host.
func (l *layer) foreign(r *http.Request) *shared.StatusError {
	if r.Header.Get("Origin") != "" || fromPage(r.Header.Get("Sec-Fetch-Site")) {
		return shared.Failf(http.StatusForbidden, "a web page must not use this server")
	}
	if l.Key == "" {
		return nil
	}
	if !local(r.Host) {
		return shared.Failf(http.StatusMisdirectedRequest, "this server needs no key, so it answers only to the names of its own host, such as 127.0.0.1, and not to %q", shared.Clip(r.Host))
	}
	for h := range r.Header {
		if strings.HasPrefix(h, "X-Forwarded-") || slices.Contains([]string{"Forwarded", "Via", "X-Real-Ip"}, h) {
			return shared.Failf(http.StatusForbidden, "this server needs no key, so it must not be behind a proxy (the request has %s)", shared.Clip(h))
		}
	}
	if from, err := netip.ParseAddrPort(r.RemoteAddr); err != nil || !from.Addr().Unmap().IsLoopback() {
		return shared.Failf(http.StatusForbidden, "this server needs no key, so it serves only clients of its own host")
	}
	return nil
}

// fromPage reports whether a browser sent a request for a page. A person who opens an address sends "none".
func fromPage(site string) bool { return site != "" && site != "none" }

// local reports whether a host name can only mean this host. A page may have bound any other name to its address (DNS rebinding).
func local(host string) bool {
	name := sandboxhost.Name(host)
	addr, err := netip.ParseAddr(name)
	return name == "localhost" || err == nil && addr.Unmap().IsLoopback()
}

// caller returns the REST client of a request. A key comes as a bearer token or as a password.
func (l *layer) caller(r *http.Request) (context.Context, *coppice.Client, *shared.StatusError) {
	key := l.Key
	if given := r.Header.Get("Authorization"); given != "" {
		key = credential(r)
	}
	if key == "" || len(key) > maxKey {
		return nil, nil, shared.Failf(http.StatusUnauthorized, "this server needs an API key: http://any:KEY@host:port as the client's URL, or Authorization: Bearer KEY")
	}
	return inprocess.WithRemote(r.Context(), r.RemoteAddr), shared.Client(l.API, key, "coppice-arrakis"), nil
}

// maxKey bounds a key before it is looked at.
const maxKey = 2 << 10

func credential(r *http.Request) string {
	if name, password, ok := r.BasicAuth(); ok {
		if password == "" {
			return name
		}
		return password
	}
	scheme, bearer, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(bearer)
}
