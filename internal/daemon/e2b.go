package daemon

import (
	"context"
	"crypto/hkdf"
	"crypto/sha256"
	"log/slog"
	"net/http"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/compat/e2b"
	"github.com/coppice-dev/coppice/controller/httpapi"
	"github.com/coppice-dev/coppice/core"
)

// E2BConfig says how clients of E2B are served.
type E2BConfig struct {
	Listen     string // host:port; empty: nowhere
	Domain     string // the wildcard name that leads there; empty: none
	User       string // of the guest, for clients that name none; empty: root
	OpenEgress bool   // sandboxes reach everything unless the client asks for none
	LocalPorts bool   // the runner is on this host, and so are the addresses of forwarded ports
}

// Handler makes the layer for E2B's clients over the REST API. Its tokens are the same on all controllers of the cluster.
func (c E2BConfig) Handler(api http.Handler, control *controller.Controller, trust controller.Trust, log *slog.Logger) (http.Handler, error) {
	const size = 32
	secret, err := hkdf.Key(sha256.New, trust.Passes.Seed(), nil, "coppice tokens of sandboxes for E2B's clients, v1", size)
	if err != nil {
		return nil, err
	}
	return e2b.New(e2b.Config{
		API: api, Secret: secret, Domain: c.Domain, User: c.User, OpenEgress: c.OpenEgress, LocalPorts: c.LocalPorts, Log: log.With("component", "e2b"),
		ActFor: func(ctx context.Context, key string) context.Context { return httpapi.ActFor(ctx, core.KeyID(key)) },
		HoldKey: func(ctx context.Context, key string) (context.Context, context.CancelFunc, error) {
			return httpapi.HoldKey(ctx, control, core.KeyID(key))
		},
		ConfirmPort: func(ctx context.Context, key, ws, port string) (string, error) {
			return httpapi.ConfirmPort(ctx, control, core.KeyID(key), core.WorkspaceID(ws), core.PortID(port))
		},
	})
}

// Egress says in a few words what sandboxes of these clients reach.
func (c E2BConfig) Egress() string {
	if c.OpenEgress {
		return "open, because --e2b-open-egress says so"
	}
	return "closed; --e2b-open-egress opens it, as E2B does"
}
