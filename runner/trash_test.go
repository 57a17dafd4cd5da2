package runner

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/bootclock"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/trash"
)

// trashRig is a runner with a checkpoint on a base that nothing else needs.
func trashRig(t *testing.T) (*fakeRig, core.CheckpointID) {
	t.Helper()
	r := newFakeRig(t, func(c *Config) { c.Store.Floor, c.Rebase.Off = 1, true })
	template := r.boot()
	s := r.fork(template)
	c, err := r.Capture(t.Context(), s, runnerapi.Capture{CheckpointID: core.NewID[core.CheckpointID]()})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Destroy(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	for _, id := range []core.CheckpointID{c.ID, template} { // the base too has nobody but the trash
		if err := r.Discard(id); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(r.Checkpoints()); n != 0 {
		t.Fatalf("%d checkpoints are still listed", n)
	}
	return r, c.ID
}

func (r *fakeRig) inTrash() map[core.CheckpointID]bool {
	r.t.Helper()
	list, err := trash.List(r.checkpoints.TrashDir())
	if err != nil {
		r.t.Fatal(err)
	}
	out := map[core.CheckpointID]bool{}
	for _, e := range list {
		if e.Bytes == 0 || e.Since.IsZero() {
			r.t.Errorf("%+v", e)
		}
		out[e.ID] = e.Kept
	}
	return out
}

// TestTrashIsNoCheckpoint: a runner of an older version takes all that is in the directory of the checkpoints for one, and does not start
// when it has no record.
func TestTrashIsNoCheckpoint(t *testing.T) {
	t.Parallel()
	r, id := trashRig(t)
	s := r.fork(id)
	r.capture(s)
	entries, err := os.ReadDir(r.checkpoints.Dir())
	if err != nil || len(entries) != 2 {
		t.Fatalf("%v, %v", entries, err)
	}
	for _, e := range entries {
		rec := new(checkpoints.Record)
		if err := atomicfile.ReadJSON(r.checkpoints.Path(core.CheckpointID(e.Name()), checkpoints.RecordFile), rec); err != nil || string(rec.ID) != e.Name() {
			t.Errorf("%s among the checkpoints is none: %v", e.Name(), err)
		}
	}
}

// expireTrash ends the grace of everything in the trash.
func (r *fakeRig) expireTrash() {
	r.checkpoints.Inspect(func(st checkpoints.State) {
		for id, c := range st.Trash {
			st.Trash[id] = checkpoints.Trashed{Record: c.Record}
		}
	})
}

// putInTrash makes the runner believe that a checkpoint is in the trash.
func (r *fakeRig) putInTrash(id core.CheckpointID) {
	r.checkpoints.Inspect(func(st checkpoints.State) {
		rec := &checkpoints.Record{Checkpoint: runnerapi.Checkpoint{ID: id}}
		st.Trash[id] = checkpoints.Trashed{Record: rec, Until: bootclock.Now() + time.Hour}
	})
}

// trashPart is where a checkpoint of the trash is while it is removed.
func (r *fakeRig) trashPart(id core.CheckpointID) string {
	return filepath.Join(r.checkpoints.TrashDir(), checkpoints.PartPrefix+string(id))
}

// TestDiscardDuringRebase: a checkpoint that is discarded while its rebase is written is in the trash whole, or not at all.
func TestDiscardDuringRebase(t *testing.T) { //nolint:paralleltest // the failpoint is one of all runners
	r := newFakeRig(t, func(c *Config) { c.Store.Floor, c.Rebase.Off = 1, true })
	id := r.capture(r.fork(r.boot()))
	rebased, discarded := make(chan error, 1), make(chan error, 1)
	armed := hang(t, "rebase.written", func() { rebased <- r.Rebase(id) })
	go func() { discarded <- r.Discard(id) }()
	select { // it must wait; what is in the trash below is not whole if it does not
	case err := <-discarded:
		t.Errorf("nothing keeps the discarding from going on before the rebase: %v", err)
		discarded <- err
	case <-time.After(200 * time.Millisecond):
	}
	armed.Release()
	if err := errors.Join(<-rebased, <-discarded); err != nil {
		t.Error(err)
	}
	if n := len(r.inTrash()); n != 1 {
		t.Errorf("%d checkpoints are in the trash", n)
	}
	if err := r.Discard(id); err != nil { // again, by another answer
		t.Error(err)
	}
	r.fork(id)
}

// TestDiscardNothing: what is in the trash stays there when nothing comes in its place, and it stays kept when something does.
func TestDiscardNothing(t *testing.T) {
	t.Parallel()
	r, id := trashRig(t)
	if err := trash.Keep(r.checkpoints.TrashDir(), id); err != nil {
		t.Fatal(err)
	}
	r.checkpoints.Inspect(func(st checkpoints.State) { st.Records[id] = st.Trash[id].Record })
	if err := r.Discard(id); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a checkpoint without files was discarded: %v", err)
	}
	if !r.inTrash()[id] {
		t.Fatal("the trash has lost it")
	}
	if err := os.CopyFS(r.checkpoints.Path(id, ""), os.DirFS(trash.Path(r.checkpoints.TrashDir(), id))); err != nil {
		t.Fatal(err)
	}
	if err := r.Discard(id); err != nil || !r.inTrash()[id] {
		t.Errorf("in the trash: %v, %v", r.inTrash(), err)
	}
}

// TestTrashThatCannotBeRead: a runner that starts removes from the trash what has no record, but neither what is kept nor what it cannot
// read now.
func TestTrashThatCannotBeRead(t *testing.T) {
	t.Parallel()
	r, id := trashRig(t)
	r.stop()
	record := filepath.Join(trash.Path(r.checkpoints.TrashDir(), id), checkpoints.RecordFile)
	good, err := os.ReadFile(record)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Remove(record), os.Mkdir(record, 0o700)); err != nil { // so that root cannot read it either
		t.Fatal(err)
	}
	if _, err := New(t.Context(), r.cfg); err == nil || !strings.Contains(err.Error(), "check the disk") {
		t.Errorf("a runner that cannot read its trash starts: %v", err)
	}
	if _, there := r.inTrash()[id]; !there {
		t.Fatal("what could not be read was removed")
	}
	if err := errors.Join(os.Remove(record), os.WriteFile(record, good, 0o600)); err != nil {
		t.Fatal(err)
	}
	for bad, content := range map[string]string{"no JSON": "{", "another one": string(good), "kept": "{"} {
		dir := trash.Path(r.checkpoints.TrashDir(), core.NewID[core.CheckpointID]())
		err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, checkpoints.RecordFile), []byte(content), 0o600))
		if bad == "kept" {
			err = errors.Join(err, trash.Keep(r.checkpoints.TrashDir(), core.CheckpointID(filepath.Base(dir))))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	r.start()
	if list := r.inTrash(); len(list) != 3 { // the two of before, and what is kept
		t.Errorf("in the trash: %v", list)
	}
	r.fork(id)
}

// TestKeepDuringRemoval: what an operator keeps while it is being removed stays, also when the runner dies before it has looked.
func TestKeepDuringRemoval(t *testing.T) { //nolint:paralleltest // the failpoint is one of all runners
	r, id := trashRig(t)
	r.expireTrash()
	emptied := make(chan error, 1)
	armed := hang(t, "trash.judged", func() { emptied <- r.checkpoints.EmptyTrash(t.Context(), r.room.Free) }) // or the runner does it itself
	if err := trash.Keep(r.checkpoints.TrashDir(), id); err != nil {
		t.Fatal(err)
	}
	armed.Release()
	if err := <-emptied; err != nil {
		t.Error(err)
	}
	r.stop() // so that nothing is under way
	if !r.inTrash()[id] {
		t.Fatalf("it was kept, and is gone: %v", r.inTrash())
	}
	path := trash.Path(r.checkpoints.TrashDir(), id)
	if err := os.Rename(path, filepath.Join(filepath.Dir(path), checkpoints.PartPrefix+string(id))); err != nil {
		t.Fatal(err)
	}
	r.start()
	if !r.inTrash()[id] {
		t.Fatalf("it was kept, and is gone after a restart: %v", r.inTrash())
	}
	r.fork(id)
}

// TestTrashIsLeftAlone: what the runner does by itself takes nothing back, and a failed taking back loses no mark.
func TestTrashIsLeftAlone(t *testing.T) {
	t.Parallel()
	r, id := trashRig(t)
	if err := trash.Keep(r.checkpoints.TrashDir(), id); err != nil {
		t.Fatal(err)
	}
	if err := r.Rebase(id); core.CategoryOf(err) != core.NotFound {
		t.Errorf("a rebase of what is in the trash: %v", err)
	}
	if err := os.MkdirAll(r.checkpoints.Path(id, "x"), 0o700); err != nil { // in the way
		t.Fatal(err)
	}
	if _, err := r.Checkpoint(id); err == nil || !r.inTrash()[id] {
		t.Errorf("it was not taken back (%v), and is not kept any more: %v", err, r.inTrash())
	}
	if err := os.RemoveAll(r.checkpoints.Path(id, "")); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Checkpoint(id); err != nil || trash.Marked(r.checkpoints.Path(id, "")) {
		t.Errorf("taken back: %v, and still marked: %v", err, trash.Marked(r.checkpoints.Path(id, "")))
	}
}

// TestTrashGoesOn: one that cannot be removed does not keep the others.
func TestTrashGoesOn(t *testing.T) {
	t.Parallel()
	r, _ := trashRig(t)
	first := r.checkpoints.ListTrash()[0].Record.ID
	stuck(t, r.trashPart(first)) // it cannot be moved
	r.expireTrash()
	if err := r.checkpoints.EmptyTrash(t.Context(), r.room.Free); err == nil {
		t.Error("nothing is wrong")
	}
	eventually.True(t, "the other is gone", func() bool { return len(r.checkpoints.ListTrash()) == 1 && len(r.inTrash()) == 1 })
}

// stuck makes a directory that cannot be removed, until the test ends.
func stuck(t *testing.T, dir string) {
	t.Helper()
	require.Root(t)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}

// TestTrashThatWasMovedAway: a removal from the trash may fail when it has moved the files. The next one, and a request that names the
// checkpoint, find them. What is in neither place leaves the list.
func TestTrashThatWasMovedAway(t *testing.T) {
	t.Parallel()
	r, id := trashRig(t)
	path, part := trash.Path(r.checkpoints.TrashDir(), id), r.trashPart(id)
	away := func() {
		t.Helper()
		if err := os.Rename(path, part); err != nil {
			t.Fatal(err)
		}
	}
	if err := trash.Keep(r.checkpoints.TrashDir(), id); err != nil {
		t.Fatal(err)
	}
	away()
	if gone, err := r.checkpoints.Drop(t.Context(), id); gone || err != nil || !r.inTrash()[id] {
		t.Fatalf("it was kept: gone %v, %v; in the trash: %v", gone, err, r.inTrash())
	}
	away()
	r.fork(id)
	if err := r.Discard(id); err != nil {
		t.Fatal(err)
	}
	away()
	if gone, err := r.checkpoints.Drop(t.Context(), id); !gone || err != nil || len(r.checkpoints.ListTrash()) != 1 {
		t.Errorf("gone %v, %v; in the trash: %v", gone, err, r.checkpoints.ListTrash())
	}
	if _, err := os.Lstat(part); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it is still there: %v", err)
	}
	for _, ask := range []func(id core.CheckpointID) error{
		func(id core.CheckpointID) error {
			gone, err := r.checkpoints.Drop(t.Context(), id)
			if !gone {
				t.Error("it is not gone")
			}
			return err
		},
		func(id core.CheckpointID) error {
			if _, err := r.Checkpoint(id); core.CategoryOf(err) != core.NotFound {
				return err
			}
			return nil
		},
	} {
		absent := core.NewID[core.CheckpointID]()
		r.putInTrash(absent)
		if err := ask(absent); err != nil || len(r.checkpoints.ListTrash()) != 1 {
			t.Errorf("without files: %v; in the trash: %v", err, r.checkpoints.ListTrash())
		}
	}
}

// TestTrash: what the database does not know can be used again, also by the next runner of the host.
func TestTrash(t *testing.T) {
	t.Parallel()
	r, id := trashRig(t)
	if err := r.roots.Collect(); err != nil {
		t.Fatal(err)
	}
	r.stop()
	r.start()
	if n := len(r.inTrash()); n != 2 || len(r.Checkpoints()) != 0 {
		t.Errorf("after a restart %d are in the trash, and %d are listed", n, len(r.Checkpoints()))
	}
	s := r.fork(id)
	if list := r.Checkpoints(); len(list) != 1 || list[0].ID != id || len(r.inTrash()) != 1 {
		t.Errorf("taken back: %v, in the trash: %v", list, r.inTrash())
	}
	if _, err := r.Capture(t.Context(), s, runnerapi.Capture{CheckpointID: core.NewID[core.CheckpointID]()}); err != nil {
		t.Error(err)
	}
	// One that was deleted is gone, from the trash too.
	if err := r.Discard(id); err != nil {
		t.Fatal(err)
	}
	if err := r.DeleteCheckpoint(id); err != nil {
		t.Fatal(err)
	}
	if r.inTrash()[id] || len(r.inTrash()) != 1 {
		t.Errorf("deleted, the trash has %v", r.inTrash())
	}
	if _, err := r.Checkpoint(id); core.CategoryOf(err) != core.NotFound {
		t.Errorf("deleted: %v", err)
	}
}

// TestTrashIsEmptied: after the grace a checkpoint goes, unless an operator wants it kept, and then it can still be taken back.
func TestTrashIsEmptied(t *testing.T) {
	t.Parallel()
	r, id := trashRig(t)
	if err := trash.Keep(r.checkpoints.TrashDir(), id); err != nil {
		t.Fatal(err)
	}
	if err := trash.Keep(r.checkpoints.TrashDir(), core.NewID[core.CheckpointID]()); core.CodeOf(err) != core.CodeCheckpointNotFound {
		t.Errorf("an absent one is kept: %v", err)
	}
	r.expireTrash()
	eventually.True(t, "what is not kept goes", func() bool { return len(r.inTrash()) == 1 })
	if err := r.checkpoints.EmptyTrash(t.Context(), r.room.Free); err != nil || !r.inTrash()[id] {
		t.Errorf("the trash has %v, %v", r.inTrash(), err)
	}
	r.fork(id)
}

// TestTrashOnAFullDisk: the trash goes when the disk is short.
func TestTrashOnAFullDisk(t *testing.T) {
	t.Parallel()
	r, id := trashRig(t)
	if err := trash.Keep(r.checkpoints.TrashDir(), id); err != nil {
		t.Fatal(err)
	}
	r.stop()
	r.cfg.Store.Floor = 1 << 60
	r.start()
	eventually.True(t, "the trash is emptied", func() bool { return len(r.inTrash()) == 1 && r.inTrash()[id] })
	if err := trash.Unkeep(r.checkpoints.TrashDir(), id); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "nothing is left", func() bool { return len(r.inTrash()) == 0 })
	eventually.True(t, "no base is left", func() bool {
		left, err := r.bases.List()
		return err == nil && len(left) == 0
	})
}
