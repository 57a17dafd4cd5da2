// Package postgres keeps the controller's state in PostgreSQL. It is the only package with SQL, and
// pgtx.MapError is the only function that knows the server's error codes and the schema's constraint
// names. It owns no rules: core's transition tables say which change is legal, and the schema
// repeats them.
//
// Every transaction works as the role coppice_app, which is neither owner nor superuser, in the
// scope of one project or of the system (controller.Scope). Row-level security hides rows of other
// projects, so a forgotten WHERE cannot leak. A test proves this with no WHERE at all.
package postgres

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/buildrows"
	"github.com/coppice-dev/coppice/controller/postgres/durability"
	"github.com/coppice-dev/coppice/controller/postgres/eventrows"
	"github.com/coppice-dev/coppice/controller/postgres/fleetrows"
	"github.com/coppice-dev/coppice/controller/postgres/flowrows"
	"github.com/coppice-dev/coppice/controller/postgres/grantrows"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/controller/postgres/preparerows"
	"github.com/coppice-dev/coppice/controller/postgres/steprows"
	"github.com/coppice-dev/coppice/controller/postgres/tenantrows"
	"github.com/coppice-dev/coppice/controller/postgres/uploadrows"
	"github.com/coppice-dev/coppice/core"
)

// Config says how to reach the database.
type Config struct {
	DSN      string // a URL or key=value pairs, as libpq takes them
	MaxConns int32  // 0: 16

	// Check judges the server of each new connection; one that it refuses is not used, and calls fail with its error. It must be
	// safe for concurrent use. Nil: every server will do.
	Check func(durability.Report) error
}

const (
	connectTimeout   = 3 * time.Second
	statementTimeout = "10s" // a query that takes longer is a fault, not work
	lockTimeout      = "5s"
	idleTimeout      = "10s" // of a transaction that nobody works on: its holder is gone
	callTimeout      = 15 * time.Second
	deadlockRetries  = 5
	channel          = "coppice_operations"
	defaultMaxConns  = 16
)

// Store is the controller's database. Close it when everything that uses it has ended.
type Store struct {
	pool  *pgxpool.Pool
	check func(durability.Report) error // nil: none
}

var _ controller.Store = (*Store)(nil)

// Open makes a store. It does not need the database to be there: calls fail with DATABASE_UNAVAILABLE until it is.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	pc, err := pgxpool.ParseConfig(cfg.DSN)
	if err != nil {
		return nil, fmt.Errorf("parse database address: %w", err)
	}
	pc.MaxConns = cfg.MaxConns
	if pc.MaxConns == 0 {
		pc.MaxConns = defaultMaxConns
	}
	pc.ConnConfig.ConnectTimeout = connectTimeout
	params := pc.ConnConfig.RuntimeParams
	params["application_name"] = "coppice-controller"
	params["statement_timeout"] = statementTimeout
	params["lock_timeout"] = lockTimeout
	params["idle_in_transaction_session_timeout"] = idleTimeout
	params["timezone"] = "UTC"
	params["jit"] = "off" // no query is long enough to earn a compilation
	s := &Store{check: cfg.Check}
	if s.check != nil {
		pc.ConnConfig.ValidateConnect = s.CheckNew(pc.ConnConfig.ValidateConnect)
	}
	if s.pool, err = pgxpool.NewWithConfig(ctx, pc); err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	return s, nil
}

// Close waits for running transactions and closes all connections.
func (s *Store) Close() { s.pool.Close() }

// Ping reports whether the database answers.
func (s *Store) Ping(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, connectTimeout, pgtx.ErrTimeout)
	defer cancel()
	return pgtx.MapError(ctx, s.pool.Ping(ctx))
}

// InTx runs fn in a transaction; see controller.Store.
func (s *Store) InTx(ctx context.Context, scope controller.Scope, fn func(controller.AllTx) error) error {
	if name := scope.String(); name == "" || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789_") != "" {
		return fmt.Errorf("%q is no scope for a transaction", name)
	}
	for attempt := 0; ; attempt++ {
		err := s.inTx(ctx, scope, fn)
		if _, deadlock := errors.AsType[*pgtx.DeadlockError](err); !deadlock || attempt == deadlockRetries || ctx.Err() != nil {
			return err
		}
	}
}

func (s *Store) inTx(ctx context.Context, scope controller.Scope, fn func(controller.AllTx) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, callTimeout, pgtx.ErrTimeout)
	defer cancel()
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return pgtx.MapError(ctx, err)
	}
	defer conn.Release() // a connection that is still in a transaction is closed, and the server rolls back
	t := pgtx.Begin(ctx, conn, scope)
	if err := fn(newTx(t)); err != nil {
		t.Rollback(ctx)
		return err
	}
	return t.Commit(ctx)
}

// Notify wakes the listeners.
func (s *Store) Notify(ctx context.Context, ended []core.OperationID) error {
	ctx, cancel := context.WithTimeoutCause(ctx, callTimeout, pgtx.ErrTimeout)
	defer cancel()
	_, err := s.pool.Exec(ctx, "SELECT pg_notify($1, id) FROM unnest($2::text[]) AS id", channel, ended)
	return pgtx.MapError(ctx, err)
}

// Listen blocks on a connection of its own.
func (s *Store) Listen(ctx context.Context, ended func(core.OperationID), revoked func(core.KeyID)) error {
	conn, err := pgx.ConnectConfig(ctx, s.pool.Config().ConnConfig)
	if err != nil {
		return pgtx.MapError(ctx, err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if _, err := conn.Exec(ctx, "LISTEN "+channel+"; LISTEN "+tenantrows.KeyChannel); err != nil {
		return pgtx.MapError(ctx, err)
	}
	for {
		n, err := conn.WaitForNotification(ctx)
		if err != nil {
			return pgtx.MapError(ctx, err)
		}
		if n.Channel == tenantrows.KeyChannel {
			revoked(core.KeyID(n.Payload))
		} else if id, err := core.ParseID[core.OperationID](n.Payload); err == nil {
			ended(id)
		}
	}
}

// tx is one transaction with all statements: those of this package, in files named after what they keep, and those of the packages below.
type tx struct {
	*pgtx.Tx
	buildTx
	eventTx
	fleetTx
	flowTx
	grantTx
	prepareTx
	stepTx
	tenantTx
	uploadTx
}

// Each package has a type Tx of its own.
type (
	buildTx   = buildrows.Tx
	eventTx   = eventrows.Tx
	fleetTx   = fleetrows.Tx
	flowTx    = flowrows.Tx
	grantTx   = grantrows.Tx
	stepTx    = steprows.Tx
	tenantTx  = tenantrows.Tx
	uploadTx  = uploadrows.Tx
	prepareTx = preparerows.Tx
)

var _ controller.AllTx = (*tx)(nil)

// newTx names no field of tx, so that none is forgotten.
func newTx(t *pgtx.Tx) *tx {
	return &tx{t, buildTx{Tx: t}, eventTx{Tx: t}, fleetTx{Tx: t}, flowTx{Tx: t}, grantTx{Tx: t}, prepareTx{Tx: t}, stepTx{Tx: t}, tenantTx{Tx: t}, uploadTx{Tx: t}}
}
