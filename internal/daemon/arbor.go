package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/compat/arbor"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/undo"
)

// ArborConfig says how clients of Arbor are served.
type ArborConfig struct {
	Listen string // host:port; empty: nowhere
	Key    string // the API key for requests without one; only on loopback. Empty: every request needs a key
}

// Validate refuses a listener that others than this host reach and that needs no key.
func (c ArborConfig) Validate() error {
	if c.Listen != "" && c.Key != "" && !loopback(c.Listen) {
		return core.Errorf(core.Invalid, core.CodeInvalidField,
			"--arbor-listen %s: clients of Arbor would need no key there, and others than this host reach it; listen on 127.0.0.1, or let every request need a key", core.Clip(c.Listen))
	}
	return nil
}

// Handler makes the layer for Arbor's clients over the REST API. It also says in a few words who may do what there.
func (c ArborConfig) Handler(ctx context.Context, api http.Handler, control *controller.Controller, log *slog.Logger) (http.Handler, string, error) {
	terms := "each request needs an API key"
	if c.Key != "" {
		project, err := projectOf(ctx, control, c.Key)
		if err != nil {
			return nil, "", fmt.Errorf("the key for Arbor's clients: %w", err)
		}
		terms = "no key needed, all in project " + project
	}
	h, err := arbor.New(arbor.Config{API: api, Key: c.Key, Log: log.With("component", "arbor")})
	return h, terms, err
}

// listenArbor opens the listener for Arbor's clients; nil if there is none.
func (c ControllerConfig) listenArbor(ctx context.Context, api http.Handler, control *controller.Controller, steps *undo.Stack) (*listener, error) {
	if c.Arbor.Listen == "" {
		return nil, nil
	}
	h, terms, err := c.Arbor.Handler(ctx, api, control, c.Log)
	if err != nil {
		return nil, err
	}
	l, err := listenPublic(ctx, c, c.Arbor.Listen, "arbor-listen", h)
	if err != nil {
		return nil, err
	}
	steps.Push("listener for Arbor's clients", func(context.Context) error { return l.close() })
	c.Log.InfoContext(ctx, "clients of Arbor are served", "listen", l.Addr().String(), "terms", terms)
	return l, nil
}
