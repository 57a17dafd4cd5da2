package arbor

import (
	"bytes"
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/controller/compat/shared"
)

// maxBody bounds a request.
const maxBody = 1 << 20

// answerTime is how long a client may take to read an answer.
const answerTime = 2 * time.Minute

// answer is what a route answers: a status, and a body unless it is nil.
type answer struct {
	status int
	body   any
}

// handler is a route.
type handler func(r *http.Request, c call) (answer, error)

// call is a request, and the values that its routes need.
type call struct {
	caller
	layer *layer
	id    string // of the object in the path
	body  []byte
}

func (l *layer) mux() *http.ServeMux {
	mux := http.NewServeMux()
	for pattern, h := range map[string]handler{
		"POST /v1/workspaces":                               create,
		"GET /v1/workspaces/{id}":                           describe,
		"POST /v1/workspaces/{id}":                          colon, // {id}:terminate
		"POST /v1/workspaces/{id}/terminate":                terminate,
		"POST /v1/workspaces/{id}/exec":                     exec,
		"POST /v1/workspaces/{id}/checkpoints":              checkpoint,
		"GET /v1/workspaces/{id}/checkpoints":               checkpoints,
		"PUT /v1/workspaces/{id}/secrets/grants/{grant}":    putGrant,
		"DELETE /v1/workspaces/{id}/secrets/grants/{grant}": revokeGrant,
		"POST /v1/checkpoints/{id}/fork":                    fork,
		"POST /v1/checkpoints/{id}/restore":                 restore,
		"GET /v1/operations/{id}":                           operation,
		"POST /v1/sessions/{id}/attach":                     pass,
		"GET /v1/runners":                                   runners,
	} {
		mux.HandleFunc(pattern, l.serve(h))
	}
	mux.HandleFunc("GET /v1/workspaces/{id}/events", l.events)
	mux.HandleFunc("GET /v1/attach/{id}", l.attach)
	mux.HandleFunc("GET /health", l.health)
	return mux
}

// serve makes a route of a handler.
func (l *layer) serve(h handler) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		a, err := l.answer(w, r, h)
		if err != nil {
			l.fail(w, r, err)
			return
		}
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(answerTime)) // fails only without a connection
		if a.body == nil {
			w.WriteHeader(a.status)
			return
		}
		writeJSON(w, a.status, a.body)
	}
}

func (l *layer) fail(w http.ResponseWriter, r *http.Request, err error) {
	if f := shared.Translate(err); f.Status >= http.StatusInternalServerError && f.Status != http.StatusNotImplemented {
		l.Log.WarnContext(r.Context(), "request failed", "method", r.Method, "path", r.URL.Path, "status", f.Status, "err", err)
	}
	writeFailure(w, err)
}

func (l *layer) answer(w http.ResponseWriter, r *http.Request, h handler) (answer, error) {
	ctx, c, err := l.caller(r)
	if err != nil {
		return answer{}, err
	}
	r = r.WithContext(ctx)
	if r.Header.Get("Authorization") != "" { // the key is checked before the body is read
		if _, err := c.Self(ctx); err != nil {
			return answer{}, err
		}
	}
	body, err := shared.ReadBody(w, r, maxBody) // of any type, see the package comment
	if err != nil {
		return answer{}, err
	}
	return h(r, call{c, l, r.PathValue("id"), body})
}

// read decodes the body of a call. An unknown field is refused by its name: to ignore it could do something that the client did not ask for.
func (c call) read(into any) error {
	if len(bytes.TrimSpace(c.body)) == 0 {
		return nil // every field has a default, or the REST API says which one is missing
	}
	d := json.NewDecoder(bytes.NewReader(c.body))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return shared.Failf(http.StatusBadRequest, "the body cannot be used: %s", shared.Clip(strings.TrimPrefix(err.Error(), "json: ")))
	}
	if d.More() {
		return shared.Failf(http.StatusBadRequest, "the body has more than one JSON value")
	}
	return nil
}

// health says whether new workspaces can be made. It needs no key.
func (l *layer) health(w http.ResponseWriter, r *http.Request) {
	if _, err := shared.Client(l.API, "", agent).Ready(r.Context()); err != nil {
		writeFailure(w, err)
		return
	}
	writeJSON(w, http.StatusOK, map[string]string{"status": "ok"})
}
