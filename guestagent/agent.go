//go:build linux

package guestagent

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"log/slog"
	"net/http"
	"time"

	"github.com/coppice-dev/coppice/guestagent/files"
	"github.com/coppice-dev/coppice/guestagent/link"
	"github.com/coppice-dev/coppice/guestagent/reseal"
	"github.com/coppice-dev/coppice/guestagent/sessions"
	"github.com/coppice-dev/coppice/guestagent/userthread"
	"github.com/coppice-dev/coppice/guestagent/watch"
	"github.com/coppice-dev/coppice/guestagent/workload"
)

// Config configures the agent.
type Config struct {
	Logger *slog.Logger
	// Wrap, unless it is nil, is put in front of every route. The agent of an image has none; tests that simulate a
	// lying agent have one.
	Wrap func(http.Handler) http.Handler
}

// Agent serves a host for one guest.
type Agent struct {
	log       *slog.Logger
	work      work
	sessions  *sessions.Server
	files     *files.Server
	watches   watch.Watches
	gate      *gate
	reseal    *reseal.Resealer
	disk      *flusher
	bootNonce string
	handler   http.Handler
	hosts     *link.Server
	idle      idler
	nothing   string // the path of this program, which does nothing if its argument is workload.NothingMode
}

// work is the workload, as the agent uses it.
type work interface {
	sessions.Workload
	reseal.Workload

	// Join moves the calling thread for good to where Inside runs functions. The thread must be locked to its goroutine.
	Join() error
	// Freeze stops every process of the workload and returns their number. If it fails, everything runs again.
	Freeze(ctx context.Context, timeout time.Duration) (int, error)
	// Thaw undoes Freeze. It is idempotent.
	Thaw(ctx context.Context) error
	// Proc is the directory under which the agent sees the workload's own /proc.
	Proc() string
}

// newAgent makes an agent. statePath is the file with the state that outlives the agent.
func newAgent(cfg Config, w work, statePath string) *Agent {
	var nonce [8]byte
	_, _ = rand.Read(nonce[:]) // never fails
	a := &Agent{log: cfg.Logger, work: w, bootNonce: hex.EncodeToString(nonce[:]), disk: newFlusher(workload.DiskMount), nothing: "/proc/self/exe"}
	a.files = &files.Server{Inside: w.Inside, As: userthread.New(w.Join).As}
	a.gate = loadGate(statePath, a.bootNonce)
	a.sessions = sessions.New(w, a.gate.pass)
	a.reseal = reseal.New(w, reseal.Steps())
	handler := a.routes()
	if cfg.Wrap != nil {
		handler = cfg.Wrap(handler)
	}
	a.handler, a.hosts = handler, link.New(handler, cfg.Logger)
	return a
}
