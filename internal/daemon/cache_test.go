package daemon_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/internal/daemon"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestRotInTheCache gives a runner a cache in which a bit of every object has changed: what it grows from there is right, and it says
// what it found.
func TestRotInTheCache(t *testing.T) {
	t.Parallel()
	store := daemon.StoreConfig{URL: "dir:" + t.TempDir(), CacheSize: 1 << 30}
	c := newClusterOf(t, func(cfg *daemon.ControllerConfig) { cfg.Store = store })
	ctx := t.Context()
	first := c.join(func(rc *daemon.RunnerConfig) { rc.Store = store })
	ws := create(t, c.client)
	if _, err := c.client.WriteFile(ctx, ws.ID, "/note", strings.NewReader("kept"), coppice.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	cp := sealedCheckpoint(t, c.client, ws.ID)
	first.kill()
	second := c.join(func(rc *daemon.RunnerConfig) {
		rc.Store, rc.Metrics = store, "127.0.0.1:0"
		rot(t, filepath.Join(first.cfg.Runner.DataDir, "cache"), filepath.Join(rc.DataDir, "cache"))
	})
	var forked coppice.ForkResult
	until(t, "it is forked on the runner that lives", func() (_ bool, err error) {
		forked, err = c.client.ForkCheckpoint(ctx, cp.ID, coppice.ForkCheckpointRequest{})
		return err == nil, err
	})
	got, err := c.client.ReadFile(ctx, forked.Children[0].Workspace.ID, "/note", 100)
	if err != nil || string(got) != "kept" {
		t.Errorf("the child has %q, %v", got, err)
	}
	if text := scrape(t, second.ready.Metrics); strings.Contains(text, "coppice_cache_rot_total 0\n") || !strings.Contains(text, "coppice_cache_rot_total ") {
		t.Errorf("%s", similar(text, "coppice_cache_"))
	}
	if log := second.text(t); !strings.Contains(log, "the cache had other bytes than the store") {
		t.Errorf("nothing is said:\n%s", log)
	}
}

// rot copies the objects of a cache, each with a bit changed.
func rot(t *testing.T, from, to string) {
	t.Helper()
	if err := os.Mkdir(to, 0o700); err != nil {
		t.Fatal(err)
	}
	paths, err := filepath.Glob(filepath.Join(from, "[0-9a-f]*"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("%q, %v", paths, err)
	}
	for _, path := range paths {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		b[len(b)/2] ^= 1
		if err := os.WriteFile(filepath.Join(to, filepath.Base(path)), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// TestCopiesAreGivenUp fetches a checkpoint to a runner that has no room for copies: when nothing uses it any more it goes, the controller
// knows, and it is fetched again for the next fork.
func TestCopiesAreGivenUp(t *testing.T) {
	t.Parallel()
	store := daemon.StoreConfig{URL: "dir:" + t.TempDir(), CopiesSize: 1}
	c := newClusterOf(t, func(cfg *daemon.ControllerConfig) { cfg.Store = store })
	ctx := t.Context()
	first := c.join(func(rc *daemon.RunnerConfig) { rc.Store = store })
	ws := create(t, c.client)
	cp := sealedCheckpoint(t, c.client, ws.ID)
	second := c.join(func(rc *daemon.RunnerConfig) { rc.Store = store })
	first.kill()
	db, err := pgx.Connect(ctx, c.cfg.Database)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close(context.WithoutCancel(ctx))
	copies := func() (n int, err error) {
		err = db.QueryRow(ctx, "SELECT count(*) FROM checkpoint_copies WHERE runner_id = $1", second.ready.RunnerID).Scan(&n)
		return n, err
	}
	for range 2 {
		var forked coppice.ForkResult
		until(t, "it is forked on the runner that lives", func() (_ bool, err error) {
			forked, err = c.client.ForkCheckpoint(ctx, cp.ID, coppice.ForkCheckpointRequest{})
			return err == nil, err
		})
		until(t, "the copy is known", func() (bool, error) { n, err := copies(); return n > 0, err })
		if _, err := c.client.TerminateWorkspace(ctx, forked.Children[0].Workspace.ID); err != nil {
			t.Fatal(err)
		}
		until(t, "the copy is gone", func() (bool, error) { n, err := copies(); return n == 0, err })
	}
}

// TestDiskFloor: a runner whose disk must keep more free space than it has fetches nothing and says so. One with the usual floor fetches.
func TestDiskFloor(t *testing.T) {
	t.Parallel()
	store := daemon.StoreConfig{URL: "dir:" + t.TempDir()}
	c := newClusterOf(t, func(cfg *daemon.ControllerConfig) { cfg.Store = store })
	ctx := t.Context()
	first := c.join(func(rc *daemon.RunnerConfig) { rc.Store = store })
	ws := create(t, c.client)
	cp := sealedCheckpoint(t, c.client, ws.ID)
	full := store
	full.Floor = 1 << 60
	second := c.join(func(rc *daemon.RunnerConfig) { rc.Store = full })
	first.kill()
	until(t, "the fork is refused", func() (bool, error) {
		_, err := c.client.ForkCheckpoint(ctx, cp.ID, coppice.ForkCheckpointRequest{})
		if err == nil {
			t.Fatal("a fork succeeded on a disk below its floor")
		}
		return strings.Contains(err.Error(), "DISK_FULL"), nil
	})
	second.kill()
	c.join(func(rc *daemon.RunnerConfig) { rc.Store = store })
	until(t, "the fork succeeds on a runner with room", func() (bool, error) {
		_, err := c.client.ForkCheckpoint(ctx, cp.ID, coppice.ForkCheckpointRequest{})
		return err == nil, nil
	})
}
