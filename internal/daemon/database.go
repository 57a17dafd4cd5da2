package daemon

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/controller/postgres/durability"
	"github.com/coppice-dev/coppice/core"
)

// DatabaseFacts is what the database server keeps of a commit, for people.
type DatabaseFacts struct {
	Commits  string   `json:"commits"` // where a commit is when it is acknowledged: memory, server, received or standby
	Weak     []string `json:"weak,omitempty"`
	Timeline int64    `json:"timeline"`
	Promise  string   `json:"promise"`
}

// databaseWatch judges the server of every new connection, says in the log when it is another one than before or has other settings,
// and shows both as metrics.
type databaseWatch struct {
	allowed []string
	log     *slog.Logger

	weak                       *prometheus.GaugeVec // setting
	commits                    *prometheus.GaugeVec // where
	timeline, refused, changes prometheus.Gauge

	// mu guards the fields below.
	mu      sync.Mutex
	store   *postgres.Store
	known   bool
	last    durability.Report
	passed  durability.Report // the last one that was passed over
	reached int64             // the highest timeline that a server had
	serving bool              // the start is over: a refusal is an outage now
}

// databaseInterval is how often the settings are read where no new connection reads them.
const databaseInterval = 10 * time.Second

func newDatabaseWatch(allowed []string, log *slog.Logger, to prometheus.Registerer) *databaseWatch {
	gauge := func(name, help string) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: "coppice_database_" + name, Help: help})
		to.MustRegister(g)
		return g
	}
	w := &databaseWatch{allowed: allowed, log: log}
	w.weak = prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "coppice_database_weak", Help: "Whether a setting of the database server lets it lose acknowledged commits."}, []string{"setting"})
	w.commits = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "coppice_database_commits", Help: "1 for the place where a commit is when it is acknowledged: memory, server, received (by a standby) or standby.",
	}, []string{"where"})
	to.MustRegister(w.weak, w.commits)
	w.timeline = gauge("timeline", "Timeline of the database server. A promotion raises it.")
	w.refused = gauge("refused", "Whether the last database server that was asked is refused.")
	w.changes = gauge("server_changes", "Times that another database server or timeline answered.")
	return w
}

// check is postgres.Config.Check.
func (w *databaseWatch) check(d durability.Report) error {
	err := d.Judge(w.allowed)
	w.mu.Lock()
	defer w.mu.Unlock()
	if err == nil && d.Timeline < w.reached {
		err = core.Errorf(core.Unavailable, core.CodeDatabaseUnavailable,
			"the database server at %s is on timeline %d, and this controller has used timeline %d: it is a primary of before a failover; stop it, or restart the controllers if the database was restored from a dump",
			d.Server, d.Timeline, w.reached)
	}
	if d.Recovers || d.Timeline < w.reached { // another in the address may do
		w.pass(d, err)
	} else {
		w.show(d, err)
	}
	if err == nil {
		if w.store != nil && w.reached != 0 && d.Timeline > w.reached {
			w.store.Recheck() // connections to the server of before may be open
		}
		w.reached = max(w.reached, d.Timeline)
	}
	if err != nil && w.serving {
		// Users learn nothing about the server.
		err = core.Wrapf(err, core.Unavailable, core.CodeDatabaseUnavailable, "the database server that answers is refused; the controller's log says why")
	}
	if err != nil {
		err = &refusedError{err}
	}
	return err
}

// refusedError says that a server has answered and is refused: other errors are of servers that cannot be asked.
type refusedError struct{ error }

// Unwrap gives the core error that callers see.
func (e *refusedError) Unwrap() error { return e.error }

// pass logs, once, that a server is passed over. mu is held.
func (w *databaseWatch) pass(d durability.Report, why error) {
	w.refused.Set(1) // until another is shown
	if d != w.passed {
		w.passed = d
		w.log.WarnContext(context.Background(), "database server passed over", "server", d.Server, "timeline", d.Timeline, "standby", d.Recovers, "err", why)
	}
}

// show logs what has changed, and sets the metrics. mu is held.
func (w *databaseWatch) show(d durability.Report, refusal error) {
	w.refused.Set(boolGauge(refusal != nil))
	if w.known && d == w.last {
		return
	}
	what := "database server found"
	switch {
	case !w.known:
	case d.Server != w.last.Server || d.Started != w.last.Started || d.Timeline != w.last.Timeline:
		what = "another database server answered"
		w.changes.Inc()
	default:
		what = "settings of the database server changed"
	}
	w.known, w.last = true, d
	for _, name := range durability.Settings() {
		w.weak.WithLabelValues(name).Set(boolGauge(slices.Contains(d.Weak(), name)))
	}
	for _, where := range []string{durability.InMemory, durability.OnServer, durability.Received, durability.OnStandby} {
		w.commits.WithLabelValues(where).Set(boolGauge(d.Commits() == where))
	}
	w.timeline.Set(float64(d.Timeline))
	level, attrs := slog.LevelInfo, []slog.Attr{
		slog.String("server", d.Server), slog.Int64("timeline", d.Timeline), slog.Bool("standby", d.Recovers), slog.Bool("fsync", d.Fsync),
		slog.Bool("full_page_writes", d.FullPageWrites), slog.String("synchronous_commit", d.SynchronousCommit),
		slog.String("synchronous_standby_names", core.Clip(d.Standbys)), slog.String("promise", d.Promise()),
	}
	if weak := d.Weak(); len(weak) > 0 {
		level, attrs = slog.LevelWarn, append(attrs, slog.String("weak", strings.Join(weak, ",")))
	}
	if refusal != nil {
		level, attrs = slog.LevelError, append(attrs, slog.Any("err", refusal))
	}
	w.log.LogAttrs(context.Background(), level, what, attrs...) //nolint:sloglint // one of three constants
}

func boolGauge(on bool) float64 {
	if on {
		return 1
	}
	return 0
}

// facts are those of the server that answered last.
func (w *databaseWatch) facts() DatabaseFacts {
	w.mu.Lock()
	defer w.mu.Unlock()
	return DatabaseFacts{Commits: w.last.Commits(), Weak: w.last.Weak(), Timeline: w.last.Timeline, Promise: w.last.Promise()}
}

// start waits for a server that may be used. From then on a refused one is an outage, and requests fail with it.
func (w *databaseWatch) start(ctx context.Context, store *postgres.Store, wait time.Duration) error {
	w.mu.Lock()
	w.store = store
	w.mu.Unlock()
	err := retryUnavailable(ctx, wait, w.log, func(ctx context.Context) error {
		_, err := store.Inspect(ctx)
		return err
	})
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.serving = true
	return nil
}

// run reads the settings now and then: a reload changes them under open connections.
func (w *databaseWatch) run(ctx context.Context, store *postgres.Store) error {
	tick := time.NewTicker(databaseInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			w.look(ctx, store)
		}
	}
}

// inspector is the part of a postgres.Store that look needs.
type inspector interface {
	Inspect(ctx context.Context) (durability.Report, error)
	Recheck()
}

// look checks the open connections again when the server of one is refused. Callers notice an absent database, and one whose
// connections are all in use keeps them.
func (w *databaseWatch) look(ctx context.Context, store inspector) {
	_, err := store.Inspect(ctx)
	if _, refused := errors.AsType[*refusedError](err); refused {
		store.Recheck()
	}
}
