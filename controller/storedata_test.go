package controller_test

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore"
)

// TestCheckStoreProblems has checkpoints whose manifests are no manifests: each is a problem of what needs it, and none of what was deleted.
// internal/daemon has the same with checkpoints of a runner.
func TestCheckStoreProblems(t *testing.T) {
	t.Parallel()
	files, store := withStore(t)
	w := newWorld(t, store, atOnce)
	ws := w.create("a")
	var want []core.CheckpointID
	for range 20 { // more than a look at the rows brings
		cp := w.checkpoint(ws.ID)
		w.seal(files, cp.ID)
		want = append(want, cp.ID)
	}
	if err := w.DeleteCheckpoint(t.Context(), w.project, want[7]); err != nil {
		t.Fatal(err)
	}
	want = slices.Delete(want, 7, 8)
	for _, key := range keys(t, files) {
		if strings.HasSuffix(key, "/manifest") {
			other := []byte("another manifest")
			if err := files.Delete(t.Context(), key); err != nil {
				t.Fatal(err)
			}
			if err := files.Put(t.Context(), key, bytes.NewReader(other), int64(len(other)), core.DigestOf(other)); err != nil {
				t.Fatal(err)
			}
		}
	}
	got, err := w.CheckStoreData(t.Context(), snapshotstore.Whole, "")
	if err != nil || got.Checkpoints != len(want) || got.Remaining != 0 || got.Next != "" || len(got.Problems) != len(want) {
		t.Fatalf("%+v, %v", got, err)
	}
	var needers []core.CheckpointID
	for _, p := range got.Problems {
		if p.Code != core.CodeCheckpointCorrupt || p.Needed != len(p.Checkpoints) || p.Needed == 0 {
			t.Errorf("%+v", p)
		}
		needers = append(needers, p.Checkpoints[0])
	}
	if slices.Sort(want); !slices.Equal(needers, want) {
		t.Errorf("%v need what is wrong; want %v", needers, want)
	}
	err = w.store.InTx(t.Context(), controller.System(), func(tx controller.AllTx) error {
		needs, err := tx.NeededBy(t.Context(), keys(t, files))
		most := 0
		for key, by := range needs {
			if n := w.number(`SELECT count(*) FROM checkpoint_objects WHERE key = $1`, key); n != len(by) {
				t.Errorf("%s is needed by %d, not by %d", key, n, len(by))
			}
			most = max(most, len(by))
		}
		if most != len(want) {
			t.Errorf("the pack of the root of all is needed by %d of %d", most, len(want))
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	for name, c := range map[string]struct {
		part  snapshotstore.Part
		after string
	}{
		"no part":       {snapshotstore.Part{}, ""},
		"behind all":    {snapshotstore.Part{Which: 3, Of: 2}, ""},
		"too many":      {snapshotstore.Part{Which: 1, Of: controller.MaxStoreParts + 1}, ""},
		"no cursor":     {snapshotstore.Whole, "x"},
		"another thing": {snapshotstore.Whole, "eyJjIjoieCJ9"},
	} {
		if _, err := w.CheckStoreData(t.Context(), c.part, c.after); core.CodeOf(err) != core.CodeInvalidField && core.CategoryOf(err) != core.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
}
