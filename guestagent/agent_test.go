//go:build linux

package guestagent

import (
	"context"
	"log/slog"
	"path/filepath"
	"testing"

	"github.com/coppice-dev/coppice/guestagent/guesttest"
	"github.com/coppice-dev/coppice/guestagent/reseal"
	"github.com/coppice-dev/coppice/internal/test/testleak"
)

func TestMain(m *testing.M) { testleak.Main(m) }

// testAgent is an agent behind plain HTTP.
type testAgent struct {
	*Agent
	*guesttest.Client
	work *guesttest.Workload
}

func newTestAgent(t *testing.T) *testAgent {
	t.Helper()
	w := &guesttest.Workload{}
	a := newAgent(Config{Logger: slog.New(slog.NewTextHandler(t.Output(), nil))}, w, filepath.Join(t.TempDir(), "state"))
	a.nothing = "/bin/true"       // this program would run its tests
	a.reseal = reseal.New(w, nil) // the steps of a guest would change this machine
	c := guesttest.NewClient(t, a.handler)
	t.Cleanup(func() {
		_ = a.sessions.Close(context.WithoutCancel(t.Context()))
		a.watches.Close()
		a.idle.stop()
	})
	return &testAgent{Agent: a, Client: c, work: w}
}
