package runner

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/lazy"
	"github.com/coppice-dev/coppice/runner/pager"
	"github.com/coppice-dev/coppice/runner/trash"
)

// smallDisk mounts a file system of a size.
func smallDisk(t *testing.T, size string) string {
	t.Helper()
	require.Root(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// TestFetchesOnASmallDisk has many forks at once bring checkpoints that do not all fit. Those that do not are told so and leave nothing, and
// the floor of free space is never touched.
func TestFetchesOnASmallDisk(t *testing.T) {
	t.Parallel()
	const floor, root, many = 24 << 20, 12 << 20, 10
	p := newSealPool(t)
	a := p.runner(nil)
	template := a.boot()
	c := a.capture(a.fork(template))
	p.sealed(t, template, c)
	random := rand.NewChaCha8([32]byte{7})
	var stored []runnerapi.Stored
	for range many { // each brings a root file system of its own
		b := make([]byte, root)
		if _, err := random.Read(b); err != nil {
			t.Fatal(err)
		}
		stored = append(stored, p.forge(a, c, b))
	}
	disk := smallDisk(t, "96m")
	b := newFakeRig(t, func(cfg *Config) {
		empty, err := images.Open(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		cfg.Store.Blobs, cfg.Images, cfg.DataDir, cfg.Store.Floor = p.blobs, empty, filepath.Join(disk, "data"), floor
	})
	free := func() int64 {
		var fs unix.Statfs_t
		if err := unix.Statfs(disk, &fs); err != nil {
			t.Error(err)
		}
		return int64(fs.Bavail) * fs.Bsize
	}
	done, watched := make(chan struct{}), make(chan int64)
	go func() {
		least := free()
		for {
			select {
			case <-done:
				watched <- least
				return
			default:
				least = min(least, free())
			}
		}
	}()
	var wg sync.WaitGroup
	var mu sync.Mutex
	forked, refused := map[core.CheckpointID]bool{}, 0
	for _, at := range stored {
		child := b.child()
		wg.Go(func() {
			out, err := b.Fork(t.Context(), runnerapi.Fork{CheckpointID: at.CheckpointID, Children: []runnerapi.Child{child}, Sources: []runnerapi.Stored{at}})
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil && out.Children[0].Problem == nil:
				forked[at.CheckpointID] = true
			case core.CodeOf(err) == core.CodeDiskFull && strings.Contains(err.Error(), "--copies-size"):
				refused++
			default:
				t.Errorf("%+v, %v", out, err)
			}
		})
	}
	wg.Wait()
	close(done)
	if least := <-watched; least < floor {
		t.Errorf("%d MiB were free at one moment, and %d must be", least>>20, int64(floor)>>20)
	}
	if len(forked) == 0 || refused == 0 {
		t.Errorf("%d forks succeeded and %d were refused: both should have happened", len(forked), refused)
	}
	entries, err := os.ReadDir(filepath.Join(b.cfg.DataDir, "checkpoints"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !forked[core.CheckpointID(e.Name())] {
			t.Errorf("%s is left of a fetch that was refused", e.Name())
		}
	}
	files, err := os.ReadDir(b.roots.Dir())
	if err != nil || len(files) != len(forked) {
		t.Errorf("%d root file systems of %d checkpoints, %v", len(files), len(forked), err)
	}
	if before, err := b.room.Free(); err != nil || before != max(free()-floor, 0) {
		t.Errorf("%d bytes are still reserved: %v", free()-floor-before, err)
	}
	// What nothing uses makes room for the next one.
	for _, s := range b.Sandboxes() {
		if err := b.Destroy(t.Context(), s.ID); err != nil {
			t.Fatal(err)
		}
	}
	for _, at := range stored {
		out, err := b.Fork(t.Context(), runnerapi.Fork{CheckpointID: at.CheckpointID, Children: []runnerapi.Child{b.child()}, Sources: []runnerapi.Stored{at}})
		if err != nil || out.Children[0].Problem != nil {
			t.Fatalf("after the others have ended: %+v, %v", out, err)
		}
		if err := b.Destroy(t.Context(), out.Children[0].SandboxID); err != nil {
			t.Fatal(err)
		}
	}
	// For what can never fit, none of it goes.
	before := len(b.Checkpoints())
	if _, err := b.fetches.Reserve(t.Context(), "ckpt_huge", 1<<30); core.CodeOf(err) != core.CodeDiskFull {
		t.Errorf("room for a GiB: %v", err)
	}
	if n := len(b.Checkpoints()); n != before || n == 0 {
		t.Errorf("%d checkpoints, and then %d", before, n)
	}
	if n := b.roots.StoredBytes(); n == 0 || n > 72<<20 {
		t.Errorf("root file systems take %d bytes", n)
	}
}

// TestUnusedCopiesAreRoom: what a runner says of its free disk counts the copies that it would give up for a fork. A disk that is
// full of them does not keep forks away.
func TestUnusedCopiesAreRoom(t *testing.T) {
	t.Parallel()
	const root = 24 << 20
	p := newSealPool(t)
	a := p.runner(nil)
	template := a.boot()
	c := a.capture(a.fork(template))
	p.sealed(t, template, c)
	random := rand.NewChaCha8([32]byte{8})
	b := make([]byte, root)
	if _, err := random.Read(b); err != nil {
		t.Fatal(err)
	}
	at := p.forge(a, c, b)
	disk := smallDisk(t, "96m")
	other := newFakeRig(t, func(cfg *Config) {
		empty, err := images.Open(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		cfg.Store.Blobs, cfg.Images, cfg.DataDir, cfg.Store.Floor = p.blobs, empty, filepath.Join(disk, "data"), 8<<20
	})
	said := func() int64 {
		t.Helper()
		info, err := other.Info()
		if err != nil {
			t.Fatal(err)
		}
		return info.DiskFreeMB
	}
	child := other.child()
	out, err := other.Fork(t.Context(), runnerapi.Fork{CheckpointID: at.CheckpointID, Children: []runnerapi.Child{child}, Sources: []runnerapi.Stored{at}})
	if err != nil || out.Children[0].Problem != nil {
		t.Fatalf("%+v, %v", out, err)
	}
	used := said()
	if err := other.Destroy(t.Context(), child.SandboxID); err != nil {
		t.Fatal(err)
	}
	if unused := said(); unused-used < 25 {
		t.Errorf("%d MB may be written while a sandbox uses the copy, and %d MB when none does", used, unused)
	}
	// The copy gives its room also when the trash cannot.
	id := core.NewID[core.CheckpointID]()
	if err := os.Mkdir(trash.Path(other.checkpoints.TrashDir(), id), 0o700); err != nil {
		t.Fatal(err)
	}
	stuck(t, other.trashPart(id))
	other.putInTrash(id)
	free, err := other.room.Free()
	if err != nil {
		t.Fatal(err)
	}
	v, err := other.fetches.Reserve(t.Context(), "ckpt_next", free+(16<<20))
	if err != nil {
		t.Fatal(err)
	}
	v.Release()
}

// TestLazyPartsInUseAreNoRoom: images that come later and that machines use are no room for forks: not in what a runner says of its free
// disk, and not when a fetch looks for room. A fetch that can never fit takes no unused copy away.
func TestLazyPartsInUseAreNoRoom(t *testing.T) {
	t.Parallel()
	const part, slack = 30 << 20, 2 << 20
	p := newSealPool(t)
	a := p.runner(nil)
	template := a.boot()
	c := a.capture(a.fork(template))
	p.sealed(t, template, c)
	disk := smallDisk(t, "112m")
	b, _ := newPagerRig(t, func(cfg *Config) {
		empty, err := images.Open(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		cfg.Store.Blobs, cfg.Images, cfg.DataDir, cfg.Store.Floor = p.blobs, empty, filepath.Join(disk, "data"), 8<<20
	})
	random := rand.NewChaCha8([32]byte{10})
	forkFrom := func() (*checkpoints.Record, core.SandboxID) {
		t.Helper()
		root := make([]byte, 12<<20)
		if _, err := random.Read(root); err != nil {
			t.Fatal(err)
		}
		at := p.forge(a, c, root)
		child := b.child()
		out, err := b.Fork(t.Context(), runnerapi.Fork{CheckpointID: at.CheckpointID, Children: []runnerapi.Child{child}, Sources: []runnerapi.Stored{at}})
		if err != nil || out.Children[0].Problem != nil {
			t.Fatalf("%+v, %v", out, err)
		}
		return b.recordOf(t, at.CheckpointID), child.SandboxID
	}
	used, _ := forkFrom()
	deleted, _ := forkFrom() // its machine goes on
	if err := b.DeleteCheckpoint(deleted.ID); err != nil {
		t.Fatal(err)
	}
	unused, s := forkFrom()
	if err := b.Destroy(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	most := func() int64 {
		t.Helper()
		n, err := b.fetches.MostFreed()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	room := most()
	if room < 12<<20 {
		t.Fatalf("the unused copy is %d bytes of room", room)
	}
	// arrives has an image come later, and returns by how much what can be freed grows.
	arrives := func(id string, from core.CheckpointID, used bool) (more int64) {
		t.Helper()
		before := most()
		im := &lazy.Image{Image: pager.Image{ID: id, Source: pager.Source{CheckpointID: from}}, Size: part}
		im.Reserve(b.room.Hold(part), part)
		b.arrives(im)
		more = most() - before
		if used {
			info, err := b.Info()
			if err != nil {
				t.Fatal(err)
			}
			free, err := b.room.Free()
			if err != nil || info.DiskFreeMB > (free+room+slack)/1_000_000 {
				t.Errorf("%d MB may be written, it says; %d are free, and %d can be freed: %v", info.DiskFreeMB, free/1_000_000, room/1_000_000, err)
			}
			if _, err := b.fetches.Reserve(t.Context(), "ckpt_huge", free+room+2*slack); core.CodeOf(err) != core.CodeDiskFull {
				t.Errorf("room for what can never fit: %v", err)
			}
			if !b.has(unused.ID) {
				t.Fatal("the unused copy went for what can never fit")
			}
		}
		if err := b.lazy.Drop(id); err != nil {
			t.Fatal(err)
		}
		return more
	}
	for what, id := range map[string]string{
		"the memory of a checkpoint": string(used.Base), "its root file system": rootImageID(used.RootKey()),
		"the memory of a machine whose checkpoint is gone": string(deleted.Base), "the root file system of that": rootImageID(deleted.RootKey()),
	} {
		if more := arrives(id, used.ID, true); more >= slack {
			t.Errorf("%s is used and counts as %d bytes that can be freed", what, more)
		}
	}
	end := b.fetches.Reading([]runnerapi.Stored{{CheckpointID: "ckpt_fetched"}})
	if more := arrives("base_fetched", "ckpt_fetched", true); more >= slack {
		t.Errorf("what a fetch has begun counts as %d bytes that can be freed", more)
	}
	end()
	if more := arrives(string(unused.Base), unused.ID, false); more < part {
		t.Errorf("an image that nothing uses counts as %d bytes that can be freed, not %d", more, part)
	}
}
