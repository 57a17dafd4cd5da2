package controller_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/core"
)

// TestDataPlaneUse has a runner say whom its data plane serves: its own workspaces are in use then, others are not.
func TestDataPlaneUse(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	mine := w.create("mine")
	if way, err := w.FilesWay(t.Context(), w.project, mine.ID); err != nil || way.URL != "" {
		t.Errorf("a pass without a data plane: %+v, %v", way, err)
	}
	conn, err := pgx.Connect(t.Context(), w.dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	if _, err := conn.Exec(t.Context(), `DELETE FROM workspace_uses`); err != nil {
		t.Fatal(err)
	}
	foreign := core.NewID[core.WorkspaceID]()
	beat := w.runner.NextBeat(w.epoch)
	beat.DataUsed, beat.DataKeys = []core.WorkspaceID{mine.ID, foreign}, []core.KeyID{core.NewID[core.KeyID]()}
	out, err := w.Fleet().Heartbeat(t.Context(), w.runner.ID(), beat)
	if err != nil || len(out.EndedKeys) != 0 {
		t.Fatalf("%+v, %v", out, err)
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for began := time.Now(); ; <-tick.C {
		rows, err := conn.Query(t.Context(), `SELECT workspace_id FROM workspace_uses`)
		if err != nil {
			t.Fatal(err)
		}
		used, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		if len(used) == 1 && used[0] == string(mine.ID) {
			return
		}
		if len(used) > 0 || time.Since(began) > wait {
			t.Fatalf("in use are %q, want %s only", used, mine.ID)
		}
	}
}
