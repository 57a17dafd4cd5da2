// Package httpapi serves api/runnerapi: it decodes requests, calls the runner and encodes answers
// and problems. Only controllers may reach it: over TLS by their certificate, or, on one machine,
// by a shared secret.
package httpapi

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/mtls"
	"github.com/coppice-dev/coppice/internal/tracing"
	"github.com/coppice-dev/coppice/runner"
	"github.com/coppice-dev/coppice/runner/pulls"
)

// maxBody bounds a request: a fork of 256 children with the largest rules and a large environment each fits.
const maxBody = 64 << 20

const _ uint = maxBody - 256*(runnerapi.MaxEgressRules+64<<10) // it does not compile where they do not fit

type server struct {
	runner *runner.Runner
	pulls  *pulls.Pulls
	log    *slog.Logger
	most   int64 // bytes of a request
}

func newServer(r *runner.Runner, p *pulls.Pulls, log *slog.Logger) *server {
	return &server{runner: r, pulls: p, log: log, most: maxBody}
}

// New returns the handler for a controller on the same machine. secret must not be empty.
func New(r *runner.Runner, p *pulls.Pulls, secret string, log *slog.Logger) (http.Handler, error) {
	if secret == "" {
		return nil, errors.New("the runner's API needs a secret")
	}
	want := sha256.Sum256([]byte(secret))
	return newServer(r, p, log).handler(func(q *http.Request, _ string) error {
		token, _ := strings.CutPrefix(q.Header.Get("Authorization"), "Bearer ")
		got := sha256.Sum256([]byte(token))
		if subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
			return core.Errorf(core.Unauthenticated, core.CodeUnauthenticated, "the runner's API takes requests from its controller only")
		}
		return nil
	}), nil
}

// NewTLS returns the handler for controllers of other machines, to be served with mtls.Identity.Server. It refuses clients without the
// certificate of a controller. Runners that peers allows may only ask for objects of the store.
func NewTLS(r *runner.Runner, p *pulls.Pulls, peers *Peers, log *slog.Logger) http.Handler {
	return newServer(r, p, log).handler(func(q *http.Request, route string) error {
		peer, err := mtls.PeerOf(q)
		if err == nil && !peer.Controller && route != routeObject {
			err = core.Errorf(core.PermissionDenied, core.CodePermissionDenied, "the runner's API takes requests from controllers only, not from runner %s", peer.Runner)
		}
		if err == nil && !peer.Controller {
			err = peers.allow(peer.Runner)
		}
		return err
	})
}

// routeObject is the only route for runners.
const routeObject = "GET " + runnerapi.PathObject

func (s *server) handler(authorize func(q *http.Request, route string) error) http.Handler {
	r := s.runner
	mux := http.NewServeMux()
	handle := func(method, path string, h http.HandlerFunc) { mux.HandleFunc(method+" "+path, h) }
	handle("GET", runnerapi.PathInfo, s.info)
	handle("GET", runnerapi.PathImages, s.images)
	handle("POST", runnerapi.PathTemplates, call(s, func(ctx context.Context, _ *http.Request, in runnerapi.Template) (runnerapi.Checkpoint, error) {
		return r.Template(ctx, in)
	}))
	handle("POST", runnerapi.PathForks, call(s, func(ctx context.Context, _ *http.Request, in runnerapi.Fork) (runnerapi.ForkResult, error) {
		return r.Fork(ctx, in)
	}))
	handle("GET", runnerapi.PathSandboxes, func(w http.ResponseWriter, _ *http.Request) {
		s.reply(w, runnerapi.Sandboxes{Sandboxes: r.Sandboxes()}, nil)
	})
	handle("GET", runnerapi.PathSandbox, func(w http.ResponseWriter, q *http.Request) {
		out, err := r.Sandbox(sandboxID(q))
		s.reply(w, out, err)
	})
	handle("DELETE", runnerapi.PathSandbox, func(w http.ResponseWriter, q *http.Request) {
		s.reply(w, nil, r.Destroy(context.WithoutCancel(q.Context()), sandboxID(q)))
	})
	handle("POST", runnerapi.PathSandboxCheckpoint, call(s, func(ctx context.Context, q *http.Request, in runnerapi.Capture) (runnerapi.Checkpoint, error) {
		return r.Capture(ctx, sandboxID(q), in)
	}))
	handle("POST", runnerapi.PathSandboxPorts, call(s, func(ctx context.Context, q *http.Request, in runnerapi.Port) (runnerapi.Port, error) {
		return r.OpenPort(ctx, sandboxID(q), in)
	}))
	handle("DELETE", runnerapi.PathSandboxPort, func(w http.ResponseWriter, q *http.Request) {
		s.reply(w, nil, r.ClosePort(sandboxID(q), core.PortID(q.PathValue("port_id"))))
	})
	handle("GET", runnerapi.PathSandboxConnect, s.connect)
	handle("PUT", runnerapi.PathSandboxEgress, call(s, func(ctx context.Context, q *http.Request, in runnerapi.EgressRules) (any, error) {
		return nil, r.SetEgressRules(ctx, sandboxID(q), in)
	}))
	handle("GET", runnerapi.PathSandboxConsole, s.console)
	mux.HandleFunc(strings.TrimSuffix(runnerapi.PathSandboxGuest, "*")+"{rest...}", s.guest)
	handle("GET", runnerapi.PathCheckpoints, func(w http.ResponseWriter, _ *http.Request) {
		s.reply(w, runnerapi.Checkpoints{Checkpoints: r.Checkpoints()}, nil)
	})
	handle("GET", runnerapi.PathCheckpoint, func(w http.ResponseWriter, q *http.Request) {
		out, err := r.Checkpoint(core.CheckpointID(q.PathValue("id")))
		s.reply(w, out, err)
	})
	handle("POST", runnerapi.PathCheckpointDiff, call(s, func(ctx context.Context, q *http.Request, in runnerapi.Diff) (runnerapi.DiffPage, error) {
		return r.Diff(ctx, core.CheckpointID(q.PathValue("id")), in)
	}))
	handle("POST", runnerapi.PathCheckpointFiles, call(s, func(ctx context.Context, q *http.Request, in runnerapi.ReadFile) (runnerapi.FilePart, error) {
		return r.ReadFile(ctx, core.CheckpointID(q.PathValue("id")), in)
	}))
	handle("POST", runnerapi.PathCheckpointExport, s.export)
	handle("DELETE", runnerapi.PathCheckpoint, func(w http.ResponseWriter, q *http.Request) {
		s.reply(w, nil, r.DeleteCheckpoint(core.CheckpointID(q.PathValue("id"))))
	})
	handle("PUT", runnerapi.PathPrepared, call(s, func(_ context.Context, _ *http.Request, in runnerapi.Prepare) (runnerapi.Prepared, error) {
		return r.Prepare(in)
	}))
	handle("PUT", runnerapi.PathPull, call(s, func(_ context.Context, q *http.Request, in runnerapi.Pull) (runnerapi.PullState, error) {
		return s.pulls.Pull(core.OperationID(q.PathValue("id")), in)
	}))
	mux.HandleFunc(routeObject, s.object)
	return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		_, route := mux.Handler(q)
		if err := authorize(q, route); err != nil {
			s.reply(w, nil, err)
			return
		}
		s.logged(mux, w, q)
	})
}

// logged serves a request under the ids that the controller gave with it, and writes a line about work for an operation.
func (s *server) logged(h http.Handler, w http.ResponseWriter, q *http.Request) {
	ctx, span := tracing.Serve(s.runner.Traces(), q, "runner "+q.Method)
	defer span.End()
	if id := q.Header.Get(runnerapi.HeaderRequest); core.Traceable(id) {
		ctx = core.WithRequestID(ctx, id)
	}
	operation := q.Header.Get(runnerapi.HeaderOperation)
	if !core.Traceable(operation) {
		h.ServeHTTP(w, q.WithContext(ctx))
		return
	}
	ctx = core.WithOperationID(ctx, core.OperationID(operation))
	seen := &statusWriter{ResponseWriter: w, status: http.StatusOK}
	began := time.Now()
	q = q.WithContext(ctx)
	h.ServeHTTP(seen, q)
	s.log.InfoContext(ctx, "controller's request", "request", q.Pattern, "status", seen.status, "duration_ms", core.Milliseconds(time.Since(began)))
}

// statusWriter remembers the status.
type statusWriter struct {
	http.ResponseWriter
	status int
}

// WriteHeader passes the status on.
func (w *statusWriter) WriteHeader(status int) {
	w.status = status
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap is for http.ResponseController.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func sandboxID(q *http.Request) core.SandboxID { return core.SandboxID(q.PathValue("id")) }

// call makes a handler of a function that takes and gives JSON.
func call[In, Out any](s *server, fn func(context.Context, *http.Request, In) (Out, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, q *http.Request) {
		var in In
		if err := s.decode(w, q, &in); err != nil {
			s.reply(w, nil, err)
			return
		}
		out, err := fn(q.Context(), q, in)
		s.reply(w, out, err)
	}
}

func (s *server) decode(w http.ResponseWriter, q *http.Request, in any) error {
	d := json.NewDecoder(http.MaxBytesReader(w, q.Body, s.most))
	d.DisallowUnknownFields()
	err := d.Decode(in)
	if large, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return tooLarge(large.Limit)
	}
	if err != nil {
		return core.Wrapf(err, core.Invalid, core.CodeMalformedBody, "the runner cannot read the request: %s", core.Clip(err.Error()))
	}
	return nil
}

// export sends a checkpoint as one file. An answer that has begun and fails is cut short.
func (s *server) export(w http.ResponseWriter, q *http.Request) {
	var in runnerapi.ExportCheckpoint
	if err := s.decode(w, q, &in); err != nil {
		s.reply(w, nil, err)
		return
	}
	begun := false
	err := s.runner.Export(q.Context(), core.CheckpointID(q.PathValue("id")), in, func(size int64) io.Writer {
		begun = true
		w.Header().Set("Content-Type", "application/octet-stream")
		w.Header().Set("Content-Length", strconv.FormatInt(size, 10))
		return w
	})
	switch {
	case err == nil:
	case !begun:
		s.reply(w, nil, err)
	default:
		s.log.WarnContext(q.Context(), "the export of a checkpoint ended early", "checkpoint_id", q.PathValue("id"), "err", err)
		panic(http.ErrAbortHandler)
	}
}

func tooLarge(limit int64) error {
	return core.Errorf(core.Invalid, core.CodeBodyTooLarge, "the body is larger than the %d bytes that are allowed here", limit)
}

func (s *server) info(w http.ResponseWriter, _ *http.Request) {
	out, err := s.runner.Info()
	s.reply(w, out, err)
}

func (s *server) images(w http.ResponseWriter, _ *http.Request) {
	out, err := s.runner.Images()
	s.reply(w, runnerapi.Images{Images: out}, err)
}

// object gives a range of an object of the store, if the host keeps it.
func (s *server) object(w http.ResponseWriter, q *http.Request) {
	off, errOff := strconv.ParseInt(q.URL.Query().Get("offset"), 10, 64)
	n, errN := strconv.ParseInt(q.URL.Query().Get("bytes"), 10, 64)
	if errOff != nil || errN != nil {
		s.reply(w, nil, core.Errorf(core.Invalid, core.CodeInvalidField, "offset and bytes: they must be numbers"))
		return
	}
	b, there := s.runner.Object(q.PathValue("key"), off, n)
	if !there {
		w.WriteHeader(http.StatusNotFound)
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	_, _ = w.Write(b) //nolint:gosec // G705: never shown as a page: of a type of its own, to runners; the reader may have gone
}

func (s *server) console(w http.ResponseWriter, q *http.Request) {
	text, err := s.runner.Console(sandboxID(q))
	if err != nil {
		s.reply(w, nil, err)
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = io.WriteString(w, text) //nolint:gosec // G705: plain text, and printable; the reader may have gone
}

// guest passes a request on to the guest agent, under the path that the agent knows.
func (s *server) guest(w http.ResponseWriter, q *http.Request) {
	fail := func(w http.ResponseWriter, _ *http.Request, err error) { s.reply(w, nil, err) }
	h, err := s.runner.Guest(q.Context(), sandboxID(q), fail)
	if err != nil {
		s.reply(w, nil, err)
		return
	}
	q = q.Clone(q.Context())
	q.URL.Path, q.URL.RawPath = "/"+q.PathValue("rest"), ""
	q.Header.Del("Authorization")
	h.ServeHTTP(w, q)
}

// reply encodes an answer or a problem. What only the log may hold is logged here, once.
func (s *server) reply(w http.ResponseWriter, out any, err error) {
	if err == nil && out == nil {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	if err != nil {
		if core.CategoryOf(err) == core.Internal {
			s.log.Error("runner request failed", "err", err)
		} else {
			s.log.Info("runner request refused", "code", core.CodeOf(err), "err", err)
		}
		w.WriteHeader(status(core.CategoryOf(err)))
		out = runnerapi.ProblemOf(err)
	}
	_ = json.NewEncoder(w).Encode(out) // the reader may have gone
}

// status says whether the request or the runner was at fault; the problem in the body has the rest.
func status(c core.Category) int {
	switch c {
	case core.NotFound:
		return http.StatusNotFound
	case core.Invalid:
		return http.StatusBadRequest
	case core.Unauthenticated:
		return http.StatusUnauthorized
	case core.PermissionDenied:
		return http.StatusForbidden
	case core.AlreadyExists, core.Conflict, core.FailedPrecondition:
		return http.StatusConflict
	case core.Exhausted:
		return http.StatusInsufficientStorage
	case core.Unavailable, core.TimedOut, core.Canceled:
		return http.StatusServiceUnavailable
	case core.DataLoss, core.Internal:
	}
	return http.StatusInternalServerError
}
