package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/controller/postgres/durability"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/testmetrics"
)

func newTestWatch() (*databaseWatch, *prometheus.Registry) {
	reg := prometheus.NewRegistry()
	return newDatabaseWatch(nil, slog.New(slog.DiscardHandler), reg), reg
}

func refusedGauge(t *testing.T, reg *prometheus.Registry) bool {
	t.Helper()
	return testmetrics.One(t, reg, "coppice_database_refused") == 1
}

// TestRefusedGauge: coppice_database_refused is about the server that answered last, also where that is a standby or of before a failover, and
// where the one before was the same.
func TestRefusedGauge(t *testing.T) {
	t.Parallel()
	w, reg := newTestWatch()
	good := durability.Report{Server: "a", Timeline: 2, Fsync: true, FullPageWrites: true, SynchronousCommit: "on"}
	standby, before, weak := good, good, good
	standby.Timeline, standby.Recovers = 0, true
	before.Timeline = 1
	weak.Fsync = false
	for i, d := range []durability.Report{standby, good, standby, standby, good, before, good, weak, weak, good, good} {
		err := w.check(d)
		if refused := d != good; (err != nil) != refused || refusedGauge(t, reg) != refused {
			t.Errorf("answer %d, %+v: the metric says %v, and the error is %v", i, d, refusedGauge(t, reg), err)
		}
	}
}

// answering is a store whose Inspect answers with an error.
type answering struct {
	err      error
	rechecks int
}

func (a *answering) Inspect(context.Context) (durability.Report, error) {
	return durability.Report{}, a.err
}

func (a *answering) Recheck() { a.rechecks++ }

// TestLook: connections are checked again when their server is refused, and not when none was free in time.
func TestLook(t *testing.T) {
	t.Parallel()
	w, _ := newTestWatch()
	for name, test := range map[string]struct {
		err  error
		want int
	}{
		"well":             {nil, 0},
		"busy":             {core.Errorf(core.Unavailable, core.CodeDatabaseUnavailable, "the database cannot be reached"), 0},
		"refused":          {w.check(durability.Report{Recovers: true}), 1},
		"refused when new": {fmt.Errorf("connect: %w", w.check(durability.Report{Recovers: true})), 1},
	} {
		store := &answering{err: test.err}
		if w.look(t.Context(), store); store.rechecks != test.want {
			t.Errorf("%s: connections were checked again %d times, want %d", name, store.rechecks, test.want)
		}
	}
}
