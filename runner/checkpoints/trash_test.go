package checkpoints

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/trash"
)

// TestDeletedThoughKept: a runner that dies while it removes a kept checkpoint that was deleted does not bring back what is left.
func TestDeletedThoughKept(t *testing.T) {
	t.Parallel()
	data, id := t.TempDir(), core.NewID[core.CheckpointID]()
	dir := trash.Path(trash.Dir(data), id)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := atomicfile.WriteJSON(filepath.Join(dir, RecordFile), Record{Checkpoint: runnerapi.Checkpoint{ID: id}}, 0o600); err != nil {
		t.Fatal(err)
	}
	open := func() *Store {
		t.Helper()
		bases, err := memory.NewBaseStore(filepath.Join(data, "bases"), false)
		if err != nil {
			t.Fatal(err)
		}
		s, err := New(Config{
			DataDir: data, Bases: bases, Enter: func() (func(), error) { return func() {}, nil }, Published: func() {}, Forgotten: func(core.CheckpointID) {},
			Removed: func() error { return nil }, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
		}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := open()
	if err := trash.Keep(s.TrashDir(), id); err != nil {
		t.Fatal(err)
	}
	if gone, err := s.takeOut(id, true); !gone || err != nil { // the runner dies before it has removed anything
		t.Fatalf("gone %v, %v", gone, err)
	}
	if list := open().ListTrash(); len(list) != 0 {
		t.Errorf("in the trash: %v", list)
	}
}
