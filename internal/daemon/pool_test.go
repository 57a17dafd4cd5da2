package daemon_test

import (
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/daemon"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestPool grows a tree on one runner, seals it, and goes on with it on another one when the first has died: with nothing but PostgreSQL
// and the store.
func TestPool(t *testing.T) {
	t.Parallel()
	store := daemon.StoreConfig{URL: "dir:" + t.TempDir()}
	c := newClusterOf(t, func(cfg *daemon.ControllerConfig) { cfg.Store, cfg.Tune.RunnerLease = store, 3*time.Second })
	ctx := t.Context()
	inStore := func(rc *daemon.RunnerConfig) { rc.Store = store }
	first := c.join(inStore)
	ws := create(t, c.client)
	note := func(text string) {
		t.Helper()
		if _, err := c.client.WriteFile(ctx, ws.ID, "/note", strings.NewReader(text), coppice.WriteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	note("one")
	cp, err := c.client.CreateCheckpoint(ctx, ws.ID, coppice.CreateCheckpointRequest{})
	if err != nil {
		t.Fatal(err)
	}
	note("two")
	later, err := c.client.CreateCheckpoint(ctx, ws.ID, coppice.CreateCheckpointRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range []coppice.CheckpointID{cp.ID, later.ID} {
		sealed, err := c.client.WaitSealed(ctx, id)
		if err != nil || sealed.State != coppice.CheckpointSealed {
			t.Fatalf("%+v, %v", sealed, err)
		}
	}
	c.join(inStore)
	first.kill()
	for id, want := range map[coppice.CheckpointID]string{cp.ID: "one", later.ID: "two"} {
		var forked coppice.ForkResult
		until(t, "it is forked on the runner that lives", func() (bool, error) {
			forked, err = c.client.ForkCheckpoint(ctx, id, coppice.ForkCheckpointRequest{Count: new(2)})
			return err == nil, err
		})
		for _, child := range forked.Children {
			got, err := c.client.ReadFile(ctx, child.Workspace.ID, "/note", 100)
			if err != nil || string(got) != want {
				t.Errorf("a child of %s has %q instead of %q, %v", id, got, want, err)
			}
		}
	}
}
