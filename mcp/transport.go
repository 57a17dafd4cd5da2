package mcp

import (
	"context"
	"net"
	"net/http"
	"net/url"
	"time"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// transport carries the API calls of all keys.
type transport struct {
	server string
	pool   *http.Transport
	round  http.RoundTripper
}

// newTransport makes the connections to one server. With readOnly it refuses every request that could change something,
// whatever a tool does.
func newTransport(server string, readOnly bool) (*transport, error) {
	dialer := &net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}
	pool := &http.Transport{
		Proxy: http.ProxyFromEnvironment, DialContext: dialer.DialContext, MaxIdleConnsPerHost: 64, IdleConnTimeout: 90 * time.Second, ExpectContinueTimeout: 5 * time.Second,
	}
	if u, err := url.Parse(server); err == nil && u.Scheme == "unix" {
		pool.Proxy = nil
		pool.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, "unix", u.Path)
		}
	}
	t := &transport{server: server, pool: pool, round: pool}
	if readOnly {
		t.round = fence{pool}
	}
	_, err := t.client(Config{}, "") // checks the address
	return t, err
}

// client makes a client for one key.
func (t *transport) client(cfg Config, token string) (*coppice.Client, error) {
	return coppice.New(coppice.Config{Server: t.server, Token: token, Transport: t.round, UserAgent: "coppice-mcp/" + cfg.Version})
}

func (t *transport) close() { t.pool.CloseIdleConnections() }

// fence passes only requests that read.
type fence struct{ next http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (f fence) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Method == http.MethodGet || req.Method == http.MethodHead {
		return f.next.RoundTrip(req)
	}
	if req.Body != nil {
		_ = req.Body.Close()
	}
	return nil, &fault{code: codeReadOnly, detail: "this MCP server was started with --read-only"}
}
