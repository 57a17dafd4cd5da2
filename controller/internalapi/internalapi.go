// Package internalapi serves the listener of a controller for its runners: how they join and renew their certificates, register, send
// heartbeats and flows, and tell of their uploads.
package internalapi

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/httpapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/boundjson"
	"github.com/coppice-dev/coppice/internal/mtls"
)

// New returns the handler for runners of the same machine: registration and heartbeats. Every request carries the
// secret that controller and runners share, which must not be empty.
func New(control *controller.Controller, secret string, log *slog.Logger) (http.Handler, error) {
	if secret == "" {
		return nil, errors.New("the listener for runners needs a secret")
	}
	want := sha256.Sum256([]byte(secret))
	mux := internalRoutes(control, log)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		token, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		got := sha256.Sum256([]byte(token))
		if subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
			refuse(w, r, log, core.Errorf(core.Unauthenticated, core.CodeUnauthenticated, "this listener is for runners only"))
			return
		}
		mux.ServeHTTP(w, r)
	}), nil
}

// NewTLS returns the handler for runners of other hosts, to be served with mtls.Identity.JoinServer. Who a runner is
// says its certificate alone. One that has none may join and nothing else.
func NewTLS(control *controller.Controller, log *slog.Logger) http.Handler {
	mux := internalRoutes(control, log)
	mux.HandleFunc("POST "+runnerapi.PathRenew, func(w http.ResponseWriter, r *http.Request) {
		var in runnerapi.Renew
		answer(w, r, log, &in, func() (any, error) {
			id, err := sender(r)
			if err != nil {
				return nil, err
			}
			return control.Fleet().Renew(r.Context(), id, in)
		})
	})
	join := http.NewServeMux()
	join.HandleFunc("POST "+runnerapi.PathJoin, func(w http.ResponseWriter, r *http.Request) {
		r.Body = http.MaxBytesReader(w, r.Body, maxJoin)
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(joinTime)) // not every test's writer has a connection
		var in runnerapi.Join
		answer(w, r, log, &in, func() (any, error) { return control.Fleet().Join(r.Context(), in) })
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if mtls.Joining(r) {
			join.ServeHTTP(w, r)
			return
		}
		peer, err := mtls.PeerOf(r)
		if err == nil && peer.Runner == "" {
			err = core.Errorf(core.PermissionDenied, core.CodePermissionDenied, "this listener is for runners only")
		}
		if err == nil {
			err = control.Fleet().CheckIdentity(r.Context(), peer.Runner)
		}
		if err != nil {
			w.Header().Set("Connection", "close") // with what it shows, it gets nowhere
			refuse(w, r, log, err)
			return
		}
		mux.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), runnerKey{}, peer.Runner)))
	})
}

// What one that has not shown who it is may send, and how long that may take.
const (
	maxJoin  = 32 << 10
	joinTime = 10 * time.Second
)

type runnerKey struct{}

// same refuses a message about another runner than the one that sent it.
func same(r *http.Request, named core.RunnerID) error {
	if by, ok := r.Context().Value(runnerKey{}).(core.RunnerID); ok && by != named {
		return core.Errorf(core.PermissionDenied, core.CodePermissionDenied, "the certificate is of runner %s, which cannot speak for %s", by, core.Clip(string(named)))
	}
	return nil
}

// sender returns the runner in the path of a request, which must be the one that sent it.
func sender(r *http.Request) (core.RunnerID, error) {
	id, err := core.ParseID[core.RunnerID](r.PathValue("id"))
	if err == nil {
		err = same(r, id)
	}
	return id, err
}

// named writes into a runner's endpoint whose certificate is to be expected there.
func named(r *http.Request, in *runnerapi.Register) error {
	id, ok := r.Context().Value(runnerKey{}).(core.RunnerID)
	if !ok {
		return nil
	}
	for field, address := range map[string]string{"endpoint": in.Endpoint, "data_url": in.DataURL} {
		u, err := url.Parse(address)
		if address == "" && field == "data_url" {
			continue
		}
		if err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || strings.Trim(u.Path, "/") != "" {
			return core.Errorf(core.Invalid, core.CodeInvalidField, "%s: it must be https://host:port", field)
		}
		if field == "endpoint" {
			u.User = url.User(string(id))
			in.Endpoint = u.String()
		}
	}
	return nil
}

func internalRoutes(control *controller.Controller, log *slog.Logger) *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+runnerapi.PathRegister, func(w http.ResponseWriter, r *http.Request) {
		var in runnerapi.Register
		answer(w, r, log, &in, func() (any, error) {
			if err := same(r, in.Info.RunnerID); err != nil {
				return nil, err
			}
			if err := named(r, &in); err != nil {
				return nil, err
			}
			return control.Fleet().Register(r.Context(), in)
		})
	})
	mux.HandleFunc("POST "+runnerapi.PathHeartbeat, func(w http.ResponseWriter, r *http.Request) {
		var in runnerapi.Heartbeat
		answer(w, r, log, &in, func() (any, error) {
			id, err := sender(r)
			if err != nil {
				return nil, err
			}
			return control.Fleet().Heartbeat(r.Context(), id, in)
		})
	})
	mux.HandleFunc("POST "+runnerapi.PathBeats, func(w http.ResponseWriter, r *http.Request) {
		var in runnerapi.Beat
		answer(w, r, log, &in, func() (any, error) {
			id, err := sender(r)
			if err != nil {
				return nil, err
			}
			return control.Fleet().Beat(r.Context(), id, in)
		})
	})
	mux.HandleFunc("POST "+runnerapi.PathFlows, func(w http.ResponseWriter, r *http.Request) {
		var in runnerapi.Flows
		answer(w, r, log, &in, func() (any, error) {
			id, err := sender(r)
			if err != nil {
				return nil, err
			}
			ctx := controller.WithOrigin(r.Context(), controller.Origin{Actor: string(id), Action: "flows"})
			return nil, control.Flows().Record(ctx, id, in)
		})
	})
	mux.HandleFunc("POST "+runnerapi.PathSeals, func(w http.ResponseWriter, r *http.Request) {
		var in runnerapi.BeginSeal
		answer(w, r, log, &in, func() (any, error) {
			id, err := sender(r)
			if err != nil {
				return nil, err
			}
			return control.BeginSeal(r.Context(), id, in)
		})
	})
	mux.HandleFunc("POST "+runnerapi.PathSealCommit, func(w http.ResponseWriter, r *http.Request) {
		var in runnerapi.CommitSeal
		answer(w, r, log, &in, func() (any, error) {
			id, err := sender(r)
			if err != nil {
				return nil, err
			}
			return struct{}{}, control.CommitSeal(r.Context(), id, core.CheckpointID(r.PathValue("checkpoint_id")), in)
		})
	})
	mux.HandleFunc("POST "+runnerapi.PathSealFail, func(w http.ResponseWriter, r *http.Request) {
		var in runnerapi.FailSeal
		answer(w, r, log, &in, func() (any, error) {
			id, err := sender(r)
			if err != nil {
				return nil, err
			}
			return struct{}{}, control.FailSeal(r.Context(), id, core.CheckpointID(r.PathValue("checkpoint_id")), in)
		})
	})
	return mux
}

// answer decodes, calls and encodes; nil is 204. Fields that this version does not know are ignored: a newer runner may send them.
func answer(w http.ResponseWriter, r *http.Request, log *slog.Logger, in any, call func() (any, error)) {
	if err := boundjson.Decode(http.MaxBytesReader(w, r.Body, maxReport+1), reportBound(in), nil, in); err != nil {
		refuse(w, r, log, core.Wrapf(err, core.Invalid, core.CodeMalformedBody, "the controller cannot read the request"))
		return
	}
	out, err := call()
	if err != nil {
		refuse(w, r, log, err)
		return
	}
	if out == nil {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	if err := writeJSON(w, http.StatusOK, out); err != nil {
		log.DebugContext(r.Context(), "answer to a runner was not sent", "err", err)
	}
}

func refuse(w http.ResponseWriter, r *http.Request, log *slog.Logger, err error) {
	status := httpapi.Status(err)
	level := slog.LevelInfo
	if status >= http.StatusInternalServerError {
		level = slog.LevelWarn
	}
	log.Log(r.Context(), level, "runner request refused", "path", r.URL.Path, "code", core.CodeOf(err), "err", err)
	if err := writeJSON(w, status, runnerapi.ProblemOf(err)); err != nil {
		log.DebugContext(r.Context(), "answer to a runner was not sent", "err", err)
	}
}

func writeJSON(w http.ResponseWriter, status int, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, err = w.Write(append(b, '\n'))
	return err
}
