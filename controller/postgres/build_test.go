package postgres_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/builds"
	"github.com/coppice-dev/coppice/controller/steps"
	"github.com/coppice-dev/coppice/core"
)

// TestBuildLogs: a log is cut at its bound, is read from any offset, and goes with its time or its number; an old lease writes nothing.
func TestBuildLogs(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	op := d.operation(controller.OpBuildImage, "first", time.Hour)
	ref := steps.Ref{ID: op.ID, Project: d.project, Epoch: op.LeaseEpoch}
	add := func(ref steps.Ref, text string) error {
		return d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error {
			return tx.AppendBuildLog(ctx, ref, []byte(text), 100)
		})
	}
	read := func(offset int64) (out builds.Log) {
		d.mine(func(ctx context.Context, tx controller.AllTx) (err error) {
			out, err = tx.BuildLog(ctx, op.ID, offset)
			return err
		})
		return out
	}
	for _, text := range []string{"one\n", "two\n", strings.Repeat("x", 20), strings.Repeat("y", 90), "z"} {
		if err := add(ref, text); err != nil {
			t.Fatal(err)
		}
	}
	all := read(0)
	if want := "one\ntwo\n" + strings.Repeat("x", 20) + "\nthe rest of the log is left out\n"; string(all.Data) != want || all.Next != int64(len(want)) {
		t.Errorf("%q, next %d", all.Data, all.Next)
	}
	if part := read(6); !bytes.HasPrefix(part.Data, []byte("o\nxxx")) {
		t.Errorf("from the middle: %q", part.Data)
	}
	if none := read(all.Next); len(none.Data) != 0 || none.Next != all.Next {
		t.Errorf("at the end: %+v", none)
	}
	ref.Epoch++
	if err := add(ref, "stale"); !errors.Is(err, controller.ErrLeaseLost) {
		t.Errorf("with another lease: %v", err)
	}
	swept := func(kept time.Duration, newest int) (n int) {
		if err := d.try(controller.System(), func(ctx context.Context, tx controller.AllTx) (err error) {
			n, err = tx.SweepBuildLogs(ctx, kept, newest, 10)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return n
	}
	if n := swept(0, 0); n != 0 {
		t.Errorf("%d parts of a build that goes on were removed", n)
	}
	d.exec(`UPDATE operations SET state = 'succeeded', result = '{}', ended_at = now(), lease_expires_at = NULL`)
	if n := swept(time.Hour, 1); n != 0 {
		t.Errorf("%d parts were removed before their time", n)
	}
	if n := swept(time.Hour, 0); n != 4 {
		t.Errorf("%d parts were removed of one log too many", n)
	}
}

// TestProjectImages: names are replaced one for one, at most so many. A checkpoint with a name cannot be deleted, whatever its pin says, and its pin
// stays as the client has set it.
func TestProjectImages(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	template := d.template()
	ws := d.ready(d.project, template)
	first := d.node(ws, template.ID).ID
	second := d.node(ws, first).ID
	put := func(name string, id core.CheckpointID) error {
		return d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error {
			_, err := tx.PutProjectImage(ctx, d.project, builds.Image{Name: name, Checkpoint: id, From: "base", Operation: core.NewID[core.OperationID]()}, 3)
			return err
		})
	}
	remove := func(id core.CheckpointID) error {
		return d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error {
			_, err := tx.DeleteCheckpoint(ctx, id, false)
			return err
		})
	}
	removeMany := func(id core.CheckpointID) (refused error) {
		d.mine(func(ctx context.Context, tx controller.AllTx) error {
			list, err := tx.DeleteCheckpoints(ctx, []core.CheckpointID{id}, false)
			if err == nil {
				refused = list[0].Refused
			}
			return err
		})
		return refused
	}
	pin := func(id core.CheckpointID, yes bool) {
		d.mine(func(ctx context.Context, tx controller.AllTx) error {
			_, err := tx.PatchCheckpoint(ctx, id, controller.CheckpointPatch{Pinned: &yes})
			return err
		})
	}
	pin(second, true)
	for i := range 3 {
		if err := put(fmt.Sprint("n", i), first); err != nil {
			t.Fatal(err)
		}
	}
	if err := put("n3", second); core.CodeOf(err) != core.CodeQuotaExceeded {
		t.Errorf("a name too many: %v", err)
	}
	if err := put("n0", core.NewID[core.CheckpointID]()); core.CodeOf(err) != core.CodeCheckpointNotFound {
		t.Errorf("a checkpoint that is gone: %v", err)
	}
	if err := put("n0", second); err != nil {
		t.Errorf("one of three: %v", err)
	}
	pin(first, false)
	if err := remove(first); core.CodeOf(err) != core.CodeCheckpointInUse || !strings.Contains(err.Error(), "n1") {
		t.Errorf("the checkpoint of an image was deleted: %v", err)
	}
	if err := removeMany(first); core.CodeOf(err) != core.CodeCheckpointInUse {
		t.Errorf("the checkpoint of an image was deleted with others: %v", err)
	}
	if held := d.walked(first)[0].Held; held != "image" {
		t.Errorf("for policies, the checkpoint of an image is held by %q", held)
	}
	for i := range 3 {
		d.mine(func(ctx context.Context, tx controller.AllTx) error {
			return tx.DeleteProjectImage(ctx, d.project, fmt.Sprint("n", i))
		})
	}
	if err := remove(first); err != nil {
		t.Errorf("without a name: %v", err)
	}
	if err := remove(second); core.CodeOf(err) != core.CodeCheckpointPinned {
		t.Errorf("a name took the pin of a client with it: %v", err)
	}
	if err := put("n0", first); core.CodeOf(err) != core.CodeCheckpointNotFound {
		t.Errorf("a name for a checkpoint that was deleted: %v", err)
	}
}
