package e2b

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// maxBody bounds a request of the control plane.
const maxBody = 1 << 20

// handler is a route of the control plane. It answers, or returns an error.
type handler func(w http.ResponseWriter, r *http.Request, c call) error

// call is a request of the control plane, and the values that its routes need.
type call struct {
	*coppice.Client
	layer   *layer
	sandbox string          // of the path
	key     *coppice.APIKey // nil: it was not asked for yet
}

// Self returns the key of the call. It asks the API, unless checkKey has done so.
func (c call) Self(ctx context.Context) (coppice.APIKey, error) {
	if c.key != nil {
		return *c.key, nil
	}
	return c.Client.Self(ctx)
}

// controlRoutes are the routes of E2B's control plane. Every other route answers with an error in E2B's form.
func (l *layer) controlRoutes() http.Handler {
	routes := map[string]handler{
		"POST /sandboxes":                         l.create(timeoutV1),
		"POST /v2/sandboxes":                      l.create(timeoutV2),
		"GET /sandboxes":                          listRunning,
		"GET /v2/sandboxes":                       listPaged,
		"GET /sandboxes/{id}":                     describe,
		"DELETE /sandboxes/{id}":                  kill,
		"POST /sandboxes/{id}/timeout":            setTimeout,
		"POST /sandboxes/{id}/refreshes":          refresh,
		"POST /sandboxes/{id}/pause":              pause,
		"POST /sandboxes/{id}/resume":             resume,
		"POST /sandboxes/{id}/connect":            connectSandbox,
		"POST /v2/sandboxes/{id}/connect":         connectSandbox,
		"POST /sandboxes/{id}/fork":               fork,
		"POST /sandboxes/{id}/snapshots":          takeSnapshot,
		"GET /snapshots":                          listSnapshots,
		"DELETE /templates/{template}":            deleteSnapshot,
		"GET /templates/aliases/{alias}":          templateExists,
		"GET /sandboxes/{id}/metrics":             metrics,
		"PUT /sandboxes/{id}/network":             l.updateNetwork,
		"GET /sandboxes/{id}/logs":                logsV1,
		"GET /v2/sandboxes/{id}/logs":             logs,
		"GET /templates":                          listTemplates,
		"POST /v3/templates":                      requestBuild,
		"GET /templates/{id}/files/{hash}":        linkUpload,
		"POST /v2/templates/{id}/builds/{bid}":    startBuild,
		"GET /templates/{id}/builds/{bid}/status": buildStatus,
		"POST /templates/tags":                    refuseTags,
		"DELETE /templates/tags":                  refuseTags,
	}
	mux := http.NewServeMux()
	mux.HandleFunc("PUT /templates/files/{hash}", l.takeUpload) // its link is its key
	for pattern, h := range routes {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			ctx, client := l.caller(r)
			r = r.WithContext(ctx)
			r.Body = shared.HurriedBody{ReadCloser: http.MaxBytesReader(w, r.Body, maxBody), Writer: w}
			c := call{Client: client, layer: l, sandbox: r.PathValue("id")}
			err := c.checkKey(r)
			if err == nil {
				err = h(w, r, c)
			}
			if err != nil {
				l.fail(w, r, err)
			}
		})
	}
	return l.fallback(mux)
}

// checkKey checks the key of a request that has a body, before the body is read.
func (c *call) checkKey(r *http.Request) error {
	if r.ContentLength == 0 {
		return nil
	}
	key, err := c.Client.Self(r.Context())
	switch {
	case errors.Is(err, coppice.CodeRateLimited): // the key is good, and the request counts for a rate of its own
		return nil
	case err != nil:
		return err
	}
	c.key = &key
	return nil
}

// fallback gives the mux's own refusals E2B's form.
func (l *layer) fallback(mux *http.ServeMux) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, pattern := mux.Handler(r); pattern != "" {
			mux.ServeHTTP(w, r)
			return
		}
		writeFailure(w, r, shared.Failf(http.StatusNotFound, "there is no route %s %s here", r.Method, shared.Clip(r.URL.Path)))
	})
}

func (l *layer) fail(w http.ResponseWriter, r *http.Request, err error) {
	f := shared.Translate(err)
	if f.Status >= http.StatusInternalServerError && f.Status != http.StatusNotImplemented {
		l.Log.WarnContext(r.Context(), "request failed", "method", r.Method, "path", r.URL.Path, "status", f.Status, "err", err)
	}
	writeFailure(w, r, f)
}

// readJSON decodes a body. An unknown field is refused by its name: to ignore it could do something that the client did not ask for.
func readJSON(r *http.Request, into any) error {
	d := json.NewDecoder(r.Body)
	d.DisallowUnknownFields()
	err := d.Decode(into)
	switch {
	case errors.Is(err, io.EOF):
		return nil // every field has a default
	case errors.As(err, new(*http.MaxBytesError)):
		return err
	case errors.Is(err, os.ErrDeadlineExceeded):
		return shared.Failf(http.StatusRequestTimeout, "the body did not arrive within %v", shared.BodyTime)
	case err != nil:
		return shared.Failf(http.StatusBadRequest, "the body cannot be used: %s", strings.TrimPrefix(err.Error(), "json: "))
	case d.More():
		return shared.Failf(http.StatusBadRequest, "the body has more than one JSON value")
	}
	return nil
}

// workspace returns the workspace of the call's sandbox: one that runs, is paused, or changes between the two.
func (c call) workspace(r *http.Request) (coppice.Workspace, error) {
	id, ok := workspaceID(c.sandbox)
	if !ok {
		if _, err := c.Self(r.Context()); err != nil {
			return coppice.Workspace{}, err
		}
		return coppice.Workspace{}, notFound(c.sandbox)
	}
	ws, err := c.Workspace(r.Context(), id)
	if errors.Is(err, coppice.CodeWorkspaceNotFound) || err == nil && !live(ws) {
		return ws, notFound(c.sandbox)
	}
	return ws, err
}

func live(ws coppice.Workspace) bool {
	switch ws.State {
	case coppice.WorkspaceTerminating, coppice.WorkspaceTerminated, coppice.WorkspaceFailed, coppice.WorkspaceLost:
		return false
	case coppice.WorkspaceCreating, coppice.WorkspaceRestoring, coppice.WorkspaceQuarantined, coppice.WorkspaceReady, coppice.WorkspaceCheckpointing, coppice.WorkspaceSuspended:
	}
	return true
}

func paused(ws coppice.Workspace) bool { return ws.State == coppice.WorkspaceSuspended }

// rawQuery is the value of a parameter after one decoding.
func rawQuery(r *http.Request, name string) string {
	q, _ := url.ParseQuery(r.URL.RawQuery) // a malformed parameter counts as absent
	return q.Get(name)
}
