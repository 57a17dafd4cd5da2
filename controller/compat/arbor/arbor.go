package arbor

import (
	"context"
	"errors"
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

	Log *slog.Logger
}

// layer is the handler.
type layer struct {
	Config
	routes  *http.ServeMux
	passes  passes
	streams streams
}

const agent = "coppice-arbor"

// New returns the handler of the layer.
func New(cfg Config) (http.Handler, error) {
	if cfg.API == nil || cfg.Log == nil {
		return nil, errors.New("the layer for Arbor's clients needs API and Log")
	}
	l := &layer{Config: cfg}
	l.routes = l.mux()
	return l, nil
}

// ServeHTTP answers every request of the listener, also those that fail or panic, in Arbor's form.
func (l *layer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	defer shared.Recover(r, l.Log, func(f *shared.StatusError) { writeFailure(w, f) })
	shared.Hurry(w, r)
	w.Header().Set("X-Content-Type-Options", "nosniff")
	f := shared.Foreign(r, l.Key != "")
	if f == nil && l.Key != "" {
		f = browser(r)
	}
	if f != nil {
		writeFailure(w, f)
		return
	}
	if f := shared.Route(l.routes, w, r); f != nil {
		writeFailure(w, f)
	}
}

// browser refuses what only browsers send. Old ones send the form of a page without an origin, and a form can be taken for JSON here.
func browser(r *http.Request) *shared.StatusError {
	for _, name := range []string{"Referer", "Cookie", "Accept-Language", "Sec-Fetch-Mode", "Sec-Fetch-Dest", "Upgrade-Insecure-Requests"} {
		if len(r.Header.Values(name)) > 0 {
			return shared.Failf(http.StatusForbidden, "this server needs no key, so it serves no browsers (the request has %s)", name)
		}
	}
	return nil
}

// caller returns the REST client of a request.
func (l *layer) caller(r *http.Request) (context.Context, caller, error) {
	key, given := shared.Credential(r)
	if !given {
		key = l.Key
	}
	if key == "" {
		return nil, caller{}, shared.Failf(http.StatusUnauthorized, "this server needs an API key: Authorization: Bearer KEY, or http://any:KEY@host:port as the URL")
	}
	return inprocess.WithRemote(r.Context(), r.RemoteAddr), l.as(key), nil
}

// caller calls the REST API with a key.
type caller struct {
	*coppice.Client
	key string
	raw *http.Client
}

func (l *layer) as(key string) caller {
	return caller{shared.Client(l.API, key, agent), key, &http.Client{Transport: inprocess.Transport{Handler: l.API}}}
}
