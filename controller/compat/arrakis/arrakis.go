package arrakis

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	"github.com/coppice-dev/coppice/internal/inprocess"
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
	if f := shared.Foreign(r, l.Key != ""); f != nil {
		writeFailure(w, f)
		return
	}
	if f := shared.Route(l.routes, w, r); f != nil {
		writeFailure(w, f)
	}
}

// caller returns the REST client of a request. A key comes as a bearer token or as a password.
func (l *layer) caller(r *http.Request) (context.Context, *coppice.Client, *shared.StatusError) {
	key, given := shared.Credential(r)
	if !given {
		key = l.Key
	}
	if key == "" {
		return nil, nil, shared.Failf(http.StatusUnauthorized, "this server needs an API key: http://any:KEY@host:port as the client's URL, or Authorization: Bearer KEY")
	}
	return inprocess.WithRemote(r.Context(), r.RemoteAddr), shared.Client(l.API, key, "coppice-arrakis"), nil
}
