package fakeguest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"net/http"
	"path"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/answer"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// Hook is called before the guest does something, without a lock. It may wait. If it returns an error, the guest does
// not do it, and answers with the error. The steps are:
//
//	agent.NAME   a control route, by its last element: agent.health, agent.quiesce …
//	agent.public any public route
//	reseal.NAME  a step of a reseal or reseed, by its name in guestapi; see ErrLie
type Hook func(ctx context.Context, step string) error

// ErrLie makes a step of a reseal report success, with wrong evidence.
var ErrLie = errors.New("the guest lies")

// Guest is a guest that runs. It is the handler of its agent's routes.
type Guest struct {
	memory Memory
	hook   Hook

	mu      sync.Mutex    // guards the fields below
	changed chan struct{} // closed at the next change of state
	alarm   *time.Timer   // wakes programs
	armed   uint64        // State.Changes when alarm was set
}

// New makes a guest, and its programs go on. hook may be nil.
func New(m Memory, hook Hook) *Guest {
	g := &Guest{memory: m, hook: hook, changed: make(chan struct{})}
	_ = g.wake() // an error is the memory's, and the next request will get it too
	return g
}

// State returns a copy of the state.
func (g *Guest) State() *State {
	var c *State
	_ = g.view(func(s *State) error { c = s.Clone(); return nil }) // fails only with another Memory than InProcess
	return c
}

// End kills every program, as the end of the machine does.
func (g *Guest) End() {
	_ = g.update(func(s *State) error { // as in State
		for _, n := range s.Sessions {
			n.end(killed, "SIGKILL")
		}
		return nil
	})
}

// wake lets the programs go on whose time has come.
func (g *Guest) wake() error { return g.update(func(*State) error { return nil }) }

// update changes the state. fn must change nothing if it returns an error.
func (g *Guest) update(fn func(s *State) error) error {
	var number uint64
	var next time.Duration
	if err := g.memory.Do(true, func(s *State) error {
		s.elapse()
		if err := fn(s); err != nil {
			return err
		}
		s.Changes++
		number, next = s.Changes, s.next()
		return nil
	}); err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.changed)
	g.changed = make(chan struct{})
	if number < g.armed {
		return nil // a later change was faster
	}
	if g.armed = number; g.alarm != nil {
		g.alarm.Stop()
	}
	if g.alarm = nil; next >= 0 {
		g.alarm = time.AfterFunc(next, func() { _ = g.wake() }) // as in New
	}
	return nil
}

// view reads the state.
func (g *Guest) view(fn func(s *State) error) error { return g.memory.Do(false, fn) }

// await calls fn with the state, now and after every change, until fn is done.
func (g *Guest) await(ctx context.Context, fn func(s *State) (done bool, err error)) error {
	for {
		g.mu.Lock()
		changed := g.changed
		g.mu.Unlock()
		var done bool
		if err := g.view(func(s *State) (err error) { done, err = fn(s); return err }); err != nil || done {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// pass lets a public request through when the workload runs. It waits while the guest is frozen for a capture.
func (g *Guest) pass(ctx context.Context) error {
	return g.await(ctx, func(s *State) (bool, error) {
		if s.State == guestapi.StateQuarantined {
			return false, core.Errorf(core.FailedPrecondition, guestapi.CodeQuarantined, "the sandbox is quarantined: nothing may run in it until it is released")
		}
		return s.State == guestapi.StateReleased, nil
	})
}

func (g *Guest) reach(ctx context.Context, step string) error {
	if g.hook == nil {
		return nil
	}
	return g.hook(ctx, step)
}

// guestKey is the context key of the guest that a request is for. All guests share one table of routes.
type guestKey struct{}

// ServeHTTP answers a request to the agent.
func (g *Guest) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	routes().ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), guestKey{}, g)))
}

type handler func(g *Guest, w http.ResponseWriter, r *http.Request) error

var routes = sync.OnceValue(func() http.Handler {
	mux := http.NewServeMux()
	handle := func(pattern, step string, public bool, h handler) {
		mux.Handle(pattern, answer.Handler(func(w http.ResponseWriter, r *http.Request) error {
			g, _ := r.Context().Value(guestKey{}).(*Guest)
			if err := g.reach(r.Context(), "agent."+step); err != nil {
				return err
			}
			if public {
				if err := g.pass(r.Context()); err != nil {
					return err
				}
			}
			return h(g, w, r)
		}))
	}
	for pattern, h := range map[string]handler{
		"GET " + guestapi.PathHealth:   show((*State).health),
		"POST " + guestapi.PathQuiesce: change(http.StatusOK, (*State).quiesce),
		"POST " + guestapi.PathReseed:  (*Guest).reseed,
		"POST " + guestapi.PathReseal:  (*Guest).reseal,
		"POST " + guestapi.PathRelease: change(http.StatusOK, (*State).release),
		"POST " + guestapi.PathFlush:   change(http.StatusOK, (*State).flush),
	} {
		handle(pattern, path.Base(pattern), false, h)
	}
	for pattern, h := range map[string]handler{
		"POST " + guestapi.PathSessions:        change(http.StatusCreated, (*State).createSession),
		"GET " + guestapi.PathSessions:         show((*State).listSessions),
		"GET " + guestapi.PathSession:          show((*State).info),
		"DELETE " + guestapi.PathSession:       remove((*State).deleteSession),
		"GET " + guestapi.PathSessionWait:      (*Guest).waitSession,
		"GET " + guestapi.PathSessionOutput:    (*Guest).sessionOutput,
		"POST " + guestapi.PathSessionStdin:    (*Guest).sessionStdin,
		"POST " + guestapi.PathSessionSignal:   change(http.StatusNoContent, (*State).signal),
		"POST " + guestapi.PathSessionResize:   change(http.StatusNoContent, (*State).resize),
		"POST " + guestapi.PathSessionDeadline: change(http.StatusNoContent, (*State).deadline),
		"GET " + guestapi.PathSessionAttach:    (*Guest).attachSession,
		"GET " + guestapi.PathFiles:            (*Guest).getFile,
		"PUT " + guestapi.PathFiles:            (*Guest).putFile,
		"DELETE " + guestapi.PathFiles:         remove((*State).deleteFile),
		"GET " + guestapi.PathFileContent:      (*Guest).getFile,
		"PUT " + guestapi.PathFileContent:      (*Guest).putFile,
		"DELETE " + guestapi.PathFileContent:   remove((*State).deleteFile),
		"POST " + guestapi.PathMakeDir:         change(http.StatusOK, (*State).makeDir),
		"POST " + guestapi.PathRename:          change(http.StatusOK, (*State).rename),
		"POST " + guestapi.PathXAttrs:          change(http.StatusOK, (*State).setXAttrs),
		"POST " + guestapi.PathWatches:         change(http.StatusCreated, (*State).createWatch),
		"GET " + guestapi.PathWatches:          show((*State).listWatches),
		"DELETE " + guestapi.PathWatch:         remove((*State).deleteWatch),
		"GET " + guestapi.PathWatchEvents:      (*Guest).watchEvents,
		"GET " + guestapi.PathProcesses:        show((*State).listProcesses),
		"GET " + guestapi.PathMark:             show((*State).mark),
	} {
		handle(pattern, "public", true, h)
	}
	mux.Handle("/", answer.Handler(func(http.ResponseWriter, *http.Request) error {
		return core.Errorf(core.NotFound, core.CodeRouteNotFound, "the agent has no such route")
	}))
	return mux
})

// show answers with what fn finds in the state.
func show[Out any](fn func(s *State, r *http.Request) (Out, error)) handler {
	return func(g *Guest, w http.ResponseWriter, r *http.Request) error {
		var out Out
		err := g.view(func(s *State) (err error) { out, err = fn(s, r); return err })
		if err == nil {
			answer.WriteJSON(w, http.StatusOK, out)
		}
		return err
	}
}

// change reads a body, and answers with what fn returns; with StatusNoContent, without a body.
func change[In, Out any](status int, fn func(s *State, r *http.Request, in In) (Out, error)) handler {
	return func(g *Guest, w http.ResponseWriter, r *http.Request) error {
		var in In
		if err := answer.ReadJSON(w, r, maxBody, &in); err != nil {
			return err
		}
		return respond(g, w, status, func(s *State) (Out, error) { return fn(s, r, in) })
	}
}

// remove answers without a body.
func remove(fn func(s *State, r *http.Request) (none, error)) handler {
	return func(g *Guest, w http.ResponseWriter, r *http.Request) error {
		return respond(g, w, http.StatusNoContent, func(s *State) (none, error) { return fn(s, r) })
	}
}

// none is an answer without a body.
type none struct{}

// respond changes the state, and answers with what fn returns; with StatusNoContent, without a body.
func respond[Out any](g *Guest, w http.ResponseWriter, status int, fn func(s *State) (Out, error)) error {
	var out Out
	if err := g.update(func(s *State) (err error) { out, err = fn(s); return err }); err != nil {
		return err
	}
	if status == http.StatusNoContent {
		w.WriteHeader(status)
		return nil
	}
	answer.WriteJSON(w, status, out)
	return nil
}

// mark covers the files and the counter.
func (s *State) mark(*http.Request) (guestapi.Mark, error) {
	if len(s.Workload()) > 0 {
		return guestapi.Mark{}, nil
	}
	b, err := json.Marshal(struct {
		Counter int64
		Files   map[string]File
	}{s.Counter, s.Files})
	sum := sha256.Sum256(b)
	return guestapi.Mark{Mark: hex.EncodeToString(sum[:])}, err
}

// listProcesses answers that only an init runs.
func (s *State) listProcesses(*http.Request) (guestapi.Processes, error) {
	return guestapi.Processes{Processes: []guestapi.Process{{PID: 1, Comm: "init", Cmdline: "init", State: "S", RSSBytes: 4096}}}, nil
}
