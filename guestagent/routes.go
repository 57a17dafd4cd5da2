//go:build linux

package guestagent

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"sync"
	"syscall"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

const (
	maxControlBody = 1 << 20
	maxSpecBody    = 16 << 20 // including inline stdin
)

// handler answers a request, or returns an error for it. Once it has begun its answer, it returns nil.
type handler func(w http.ResponseWriter, r *http.Request) error

func (a *Agent) routes() http.Handler {
	mux := http.NewServeMux()
	control := func(pattern string, h handler) { mux.Handle(pattern, a.handle(h)) }
	public := func(pattern string, h handler) {
		mux.Handle(pattern, a.handle(func(w http.ResponseWriter, r *http.Request) error {
			a.idle.begin()
			defer a.idle.end()
			if err := a.gate.pass(r.Context()); err != nil {
				return err
			}
			return h(w, r)
		}))
	}
	control("GET "+guestapi.PathHealth, a.health)
	control("POST "+guestapi.PathQuiesce, a.quiesce)
	control("POST "+guestapi.PathReseed, a.reseed)
	control("POST "+guestapi.PathReseal, a.resealGuest)
	control("POST "+guestapi.PathRelease, a.release)
	control("POST "+guestapi.PathFlush, a.flushDisk)

	public("POST "+guestapi.PathSessions, a.createSession)
	public("GET "+guestapi.PathSessions, a.listSessions)
	public("GET "+guestapi.PathSession, a.getSession)
	public("DELETE "+guestapi.PathSession, a.deleteSession)
	public("GET "+guestapi.PathSessionWait, a.waitSession)
	public("GET "+guestapi.PathSessionOutput, a.sessionOutput)
	public("POST "+guestapi.PathSessionStdin, a.sessionStdin)
	public("POST "+guestapi.PathSessionSignal, a.sessionSignal)
	public("POST "+guestapi.PathSessionResize, a.sessionResize)
	public("GET "+guestapi.PathSessionAttach, a.attachSession)

	public("GET "+guestapi.PathFiles, a.getFile)
	public("PUT "+guestapi.PathFiles, a.putFile)
	public("DELETE "+guestapi.PathFiles, a.deleteFile)
	public("GET "+guestapi.PathProcesses, a.getProcesses)
	public("GET "+guestapi.PathPorts, a.getPorts)
	control("/", func(http.ResponseWriter, *http.Request) error {
		return core.Errorf(core.NotFound, core.CodeRouteNotFound, "the agent has no such route")
	})
	return mux
}

// handle runs a handler as part of its link's requests, and sends its error as the answer.
func (a *Agent) handle(h handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if wg, ok := r.Context().Value(linkKey{}).(*sync.WaitGroup); ok {
			wg.Add(1)
			defer wg.Done()
		}
		if r.Context().Err() != nil {
			return // the link has ended, and the next one may have been answered
		}
		if err := h(w, r); err != nil {
			writeProblem(w, err)
		}
	})
}

// statusOf returns the HTTP status of an error.
func statusOf(c core.Category) int {
	switch c {
	case core.NotFound:
		return http.StatusNotFound
	case core.AlreadyExists, core.Conflict, core.FailedPrecondition:
		return http.StatusConflict
	case core.Invalid:
		return http.StatusBadRequest
	case core.Exhausted:
		return http.StatusTooManyRequests
	case core.PermissionDenied, core.Unauthenticated:
		return http.StatusForbidden
	case core.Unavailable, core.Canceled:
		return http.StatusServiceUnavailable
	case core.TimedOut:
		return http.StatusGatewayTimeout
	case core.DataLoss, core.Internal:
	}
	return http.StatusInternalServerError
}

func writeProblem(w http.ResponseWriter, err error) {
	p := guestapi.ProblemOf(err)
	writeJSON(w, statusOf(p.Category), p)
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // an error means that the host is gone
}

// readJSON reads a request's body. Unknown fields are ignored: they come from a newer host.
func readJSON(w http.ResponseWriter, r *http.Request, limit int64, v any) error {
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, limit))
	if err != nil {
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			return core.Errorf(core.Invalid, core.CodeBodyTooLarge, "the request's body is longer than %d bytes", limit)
		}
		return bodyError(r.Context(), err)
	}
	if err := json.Unmarshal(b, v); err != nil {
		return core.Errorf(core.Invalid, core.CodeMalformedBody, "the request's body cannot be read: %s", core.Clip(err.Error()))
	}
	return nil
}

// bodyError is the error of a body that ended too early.
func bodyError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return core.Errorf(core.Invalid, core.CodeMalformedBody, "the request's body broke off: %s", core.Clip(err.Error()))
}

// fileError builds the error for an operation on a path from the kernel's error.
func fileError(err error, what, path string) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[*core.Error](err); ok {
		return err
	}
	path = core.Clip(path)
	reason := "failed"
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		reason = errno.Error()
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return core.Errorf(core.NotFound, core.CodeFileNotFound, "%s %s: there is no such file or directory in the sandbox", what, path)
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		return core.Errorf(core.PermissionDenied, guestapi.CodeFileDenied, "%s %s: %s", what, path, reason)
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return core.Errorf(core.Exhausted, core.CodeDiskFull, "%s %s: the sandbox's disk is full", what, path)
	case errors.Is(err, fs.ErrExist), errors.Is(err, syscall.ENOTEMPTY), errors.Is(err, syscall.EISDIR), errors.Is(err, syscall.ENOTDIR),
		errors.Is(err, syscall.EBUSY), errors.Is(err, syscall.ETXTBSY):
		return core.Errorf(core.Conflict, guestapi.CodeFileConflict, "%s %s: %s", what, path, reason)
	case errors.Is(err, syscall.ELOOP), errors.Is(err, syscall.ENAMETOOLONG), errors.Is(err, syscall.EINVAL):
		return core.Errorf(core.Invalid, core.CodeInvalidField, "%s %s: %s", what, path, reason)
	}
	return core.Wrapf(err, core.Internal, core.CodeInternal, "%s %s: %s", what, path, reason)
}
