package postgres_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/core"
)

// TestPeriodicJobsRunOnce has two controllers take part: a job runs on one of them at a time, and on the other when the first stops.
func TestPeriodicJobsRunOnce(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	other, err := postgres.Open(t.Context(), postgres.Config{DSN: d.dsn})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(other.Close)

	ran := make(chan string, 1000)
	take := func(store *postgres.Store, name string) (stop func()) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		list := []controller.PeriodicJob{
			{Name: "tick", Every: time.Second, Do: func(context.Context) error {
				ran <- name
				return nil
			}},
			{Name: "broken", Every: time.Second, Do: func(context.Context) error { return core.Errorf(core.Internal, core.CodeInternal, "broken") }},
		}
		go func() { done <- store.RunPeriodicJobs(ctx, list, slog.New(slog.DiscardHandler)) }()
		return func() {
			cancel()
			if err := <-done; err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	start := time.Now()
	stopFirst := take(d.store, "first")
	first := <-ran
	stopSecond := take(other, "second")
	for range 5 {
		<-ran
	}
	var due int
	if err := d.conn().QueryRow(t.Context(), `SELECT count(*) FROM river.river_job WHERE args ->> 'name' = 'tick'`).Scan(&due); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); first != "first" || float64(due) > took.Seconds()+2 {
		t.Errorf("%s began; it was due %d times within %s: more than once an interval", first, due, took)
	}
	stopFirst()
	for len(ran) > 0 {
		<-ran
	}
	if got := <-ran; got != "second" {
		t.Errorf("%s ran after the first had stopped", got)
	}
	stopSecond()
}

// TestPeriodicJobsWithoutDatabase ends with an error that says so.
func TestPeriodicJobsWithoutDatabase(t *testing.T) {
	t.Parallel()
	store, err := postgres.Open(t.Context(), postgres.Config{DSN: "postgres://nobody@127.0.0.1:1/x?connect_timeout=1"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	if err := store.RunPeriodicJobs(t.Context(), nil, slog.New(slog.DiscardHandler)); core.CodeOf(err) != core.CodeDatabaseUnavailable {
		t.Errorf("got %v", err)
	}
}

// TestQueueSchema compares the queue's tables with those that the library would make.
func TestQueueSchema(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	pool, err := pgxpool.New(t.Context(), d.dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	migrator := func(schema string) *rivermigrate.Migrator[pgx.Tx] {
		m, err := rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{Schema: schema, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	if res, err := migrator("river").Validate(t.Context(), nil); err != nil || !res.OK {
		t.Errorf("the library misses migrations: %v, %v", res, err)
	}
	d.exec(`CREATE SCHEMA wanted`)
	if _, err := migrator("wanted").Migrate(t.Context(), rivermigrate.DirectionUp, nil); err != nil {
		t.Fatal(err)
	}
	shape := func(schema string) []string {
		rows, err := pool.Query(t.Context(), fmt.Sprintf(`
			SELECT 'column ' || table_name || '.' || column_name || ' ' || udt_name || ' ' || is_nullable || ' ' || replace(coalesce(column_default, ''), '%[1]s.', '')
				FROM information_schema.columns WHERE table_schema = '%[1]s'
			UNION ALL SELECT 'constraint ' || conname || ' ' || replace(pg_get_constraintdef(oid), '%[1]s.', '') FROM pg_constraint WHERE connamespace = '%[1]s'::regnamespace
			UNION ALL SELECT 'index ' || replace(indexdef, '%[1]s.', '') FROM pg_indexes WHERE schemaname = '%[1]s'
			UNION ALL SELECT 'state ' || enumlabel FROM pg_enum WHERE enumtypid = '%[1]s.river_job_state'::regtype`, schema))
		if err != nil {
			t.Fatal(err)
		}
		list, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		slices.Sort(list)
		return list
	}
	if diff := cmp.Diff(shape("wanted"), shape("river")); diff != "" {
		t.Errorf("the migration differs from the library's own (-library +ours):\n%s", diff)
	}
}
