package devstack

import (
	"context"
	"log/slog"
	"net"
	"net/http"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/internal/daemon"
)

// arrakisConfig is how Arrakis' clients are served if the key of the stack is this one.
func (cfg Config) arrakisConfig(key string) daemon.ArrakisConfig {
	c := cfg.Arrakis
	if !cfg.ArrakisNeedsKey {
		c.Key = key
	}
	return c
}

// arborConfig is the same for Arbor's clients.
func (cfg Config) arborConfig(key string) daemon.ArborConfig {
	c := cfg.Arbor
	if !cfg.ArborNeedsKey {
		c.Key = key
	}
	return c
}

// layer serves the clients of a product over the REST API.
type layer interface {
	Handler(ctx context.Context, api http.Handler, control *controller.Controller, log *slog.Logger) (h http.Handler, terms string, err error)
}

// serveLayer serves a layer, if there is a listener for it, and sets its terms.
func (s *stack) serveLayer(ctx context.Context, api http.Handler, on net.Listener, l layer, terms *string) error {
	if on == nil {
		return nil
	}
	h, said, err := l.Handler(ctx, api, s.control, s.log)
	if err != nil {
		return err
	}
	*terms = said
	s.serve(&s.public, on, h)
	return nil
}
