package daemon

import (
	"log/slog"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/controller/postgres"
)

func newTestWatch() (*databaseWatch, *prometheus.Registry) {
	reg := prometheus.NewRegistry()
	return newDatabaseWatch(nil, slog.New(slog.DiscardHandler), reg), reg
}

func refusedGauge(t *testing.T, reg *prometheus.Registry) bool {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "coppice_database_refused" {
			return f.GetMetric()[0].GetGauge().GetValue() == 1
		}
	}
	t.Fatal("there is no such metric")
	return false
}

// TestRefusedGauge: coppice_database_refused is about the server that answered last, also where that is a standby or of before a failover, and
// where the one before was the same.
func TestRefusedGauge(t *testing.T) {
	t.Parallel()
	w, reg := newTestWatch()
	good := postgres.Durability{Server: "a", Timeline: 2, Fsync: true, FullPageWrites: true, SynchronousCommit: "on"}
	standby, before, weak := good, good, good
	standby.Timeline, standby.Recovers = 0, true
	before.Timeline = 1
	weak.Fsync = false
	for i, d := range []postgres.Durability{standby, good, standby, standby, good, before, good, weak, weak, good, good} {
		err := w.check(d)
		if refused := d != good; (err != nil) != refused || refusedGauge(t, reg) != refused {
			t.Errorf("answer %d, %+v: the metric says %v, and the error is %v", i, d, refusedGauge(t, reg), err)
		}
	}
}
