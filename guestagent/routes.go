//go:build linux

package guestagent

import (
	"net/http"
	"sync"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/answer"
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
	public("POST "+guestapi.PathSessionDeadline, a.sessionDeadline)
	public("GET "+guestapi.PathSessionAttach, a.attachSession)

	for _, path := range []string{guestapi.PathFiles, guestapi.PathFileContent} {
		public("GET "+path, a.files.Get)
		public("PUT "+path, a.files.Put)
		public("DELETE "+path, a.files.Delete)
	}
	public("POST "+guestapi.PathMakeDir, a.files.MakeDir)
	public("POST "+guestapi.PathRename, a.files.Rename)
	public("POST "+guestapi.PathXAttrs, a.files.SetXAttrs)
	public("POST "+guestapi.PathWatches, a.createWatch)
	public("GET "+guestapi.PathWatches, a.listWatches)
	public("DELETE "+guestapi.PathWatch, a.deleteWatch)
	public("GET "+guestapi.PathWatchEvents, a.watchEvents)
	public("GET "+guestapi.PathProcesses, a.getProcesses)
	public("GET "+guestapi.PathPorts, a.getPorts)
	public("GET "+guestapi.PathPortConnect, a.connectPort)
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
	answer.WriteJSON(w, statusOf(p.Category), p)
}
