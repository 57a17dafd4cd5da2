package httpapi

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/internal/pass"
	"github.com/coppice-dev/coppice/runner"
	"github.com/coppice-dev/coppice/runner/writelog"
)

const headerRequest = "X-Request-Id"

// maxFile bounds an upload, as the public API does.
const maxFile = 10 << 30

// Data is the data plane: users' streams and files, straight to the sandboxes. Everything but the health check needs a pass.
type Data struct {
	runner *runner.Runner
	passes *pass.Verifier
	log    *slog.Logger
	mux    *http.ServeMux
	wake   func() // has the controller told soon
	writes *writelog.Log
	upload int64 // bytes of one

	mu   sync.Mutex // guards what follows
	keys map[core.KeyID]*keyUse
	woke time.Time                // when writes asked for a report last
	used map[core.WorkspaceID]int // how often they are reached now; 0 for those that were, lately
}

// Used returns the workspaces that were reached since the last call, or are.
func (d *Data) Used() []core.WorkspaceID {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := slices.Collect(maps.Keys(d.used))
	maps.DeleteFunc(d.used, func(_ core.WorkspaceID, n int) bool { return n == 0 })
	return list
}

// keyUse is what was begun with the passes of an API key.
type keyUse struct {
	at    time.Time // of the last one
	ended bool
	open  map[*context.CancelFunc]struct{}
}

// keyMemory is how long a key is remembered after its last pass was used: longer than a pass is good for.
const keyMemory = 10 * time.Minute

// Keys returns the API keys whose passes were used lately.
func (d *Data) Keys() []core.KeyID {
	d.mu.Lock()
	defer d.mu.Unlock()
	maps.DeleteFunc(d.keys, func(_ core.KeyID, u *keyUse) bool { return len(u.open) == 0 && time.Since(u.at) > keyMemory })
	return slices.Collect(maps.Keys(d.keys))
}

// End ends the streams of these keys, and refuses their passes from now on.
func (d *Data) End(keys []core.KeyID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, id := range keys {
		if u, ok := d.keys[id]; ok {
			u.ended = true
			for cancel := range u.open {
				(*cancel)()
			}
		}
	}
}

var errKeyEnded = core.Errorf(core.Unauthenticated, core.CodeUnauthenticated, "the API key that asked for the pass is not valid any more")

// begin ties a request to the key of its pass. The returned function must be called at its end.
func (d *Data) begin(ctx context.Context, c pass.Claims) (context.Context, func(), error) {
	if !c.KeyEnds.IsZero() && !time.Now().Before(c.KeyEnds) {
		return ctx, nil, errKeyEnded
	}
	ctx, cancel := context.WithCancel(ctx)
	stop := cancel
	if !c.KeyEnds.IsZero() {
		ctx, stop = context.WithDeadline(ctx, c.KeyEnds)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	u, ok := d.keys[c.Key]
	if !ok {
		u = &keyUse{open: map[*context.CancelFunc]struct{}{}}
		d.keys[c.Key] = u
	}
	if u.ended {
		stop()
		cancel()
		return ctx, nil, errKeyEnded
	}
	u.at = time.Now()
	u.open[&cancel] = struct{}{}
	d.used[c.Workspace]++
	return ctx, func() {
		stop()
		cancel()
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(u.open, &cancel)
		d.used[c.Workspace]--
	}, nil
}

// NewData returns the handler. It keeps writes in a log, which the caller closes after it.
func NewData(r *runner.Runner, passes *pass.Verifier, writes *writelog.Log, log *slog.Logger) *Data {
	d := &Data{runner: r, passes: passes, writes: writes, log: log, upload: maxFile, mux: http.NewServeMux(), wake: r.Hurry, keys: map[core.KeyID]*keyUse{}, used: map[core.WorkspaceID]int{}}
	d.mux.HandleFunc("GET "+runnerapi.PathDataHealth, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"status":"ok"}` + "\n")) // the reader may have gone
	})
	d.mux.HandleFunc("GET "+runnerapi.PathDataAttach, d.attach)
	for _, method := range []string{http.MethodGet, http.MethodPut, http.MethodDelete} { // GET serves HEAD too
		d.mux.HandleFunc(method+" "+runnerapi.PathDataFiles, d.files)
	}
	return d
}

// ServeHTTP serves the data plane.
func (d *Data) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	id := make([]byte, 10)
	_, _ = rand.Read(id) // never fails: crypto/rand ends the program instead
	w.Header().Set(headerRequest, "req_"+hex.EncodeToString(id))
	w.Header().Set("X-Content-Type-Options", "nosniff")
	d.mux.ServeHTTP(w, q)
}

func (d *Data) attach(w http.ResponseWriter, q *http.Request) {
	if !strings.EqualFold(q.Header.Get("Upgrade"), "websocket") {
		d.fail(w, q, core.Errorf(core.Invalid, core.CodeInvalidField, "Upgrade: this route speaks WebSocket only"))
		return
	}
	c, err := d.authorize(q, pass.Attach)
	if err != nil {
		d.fail(w, q, err)
		return
	}
	d.pass(w, q, c, "/v1/sessions/"+string(c.Session)+"/attach", "stdout_offset", "stderr_offset", "from")
}

func (d *Data) files(w http.ResponseWriter, q *http.Request) {
	c, err := d.authorize(q, pass.Files)
	if err != nil {
		d.fail(w, q, err)
		return
	}
	names := []string{"path", "user", "list", "tar", "stat", "max_bytes", "recursive", "depth", "follow", "xattrs"}
	if q.Method == http.MethodPut {
		names = []string{"path", "user", "mode", "uid", "gid", "mkdirs", "untar", "in_place", "offset", "append"}
		if q.ContentLength > d.upload {
			d.fail(w, q, tooLarge(d.upload))
			return
		}
		q.Body = http.MaxBytesReader(w, q.Body, d.upload)
	}
	path := guestapi.PathFiles
	if len(guestapi.Needs(path, q.URL.Query())) > 0 {
		path = guestapi.PathFileContent
	}
	d.pass(w, q, c, path, names...)
}

// authorize checks a pass, and that the sandbox in it still exists: the sandbox of a workspace changes with every restore,
// and a fork has one of its own.
func (d *Data) authorize(q *http.Request, scope pass.Scope) (pass.Claims, error) {
	token, ok := strings.CutPrefix(q.Header.Get("Authorization"), "Bearer ")
	if !ok && scope == pass.Attach {
		token = q.URL.Query().Get("token") // browsers cannot set a header on a WebSocket
	}
	if token == "" {
		return pass.Claims{}, core.Errorf(core.Unauthenticated, core.CodeUnauthenticated, "the data plane needs a pass from the API: Authorization: Bearer <pass>")
	}
	c, err := d.passes.Verify(token, scope, time.Now())
	if err != nil {
		return c, err
	}
	s, err := d.runner.Sandbox(c.Sandbox)
	if err != nil || s.WorkspaceID != c.Workspace || s.Epoch != c.Epoch || s.State == runnerapi.SandboxDead {
		return c, core.Errorf(core.Unauthenticated, core.CodeUnauthenticated, "the pass is of an epoch of workspace %s that has ended; ask the API for another", c.Workspace)
	}
	return c, nil
}

// pass hands a request to the agent under its path there, with those parameters that it understands.
func (d *Data) pass(w http.ResponseWriter, q *http.Request, c pass.Claims, path string, names ...string) {
	given := q.URL.Query()
	for name := range given {
		if name != "token" && !slices.Contains(names, name) {
			d.fail(w, q, core.Errorf(core.Invalid, core.CodeInvalidField, "%s: this route has no such query parameter", core.Clip(name)))
			return
		}
	}
	query := runnerapi.GuestQuery(given.Get, names...)
	ctx, end, err := d.begin(q.Context(), c)
	if err != nil {
		d.fail(w, q, err)
		return
	}
	defer end()
	if isWrite(q) && given.Get("path") == "" { // the agent would refuse it, after it was noted
		d.fail(w, q, core.Errorf(core.Invalid, core.CodeInvalidField, "path must name a file in the sandbox"))
		return
	}
	h, err := d.runner.Guest(ctx, c.Sandbox, func(w http.ResponseWriter, q *http.Request, err error) {
		if large, ok := errors.AsType[*http.MaxBytesError](err); ok { // the guest is not at fault
			err = tooLarge(large.Limit)
		}
		d.fail(w, q, err)
	})
	if err != nil {
		d.fail(w, q, err)
		return
	}
	if err := d.note(w, q, c); err != nil {
		d.fail(w, q, err)
		return
	}
	out := q.Clone(ctx)
	out.URL = &url.URL{Path: path, RawQuery: query.Encode()}
	out.Header.Del("Authorization")
	d.log.InfoContext(q.Context(), "pass used", "request_id", w.Header().Get(headerRequest), "workspace_id", c.Workspace, "sandbox_id", c.Sandbox, "scope", c.Scope, "key_id", c.Key)
	h.ServeHTTP(w, out)
}

// fail answers as the public API does. A query string may hold a pass, so it is not logged.
func (d *Data) fail(w http.ResponseWriter, q *http.Request, err error) {
	code := status(core.CategoryOf(err))
	if core.CodeOf(err) == core.CodeRateLimited {
		code = http.StatusTooManyRequests
		w.Header().Set("Retry-After", "1")
	}
	if core.CodeOf(err) == core.CodeBodyTooLarge {
		code = http.StatusRequestEntityTooLarge
	}
	level := slog.LevelInfo
	if core.CategoryOf(err) == core.Internal {
		level = slog.LevelError
	}
	d.log.Log(q.Context(), level, "data request refused", "request_id", w.Header().Get(headerRequest), "path", q.URL.Path, "code", core.CodeOf(err), "err", err)
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(map[string]any{ // the reader may have gone
		"type": "https://coppice.dev/problems/" + string(core.CodeOf(err)), "title": http.StatusText(code), "status": code,
		"code": core.CodeOf(err), "detail": core.MessageOf(err), "request_id": w.Header().Get(headerRequest),
	})
}
