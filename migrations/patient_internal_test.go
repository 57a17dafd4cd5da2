package migrations

import (
	"strings"
	"testing"

	driver "github.com/golang-migrate/migrate/v4/database/pgx/v5"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testpg"
)

// TestDeadlock has a migration lose a deadlock: it is undone, and run again.
func TestDeadlock(t *testing.T) {
	t.Parallel()
	dsn := testpg.New(t, nil)
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	other, err := pgx.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close(t.Context()) }()
	run := func(sql string) error { _, err := other.Exec(t.Context(), sql); return err }
	// The migration looks for a deadlock when it has waited for 5 s, and the other one after a minute.
	if err := run(`CREATE TABLE a (); CREATE TABLE b (); SET deadlock_timeout = '1min'`); err != nil {
		t.Fatal(err)
	}
	mine := cfg.Copy()
	mine.RuntimeParams["deadlock_timeout"] = "5s"
	db := stdlib.OpenDB(*mine)
	defer db.Close()
	target, err := driver.WithInstance(db, &driver.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer target.Close()
	for lost := false; !lost; {
		if err := run(`BEGIN; LOCK TABLE b`); err != nil {
			t.Fatal(err)
		}
		migrated := make(chan error, 1)
		go func() {
			migrated <- patient{target, t.Context()}.Run(strings.NewReader(`LOCK TABLE a; LOCK TABLE b; DROP TABLE IF EXISTS c; CREATE TABLE c ()`))
		}()
		eventually.True(t, "the migration waits for b", func() bool {
			var waits bool
			err := other.QueryRow(t.Context(), `SELECT EXISTS (SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'b'::regclass)`).Scan(&waits)
			return err == nil && waits
		})
		lost = run(`LOCK TABLE a`) == nil // else this machine took more than 5 s for that
		if err := run(`ROLLBACK`); err != nil {
			t.Fatal(err)
		}
		if err := <-migrated; err != nil {
			t.Fatal(err)
		}
	}
	if err := run(`SELECT FROM c`); err != nil {
		t.Error(err)
	}
}
