package controller_test

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/internal/test/testmetrics"
)

// jobStore gives the periodic jobs to a test instead of running them.
type jobStore struct {
	*postgres.Store
	list chan []controller.PeriodicJob
}

func (s jobStore) RunPeriodicJobs(ctx context.Context, list []controller.PeriodicJob, _ *slog.Logger) error {
	select {
	case s.list <- list:
	case <-ctx.Done():
		return nil
	}
	<-ctx.Done()
	return nil
}

// TestSweepGoesOn: whatever part of a sweep fails, the others are done, and the failure is counted.
func TestSweepGoesOn(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	w := newWorld(t)
	w.stop()
	store := jobStore{w.store, make(chan []controller.PeriodicJob)}
	cfg := controller.Config{ClusterID: "test", LoopInterval: 50 * time.Millisecond, SessionsKept: time.Millisecond, Metrics: reg}
	w.startOn(store, cfg)
	jobs := map[string]controller.PeriodicJob{}
	for _, c := range <-store.list {
		jobs[c.Name] = c
	}
	conn, err := pgx.Connect(t.Context(), w.dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	exec := func(sql string) {
		t.Helper()
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	number := func(sql string) (n int) {
		t.Helper()
		if err := conn.QueryRow(t.Context(), sql).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	// What each part is to do.
	for _, table := range []string{"usage_samples", "reseal_reports", "audit_records", "attestations"} {
		exec(`DO $$ DECLARE p text; BEGIN FOR p IN SELECT inhrelid::regclass FROM pg_inherits WHERE inhparent = '` + table + `'::regclass LOOP
			IF p <> '` + table + `_default' THEN EXECUTE 'DROP TABLE ' || p; END IF; END LOOP; END $$`)
	}
	exec(`INSERT INTO usage_samples (project_id, workspace_id, sandbox_id, cpu_seconds, sent_bytes, received_bytes) SELECT project_id, 'w', 's' || i, 1, 1, 1
		FROM generate_series(1, 50) i, (SELECT id AS project_id FROM projects LIMIT 1) p`)
	exec(`INSERT INTO session_counts (project_id, rows) SELECT id, 77 FROM projects`) // it counts again
	// What fails: rows that nobody may delete or look at, a table that has a wrong partition.
	exec(`REVOKE DELETE ON sessions, attach_tokens FROM coppice_app`)
	exec(`REVOKE UPDATE ON checkpoints FROM coppice_app`) // which fails abandon_seals
	exec(`ALTER TABLE reseal_reports_default RENAME TO reseal_reports_odd`)
	exec(`REVOKE DELETE ON flow_batches FROM coppice_app`)

	delete(jobs, "roll_usage") // it removes samples, too: here the partitions have to move them
	failed := map[string]bool{}
	for name, c := range jobs {
		if err := c.Do(t.Context()); err != nil {
			failed[name] = true
			if name == "partitions" && (!strings.Contains(err.Error(), "partitions_reseal_reports") || strings.Contains(err.Error(), "usage")) {
				t.Errorf("partitions: %v", err)
			}
		}
	}
	for _, name := range []string{"partitions", "sessions", "sweep_tokens", "flows", "abandon_seals"} {
		if !failed[name] {
			t.Errorf("%s did not fail: the test shows nothing", name)
		}
		delete(failed, name)
	}
	if len(failed) != 0 {
		t.Errorf("failed with them: %v", failed)
	}
	if n := number(`SELECT count(*) FROM session_counts`); n != 0 {
		t.Errorf("sessions were not counted: %d rows of before", n)
	}
	for _, table := range []string{"usage_samples", "audit_records", "attestations"} {
		if n := number(`SELECT count(*) FROM pg_inherits WHERE inhparent = '` + table + `'::regclass`); n != 4 {
			t.Errorf("%s has %d partitions", table, n)
		}
	}
	if n := number(`SELECT count(*) FROM usage_samples_default`); n != 0 {
		t.Errorf("%d samples are in the default partition", n)
	}
	counted := testmetrics.Of(t, reg)
	const failures = "coppice_controller_chores_failed_total "
	for _, name := range []string{"partitions", "partitions_reseal_reports", "sessions", "sweep_tokens", "flow_counts", "flows"} {
		if counted[failures+name] != 1 {
			t.Errorf("failures of %s: %v", name, counted[failures+name])
		}
	}
	if counted[failures+"partitions_usage_samples"] != 0 || counted[failures+"count_sessions"] != 0 {
		t.Errorf("failures: %v", counted)
	}
	exec(`ALTER TABLE reseal_reports_odd RENAME TO reseal_reports_default`)
	if err := jobs["partitions"].Do(t.Context()); err != nil {
		t.Errorf("after it was mended: %v", err)
	}
}
