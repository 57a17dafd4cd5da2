package migrations_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/testpg"
	"github.com/coppice-dev/coppice/migrations"
)

// TestCountsOfEarlierFlows has the flows of an earlier version counted by their kind: an effect, a read, a denied flow, and the end of
// the effect.
func TestCountsOfEarlierFlows(t *testing.T) {
	t.Parallel()
	conn := connect(t, testpg.New(t, migrations.Up))
	run := func(file string) {
		t.Helper()
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Exec(t.Context(), string(b)); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
	}
	down, err := filepath.Glob("00*.down.sql")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range slices.Backward(down) {
		if file < "0042" {
			break
		}
		run(file)
	}
	const flow = `INSERT INTO flows (project_id, workspace_id, sandbox_id, epoch, id, at, final, changes, spoken, host, port, method, path, outcome, rule, grant_id,
		reason, status, sent_bytes, received_bytes) VALUES ('prj_x', 'ws_x', 'sbx_x', 1, $1, now(), $2, $3, 'http', 'h', 80, $4, '/', $5, '', '', '', 0, 0, 0)`
	for _, f := range []struct {
		id             string
		final, changes bool
		method, how    string
	}{{"a", false, true, "POST", "allowed"}, {"a", true, true, "POST", "allowed"}, {"b", true, false, "GET", "allowed"}, {"c", true, false, "POST", "denied"}} {
		if _, err := conn.Exec(t.Context(), flow, f.id, f.final, f.changes, f.method, f.how); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := conn.Exec(t.Context(), `INSERT INTO flow_rows (project_id, workspace_id, month, rows)
		VALUES ('prj_x', 'ws_x', date_trunc('month', now() AT TIME ZONE 'UTC'), 4), ('prj_x', '', date_trunc('month', now() AT TIME ZONE 'UTC'), 4)`); err != nil {
		t.Fatal(err)
	}
	run("0042_count_flows.up.sql")
	for _, workspace := range []string{"ws_x", ""} {
		var rows, effects, denied int
		if err := conn.QueryRow(t.Context(), `SELECT rows, effects, denied FROM flow_rows WHERE workspace_id = $1`, workspace).Scan(&rows, &effects, &denied); err != nil {
			t.Fatal(err)
		}
		if rows != 4 || effects != 2 || denied != 1 {
			t.Errorf("workspace %q: %d rows, %d of effects and %d of denied flows", workspace, rows, effects, denied)
		}
	}
}
