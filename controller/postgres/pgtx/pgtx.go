// Package pgtx is one transaction of the controller's database, and what all statements have in common: the scope in which they run,
// the round trips that they share, the rows that become structs, the columns with JSON, the filters of lists, and the errors. It has no
// statement of its own about any table.
package pgtx

import (
	"context"
	"reflect"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// Tx is one transaction. Statements that nobody waits for are sent with the next one, in one round trip; the server runs them in
// order, and an error of one is that of the statement that it went with.
type Tx struct {
	conn  *pgxpool.Conn
	scope controller.Scope
	in    controller.Scope // in which the server is when it comes to what is sent next
	later *pgx.Batch       // to be sent with the next statement; nil: nothing
}

// Args are the arguments of a statement, by name. Each name of the statement needs one, and each argument a name in the statement.
type Args = pgx.StrictNamedArgs

// Part is a Tx, or a type that embeds one to give it the statements of some tables.
type Part interface{ tx() *Tx }

func (t *Tx) tx() *Tx { return t }

// enterQuery puts a transaction into its scope. The settings end with it.
const enterQuery = "SELECT set_config('role', 'coppice_app', true), set_config('coppice.project_id', $1, true), set_config('coppice.origin', $2, true)"

// Begin begins a transaction with its first statement. The connection is the transaction's until Commit or Rollback.
func Begin(ctx context.Context, conn *pgxpool.Conn, scope controller.Scope) *Tx {
	t := &Tx{conn: conn, scope: scope, in: scope}
	t.queue("begin") // both go with the first statement
	t.queue(enterQuery, scope.String(), originOf(ctx))
	return t
}

// Scope is the scope of the transaction.
func (t *Tx) Scope() controller.Scope { return t.scope }

// Commit ends the transaction, with what waits to be sent.
func (t *Tx) Commit(ctx context.Context) error {
	t.queue("commit").Exec(func(tag pgconn.CommandTag) error {
		if tag.String() != "COMMIT" { // its user went on after an error
			return core.Errorf(core.Internal, core.CodeInternal, "a transaction that had failed was to be committed: the database answered %s", tag)
		}
		return nil
	})
	err := t.flush(ctx)
	if err != nil {
		t.Rollback(ctx)
	}
	return err
}

// Rollback gives up what was begun. After a failure its own error says nothing new: the server has rolled back, or will when the
// connection is gone.
func (t *Tx) Rollback(ctx context.Context) {
	t.later = nil
	c := t.conn.Conn()
	if c.IsClosed() || c.PgConn().TxStatus() == 'I' {
		return
	}
	_, _ = c.Exec(context.WithoutCancel(ctx), "rollback", pgx.QueryExecModeSimpleProtocol)
}

// enter puts what follows into a scope.
func (t *Tx) enter(scope controller.Scope) {
	if t.in != scope {
		t.queue("SELECT set_config('coppice.project_id', $1, true)", scope.String())
		t.in = scope
	}
}

func (t *Tx) queue(sql string, a ...any) *pgx.QueuedQuery {
	if t.later == nil {
		t.later = &pgx.Batch{}
	}
	return t.later.Queue(sql, a...)
}

// Soon runs a statement together with the next one, or before the commit.
func (t *Tx) Soon(sql string, a Args) {
	t.enter(t.scope)
	t.queue(sql, a)
}

// LockProject takes a lock that the transactions of a project have in common that count the same things, together with the next statement.
func (t *Tx) LockProject(project core.ProjectID, things string) {
	t.Soon(`SELECT pg_advisory_xact_lock(hashtext('coppice_' || @things::text), hashtext(@project))`, Args{"things": things, "project": project})
}

// flush runs what waits.
func (t *Tx) flush(ctx context.Context) error {
	if t.later == nil {
		return nil
	}
	b := t.later
	t.later = nil
	return MapError(ctx, t.conn.SendBatch(ctx, b).Close())
}

// send runs what waits and then a query.
func (t *Tx) send(ctx context.Context, scope controller.Scope, sql string, a Args, read func(pgx.Rows) error) error {
	t.enter(scope)
	if t.later == nil {
		rows, err := t.conn.Query(ctx, sql, a)
		if err == nil {
			err = read(rows)
		}
		return MapError(ctx, err)
	}
	b := t.later
	t.later = nil
	b.Queue(sql, a).Query(read)
	return MapError(ctx, t.conn.SendBatch(ctx, b).Close())
}

// Exec runs a statement and returns how many rows it changed.
func (t *Tx) Exec(ctx context.Context, sql string, a Args) (changed int64, err error) {
	err = t.send(ctx, t.scope, sql, a, func(rows pgx.Rows) error {
		rows.Close()
		changed = rows.CommandTag().RowsAffected()
		return rows.Err()
	})
	return changed, err
}

func collect[T any](ctx context.Context, t *Tx, scope controller.Scope, sql string, a Args) (list []T, err error) {
	to := pgx.RowTo[T]
	if reflect.TypeFor[T]().Kind() == reflect.Struct {
		to = pgx.RowToStructByName[T]
	}
	err = t.send(ctx, scope, sql, a, func(rows pgx.Rows) (err error) {
		list, err = pgx.CollectRows(rows, to)
		return err
	})
	return list, err
}

// Many runs a query and returns its rows. A row that is a struct has a field for each column: the column has the field's tag db, or its
// name in small letters with or without underscores. A row of any other type is the value of the only column.
func Many[T any](ctx context.Context, p Part, sql string, a Args) ([]T, error) {
	return collect[T](ctx, p.tx(), p.tx().scope, sql, a)
}

// AsSystem runs one query in the system's scope: some facts of the whole cluster (which addresses are free, how full runners
// are) decide about one project's rows.
func AsSystem[T any](ctx context.Context, p Part, sql string, a Args) ([]T, error) {
	return collect[T](ctx, p.tx(), controller.System(), sql, a)
}

// ByIndex runs one query in the system's scope with plans that follow indexes. The planner cannot know that the policies of a table
// hide nothing from the system. It expects a two-hundredth of the rows, and so finds it cheaper to read a table whole and sort it than to
// take the first rows in the order of an index. The settings end with the query, and travel with it.
func ByIndex[T any](ctx context.Context, p Part, sql string, a Args) ([]T, error) {
	return Planned(p, func() ([]T, error) { return AsSystem[T](ctx, p, sql, a) })
}

// InOrder is ByIndex in the transaction's own scope: the planner misjudges the rows of a project in the same way.
func InOrder[T any](ctx context.Context, p Part, sql string, a Args) ([]T, error) {
	return Planned(p, func() ([]T, error) { return Many[T](ctx, p, sql, a) })
}

// Planned runs a query with plans that follow indexes: see ByIndex.
func Planned[T any](p Part, query func() ([]T, error)) ([]T, error) {
	t := p.tx()
	const set = "SELECT set_config('enable_seqscan', $1, true), set_config('enable_sort', $1, true)"
	t.queue(set, "off")
	list, err := query()
	t.queue(set, "on")
	return list, err
}

// One runs a query for at most one row; absent is the error when there is none.
func One[T any](ctx context.Context, p Part, absent error, sql string, a Args) (T, error) {
	list, err := Many[T](ctx, p, sql, a)
	var zero T
	switch {
	case err != nil:
		return zero, err
	case len(list) == 0:
		return zero, absent
	}
	return list[0], nil
}

// Map makes something of each row.
func Map[R, M any](rows []R, of func(R) M) []M {
	list := make([]M, len(rows))
	for i, r := range rows {
		list[i] = of(r)
	}
	return list
}

// TimeOf is the time of a column; NULL is the zero time.
func TimeOf(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return *t
}

// OrNull keeps empty strings out of the database where a column means "none" by NULL.
func OrNull[S ~string](s S) *string {
	if s == "" {
		return nil
	}
	v := string(s)
	return &v
}

// OrEmpty keeps NULL out of the database where a column means "none" by an empty object.
func OrEmpty[K comparable, V any](m map[K]V) map[K]V {
	if m == nil {
		return map[K]V{}
	}
	return m
}

// OrNone keeps NULL out of the database where a column means "none" by an empty array.
func OrNone[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

// Texts is a list as an argument of type text[].
func Texts[S ~string](list []S) []string {
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = string(s)
	}
	return out
}

// Quoted joins constants of core for use inside SQL text.
func Quoted[S ~string](list ...S) string {
	return "'" + strings.Join(Texts(list), "', '") + "'"
}
