package arrakis

import (
	"bytes"
	"encoding/json"
	"errors"
	"mime"
	"net/http"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

const (
	maxBody   = 1 << 20  // of a request without files
	maxUpload = 16 << 20 // of one with files
)

// answerTime is how long a client may take to read an answer.
const answerTime = 2 * time.Minute

// handler is a route. It returns the answer, or an error.
type handler func(r *http.Request, c call) (any, error)

// call is a request, and the values that its routes need.
type call struct {
	*coppice.Client
	layer *layer
	name  string // of the VM, from the path
	body  []byte
	open  bool // the client has given no key
}

// done is the answer of a request that returns nothing.
var done = map[string]bool{"success": true}

// mux has each route with and without the prefix of the API's version: the older versions of py-arrakis have none.
func (l *layer) mux() *http.ServeMux {
	mux := http.NewServeMux()
	for _, prefix := range []string{"", "/v1"} {
		add := func(method, at, failed string, h handler) {
			mux.HandleFunc(method+" "+prefix+at, l.serve(failed, maxBody, h))
		}
		files := func(method, failed string, h handler) {
			mux.HandleFunc(method+" "+prefix+"/vms/{name}/files", l.serve(failed, maxUpload, h))
		}
		mux.HandleFunc("GET "+prefix+"/health", l.health)
		add("GET", "/vms", "Failed to list all VMs", list)
		add("POST", "/vms", "Failed to start VM", start)
		add("DELETE", "/vms", "Failed to destroy all VMs", destroyAll)
		add("GET", "/vms/{name}", "Failed to list VM", describe)
		add("PATCH", "/vms/{name}", "Failed to change VM state", patch)
		add("DELETE", "/vms/{name}", "Failed to destroy VM", destroy)
		add("POST", "/vms/{name}/snapshots", "Failed to create snapshot", takeSnapshot)
		add("POST", "/vms/{name}/cmd", "Failed to execute command", command)
		files("POST", "Failed to upload files", upload)
		files("GET", "Failed to download files", download)
	}
	return mux
}

// serve makes a route of a handler. Errors of the REST API begin with what has failed, as those of Arrakis do.
func (l *layer) serve(failed string, most int64, h handler) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		err := l.answer(w, r, most, h)
		if err == nil {
			return
		}
		f := shared.Translate(err)
		if f.Status >= http.StatusInternalServerError {
			l.Log.WarnContext(r.Context(), "request failed", "method", r.Method, "path", r.URL.Path, "status", f.Status, "err", err)
		}
		if !errors.As(err, new(*shared.StatusError)) {
			f = shared.Failf(f.Status, "%s: %s", failed, f.Message)
		}
		writeFailure(w, f)
	}
}

// answer serves a request, unless it fails. A request with files keeps its place until the client has the answer.
func (l *layer) answer(w http.ResponseWriter, r *http.Request, most int64, h handler) error {
	ctx, client, f := l.caller(r)
	if f != nil {
		return f
	}
	r = r.WithContext(ctx)
	open := r.Header.Get("Authorization") == ""
	if most > maxBody || !open { // the key is checked before the body is read
		key, err := client.Self(ctx)
		if err != nil {
			return err
		}
		if most > maxBody {
			leave, err := l.transfers.enter(ctx, key.ID)
			if err != nil {
				return err
			}
			defer leave()
		}
	}
	body, err := readBody(w, r, most)
	if err != nil {
		return err
	}
	answer, err := h(r, call{client, l, r.PathValue("name"), body, open})
	if err != nil {
		return err
	}
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(answerTime)) // fails only without a connection
	writeJSON(w, http.StatusOK, answer)
	return nil
}

// health says whether new VMs can be started. It needs no key.
func (l *layer) health(w http.ResponseWriter, r *http.Request) {
	if _, err := shared.Client(l.API, "", "coppice-arrakis").Ready(r.Context()); err != nil {
		writeFailure(w, shared.Translate(err))
		return
	}
	writeJSON(w, http.StatusOK, map[string]string{"status": "healthy", "timestamp": time.Now().UTC().Format(time.RFC3339)})
}

// readBody reads a body of JSON. Any other type is refused: a web page can send those without asking the server first.
func readBody(w http.ResponseWriter, r *http.Request, most int64) ([]byte, error) {
	body, err := shared.ReadBody(w, r, most)
	if err != nil {
		return nil, err
	}
	media, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type")) // a type that cannot be parsed is none
	if len(body) > 0 && media != "application/json" {
		return nil, shared.Failf(http.StatusUnsupportedMediaType, "Content-Type: the body must be application/json")
	}
	return body, nil
}

// readJSON decodes a body. Unknown fields are ignored, as Arrakis does.
func readJSON(body []byte, into any) error {
	if len(bytes.TrimSpace(body)) == 0 {
		return shared.Failf(http.StatusBadRequest, "Invalid request format: the body is empty")
	}
	if err := json.Unmarshal(body, into); err != nil {
		return shared.Failf(http.StatusBadRequest, "Invalid request format: %s", shared.Clip(strings.TrimPrefix(err.Error(), "json: ")))
	}
	return nil
}
