package lazy

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sidecar"
	"github.com/coppice-dev/coppice/runner/pager"
)

func (x *rig) pagerNow() string {
	x.images.mu.Lock()
	defer x.images.mu.Unlock()
	return x.images.instance
}

// TestLazyManyStalled: a store that is out of order for more images than a message takes ends no machine: the pager is the same one before, meanwhile
// and afterwards, and the runner hears of every image.
func TestLazyManyStalled(t *testing.T) {
	const many, message = 250, 96 << 10
	x := newRig(t)
	x.end()
	x.settings.Pulse = sidecar.Pulse{Limit: time.Hour} // a busy host may need long for so many images, and a pager that hangs is another test's
	x.begin()
	x.say(x.settings.Silence, true)
	ids := []core.BaseID{x.fetch()}
	was := x.pagerNow()
	for i := range many { // as those of another runner's records: they are open, so they stay
		part, err := os.Create(filepath.Join(t.TempDir(), "part"))
		if err != nil {
			t.Fatal(err)
		}
		if err := part.Truncate(int64(len(x.memory))); err != nil {
			t.Fatal(err)
		}
		id := fmt.Sprintf("zz-%s-%d", strings.Repeat("x", 240), i)
		x.images.mu.Lock()
		x.images.recorded[id] = true
		x.images.mu.Unlock()
		if _, err := x.pager().Put(t.Context(), pager.Image{ID: id, Source: x.from}, part); err != nil {
			t.Fatal(err)
		}
		_ = part.Close()
	}
	x.say(x.settings.Refusal, true)
	x.say(x.settings.Silence, false)
	x.await("all have stalled", func() bool {
		got := x.metrics()
		return got["images stalled"] == many+1
	})
	listed, _, err := x.pager().List(t.Context())
	if encoded, _ := json.Marshal(listed); err != nil || len(encoded) <= message {
		t.Errorf("the list has %d bytes, want more than a message takes: %v", len(encoded), err)
	}
	x.await("the runner has heard of its own", func() bool {
		x.images.mu.Lock()
		defer x.images.mu.Unlock()
		return x.images.images[string(ids[0])].status.Problem != nil
	})
	x.say(x.settings.Refusal, false)
	x.taken(ids[0])
	if is := x.pagerNow(); is != was || is == "" {
		t.Errorf("the pager was %s and is %q: machines that had memory from it were ended", was, is)
	}
	if got := x.metrics(); got["unheard_total"] != 0 {
		t.Errorf("metrics: %v", got)
	}
}

// TestLazyDamage: a machine that ended because it touched damaged memory ended before the runner heard of the damage. The pager is asked.
func TestLazyDamage(t *testing.T) {
	x := newRig(t)
	x.say(x.settings.Silence, true)
	id := x.fetch()
	machine := Machine{Pager: x.pagerNow(), Base: id}
	x.end() // the runner hears nothing from now on
	if said := x.images.Damage(t.Context(), machine); said != "" {
		t.Errorf("nothing is damaged yet: %s", said)
	}
	x.corrupt()
	f, err := x.pager().Open(t.Context(), string(id))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	x.say(x.settings.Silence, false)
	if _, err := f.ReadAt(make([]byte, 1), 1<<20); err == nil {
		t.Fatal("damaged memory was read")
	}
	if said := x.images.Damage(t.Context(), machine); !strings.Contains(said, "/1/pack-0") {
		t.Errorf("the pager says %q, which does not name the object", said)
	}
	machine.Pager = "of before"
	if said := x.images.Damage(t.Context(), machine); said != "" {
		t.Errorf("another pager's machine: %s", said)
	}
}

// corrupt damages all pages in the store.
func (x *rig) corrupt() {
	x.t.Helper()
	packs, err := filepath.Glob(filepath.Join(strings.TrimPrefix(x.settings.Store, "dir:"), "v1/*/*/1/pack-*"))
	if err != nil || len(packs) == 0 {
		x.t.Fatalf("%q, %v", packs, err)
	}
	for _, name := range packs {
		pack, err := os.ReadFile(name)
		if err != nil {
			x.t.Fatal(err)
		}
		for i := range pack {
			pack[i] ^= 0x10
		}
		if err := os.Chmod(name, 0o600); err != nil {
			x.t.Fatal(err)
		}
		if err := os.WriteFile(name, pack, 0o600); err != nil {
			x.t.Fatal(err)
		}
	}
}

// TestLazyDamageReported: a machine whose memory is damaged in the store is ended as soon as the pager reports that, with the reason.
func TestLazyDamageReported(t *testing.T) {
	x := newRig(t)
	x.say(x.settings.Silence, true)
	id := x.fetch()
	here := x.pagerNow()
	x.run(map[string]Machine{"user": {Pager: here, Base: id}, "on another base": {Pager: here, Base: core.NewID[core.BaseID]()}})
	x.corrupt()
	x.say(x.settings.Silence, false)
	x.wantEnded("/1/pack-0")
}

// TestLazyPagerOfOldVersion: a pager of before this version closes the connection on which its answer would be too long. It is asked again, and what
// it serves goes on until it has really ended.
func TestLazyPagerOfOldVersion(t *testing.T) {
	x := newRig(t)
	x.end()
	dir, err := os.MkdirTemp("", "old") //nolint:usetesting // the path of a socket must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	l, err := sidecar.Listen(filepath.Join(dir, "sock"))
	if err != nil {
		t.Fatal(err)
	}
	var asked atomic.Int64
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				return
			}
			wg.Go(func() { converseOld(c, &asked) })
		}
	})
	x.settings.Dir = dir
	x.begin()
	x.await("it is asked again", func() bool { return asked.Load() >= 3 })
	if is := x.pagerNow(); is != "old" || x.metrics()["unheard_total"] < 2 {
		t.Errorf("the pager is %q; %v", is, x.metrics())
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
	x.await("it has ended", func() bool { return x.pagerNow() == "" })
}

// converseOld answers who it is, and to nothing else.
func converseOld(c *net.UnixConn, asked *atomic.Int64) {
	defer c.Close()
	for {
		var r struct {
			Op string `json:"op"`
		}
		if _, err := sidecar.Receive(c, &r); err != nil {
			return
		}
		if r.Op != "hello" {
			asked.Add(1)
			return
		}
		if err := sidecar.Send(c, map[string]any{"hello": map[string]any{"pid": os.Getpid(), "instance": "old", "version": 4}}); err != nil {
			return
		}
	}
}
