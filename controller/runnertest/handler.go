package runnertest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strings"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// Handler serves the runner's API.
func (r *Runner) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+runnerapi.PathInfo, func(w http.ResponseWriter, _ *http.Request) {
		r.mu.Lock()
		info := r.info()
		r.mu.Unlock()
		reply(w, info, nil)
	})
	mux.HandleFunc("GET "+runnerapi.PathImages, func(w http.ResponseWriter, _ *http.Request) {
		r.mu.Lock()
		out := runnerapi.Images{Images: r.cfg.Images}
		r.mu.Unlock()
		reply(w, out, nil)
	})
	mux.HandleFunc("POST "+runnerapi.PathTemplates, call(func(ctx context.Context, _ *http.Request, in runnerapi.Template) (any, error) {
		out, err := r.template(ctx, in)
		return out, r.after(ctx, PointTemplate, string(in.CheckpointID), err)
	}))
	mux.HandleFunc("POST "+runnerapi.PathForks, call(func(ctx context.Context, _ *http.Request, in runnerapi.Fork) (any, error) {
		out, err := r.fork(ctx, in)
		return out, r.after(ctx, PointFork, string(in.CheckpointID), err)
	}))
	mux.HandleFunc("DELETE "+runnerapi.PathSandbox, func(w http.ResponseWriter, q *http.Request) {
		ctx := context.WithoutCancel(q.Context())
		reply(w, nil, r.after(ctx, PointDeleteSandbox, string(sandboxID(q)), r.deleteSandbox(ctx, sandboxID(q))))
	})
	mux.HandleFunc("POST "+runnerapi.PathSandboxCheckpoint, call(func(ctx context.Context, q *http.Request, in runnerapi.Capture) (any, error) {
		out, err := r.capture(ctx, sandboxID(q), in)
		return out, r.after(ctx, PointCapture, string(in.CheckpointID), err)
	}))
	mux.HandleFunc("DELETE "+runnerapi.PathCheckpoint, func(w http.ResponseWriter, q *http.Request) {
		reply(w, nil, r.deleteCheckpoint(q.Context(), core.CheckpointID(q.PathValue("id"))))
	})
	mux.HandleFunc("POST "+runnerapi.PathCheckpointDiff, call(func(ctx context.Context, q *http.Request, in runnerapi.Diff) (any, error) {
		return r.diff(ctx, core.CheckpointID(q.PathValue("id")), in)
	}))
	mux.HandleFunc("POST "+runnerapi.PathCheckpointExport, r.export)
	mux.HandleFunc("POST "+runnerapi.PathCheckpointFiles, call(func(ctx context.Context, q *http.Request, in runnerapi.ReadFile) (any, error) {
		return r.readFile(ctx, core.CheckpointID(q.PathValue("id")), in)
	}))
	mux.HandleFunc("POST "+runnerapi.PathSandboxPorts, call(func(ctx context.Context, q *http.Request, in runnerapi.Port) (any, error) {
		return r.openPort(ctx, sandboxID(q), in)
	}))
	mux.HandleFunc("DELETE "+runnerapi.PathSandboxPort, func(w http.ResponseWriter, q *http.Request) {
		r.mu.Lock()
		defer r.mu.Unlock()
		if s, ok := r.sandboxes[sandboxID(q)]; ok {
			delete(s.ports, core.PortID(q.PathValue("port_id")))
		}
		reply(w, nil, nil)
	})
	mux.HandleFunc("PUT "+runnerapi.PathPull, call(func(_ context.Context, q *http.Request, in runnerapi.Pull) (any, error) {
		return r.pull(core.OperationID(q.PathValue("id")), in)
	}))
	mux.HandleFunc("PUT "+runnerapi.PathPrepared, call(func(_ context.Context, _ *http.Request, in runnerapi.Prepare) (any, error) {
		out, err := r.prepare(in)
		return out, err
	}))
	mux.HandleFunc("GET "+runnerapi.PathSandboxConnect, r.connect)
	mux.HandleFunc("PUT "+runnerapi.PathSandboxEgress, call(func(ctx context.Context, q *http.Request, in runnerapi.EgressRules) (any, error) {
		return nil, r.setRules(ctx, sandboxID(q), in)
	}))
	mux.HandleFunc("GET "+runnerapi.PathSandboxConsole, func(w http.ResponseWriter, q *http.Request) {
		if _, err := r.living(sandboxID(q)); err != nil {
			reply(w, nil, err)
			return
		}
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		_, _ = fmt.Fprintf(w, "console of %s\n", sandboxID(q)) //nolint:gosec // G705: plain text, in a fake
	})
	mux.HandleFunc(strings.TrimSuffix(runnerapi.PathSandboxGuest, "*")+"{rest...}", func(w http.ResponseWriter, q *http.Request) {
		s, err := r.living(sandboxID(q))
		if err == nil {
			err = r.pass(q.Context(), PointGuest, string(sandboxID(q)))
		}
		if err != nil {
			reply(w, nil, err)
			return
		}
		q.URL.Path = "/" + q.PathValue("rest")
		r.mu.Lock()
		var agent http.Handler = s.guest
		if s.evil != nil {
			agent = s.evil
		}
		r.mu.Unlock()
		r.hint(w)
		agent.ServeHTTP(w, q)
	})
	return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if q.Header.Get("Authorization") != "Bearer "+r.cfg.Secret {
			reply(w, nil, core.Errorf(core.Unauthenticated, core.CodeUnauthenticated, "wrong secret"))
			return
		}
		if !r.outdated(w, q) {
			mux.ServeHTTP(w, q)
		}
	})
}

func (r *Runner) after(ctx context.Context, point, id string, err error) error {
	if err != nil {
		return err
	}
	return r.pass(ctx, point+Done, id)
}

func sandboxID(q *http.Request) core.SandboxID { return core.SandboxID(q.PathValue("id")) }

func (r *Runner) living(id core.SandboxID) (*sandbox, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s, ok := r.sandboxes[id]
	if !ok || s.State == runnerapi.SandboxDead {
		return nil, core.Errorf(core.NotFound, core.CodeSandboxNotFound, "this runner has no sandbox %s", id)
	}
	return s, nil
}

func (r *Runner) openPort(ctx context.Context, id core.SandboxID, in runnerapi.Port) (runnerapi.Port, error) {
	if err := r.pass(ctx, PointPort, string(in.ID)); err != nil {
		return in, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s, ok := r.sandboxes[id]
	if !ok {
		return in, core.Errorf(core.NotFound, core.CodeSandboxNotFound, "this runner has no sandbox %s", id)
	}
	if !in.Listen.Addr().IsValid() {
		in.Listen, in.HostPort = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), in.HostPort), 0
	}
	if in.Listen.Port() == 0 {
		in.Listen = netip.AddrPortFrom(in.Listen.Addr(), uint16(40_000+len(s.ports))) //nolint:gosec // G115: a handful of ports
	}
	s.ports[in.ID] = in
	return in, nil
}

// Ports returns what a sandbox forwards.
func (r *Runner) Ports(id core.SandboxID) []runnerapi.Port {
	r.mu.Lock()
	defer r.mu.Unlock()
	var list []runnerapi.Port
	if s, ok := r.sandboxes[id]; ok {
		for _, p := range s.ports {
			list = append(list, p)
		}
	}
	return list
}

func call[In any](fn func(context.Context, *http.Request, In) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, q *http.Request) {
		var in In
		d := json.NewDecoder(q.Body)
		d.DisallowUnknownFields()
		if err := d.Decode(&in); err != nil {
			reply(w, nil, core.Wrapf(err, core.Invalid, core.CodeMalformedBody, "cannot be read"))
			return
		}
		// A real runner finishes what it began although its caller is gone.
		out, err := fn(context.WithoutCancel(q.Context()), q, in)
		reply(w, out, err)
	}
}

var statuses = map[core.Category]int{
	core.NotFound: 404, core.Invalid: 400, core.Unauthenticated: 401, core.PermissionDenied: 403, core.AlreadyExists: 409, core.Conflict: 409,
	core.FailedPrecondition: 409, core.Exhausted: 507, core.Unavailable: 503, core.TimedOut: 503, core.Canceled: 503, core.DataLoss: 500, core.Internal: 500,
}

func reply(w http.ResponseWriter, out any, err error) {
	if errors.Is(err, ErrVanish) {
		panic(http.ErrAbortHandler)
	}
	if err == nil && out == nil {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	if err != nil {
		w.WriteHeader(statuses[core.CategoryOf(err)])
		out = runnerapi.ProblemOf(err)
	}
	_ = json.NewEncoder(w).Encode(out) // the reader may have gone
}
