package e2b

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"net/http"
	"path"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/coppice-dev/coppice/controller/compat/e2b/envd/filesystem"
	"github.com/coppice-dev/coppice/controller/compat/e2b/envd/process"
	"github.com/coppice-dev/coppice/controller/compat/e2b/template"
	"github.com/coppice-dev/coppice/controller/compat/shared"
	"github.com/coppice-dev/coppice/internal/inprocess"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

const (
	rootUser = template.Root

	headerAccess = "X-Access-Token"
)

// visit is an admitted request to the daemon of a sandbox.
type visit struct {
	*coppice.Client
	ws   coppice.WorkspaceID
	user string // named by the client, or the default
	dir  string // of processes, if the client names none; empty: the user's home
}

type visitKey struct{}

// visitOf returns the visit of a request that serveEnvd has admitted.
func visitOf(ctx context.Context) visit {
	v, _ := ctx.Value(visitKey{}).(visit)
	return v
}

const maxMessage = 2 << 20 // bytes of one Connect message

// envdRoutes are the routes of E2B's daemon that clients use. Those that change the daemon itself are not among them.
func (l *layer) envdRoutes() http.Handler {
	mux := http.NewServeMux()
	opts := []connect.HandlerOption{connect.WithReadMaxBytes(maxMessage)}
	_, h := process.NewProcessHandler(processes{}, opts...)
	handleMethods(mux, process.File_process_process_proto, h)
	_, h = filesystem.NewFilesystemHandler(files{&watchers{}}, opts...)
	handleMethods(mux, filesystem.File_filesystem_filesystem_proto, h)
	for pattern, h := range map[string]func(http.ResponseWriter, *http.Request) error{
		"GET /health":         health,
		"GET /envs":           envs,
		"GET /files":          download,
		"POST /files":         upload,
		"GET /metrics":        envdMetrics,
		"POST /files/compose": func(http.ResponseWriter, *http.Request) error { return unsupported("to compose files") },
	} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if err := h(w, r); err != nil {
				l.fail(w, r, err)
			}
		})
	}
	return l.fallback(mux)
}

// handleMethods routes the methods of a schema's services, and no other path below them.
func handleMethods(mux *http.ServeMux, file protoreflect.FileDescriptor, h http.Handler) {
	for i := range file.Services().Len() {
		service := file.Services().Get(i)
		for j := range service.Methods().Len() {
			mux.Handle("/"+string(service.FullName())+"/"+string(service.Methods().Get(j).Name()), h)
		}
	}
}

// serveEnvd admits a request by its token or by its signature. A request with neither gets the same
// answer for every sandbox, whether it exists or not.
func (l *layer) serveEnvd(w http.ResponseWriter, r *http.Request, t target) {
	ws, _ := workspaceID(t.ID) // sandboxhost has checked it
	key, ok := l.tokens.check(purposeEnvd, ws, r.Header.Get(headerAccess))
	signed := !ok && r.URL.Path == "/files" && r.URL.Query().Has("signature")
	if signed {
		var err error
		if key, err = l.checkLink(r, ws); err != nil {
			l.fail(w, r, err)
			return
		}
		ok = true
	}
	switch {
	case !ok && r.URL.Path == "/health":
		writeGone(w, t.ID)
		return
	case !ok:
		l.refuseVisit(w, r, shared.Failf(http.StatusUnauthorized, "this sandbox needs its access token in %s", headerAccess))
		return
	}
	leave, full := l.busy.enter(key)
	if full != nil {
		l.refuseVisit(w, r, full)
		return
	}
	defer leave()
	ctx := l.ActFor(inprocess.WithRemote(r.Context(), r.RemoteAddr), key)
	v := visit{Client: l.client(""), ws: ws}
	if name, _, basic := r.BasicAuth(); basic && name != "" && !signed { // a signature is for the user in the URL
		v.user = name
	}
	if name := r.URL.Query().Get("username"); name != "" && strings.HasPrefix(r.URL.Path, "/files") {
		v.user = name
	}
	row, err := v.Workspace(ctx, ws)
	switch {
	case errors.Is(err, coppice.CodeWorkspaceNotFound), err == nil && !running(row):
		writeGone(w, t.ID)
		return
	case err != nil:
		l.refuseVisit(w, r, shared.Translate(err))
		return
	}
	v.user, v.dir = cmp.Or(v.user, row.Labels[labelUser], l.User), row.Labels[labelDir]
	l.issued.add(ws, key) // the workspace is one of the key's project
	shared.Unhurry(w)
	l.daemon.ServeHTTP(w, r.WithContext(context.WithValue(ctx, visitKey{}, v)))
}

// running reports whether requests may reach the guest: the workspace runs, or its use resumes it.
func running(ws coppice.Workspace) bool {
	return live(ws) && ws.State != coppice.WorkspaceCreating && (!paused(ws) || ws.AutoResume)
}

// refuseVisit writes an error: in Connect's form to a Connect request, and in E2B's form to others.
func (l *layer) refuseVisit(w http.ResponseWriter, r *http.Request, f *shared.StatusError) {
	shared.CloseStranger(w, f.Status)
	if errs := connect.NewErrorWriter(); errs.IsSupported(r) {
		_ = errs.Write(w, r, rpcError(r.Context(), f)) // the client may have gone
		return
	}
	writeFailure(w, r, f)
}

// checkLink finds the key whose token signed a link.
func (l *layer) checkLink(r *http.Request, ws coppice.WorkspaceID) (coppice.KeyID, error) {
	q := r.URL.Query()
	k := link{path: q.Get("path"), op: "read", user: q.Get("username"), signature: q.Get("signature")}
	if r.Method != http.MethodGet {
		k.op = "write"
	}
	if text := q.Get("signature_expiration"); text != "" {
		var err error
		if k.expires, err = strconv.ParseInt(text, 10, 64); err != nil || k.expires <= 0 {
			return "", shared.Failf(http.StatusUnauthorized, "invalid signature")
		}
	}
	for _, key := range l.issued.keys(ws) {
		ok, err := k.verify(l.tokens.issue(purposeEnvd, ws, key), time.Now())
		if err != nil {
			return "", err
		}
		if ok {
			return key, nil
		}
	}
	return "", shared.Failf(http.StatusUnauthorized, "invalid signature")
}

// health answers that the sandbox runs: serveEnvd has checked this.
func health(w http.ResponseWriter, _ *http.Request) error {
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func envs(w http.ResponseWriter, r *http.Request) error {
	v := visitOf(r.Context())
	ws, err := v.Workspace(r.Context(), v.ws)
	if err != nil {
		return err
	}
	out := map[string]string(ws.Env)
	if out == nil {
		out = map[string]string{}
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

// account is a user of the guest.
type account struct {
	name     string
	uid, gid int
	home     string
}

const (
	maxAccounts     = 1 << 20 // bytes of such a file
	maxAccountLines = 4096    // lines that are read of such a file
)

// accounts reads the users of the guest.
func (v visit) accounts(ctx context.Context) map[string]account {
	users := map[string]account{rootUser: {name: rootUser, home: "/root"}}
	for _, f := range v.table(ctx, "/etc/passwd", 7) {
		uid, err1 := strconv.Atoi(f[2])
		gid, err2 := strconv.Atoi(f[3])
		if err1 != nil || err2 != nil || f[5] == "" || f[5][0] != '/' {
			continue
		}
		users[f[0]] = account{f[0], uid, gid, path.Clean(f[5])}
	}
	return users
}

// table reads a file of lines with colons. An image without the file has root only.
func (v visit) table(ctx context.Context, name string, fields int) [][]string {
	b, err := v.ReadFile(ctx, v.ws, name, maxAccounts)
	if err != nil {
		return nil
	}
	var out [][]string
	s := bufio.NewScanner(bytes.NewReader(b))
	for n := 0; n < maxAccountLines && s.Scan(); n++ {
		if f := strings.Split(s.Text(), ":"); len(f) == fields {
			out = append(out, f)
		}
	}
	return out
}

// account returns the user of the visit.
func (v visit) account(ctx context.Context) (account, error) {
	if v.user == rootUser {
		return account{name: rootUser, home: "/root"}, nil
	}
	u, ok := v.accounts(ctx)[v.user]
	if !ok {
		return u, shared.Failf(http.StatusUnauthorized, "invalid username: '%s'", shared.Clip(v.user))
	}
	return u, nil
}

// asUser names the user for work on files. Root's rights are the default, which agents in old checkpoints know, too.
func (u account) asUser() string {
	if u.uid == 0 {
		return ""
	}
	return u.name
}

// resolve makes a path of a client absolute: a relative path is below the user's home.
func (u account) resolve(p string) string {
	switch {
	case p == "" || p == "~":
		return u.home
	case strings.HasPrefix(p, "~/"):
		return path.Join(u.home, p[2:])
	case p[0] != '/':
		return path.Join(u.home, p)
	}
	return path.Clean(p)
}
