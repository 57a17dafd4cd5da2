package daemon

import (
	"context"
	"net/http"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/internal/undo"
)

// layers are the listeners for clients of other products; nil: there is none.
type layers struct {
	e2b, arrakis, arbor *listener
	terms               string // of Arrakis' clients
}

func (c ControllerConfig) listenLayers(ctx context.Context, api http.Handler, control *controller.Controller, trust controller.Trust, steps *undo.Stack) (l layers, err error) {
	if l.e2b, err = c.listenE2B(ctx, api, control, trust, steps); err != nil {
		return l, err
	}
	if l.arrakis, l.terms, err = c.listenArrakis(ctx, api, control, steps); err != nil {
		return l, err
	}
	l.arbor, err = c.listenArbor(ctx, api, control, steps)
	return l, err
}

func (c ControllerConfig) urlOf(l *listener) string {
	if l == nil {
		return ""
	}
	return c.scheme() + "://" + l.Addr().String()
}
