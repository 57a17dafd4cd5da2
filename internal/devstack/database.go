package devstack

import (
	"context"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/internal/pgcluster"
)

// database keeps a PostgreSQL server running. One that ends by itself is started again; until then requests are refused with 503,
// and the VMs, which do not need it, go on.
type database struct {
	cfg pgcluster.Config

	mu sync.Mutex // guards pg
	pg *pgcluster.Cluster
}

func openDatabase(ctx context.Context, cfg pgcluster.Config) (*database, error) {
	pg, err := pgcluster.Start(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return &database{cfg: cfg, pg: pg}, nil
}

func (d *database) current() *pgcluster.Cluster {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.pg
}

func (d *database) dsn() string { return d.current().DSN("postgres") }

// stop ends the server. keep has returned by then.
func (d *database) stop(ctx context.Context) error {
	pg := d.current()
	select {
	case <-pg.Done(): // and it was not possible to start it again, which keep has reported
		return nil
	default:
		return pg.Stop(ctx)
	}
}

// The pauses between attempts to start a server.
const (
	firstPause = 100 * time.Millisecond
	maxPause   = 10 * time.Second
)

// keep starts the server again whenever it has ended, until ctx ends.
func (d *database) keep(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-d.current().Done():
		}
		d.cfg.Log.ErrorContext(ctx, "postgres ended; it is started again", "err", d.current().Err())
		d.restart(ctx)
	}
}

func (d *database) restart(ctx context.Context) {
	for pause := firstPause; ; pause = min(2*pause, maxPause) {
		pg, err := pgcluster.Start(ctx, d.cfg)
		if err == nil {
			d.mu.Lock()
			d.pg = pg
			d.mu.Unlock()
			return
		}
		if ctx.Err() != nil {
			return
		}
		d.cfg.Log.ErrorContext(ctx, "postgres was not started", "err", err)
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
	}
}
