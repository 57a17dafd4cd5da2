package daemon

import (
	"context"
	"fmt"
	"net/http"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/undo"
)

// layers are the listeners for clients of other products; nil: there is none.
type layers struct {
	e2b, arrakis, arbor *listener
	terms               string // of Arrakis' clients
}

func (c ControllerConfig) listenLayers(ctx context.Context, api http.Handler, control *controller.Controller, trust controller.Trust, steps *undo.Stack) (l layers, err error) {
	if l.e2b, _, err = c.listenLayer(ctx, c.E2B.Listen, "e2b-listen", "E2B", steps, func() (http.Handler, string, error) {
		h, err := c.E2B.Handler(api, control, trust, c.Log)
		return h, "egress " + c.E2B.Egress(), err
	}); err != nil {
		return l, err
	}
	if l.arrakis, l.terms, err = c.listenLayer(ctx, c.Arrakis.Listen, "arrakis-listen", "Arrakis", steps, func() (http.Handler, string, error) {
		return c.Arrakis.Handler(ctx, api, control, c.Log)
	}); err != nil {
		return l, err
	}
	l.arbor, _, err = c.listenLayer(ctx, c.Arbor.Listen, "arbor-listen", "Arbor", steps, func() (http.Handler, string, error) {
		return c.Arbor.Handler(ctx, api, control, c.Log)
	})
	return l, err
}

func (c ControllerConfig) urlOf(l *listener) string {
	if l == nil {
		return ""
	}
	return c.scheme() + "://" + l.Addr().String()
}

// listenLayer opens the listener for the clients of a product; nil if there is none. make makes the handler, and says in a few words who may
// do what there.
func (c ControllerConfig) listenLayer(ctx context.Context, address, flag, product string, steps *undo.Stack, make func() (http.Handler, string, error)) (*listener, string, error) {
	if address == "" {
		return nil, "", nil
	}
	h, terms, err := make()
	if err != nil {
		return nil, "", err
	}
	l, err := listenPublic(ctx, c, address, flag, h)
	if err != nil {
		return nil, "", err
	}
	steps.Push("listener for "+product+"'s clients", func(context.Context) error { return l.close() })
	c.Log.InfoContext(ctx, "clients of another product are served", "product", product, "listen", l.Addr().String(), "terms", terms)
	return l, terms, nil
}

// accessTerms says who may use a layer that has this key for requests without one.
func accessTerms(ctx context.Context, control *controller.Controller, product, key string) (string, error) {
	if key == "" {
		return "each request needs an API key", nil
	}
	project, err := projectOf(ctx, control, key)
	if err != nil {
		return "", fmt.Errorf("the key for %s's clients: %w", product, err)
	}
	return "no key needed, all in project " + project, nil
}

// onlyThisHost refuses an address at which others than this host would need no key.
func onlyThisHost(address, flag, product string) error {
	if address == "" || loopback(address) {
		return nil
	}
	return core.Errorf(core.Invalid, core.CodeInvalidField,
		"--%s %s: clients of %s would need no key there, and others than this host reach it; listen on 127.0.0.1, or let every request need a key", flag, core.Clip(address), product)
}
