package mcp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/modelcontextprotocol/go-sdk/auth"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/modelcontextprotocol/go-sdk/oauthex"
)

// HTTPConfig says how a server is reached over HTTP.
type HTTPConfig struct {
	Config
	// PublicURL is where clients find the server, such as https://mcp.example.com, if a proxy with TLS is before it.
	PublicURL string
	// Origins are the web origins whose pages may use the server, besides its own.
	Origins []string
	// AuthorizationServers issue API keys of this Coppice by OAuth.
	AuthorizationServers []string
}

// The paths of the server.
const (
	pathMCP      = "/mcp"
	pathMetadata = "/.well-known/oauth-protected-resource"
)

const (
	maxHeader     = 32 << 10 // bytes of a request's header
	bodyPatience  = time.Minute
	shutdownGrace = 5 * time.Second
)

// Handler serves MCP over streamable HTTP. Every request carries an API key.
type Handler struct {
	cfg       HTTPConfig
	public    *url.URL // nil: none
	transport *transport
	tenants   *tenants
	inner     http.Handler
}

// NewHandler makes a handler. Close it.
func NewHandler(cfg HTTPConfig) (*Handler, error) {
	h := &Handler{cfg: cfg}
	if cfg.PublicURL != "" {
		u, err := url.Parse(cfg.PublicURL)
		if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.User != nil {
			return nil, fmt.Errorf("public URL %q is not of the form https://host", cfg.PublicURL)
		}
		h.public = u
	}
	var err error
	if h.transport, err = newTransport(cfg.Server, cfg.ReadOnly); err != nil {
		return nil, err
	}
	h.tenants = newTenants(cfg.Config, h.transport)
	h.inner = sdk.NewStreamableHTTPHandler(serverOf, &sdk.StreamableHTTPOptions{
		Stateless:                  true, // the newest version needs it, and there is nothing to keep
		Logger:                     cfg.Log,
		MaxRequestBodyBytes:        maxMessage,
		DisableLocalhostProtection: true, // known does that, and knows the public name
		// In the newest version, a client that hangs up cancels its call.
		PropagateRequestCancellation: true,
	})
	return h, nil
}

// Close closes the connections to the API.
func (h *Handler) Close() {
	h.tenants.close()
	h.transport.close()
}

type serverKey struct{}

func serverOf(req *http.Request) *sdk.Server {
	s, _ := req.Context().Value(serverKey{}).(*sdk.Server)
	return s
}

// ServeHTTP implements http.Handler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if no := h.known(req); no != nil {
		no.answer(w)
		return
	}
	switch req.URL.Path {
	case pathMetadata, pathMetadata + pathMCP:
		h.metadata(req).ServeHTTP(w, req)
	case pathMCP:
		h.serve(w, req)
	default:
		http.NotFound(w, req)
	}
}

// known refuses requests that a foreign web page made a browser send: those to a host name that is
// not this server's (DNS rebinding), and those with a foreign origin.
func (h *Handler) known(req *http.Request) *refusal {
	if !loopback(req.Host) && (h.public == nil || !strings.EqualFold(req.Host, h.public.Host)) {
		return refuse(http.StatusForbidden, "HOST_DENIED", "this server does not have the name in the request's Host; --public-url gives it one")
	}
	origins := req.Header.Values("Origin")
	if len(origins) == 0 {
		return nil
	}
	own := []string{"http://" + req.Host}
	if h.public != nil {
		own = append(own, h.public.Scheme+"://"+h.public.Host)
	}
	if len(origins) > 1 || !slices.Contains(own, origins[0]) && !slices.Contains(h.cfg.Origins, origins[0]) {
		return refuse(http.StatusForbidden, "ORIGIN_DENIED", "pages of this origin may not use the server; --allow-origin lets them")
	}
	return nil
}

// loopback reports whether a Host names this machine by a name that DNS cannot give to another one.
func loopback(host string) bool {
	name := host
	if h, _, err := net.SplitHostPort(host); err == nil {
		name = h
	}
	if strings.EqualFold(name, "localhost") {
		return true
	}
	addr, err := netip.ParseAddr(strings.Trim(name, "[]"))
	return err == nil && addr.Unmap().IsLoopback()
}

// base is the URL of the server, as its client sees it.
func (h *Handler) base(req *http.Request) string {
	if h.public != nil {
		return h.public.Scheme + "://" + h.public.Host
	}
	return "http://" + req.Host
}

// metadata says how to authorize (RFC 9728).
func (h *Handler) metadata(req *http.Request) http.Handler {
	return auth.ProtectedResourceMetadataHandler(&oauthex.ProtectedResourceMetadata{
		Resource: h.base(req) + pathMCP, AuthorizationServers: h.cfg.AuthorizationServers, BearerMethodsSupported: []string{"header"}, ResourceName: "Coppice",
	})
}

// serve serves an MCP request: its key first, then its body.
func (h *Handler) serve(w http.ResponseWriter, req *http.Request) {
	key := bearer(req)
	t, held, no := h.tenants.admit(req.Context(), key)
	if no != nil {
		if no.status == http.StatusUnauthorized {
			challenge := fmt.Sprintf("Bearer resource_metadata=%q", h.base(req)+pathMetadata+pathMCP)
			if key != "" {
				challenge += `, error="invalid_token"`
			}
			w.Header().Set("WWW-Authenticate", challenge)
		}
		no.answer(w)
		return
	}
	defer held.leave()
	body, no := readBody(w, req)
	if no != nil {
		no.answer(w)
		return
	}
	ctx := context.WithValue(context.WithValue(req.Context(), serverKey{}, t.server), holdKey{}, held)
	req = req.WithContext(ctx)
	req.Body = io.NopCloser(bytes.NewReader(body))
	h.inner.ServeHTTP(w, req)
}

// readBody reads the one message of a request. Its deadline ends with the body: a deadline of the whole request would
// cancel the call in it.
func readBody(w http.ResponseWriter, req *http.Request) ([]byte, *refusal) {
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Now().Add(bodyPatience)) // a recorder of a test has no deadlines
	body, err := io.ReadAll(http.MaxBytesReader(w, req.Body, maxMessage))
	if err != nil {
		if errors.As(err, new(*http.MaxBytesError)) {
			return nil, refuse(http.StatusRequestEntityTooLarge, codeArguments, fmt.Sprintf("the message has more than %d bytes", maxMessage))
		}
		return nil, refuse(http.StatusBadRequest, codeArguments, "the message cannot be read")
	}
	_ = control.SetReadDeadline(time.Time{})
	if bytes.HasPrefix(bytes.TrimLeft(body, " \t\r\n"), []byte("[")) { // older versions have batches; each would be many calls of one request
		return nil, refuse(http.StatusBadRequest, codeArguments, "batches of messages are not supported")
	}
	return body, nil
}

// bearer is the API key of a request; "" if it has none, or several.
func bearer(req *http.Request) string {
	values := req.Header.Values("Authorization")
	if len(values) != 1 {
		return ""
	}
	scheme, key, ok := strings.Cut(values[0], " ")
	if !ok || !strings.EqualFold(scheme, "bearer") {
		return ""
	}
	return strings.TrimSpace(key)
}

func (r *refusal) answer(w http.ResponseWriter) {
	if r.status == http.StatusTooManyRequests || r.status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "1")
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(r.status)
	_ = json.NewEncoder(w).Encode(map[string]string{"code": r.code, "detail": r.detail, "hint": r.hint}) // the client may have gone
}

// ServeHTTP serves on an address until ctx ends. The address is of loopback: the server has no TLS.
func ServeHTTP(ctx context.Context, cfg HTTPConfig, address string) error {
	if at, err := netip.ParseAddrPort(address); err != nil || !at.Addr().IsLoopback() {
		return fmt.Errorf("%q is not an address of loopback with a port, such as 127.0.0.1:7080: the MCP server has no TLS; to reach it from elsewhere, put a proxy with TLS before it and give its address with --public-url", address)
	}
	h, err := NewHandler(cfg)
	if err != nil {
		return err
	}
	defer h.Close()
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	s := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: maxHeader}
	cfg.Log.InfoContext(ctx, "serving MCP over HTTP", "url", "http://"+listener.Addr().String()+pathMCP, "read_only", cfg.ReadOnly)
	done := make(chan error, 1)
	go func() { done <- s.Serve(listener) }()
	select {
	case err = <-done:
	case <-ctx.Done():
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownGrace)
		defer cancel()
		if s.Shutdown(last) != nil {
			_ = s.Close() // calls that wait end here
		}
		err = <-done
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}
