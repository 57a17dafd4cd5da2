package postgres

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/coppice-dev/coppice/controller/postgres/durability"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
)

// Inspect asks the server of one of the pool's connections. An answer that Config.Check refuses is an error.
func (s *Store) Inspect(ctx context.Context) (durability.Report, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, callTimeout, pgtx.ErrTimeout)
	defer cancel()
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return durability.Report{}, pgtx.MapError(ctx, err)
	}
	defer conn.Release()
	d, err := durability.Inspect(ctx, conn.Conn().PgConn())
	if err != nil {
		return d, pgtx.MapError(ctx, err)
	}
	if s.check != nil {
		err = s.check(d)
	}
	return d, err
}

// Recheck has every connection checked again before it is used: settings may have changed under those that are open.
func (s *Store) Recheck() { s.pool.Reset() }

// CheckNew returns what every new connection must pass besides next: Config.Check. Of several servers in the address, the first that passes is
// taken.
func (s *Store) CheckNew(next pgconn.ValidateConnectFunc) pgconn.ValidateConnectFunc {
	return func(ctx context.Context, conn *pgconn.PgConn) error {
		if next != nil {
			if err := next(ctx, conn); err != nil {
				return err
			}
		}
		d, err := durability.Inspect(ctx, conn)
		if err != nil {
			return fmt.Errorf("ask a database server for its settings: %w", pgtx.MapError(ctx, err))
		}
		return s.check(d)
	}
}
