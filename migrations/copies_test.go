package migrations_test

import (
	"os"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/testpg"
	"github.com/coppice-dev/coppice/migrations"
)

// TestCopiesAreNotRewritten: the table of copies has a row for each copy of each runner, and heartbeats wait while it is written again.
func TestCopiesAreNotRewritten(t *testing.T) {
	t.Parallel()
	conn := connect(t, testpg.New(t, migrations.Up))
	files := func() (nodes [2]uint32) {
		t.Helper()
		if err := conn.QueryRow(t.Context(), `SELECT pg_relation_filenode('checkpoint_copies'), pg_relation_filenode('sandboxes')`).Scan(&nodes[0], &nodes[1]); err != nil {
			t.Fatal(err)
		}
		return nodes
	}
	before := files()
	for _, file := range []string{"0050_sum_copies.down.sql", "0049_number_heartbeats.down.sql", "0049_number_heartbeats.up.sql", "0050_sum_copies.up.sql"} {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Exec(t.Context(), string(b)); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
	}
	if after := files(); after != before {
		t.Errorf("a table is in another file than before: %d, then %d", before, after)
	}
}
