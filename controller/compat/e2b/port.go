package e2b

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"time"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	"github.com/coppice-dev/coppice/internal/inprocess"
	"github.com/coppice-dev/coppice/internal/relay"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// headerTraffic carries the traffic token of a sandbox.
const headerTraffic = "E2b-Traffic-Access-Token"

// servePort forwards a request to a port of a sandbox. The request needs the traffic token or the
// access token. No port is public: E2B's public traffic is refused without a token.
func (l *layer) servePort(w http.ResponseWriter, r *http.Request, t target) {
	ws, _ := workspaceID(t.ID) // sandboxhost has checked it
	key, ok := l.tokens.check(purposeTraffic, ws, r.Header.Get(headerTraffic))
	if !ok {
		key, ok = l.tokens.check(purposeEnvd, ws, r.Header.Get(headerAccess))
	}
	if !ok {
		writeFailure(w, r, shared.Failf(http.StatusForbidden, "this port needs the traffic token of its sandbox in %s", headerTraffic))
		return
	}
	leave, full := l.busy.enter(key)
	if full != nil {
		writeFailure(w, r, full)
		return
	}
	defer leave()
	ctx, client := l.ActFor(inprocess.WithRemote(r.Context(), r.RemoteAddr), key), l.client("")
	r = r.WithContext(ctx)
	if !l.LocalPorts {
		writeFailure(w, r, unsupported("ports of a sandbox, where runners are on other hosts"))
		return
	}
	row, err := client.Workspace(ctx, ws)
	if errors.Is(err, coppice.CodeWorkspaceNotFound) || err == nil && !routed(row) {
		writeGone(w, t.ID)
		return
	}
	if err != nil {
		l.fail(w, r, err)
		return
	}
	ctx, release, err := l.HoldKey(ctx, key)
	if err != nil {
		l.Log.WarnContext(ctx, "the key of a request to a port was not held", "err", err)
		writeFailure(w, r, shared.Failf(http.StatusServiceUnavailable, "the key of this token cannot be checked now; repeat the request later"))
		return
	}
	defer release()
	r = r.WithContext(ctx)
	address, err := l.forwarded(ctx, client, key, ws, t.Port)
	if err != nil {
		l.fail(w, r, err)
		return
	}
	if address == "" {
		writeClosed(w, t)
		return
	}
	shared.Unhurry(w)
	l.proxy(address, ws, t).ServeHTTP(w, r)
}

// routed reports whether a request may go to a port: the workspace has its machine, or the request resumes it.
func routed(ws coppice.Workspace) bool {
	switch ws.State {
	case coppice.WorkspaceReady, coppice.WorkspaceCheckpointing:
		return true
	case coppice.WorkspaceSuspended, coppice.WorkspaceRestoring:
		return ws.AutoResume
	case coppice.WorkspaceCreating, coppice.WorkspaceQuarantined, coppice.WorkspaceTerminating, coppice.WorkspaceTerminated, coppice.WorkspaceFailed, coppice.WorkspaceLost:
	}
	return false
}

// proxy forwards a request to an address. It removes only this layer's headers and tokens.
func (l *layer) proxy(address string, ws coppice.WorkspaceID, t target) http.Handler {
	return &httputil.ReverseProxy{
		// A connection is for one request: after a restore the address may lead to another machine.
		Transport: relay.Final(&http.Transport{
			DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: 256 << 10,
			DialContext: (&net.Dialer{Timeout: 10 * time.Second}).DialContext,
		}),
		FlushInterval: -1,
		ErrorLog:      slog.NewLogLogger(l.Log.Handler(), slog.LevelDebug),
		Rewrite: func(p *httputil.ProxyRequest) {
			p.SetURL(&url.URL{Scheme: "http", Host: address})
			p.Out.Host = p.In.Host
			for _, h := range []string{headerSandbox, headerPort, headerTraffic, headerKey} {
				p.Out.Header.Del(h)
			}
			if _, ours := l.tokens.check(purposeEnvd, ws, p.In.Header.Get(headerAccess)); ours {
				p.Out.Header.Del(headerAccess)
			}
		},
		ModifyResponse: reduce,
		ErrorHandler:   func(w http.ResponseWriter, _ *http.Request, _ error) { writeClosed(w, t) },
	}
}

// reduce limits an answer of a guest to the guest's own name: its cookies are for this name only,
// and this layer, not the guest, decides which pages may read the answer.
func reduce(res *http.Response) error {
	h := res.Header
	h.Del("Access-Control-Allow-Origin")
	h.Del("Access-Control-Allow-Credentials")
	lines := h.Values("Set-Cookie")
	h.Del("Set-Cookie")
	for _, line := range lines {
		c, err := http.ParseSetCookie(line)
		if err != nil {
			continue
		}
		c.Domain = ""
		if text := c.String(); text != "" { // without parts that could not be parsed
			h.Add("Set-Cookie", text)
		}
	}
	return nil
}

// forwarded returns the address on the runner's host that leads to a port of the guest now, or
// nothing. It uses an existing forward again, at the address that the runner confirms: the address
// in the row may belong to somebody else by now.
func (l *layer) forwarded(ctx context.Context, c *coppice.Client, key coppice.KeyID, ws coppice.WorkspaceID, port int) (string, error) {
	ports, err := c.Ports(ctx, ws)
	if err != nil {
		return "", err
	}
	there := false
	for _, p := range ports {
		if p.GuestPort != port || p.Listen == "" { // the runner has not said yet where it listens
			continue
		}
		there = true
		address, err := l.ConfirmPort(ctx, key, ws, p.ID)
		if err == nil {
			return address, nil
		}
		l.Log.InfoContext(ctx, "a forwarded port was not confirmed", "workspace_id", ws, "port_id", p.ID, "err", err)
	}
	if there {
		return "", nil
	}
	p, err := c.CreatePort(ctx, ws, coppice.CreatePortRequest{GuestPort: port})
	return p.Listen, err
}
