package e2b

import (
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"time"

	"github.com/coppice-dev/coppice/internal/inprocess"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// headerTraffic carries the traffic token of a sandbox.
const headerTraffic = "E2b-Traffic-Access-Token"

// servePort passes a request on to a port of a sandbox, for who has the traffic token or the access token. There is no port for
// everybody: E2B's public traffic is refused without a token.
func (l *layer) servePort(w http.ResponseWriter, r *http.Request, t target) {
	ws, _ := workspaceID(t.sandbox) // newTarget has checked it
	key, ok := l.tokens.check(purposeTraffic, ws, r.Header.Get(headerTraffic))
	if !ok {
		key, ok = l.tokens.check(purposeEnvd, ws, r.Header.Get(headerAccess))
	}
	if !ok {
		writeFailure(w, r, failf(http.StatusForbidden, "this port needs the traffic token of its sandbox in %s", headerTraffic))
		return
	}
	ctx, client := l.ActFor(inprocess.WithRemote(r.Context(), r.RemoteAddr), key), l.client("")
	r = r.WithContext(ctx)
	if !l.LocalPorts {
		writeFailure(w, r, unsupported("ports of a sandbox, where runners are on other hosts"))
		return
	}
	row, err := client.Workspace(ctx, ws)
	if errors.Is(err, coppice.CodeWorkspaceNotFound) || err == nil && !running(row) {
		writeGone(w, t.sandbox)
		return
	}
	var address string
	if err == nil {
		address, err = forwarded(r, client, ws, t.port)
	}
	if err != nil {
		l.fail(w, r, err)
		return
	}
	proxy := &httputil.ReverseProxy{
		// A connection is for one request: after a restore the address may lead to another machine.
		Transport: &http.Transport{
			DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: 256 << 10,
			DialContext: (&net.Dialer{Timeout: 10 * time.Second}).DialContext,
		},
		FlushInterval: -1,
		ErrorLog:      slog.NewLogLogger(l.Log.Handler(), slog.LevelDebug),
		Rewrite: func(p *httputil.ProxyRequest) {
			p.SetURL(&url.URL{Scheme: "http", Host: address})
			p.Out.Host = r.Host
			for _, h := range []string{headerSandbox, headerPort, headerTraffic, headerKey} {
				p.Out.Header.Del(h)
			}
		},
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) { writeClosed(w, t) },
	}
	proxy.ServeHTTP(w, r)
}

// forwarded returns an address of the runner's host that leads to a port of the guest. A forward that is there is used again.
func forwarded(r *http.Request, c *coppice.Client, ws coppice.WorkspaceID, port int) (string, error) {
	ports, err := c.Ports(r.Context(), ws)
	if err != nil {
		return "", err
	}
	for _, p := range ports {
		if p.GuestPort == port {
			return p.Listen, nil
		}
	}
	p, err := c.CreatePort(r.Context(), ws, coppice.CreatePortRequest{GuestPort: port})
	return p.Listen, err
}
