package guest

import (
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/internal/relay"
)

// errNotPublic refuses a route that is not for users.
var errNotPublic = core.Errorf(core.NotFound, core.CodeRouteNotFound, "there is no such route to the sandbox's agent")

// requestHeaders and allowed are what passes between a user and the guest. Credentials of the host's API never do.
var (
	requestHeaders = []string{
		"Content-Type", "Content-Length", "Connection", "Upgrade",
		"Sec-Websocket-Key", "Sec-Websocket-Version", "Sec-Websocket-Protocol",
	}
	allowed = relay.Allowed{
		Headers: map[string]bool{
			"Content-Length": true, "Trailer": true, "Connection": true, "Upgrade": true, "Sec-Websocket-Accept": true,
			"Sec-Websocket-Protocol": true, guestapi.HeaderOffset: true, guestapi.HeaderEndOffset: true, guestapi.HeaderTruncated: true,
			guestapi.HeaderEOF: true, guestapi.HeaderFileInfo: true, guestapi.HeaderStatus: true, guestapi.HeaderLeftOut: true,
		},
		Types: map[string]bool{"application/json": true, "application/octet-stream": true, "application/x-tar": true, "application/x-ndjson": true},
		Type:  "application/octet-stream",
	}
)

// Public reports whether a user may send a request of this method and path, as guestapi names them, to a guest. Paths with
// escapes, dots or empty elements are refused rather than cleaned.
func Public(method, path string) bool {
	is := func(allowed ...string) bool { return slices.Contains(allowed, method) }
	switch path {
	case guestapi.PathSessions:
		return is(http.MethodGet, http.MethodPost)
	case guestapi.PathFiles, guestapi.PathFileContent:
		return is(http.MethodGet, http.MethodHead, http.MethodPut, http.MethodDelete)
	case guestapi.PathMakeDir, guestapi.PathRename, guestapi.PathXAttrs:
		return is(http.MethodPost)
	case guestapi.PathWatches:
		return is(http.MethodGet, http.MethodPost)
	case guestapi.PathProcesses, guestapi.PathPorts, guestapi.PathMark:
		return is(http.MethodGet)
	}
	if rest, ok := strings.CutPrefix(path, guestapi.PathWatches+"/"); ok {
		id, verb, sub := strings.Cut(rest, "/")
		_, err := core.ParseID[core.WatchID](id)
		return err == nil && (!sub && is(http.MethodDelete) || verb == "events" && is(http.MethodGet))
	}
	rest, ok := strings.CutPrefix(path, guestapi.PathSessions+"/")
	if !ok {
		return false
	}
	id, verb, sub := strings.Cut(rest, "/")
	if _, err := core.ParseID[core.SessionID](id); err != nil {
		return false
	}
	switch verb {
	case "":
		return !sub && is(http.MethodGet, http.MethodDelete)
	case "wait", "output", "attach":
		return is(http.MethodGet)
	case "stdin", "signal", "resize", "deadline":
		return is(http.MethodPost)
	}
	return false
}

type publicTransport struct{ c *Client }

// Transport carries requests for the public routes to the guest, whatever their scheme and host; any other request fails
// with ROUTE_NOT_FOUND and nothing is sent. It returns the answers of the guest unchanged; use Proxy to pass them to a client.
func (c *Client) Transport() http.RoundTripper { return publicTransport{c} }

func (t publicTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.RawPath != "" || !Public(req.Method, req.URL.Path) {
		if req.Body != nil {
			_ = req.Body.Close()
		}
		return nil, errNotPublic
	}
	if err := t.c.can(req.Context(), guestapi.Needs(req.URL.Path, req.URL.Query())); err != nil {
		if req.Body != nil {
			_ = req.Body.Close()
		}
		return nil, err
	}
	out := req.Clone(req.Context())
	out.URL = &url.URL{Scheme: "http", Host: "guest", Path: req.URL.Path, RawQuery: req.URL.RawQuery}
	out.Host = "guest"
	out.Header = http.Header{}
	for _, name := range requestHeaders {
		if v := req.Header.Values(name); len(v) > 0 {
			out.Header[name] = v[:1]
		}
	}
	res, err := send(t.c.public, out)
	if err != nil {
		return nil, callError(req.Context(), err, req.URL.Path)
	}
	return res, nil
}

// Proxy passes requests for the public routes on to the guest; the request's path is the guest's (strip what stands before
// "/v1"). WebSockets, streams and trailers pass. What the guest answers is reduced to the known headers and content types,
// so that nothing of it is ever taken for a page, and interim answers (1xx) do not pass. fail answers the request when the guest could not (GUEST_UNREACHABLE,
// ROUTE_NOT_FOUND, GUEST_PROTOCOL).
func (c *Client) Proxy(fail func(w http.ResponseWriter, r *http.Request, err error)) http.Handler {
	return &httputil.ReverseProxy{
		Rewrite:        func(*httputil.ProxyRequest) {}, // Transport rebuilds the request
		Transport:      relay.Final(c.Transport()),
		FlushInterval:  -1,
		ErrorLog:       log.New(io.Discard, "", 0), // what ends a stream midway is the client's or the guest's doing; callers see it
		ModifyResponse: reduce,
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if _, ok := errors.AsType[*core.Error](err); !ok {
				err = unreachable(err, "the connection ended")
			}
			fail(w, r, err)
		},
	}
}

// reduce takes away what a guest has no business to say.
func reduce(res *http.Response) error {
	code := res.StatusCode
	if code != http.StatusSwitchingProtocols && (code < 200 || code >= 300) && (code < 400 || code > 599) {
		return protocolError(nil, "it answered with status %d", code)
	}
	if err := allowed.Reduce(res); err != nil {
		return err
	}
	res.Header.Set("X-Content-Type-Options", "nosniff")
	return nil
}
