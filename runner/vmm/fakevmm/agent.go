package fakevmm

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// Agent is a guest that speaks the real guest protocol: handshake, control routes with evidence, sessions of a few
// commands, and files. It has a workload that freezes, a random generator that clones share until they are resealed, and
// an identity. It has what the tests of runners need; controller/runnertest has a guest for the tests of clients.
func Agent(ctx context.Context, c *Computer) {
	a := &agent{c: c, change: make(chan struct{})}
	if a.update(a.boot) != nil {
		return
	}
	server := &http.Server{
		Handler: a.routes(), ReadHeaderTimeout: 30 * time.Second, MaxHeaderBytes: 16 << 10,
		ErrorLog: log.New(io.Discard, "", 0), BaseContext: linkContext,
	}
	defer server.Close()
	for {
		conn, err := c.Accept(ctx)
		if err != nil {
			return
		}
		a.serveChannel(ctx, server, conn)
	}
}

// agent is the guest program. Its state is in RAM, as agentState; only waiters are here.
type agent struct {
	c *Computer

	mu     sync.Mutex    // guards change
	change chan struct{} // closed at the next change of state
}

// agentState is the state of the guest.
type agentState struct {
	BootNonce  string
	State      guestapi.State
	Generation string
	CaptureID  string
	Sealed     bool     // quarantined, and every step of the reseal succeeded
	Reseeded   bool     // frozen, and reseeded: the machine may go on
	Used       []string // every generation before this one
	Quiesced   guestapi.QuiesceResponse

	Random   []byte // the key of the random generator
	Drawn    uint64 // how often it was used under this key
	Identity core.Identity

	Counter  int64 // of the command inc
	Files    map[string]file
	Sessions []*session
	NextPID  int
}

// The form of RAM: a magic, the length of the rest, and agentState as JSON.
const (
	agentMagic = "coppice fake agent 1\n"
	agentHead  = len(agentMagic) + 8
)

var errMemoryFull = core.Errorf(core.Exhausted, core.CodeDiskFull, "the state of the fake guest does not fit into its RAM")

// load reads the state; a machine that was just switched on has none.
func load(ram []byte) (*agentState, error) {
	if !bytes.HasPrefix(ram, []byte(agentMagic)) {
		return &agentState{}, nil
	}
	n := binary.LittleEndian.Uint64(ram[len(agentMagic):])
	if n > uint64(len(ram)-agentHead) {
		return nil, errors.New("the RAM of the fake guest is damaged")
	}
	s := &agentState{}
	return s, json.Unmarshal(ram[agentHead:agentHead+int(n)], s)
}

func (s *agentState) store(ram []byte) error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	if len(b) > len(ram)-agentHead {
		return errMemoryFull
	}
	copy(ram, agentMagic)
	binary.LittleEndian.PutUint64(ram[len(agentMagic):], uint64(len(b)))
	copy(ram[agentHead:], b)
	return nil
}

// update changes the state. If fn returns an error, the state stays unchanged.
func (a *agent) update(fn func(s *agentState) error) error {
	var err error
	gone := a.c.Do(func(ram []byte) {
		var s *agentState
		if s, err = load(ram); err != nil {
			return
		}
		if err = fn(s); err == nil {
			err = s.store(ram)
		}
	})
	if gone != nil {
		return gone
	}
	if err != nil {
		return err
	}
	a.mu.Lock()
	close(a.change)
	a.change = make(chan struct{})
	a.mu.Unlock()
	return nil
}

// view reads the state.
func (a *agent) view(fn func(s *agentState) error) error {
	var err error
	if gone := a.c.Do(func(ram []byte) {
		var s *agentState
		if s, err = load(ram); err == nil {
			err = fn(s)
		}
	}); gone != nil {
		return gone
	}
	return err
}

// changed returns a channel that is closed at the next change of state. Get it before you read the state.
func (a *agent) changed() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.change
}

// await calls fn with the state, now and after every change, until fn is done.
func (a *agent) await(ctx context.Context, fn func(s *agentState) (done bool, err error)) error {
	for {
		change := a.changed()
		var done bool
		if err := a.view(func(s *agentState) (err error) { done, err = fn(s); return err }); err != nil || done {
			return err
		}
		select {
		case <-change:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// serveChannel serves hosts on one connection, one after the other, until it ends.
func (a *agent) serveChannel(ctx context.Context, server *http.Server, conn net.Conn) {
	defer conn.Close()
	if kind, err := a.c.Reach(ctx, AgentStep("handshake")); kind != "" || err != nil {
		return
	}
	channel := guestapi.NewChannel(conn)
	for {
		link, err := channel.Accept()
		if err != nil {
			return
		}
		a.serveLink(ctx, server, link)
	}
}

// linkListener passes the streams of a link to the HTTP server.
type linkListener struct {
	*yamux.Session
	linkCtx context.Context // context of the link: ends with the link
}

func (l *linkListener) Accept() (net.Conn, error) { return l.Session.Accept() }

func linkContext(l net.Listener) context.Context {
	if l, ok := l.(*linkListener); ok {
		return l.linkCtx
	}
	return context.Background()
}

// linkKey is the context key of the lock that a link's requests hold for reading while they are answered.
type linkKey struct{}

func (a *agent) serveLink(ctx context.Context, server *http.Server, link *guestapi.Link) {
	var requests sync.RWMutex
	ctx, cancel := context.WithCancel(context.WithValue(ctx, linkKey{}, &requests))
	defer func() {
		cancel()
		requests.Lock() // nothing that this host asked for happens after the next host got an answer
		defer requests.Unlock()
	}()
	defer link.Close()
	cfg := yamux.DefaultConfig()
	cfg.EnableKeepAlive = false
	cfg.StreamOpenTimeout = 0
	cfg.ConnectionWriteTimeout = time.Minute
	cfg.LogOutput = io.Discard
	mux, err := yamux.Server(link, cfg)
	if err != nil {
		return
	}
	defer mux.Close()
	stop := context.AfterFunc(ctx, func() { _ = mux.Close() })
	defer stop()
	_ = server.Serve(&linkListener{mux, ctx}) // ends with the link
}

func (a *agent) routes() http.Handler {
	mux := http.NewServeMux()
	control := func(method, path string, h handler) {
		name := path[len("/v1/"):]
		mux.Handle(method+" "+path, a.handle(func(w http.ResponseWriter, r *http.Request) error {
			if _, err := a.c.Reach(r.Context(), AgentStep(name)); err != nil {
				return err
			}
			return h(w, r)
		}))
	}
	public := func(method, path string, h handler) {
		mux.Handle(method+" "+path, a.handle(func(w http.ResponseWriter, r *http.Request) error {
			if _, err := a.c.Reach(r.Context(), AgentStep("public")); err != nil {
				return err
			}
			if err := a.pass(r.Context()); err != nil {
				return err
			}
			return h(w, r)
		}))
	}
	control(http.MethodGet, guestapi.PathHealth, a.health)
	control(http.MethodPost, guestapi.PathQuiesce, a.quiesce)
	control(http.MethodPost, guestapi.PathReseed, a.reseed)
	control(http.MethodPost, guestapi.PathReseal, a.reseal)
	control(http.MethodPost, guestapi.PathRelease, a.release)
	control(http.MethodPost, guestapi.PathFlush, a.flush)

	public(http.MethodPost, guestapi.PathSessions, a.createSession)
	public(http.MethodGet, guestapi.PathSessions, a.listSessions)
	public(http.MethodGet, guestapi.PathSession, a.getSession)
	public(http.MethodDelete, guestapi.PathSession, a.deleteSession)
	public(http.MethodGet, guestapi.PathSessionWait, a.waitSession)
	public(http.MethodGet, guestapi.PathSessionOutput, a.sessionOutput)
	public(http.MethodPost, guestapi.PathSessionStdin, a.sessionStdin)
	public(http.MethodGet, guestapi.PathSessionAttach, a.attachSession)
	for _, path := range []string{guestapi.PathFiles, guestapi.PathFileContent} {
		public(http.MethodGet, path, a.getFile)
		public(http.MethodPut, path, a.putFile)
		public(http.MethodDelete, path, a.deleteFile)
	}
	mux.Handle("/", a.handle(func(http.ResponseWriter, *http.Request) error {
		return core.Errorf(core.NotFound, core.CodeRouteNotFound, "the agent has no such route")
	}))
	return mux
}

// handler answers a request, or returns an error for it.
type handler func(w http.ResponseWriter, r *http.Request) error

func (a *agent) handle(h handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if requests, ok := r.Context().Value(linkKey{}).(*sync.RWMutex); ok {
			requests.RLock()
			defer requests.RUnlock()
		}
		if r.Context().Err() != nil {
			return
		}
		err := h(w, r)
		if err == nil || errors.Is(err, vmm.ErrGone) {
			return
		}
		p := guestapi.ProblemOf(err)
		writeJSON(w, statusOf(p.Category), p)
	})
}

// pass lets a public request through when the workload runs. It waits while the guest is frozen for a capture.
func (a *agent) pass(ctx context.Context) error {
	return a.await(ctx, func(s *agentState) (bool, error) {
		if s.State == guestapi.StateQuarantined {
			return false, core.Errorf(core.FailedPrecondition, guestapi.CodeQuarantined, "the sandbox is quarantined: nothing may run in it until it is released")
		}
		return s.State == guestapi.StateReleased, nil
	})
}

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

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // an error means that the host is gone
}

func readJSON(r *http.Request, v any) error {
	b, err := io.ReadAll(io.LimitReader(r.Body, 4<<20))
	if err == nil {
		err = json.Unmarshal(b, v)
	}
	if err != nil {
		return core.Errorf(core.Invalid, core.CodeMalformedBody, "the request's body cannot be read: %s", core.Clip(err.Error()))
	}
	return nil
}
