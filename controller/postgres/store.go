// Package postgres keeps the controller's state in PostgreSQL. It is the only package with SQL, and
// mapError is the only function that knows the server's error codes and the schema's constraint
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
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/durability"
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
	keyChannel       = "coppice_keys"
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
	ctx, cancel := context.WithTimeoutCause(ctx, connectTimeout, errTimeout)
	defer cancel()
	return mapError(ctx, s.pool.Ping(ctx))
}

// InTx runs fn in a transaction; see controller.Store.
func (s *Store) InTx(ctx context.Context, scope controller.Scope, fn func(controller.AllTx) error) error {
	if name := scope.String(); name == "" || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789_") != "" {
		return fmt.Errorf("%q is no scope for a transaction", name)
	}
	for attempt := 0; ; attempt++ {
		err := s.inTx(ctx, scope, fn)
		if _, deadlock := errors.AsType[*deadlockError](err); !deadlock || attempt == deadlockRetries || ctx.Err() != nil {
			return err
		}
	}
}

// enterQuery puts a transaction into its scope. The settings end with it.
const enterQuery = "SELECT set_config('role', 'coppice_app', true), set_config('coppice.project_id', $1, true), set_config('coppice.origin', $2, true)"

func (s *Store) inTx(ctx context.Context, scope controller.Scope, fn func(controller.AllTx) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, callTimeout, errTimeout)
	defer cancel()
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return mapError(ctx, err)
	}
	defer conn.Release() // a connection that is still in a transaction is closed, and the server rolls back
	t := &tx{conn: conn, scope: scope, in: scope}
	t.queue("begin") // both go with the first statement
	t.queue(enterQuery, scope.String(), originOf(ctx))
	if err := fn(t); err != nil {
		t.rollback(ctx)
		return err
	}
	return t.commit(ctx)
}

// commit ends the transaction, with what waits to be sent.
func (t *tx) commit(ctx context.Context) error {
	t.queue("commit").Exec(func(tag pgconn.CommandTag) error {
		if tag.String() != "COMMIT" { // fn went on after an error
			return core.Errorf(core.Internal, core.CodeInternal, "a transaction that had failed was to be committed: the database answered %s", tag)
		}
		return nil
	})
	err := t.flush(ctx)
	if err != nil {
		t.rollback(ctx)
	}
	return err
}

// rollback gives up what was begun. After a failure its own error says nothing new: the server has rolled back, or will when the
// connection is gone.
func (t *tx) rollback(ctx context.Context) {
	t.later = nil
	c := t.conn.Conn()
	if c.IsClosed() || c.PgConn().TxStatus() == 'I' {
		return
	}
	_, _ = c.Exec(context.WithoutCancel(ctx), "rollback", pgx.QueryExecModeSimpleProtocol)
}

// Notify wakes whoever listens.
func (s *Store) Notify(ctx context.Context, ended []core.OperationID) error {
	ctx, cancel := context.WithTimeoutCause(ctx, callTimeout, errTimeout)
	defer cancel()
	_, err := s.pool.Exec(ctx, "SELECT pg_notify($1, id) FROM unnest($2::text[]) AS id", channel, ended)
	return mapError(ctx, err)
}

// Listen blocks on a connection of its own.
func (s *Store) Listen(ctx context.Context, ended func(core.OperationID), revoked func(core.KeyID)) error {
	conn, err := pgx.ConnectConfig(ctx, s.pool.Config().ConnConfig)
	if err != nil {
		return mapError(ctx, err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if _, err := conn.Exec(ctx, "LISTEN "+channel+"; LISTEN "+keyChannel); err != nil {
		return mapError(ctx, err)
	}
	for {
		n, err := conn.WaitForNotification(ctx)
		if err != nil {
			return mapError(ctx, err)
		}
		if n.Channel == keyChannel {
			revoked(core.KeyID(n.Payload))
		} else if id, err := core.ParseID[core.OperationID](n.Payload); err == nil {
			ended(id)
		}
	}
}

// tx is one transaction. Its methods are in the files named after what they keep. Statements that nobody waits for are sent with
// the next one, in one round trip; the server runs them in order, and an error of one is that of the statement that it went with.
type tx struct {
	conn  *pgxpool.Conn
	scope controller.Scope
	in    controller.Scope // in which the server is when it comes to what is sent next
	later *pgx.Batch       // to be sent with the next statement; nil: nothing
}

var _ controller.AllTx = (*tx)(nil)

type args = pgx.StrictNamedArgs

// enter puts what follows into a scope.
func (t *tx) enter(scope controller.Scope) {
	if t.in != scope {
		t.queue("SELECT set_config('coppice.project_id', $1, true)", scope.String())
		t.in = scope
	}
}

func (t *tx) queue(sql string, a ...any) *pgx.QueuedQuery {
	if t.later == nil {
		t.later = &pgx.Batch{}
	}
	return t.later.Queue(sql, a...)
}

// soon runs a statement together with the next one, or before the commit.
func (t *tx) soon(sql string, a args) {
	t.enter(t.scope)
	t.queue(sql, a)
}

// flush runs what waits.
func (t *tx) flush(ctx context.Context) error {
	if t.later == nil {
		return nil
	}
	b := t.later
	t.later = nil
	return mapError(ctx, t.conn.SendBatch(ctx, b).Close())
}

// send runs what waits and then a query.
func (t *tx) send(ctx context.Context, scope controller.Scope, sql string, a args, read func(pgx.Rows) error) error {
	t.enter(scope)
	if t.later == nil {
		rows, err := t.conn.Query(ctx, sql, a)
		if err == nil {
			err = read(rows)
		}
		return mapError(ctx, err)
	}
	b := t.later
	t.later = nil
	b.Queue(sql, a).Query(read)
	return mapError(ctx, t.conn.SendBatch(ctx, b).Close())
}

func collect[T any](ctx context.Context, t *tx, scope controller.Scope, sql string, a args) (list []T, err error) {
	err = t.send(ctx, scope, sql, a, func(rows pgx.Rows) (err error) {
		list, err = pgx.CollectRows(rows, pgx.RowToStructByName[T])
		return err
	})
	return list, err
}

// many runs a query and returns its rows.
func many[T any](ctx context.Context, t *tx, sql string, a args) ([]T, error) {
	return collect[T](ctx, t, t.scope, sql, a)
}

// asSystem runs one query in the system's scope: some facts of the whole cluster (which addresses are free, how full runners
// are) decide about one project's rows.
func asSystem[T any](ctx context.Context, t *tx, sql string, a args) ([]T, error) {
	return collect[T](ctx, t, controller.System(), sql, a)
}

// byIndex runs one query in the system's scope with plans that follow indexes. The planner cannot know that the policies of a table
// hide nothing from the system. It expects a two-hundredth of the rows, and so finds it cheaper to read a table whole and sort it than to
// take the first rows in the order of an index. The settings end with the query, and travel with it.
func byIndex[T any](ctx context.Context, t *tx, sql string, a args) ([]T, error) {
	return planned(t, func() ([]T, error) { return asSystem[T](ctx, t, sql, a) })
}

// inOrder is byIndex in the transaction's own scope: the planner misjudges the rows of a project in the same way.
func inOrder[T any](ctx context.Context, t *tx, sql string, a args) ([]T, error) {
	return planned(t, func() ([]T, error) { return many[T](ctx, t, sql, a) })
}

func planned[T any](t *tx, query func() ([]T, error)) ([]T, error) {
	const set = "SELECT set_config('enable_seqscan', $1, true), set_config('enable_sort', $1, true)"
	t.queue(set, "off")
	list, err := query()
	t.queue(set, "on")
	return list, err
}

// one runs a query for at most one row; absent is the error when there is none.
func one[T any](ctx context.Context, t *tx, absent error, sql string, a args) (T, error) {
	list, err := many[T](ctx, t, sql, a)
	var zero T
	switch {
	case err != nil:
		return zero, err
	case len(list) == 0:
		return zero, absent
	}
	return list[0], nil
}

// exec runs a statement and returns how many rows it changed.
func (t *tx) exec(ctx context.Context, sql string, a args) (changed int64, err error) {
	err = t.send(ctx, t.scope, sql, a, func(rows pgx.Rows) error {
		rows.Close()
		changed = rows.CommandTag().RowsAffected()
		return rows.Err()
	})
	return changed, err
}

func timeOf(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return *t
}

// orNull keeps empty strings out of the database where a column means "none" by NULL.
func orNull[S ~string](s S) *string {
	if s == "" {
		return nil
	}
	v := string(s)
	return &v
}

func orEmpty[K comparable, V any](m map[K]V) map[K]V {
	if m == nil {
		return map[K]V{}
	}
	return m
}

func orNone[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

func texts[S ~string](list []S) []string {
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = string(s)
	}
	return out
}
