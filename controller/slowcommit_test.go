package controller_test

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

// hangingGets is a store that gives nothing for as long as it hangs.
type hangingGets struct {
	blob.Blobs
	hangs   atomic.Bool
	waiting atomic.Int64
	back    chan struct{} // closed: it goes on
}

// Get implements blob.Blobs.
func (h *hangingGets) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	if h.hangs.Load() {
		h.waiting.Add(1)
		defer h.waiting.Add(-1)
		select {
		case <-h.back:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	return h.Blobs.Get(ctx, key, off, n)
}

// TestSlowStoreAtCommit: runners commit manifests while the store gives the controller nothing. The commits wait, hold no
// connection of the database, read at most four manifests at once, and end with their requests. Everything else goes on. When
// the store is back the same commits succeed, and each checkpoint is sealed once.
func TestSlowStoreAtCommit(t *testing.T) {
	t.Parallel()
	files, _ := withStore(t)
	slow := &hangingGets{Blobs: files, back: make(chan struct{})}
	w := newWorld(t, func(c *controller.Config, r *runnertest.Config) { c.Store, r.Store = slow, files })
	ws := w.create("main")
	w.seal(files, ws.Parent)
	const many = 12
	uploads := make([]*runnertest.Upload, many)
	ids := make([]core.CheckpointID, many)
	for i := range many {
		ids[i] = w.checkpoint(ws.ID).ID
		uploads[i] = w.begin(files, ids[i])
		if err := uploads[i].Write(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
	}
	slow.hangs.Store(true)
	impatient, cancel := context.WithCancelCause(t.Context())
	given := errors.New("the runner gave up")
	errs := make(chan error, 2*many)
	for _, u := range uploads {
		go func() { errs <- u.End(impatient) }()
	}
	eventually(t, "commits wait for the store", func() bool { return slow.waiting.Load() == 4 }) // maxManifests
	began := time.Now()
	w.beat()
	if _, err := w.Exec(t.Context(), w.project, ws.ID, controller.ExecRequest{Command: []string{"true"}}); err != nil {
		t.Error(err)
	}
	w.checkpoint(ws.ID)
	w.fork(ids[0], 1)
	eventually(t, "no transaction is open", func() bool { // the loops have some for a moment
		return w.number(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'`) == 0
	})
	t.Logf("a heartbeat, an exec, a checkpoint and a fork took %s beside %d commits that hang", time.Since(began), many)
	if n := slow.waiting.Load(); n > 4 {
		t.Errorf("%d manifests are read at once", n)
	}
	cancel(given)
	for range many {
		if err := <-errs; err == nil || !errors.Is(err, given) && !strings.Contains(err.Error(), given.Error()) {
			t.Errorf("a commit whose runner gave up: %v", err)
		}
	}
	for _, id := range ids {
		if cp := w.get(id); cp.State != core.CheckpointCaptured {
			t.Errorf("%s is %s", id, cp.State)
		}
	}
	for _, u := range uploads {
		go func() { errs <- u.End(t.Context()) }()
	}
	eventually(t, "commits wait again", func() bool { return slow.waiting.Load() == 4 })
	slow.hangs.Store(false)
	close(slow.back)
	for range many {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	for _, id := range ids {
		cp := w.get(id)
		if cp.State != core.CheckpointSealed || runnertest.Restorable(t.Context(), files, *cp.Stored) != nil {
			t.Errorf("%s is %s", id, cp.State)
		}
	}
}
