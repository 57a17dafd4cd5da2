package devstack

import (
	"context"
	"net/http"

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

// serveArrakis serves Arrakis' clients, if there is a listener for them.
func (s *stack) serveArrakis(ctx context.Context, api http.Handler) error {
	if s.onArrakis == nil {
		return nil
	}
	h, terms, err := s.cfg.arrakisConfig(s.key).Handler(ctx, api, s.control, s.log)
	if err != nil {
		return err
	}
	s.terms = terms
	s.serve(&s.public, s.onArrakis, h)
	return nil
}
