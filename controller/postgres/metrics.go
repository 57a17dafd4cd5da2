package postgres

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
)

const (
	countEvery   = 5 * time.Second // a scrape does not count more often
	countTimeout = 2 * time.Second
)

// collector shows the pool of connections and, counted by the database now and then, what waits and what lives. Every controller
// shows the same counts of the database.
type collector struct {
	store *Store
	pool  map[*prometheus.Desc]func(*pgxpool.Stat) float64

	up, operations, workspaces, runners, jobs *prometheus.Desc

	// mu guards the fields below.
	mu      sync.Mutex
	counted time.Time
	counts  []tallyRow
	err     error
}

type tallyRow struct {
	What  string `db:"what"`
	Kind  string `db:"kind"`
	State string `db:"state"`
	N     int64  `db:"n"`
}

// Register shows the store's metrics.
func (s *Store) Register(reg prometheus.Registerer) error {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("coppice_database_"+name, help, labels, nil)
	}
	return reg.Register(&collector{
		store: s,
		pool: map[*prometheus.Desc]func(*pgxpool.Stat) float64{
			desc("connections_used", "Connections in use."):                                      func(p *pgxpool.Stat) float64 { return float64(p.AcquiredConns()) },
			desc("connections_idle", "Connections that wait for work."):                          func(p *pgxpool.Stat) float64 { return float64(p.IdleConns()) },
			desc("connections_max", "The most connections of the pool."):                         func(p *pgxpool.Stat) float64 { return float64(p.MaxConns()) },
			desc("acquires_total", "Times that a connection was taken."):                         func(p *pgxpool.Stat) float64 { return float64(p.AcquireCount()) },
			desc("acquires_waited_total", "Times that one had to be waited for."):                func(p *pgxpool.Stat) float64 { return float64(p.EmptyAcquireCount()) },
			desc("acquire_wait_seconds_total", "Time that connections were waited for, in sum."): func(p *pgxpool.Stat) float64 { return p.AcquireDuration().Seconds() },
		},
		up:         desc("up", "Whether the database answered the last count."),
		operations: desc("operations_unfinished", "Operations that have not ended.", "kind", "state"),
		workspaces: desc("workspaces", "Living workspaces.", "state"),
		runners:    desc("runners", "Runners.", "state"),
		jobs:       desc("chores_queued", "Periodic jobs in the queue.", "state"),
	})
}

// Describe sends what Collect may send.
func (c *collector) Describe(out chan<- *prometheus.Desc) {
	for d := range c.pool {
		out <- d
	}
	for _, d := range []*prometheus.Desc{c.up, c.operations, c.workspaces, c.runners, c.jobs} {
		out <- d
	}
}

// Collect sends the present values.
func (c *collector) Collect(out chan<- prometheus.Metric) {
	stat := c.store.pool.Stat()
	for d, value := range c.pool {
		out <- prometheus.MustNewConstMetric(d, prometheus.UntypedValue, value(stat))
	}
	counts, err := c.count()
	if err != nil {
		out <- prometheus.MustNewConstMetric(c.up, prometheus.GaugeValue, 0)
		return
	}
	out <- prometheus.MustNewConstMetric(c.up, prometheus.GaugeValue, 1)
	for _, r := range counts {
		switch r.What {
		case "operations":
			out <- prometheus.MustNewConstMetric(c.operations, prometheus.GaugeValue, float64(r.N), r.Kind, r.State)
		case "workspaces":
			out <- prometheus.MustNewConstMetric(c.workspaces, prometheus.GaugeValue, float64(r.N), r.State)
		case "runners":
			out <- prometheus.MustNewConstMetric(c.runners, prometheus.GaugeValue, float64(r.N), r.State)
		case "chores":
			out <- prometheus.MustNewConstMetric(c.jobs, prometheus.GaugeValue, float64(r.N), r.State)
		}
	}
}

// count asks the database, at most every few seconds.
func (c *collector) count() ([]tallyRow, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.counted) < countEvery {
		return c.counts, c.err
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), countTimeout, pgtx.ErrTimeout) // a scrape has no context
	defer cancel()
	c.err = c.store.InTx(ctx, controller.System(), func(t controller.AllTx) error {
		var err error
		c.counts, err = pgtx.Many[tallyRow](ctx, t.(*tx), `
			SELECT 'operations' AS what, kind, state, count(*) AS n FROM operations WHERE state IN ('pending', 'running') GROUP BY kind, state
			UNION ALL SELECT 'workspaces', '', state, count(*) FROM workspaces WHERE ended_at IS NULL GROUP BY state
			UNION ALL SELECT 'runners', '', CASE WHEN lease_expires_at < now() THEN 'silent' WHEN draining THEN 'draining' ELSE 'fresh' END AS state, count(*) FROM runners GROUP BY 3
			UNION ALL SELECT 'chores', '', state::text, count(*) FROM river.river_job WHERE state IN ('available', 'running', 'retryable') GROUP BY state`, pgtx.Args{})
		return err
	})
	c.counted = time.Now()
	return c.counts, c.err
}
