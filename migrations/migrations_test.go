package migrations_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/internal/test/testpg"
	"github.com/coppice-dev/coppice/migrations"
)

func TestMain(m *testing.M) { testleak.Main(m, testpg.Leak()) }

func connect(t *testing.T, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	return conn
}

// shape lists every column, constraint, index, policy, trigger and function of the schema.
func shape(t *testing.T, conn *pgx.Conn) []string {
	t.Helper()
	rows, err := conn.Query(t.Context(), `
		SELECT 'column ' || table_name || '.' || column_name || ' ' || data_type || ' ' || is_nullable FROM information_schema.columns WHERE table_schema = 'public'
		UNION ALL SELECT 'constraint ' || conname || ' ' || pg_get_constraintdef(oid) FROM pg_constraint WHERE connamespace = 'public'::regnamespace
		UNION ALL SELECT 'index ' || indexdef FROM pg_indexes WHERE schemaname = 'public'
		UNION ALL SELECT 'policy ' || tablename || ' ' || policyname || ' ' || coalesce(qual, '') || coalesce(with_check, '') FROM pg_policies
		UNION ALL SELECT 'trigger ' || tgrelid::regclass || ' ' || tgname FROM pg_trigger WHERE NOT tgisinternal
		UNION ALL SELECT 'function ' || proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace
		ORDER BY 1`)
	if err != nil {
		t.Fatal(err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func TestUpDownUp(t *testing.T) {
	t.Parallel()
	dsn := testpg.New(t, nil)
	if err := migrations.Check(t.Context(), dsn); err == nil || !strings.Contains(err.Error(), "run the migrations") {
		t.Errorf("an empty database passes the check: %v", err)
	}
	if err := migrations.Up(t.Context(), dsn); err != nil {
		t.Fatal(err)
	}
	conn := connect(t, dsn)
	first := shape(t, conn)
	if err := migrations.Check(t.Context(), dsn); err != nil {
		t.Error(err)
	}
	if err := migrations.Down(t.Context(), dsn); err != nil {
		t.Fatal(err)
	}
	for _, line := range shape(t, conn) {
		if !strings.Contains(line, "schema_migrations") {
			t.Errorf("left behind: %s", line)
		}
	}
	if err := migrations.Up(t.Context(), dsn); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(first, shape(t, conn)); diff != "" {
		t.Errorf("the second time the schema is another (-first +second):\n%s", diff)
	}
}

func TestUpKeepsRows(t *testing.T) {
	t.Parallel()
	dsn := testpg.New(t, migrations.Up)
	conn := connect(t, dsn)
	if _, err := conn.Exec(t.Context(), `INSERT INTO projects (id, name) VALUES ('prj_x', 'x')`); err != nil {
		t.Fatal(err)
	}
	if err := migrations.Up(t.Context(), dsn); err != nil {
		t.Fatal(err)
	}
	var n int
	if err := conn.QueryRow(t.Context(), `SELECT count(*) FROM projects`).Scan(&n); err != nil || n != 2 {
		t.Errorf("%d projects, %v", n, err)
	}
}

func TestUpFromSeveralProcesses(t *testing.T) {
	t.Parallel()
	dsn := testpg.New(t, nil)
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			if err := migrations.Up(t.Context(), dsn); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	if err := migrations.Check(t.Context(), dsn); err != nil {
		t.Error(err)
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, sql, want string }{
		{"newer", `UPDATE schema_migrations SET version = version + 1`, "newer"},
		{"interrupted", `UPDATE schema_migrations SET dirty = true`, "interrupted"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dsn := testpg.New(t, migrations.Up)
			if _, err := connect(t, dsn).Exec(t.Context(), c.sql); err != nil {
				t.Fatal(err)
			}
			for _, do := range []func(context.Context, string) error{migrations.Up, migrations.Check} {
				var refused *core.Error
				if err := do(t.Context(), dsn); !errors.As(err, &refused) || refused.Category != core.FailedPrecondition || !strings.Contains(refused.Msg, c.want) {
					t.Errorf("got %v", err)
				}
			}
		})
	}
	if err := migrations.Up(t.Context(), "postgres://nobody@127.0.0.1:1/x?connect_timeout=1"); core.CodeOf(err) != core.CodeDatabaseUnavailable {
		t.Errorf("an unreachable database: %v", err)
	}
	if err := migrations.Up(t.Context(), "postgres://%zz"); err == nil {
		t.Error("a wrong address passes")
	}
}

// TestUpOn: a server that the check refuses is not migrated.
func TestUpOn(t *testing.T) {
	t.Parallel()
	dsn := testpg.New(t, nil)
	refused := core.Errorf(core.Unavailable, core.CodeDatabaseUnavailable, "this server is refused")
	err := migrations.UpOn(t.Context(), dsn+"&target_session_attrs=read-write", func(next pgconn.ValidateConnectFunc) pgconn.ValidateConnectFunc {
		if next == nil {
			t.Error("what the address wants of a server is forgotten")
		}
		return func(context.Context, *pgconn.PgConn) error { return refused }
	})
	if !errors.Is(err, refused) {
		t.Errorf("a server that is refused: %v", err)
	}
	var n int
	if err := connect(t, dsn).QueryRow(t.Context(), `SELECT count(*) FROM pg_tables WHERE schemaname = 'public'`).Scan(&n); err != nil || n != 0 {
		t.Errorf("there are %d tables, %v", n, err)
	}
}
