package devstack

import (
	"context"
	"net/http"

	"github.com/coppice-dev/coppice/internal/daemon"
)

// arborConfig is how Arbor's clients are served if the key of the stack is this one.
func (cfg Config) arborConfig(key string) daemon.ArborConfig {
	c := cfg.Arbor
	if !cfg.ArborNeedsKey {
		c.Key = key
	}
	return c
}

// serveArbor serves Arbor's clients, if there is a listener for them.
func (s *stack) serveArbor(ctx context.Context, api http.Handler) error {
	if s.onArbor == nil {
		return nil
	}
	h, terms, err := s.cfg.arborConfig(s.key).Handler(ctx, api, s.control, s.log)
	if err != nil {
		return err
	}
	s.arborTerms = terms
	s.serve(&s.public, s.onArbor, h)
	return nil
}
