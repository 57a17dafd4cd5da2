package controller_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
)

// TestWritesByPassAreRecordedOnce: a runner that has missed the answer to a heartbeat tells the same writes again. Each is in
// the audit log once, whatever heartbeat it came with.
func TestWritesByPassAreRecordedOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	key := w.admin().ID
	write := func(n int64) runnerapi.DataWrite {
		return runnerapi.DataWrite{
			Number: n, RequestID: fmt.Sprint("req_", n), SandboxID: ws.Sandbox.ID, KeyID: key, Source: "192.0.2.1", Path: fmt.Sprint("/", n), At: time.Now().UTC(),
		}
	}
	writes := func(numbers ...int64) (list []runnerapi.DataWrite) {
		for _, n := range numbers {
			list = append(list, write(n))
		}
		return list
	}
	total := 0
	for i, c := range []struct {
		log   string
		told  []runnerapi.DataWrite
		fresh int
	}{
		{"one", writes(1, 2, 3), 3},
		{"one", writes(1, 2, 3), 0}, // the answer was lost
		{"one", writes(2, 3, 4, 5), 2},
		{"one", writes(5, 5, 4, 6, 6, -1, 0), 1},
		{"two", writes(1, 2), 2}, // the file was lost
		{"two", nil, 0},
		{"two", writes(2), 0},
		{"", writes(0, 0), 2}, // by a runner of before
		{"", writes(0), 1},
	} {
		beat := w.runner.NextBeat(w.epoch)
		beat.DataLog, beat.DataWrites = c.log, c.told
		if _, err := w.Fleet().Heartbeat(t.Context(), w.runner.ID(), beat); err != nil {
			t.Fatal(err)
		}
		total += c.fresh
		if n := w.number(`SELECT count(*) FROM audit_records WHERE object_id = $1 AND detail ->> 'by' = 'pass'`, ws.ID); n != total {
			t.Errorf("after heartbeat %d: %d records, want %d", i, n, total)
		}
	}
}

// TestTooManyWritesAreNotLost: a heartbeat with more writes than a controller takes is answered with how many it took.
func TestTooManyWritesAreNotLost(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	key := w.admin().ID
	var list []runnerapi.DataWrite
	const all = runnerapi.MaxDataWrites + 3
	for n := range int64(all) {
		list = append(list, runnerapi.DataWrite{Number: n + 1, SandboxID: ws.Sandbox.ID, KeyID: key, Path: "/p", At: time.Now().UTC()})
	}
	total := 0
	for len(list) > 0 {
		out, err := w.Fleet().Heartbeat(t.Context(), w.runner.ID(), runnerapi.Heartbeat{
			LeaseEpoch: w.epoch, Info: w.runner.Info(), Sandboxes: w.runner.Sandboxes(), Checkpoints: w.runner.Checkpoints(), DataLog: "one", DataWrites: list,
		})
		if err != nil {
			t.Fatal(err)
		}
		if want := min(len(list), runnerapi.MaxDataWrites); out.DataTaken != want {
			t.Fatalf("of %d writes the controller says that it took %d, want %d", len(list), out.DataTaken, want)
		}
		total += out.DataTaken
		list = list[out.DataTaken:]
		if n := w.number(`SELECT count(*) FROM audit_records WHERE object_id = $1 AND detail ->> 'by' = 'pass'`, ws.ID); n != total {
			t.Errorf("%d records, want %d", n, total)
		}
	}
}
