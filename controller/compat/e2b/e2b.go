package e2b

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"

	"github.com/coppice-dev/coppice/controller/compat/e2b/template"
	"github.com/coppice-dev/coppice/controller/compat/shared"
	"github.com/coppice-dev/coppice/internal/inprocess"
	"github.com/coppice-dev/coppice/internal/sandboxhost"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// Config has what the layer needs.
type Config struct {
	API    http.Handler                                                 // the REST API
	ActFor func(ctx context.Context, key coppice.KeyID) context.Context // makes requests to API act for a key, without its secret

	// HoldKey returns a context that ends with a key, and a function that must be called when the work is done.
	HoldKey func(ctx context.Context, key coppice.KeyID) (context.Context, context.CancelFunc, error)

	// ConfirmPort asks the runner where a forwarded port of a workspace in the key's project listens
	// now, and returns this address. It wakes the workspace, and fails if there is no machine.
	ConfirmPort func(ctx context.Context, key coppice.KeyID, ws coppice.WorkspaceID, port coppice.PortID) (address string, err error)

	Secret []byte // makes the tokens of sandboxes; the same on all controllers of a cluster
	Domain string // the wildcard name of this layer; empty: none
	User   string // the user of processes and files if the client names none; empty: root

	// LocalPorts says that forwarded ports listen on this host, because controller and runner share
	// it. Without it, ports are refused: the address may lead to something else on this host.
	LocalPorts bool

	// OpenEgress gives sandboxes unrestricted egress unless the client asks for none, as E2B does. Otherwise they get none.
	OpenEgress bool

	Log *slog.Logger
}

// minSecret is the size of a secret that cannot be guessed.
const minSecret = 32

// layer is the handler.
type layer struct {
	Config
	tokens  tokens
	issued  issued
	busy    busy
	control http.Handler
	daemon  http.Handler
	logs    template.Places // of builds
}

// New returns the handler of the layer.
func New(cfg Config) (http.Handler, error) {
	if cfg.API == nil || cfg.ActFor == nil || cfg.HoldKey == nil || cfg.ConfirmPort == nil || cfg.Log == nil {
		return nil, errors.New("the layer for E2B's clients needs each of API, ActFor, HoldKey, ConfirmPort and Log")
	}
	if len(cfg.Secret) < minSecret {
		return nil, fmt.Errorf("the secret for tokens of sandboxes has %d bytes; it needs %d", len(cfg.Secret), minSecret)
	}
	if cfg.User == "" {
		cfg.User = rootUser
	}
	l := &layer{Config: cfg, tokens: tokens{secret: cfg.Secret}}
	l.control, l.daemon = l.controlRoutes(), l.envdRoutes()
	return l, nil
}

// The headers that say which sandbox a request is for.
const (
	headerSandbox = "E2b-Sandbox-Id"
	headerPort    = "E2b-Sandbox-Port"
	headerKey     = "X-Api-Key"
)

// ServeHTTP answers every request of the listener, also those that fail or panic, in E2B's form.
func (l *layer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	defer shared.Recover(r, l.Log, func(f *shared.StatusError) { writeFailure(w, r, f) })
	shared.Hurry(w, r)
	h := w.Header()
	h.Set("X-Content-Type-Options", "nosniff")
	if !hostAllowed(r.Host, l.Domain) {
		writeFailure(w, r, shared.Failf(http.StatusMisdirectedRequest, "this server does not serve the name %q", shared.Clip(r.Host)))
		return
	}
	if allowOrigin(w, r) {
		return
	}
	t, addressed, err := l.target(r)
	switch {
	case err != nil:
		writeFailure(w, r, err)
	case !addressed:
		l.control.ServeHTTP(w, r)
	case t.Port == envdPort:
		l.serveEnvd(w, r, t)
	default:
		l.servePort(w, r, t)
	}
}

// target finds the sandbox that a request is for: by the name of the host, or else by headers, or else by the token.
func (l *layer) target(r *http.Request) (target, bool, *shared.StatusError) {
	if t, ok := sandboxhost.Decode(r.Host, l.Domain); ok {
		return t, true, nil
	}
	id := r.Header.Get(headerSandbox)
	if id == "" { // some versions of the clients send only the token after a connect
		token, _, _ := strings.Cut(r.Header.Get(headerAccess), ".")
		t := target{ID: token, Port: envdPort}
		return t, bareID.MatchString(token) && !ofControl(r.URL.Path), nil
	}
	t, ok := sandboxhost.New(id, r.Header.Get(headerPort))
	if ok && t.Port == envdPort && ofControl(r.URL.Path) {
		return target{}, false, nil // some versions of the clients send the headers to the control plane, too
	}
	if !ok {
		return target{}, false, shared.Failf(http.StatusBadRequest, "%s and %s do not name a port of a sandbox", headerSandbox, headerPort)
	}
	return t, true, nil
}

// ofControl reports whether a path belongs to the control plane. The daemon of a sandbox has no such path.
func ofControl(path string) bool {
	return slices.ContainsFunc([]string{"/sandboxes", "/v2/", "/v3/", "/snapshots", "/templates"}, func(p string) bool { return strings.HasPrefix(path, p) })
}

// allowOrigin lets web pages use the layer: nothing here depends on cookies. It answers a preflight.
func allowOrigin(w http.ResponseWriter, r *http.Request) bool {
	if r.Header.Get("Origin") == "" {
		return false
	}
	h := w.Header()
	h.Set("Access-Control-Allow-Origin", "*")
	h.Set("Access-Control-Expose-Headers", "X-Next-Token, X-Total-Running, RateLimit-Limit, RateLimit-Remaining, RateLimit-Reset, Retry-After, Location, Cache-Control, X-Content-Type-Options, Connect-Content-Encoding, Connect-Accept-Encoding")
	if r.Method != http.MethodOptions || r.Header.Get("Access-Control-Request-Method") == "" {
		return false
	}
	h.Set("Access-Control-Allow-Methods", "GET, POST, PUT, PATCH, DELETE, HEAD")
	h.Set("Access-Control-Allow-Headers", clean(r.Header.Get("Access-Control-Request-Headers")))
	h.Set("Access-Control-Max-Age", "7200")
	w.WriteHeader(http.StatusNoContent)
	return true
}

func clean(header string) string {
	const most = 4096
	return header[:min(len(header), most)]
}

// client is a client of the REST API for one request.
func (l *layer) client(token string) *coppice.Client {
	return shared.Client(l.API, token, "coppice-e2b")
}

// caller returns the REST client of a request of the control plane.
func (l *layer) caller(r *http.Request) (context.Context, *coppice.Client) {
	key := apiKey(r.Header.Get(headerKey))
	if scheme, bearer, ok := strings.Cut(r.Header.Get("Authorization"), " "); key == "" && ok && strings.EqualFold(scheme, "Bearer") {
		key = apiKey(strings.TrimSpace(bearer))
	}
	ctx := inprocess.WithRemote(r.Context(), r.RemoteAddr)
	if k := r.Header.Get("Idempotency-Key"); k != "" {
		ctx = coppice.WithIdempotencyKey(ctx, k)
	}
	return ctx, l.client(key)
}
