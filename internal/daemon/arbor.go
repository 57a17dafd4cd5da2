package daemon

import (
	"context"
	"log/slog"
	"net/http"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/compat/arbor"
)

// ArborConfig says how clients of Arbor are served.
type ArborConfig struct {
	Listen string // host:port; empty: nowhere
	Key    string // the API key for requests without one; only on loopback. Empty: every request needs a key
}

// Validate refuses a listener that others than this host reach and that needs no key.
func (c ArborConfig) Validate() error {
	if c.Key == "" {
		return nil
	}
	return onlyThisHost(c.Listen, "arbor-listen", "Arbor")
}

// Handler makes the layer for Arbor's clients over the REST API. It also says in a few words who may do what there.
func (c ArborConfig) Handler(ctx context.Context, api http.Handler, control *controller.Controller, log *slog.Logger) (http.Handler, string, error) {
	terms, err := accessTerms(ctx, control, "Arbor", c.Key)
	if err != nil {
		return nil, "", err
	}
	h, err := arbor.New(arbor.Config{API: api, Key: c.Key, Log: log.With("component", "arbor")})
	return h, terms, err
}
