package controller_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/blob/dir"
)

// atOnce collects garbage that is a nanosecond old, when the test says so.
func atOnce(c *controller.Config, _ *runnertest.Config) { c.StoreGrace = time.Nanosecond }

func (w *world) collect() controller.Garbage {
	w.t.Helper()
	got, err := w.CollectGarbage(w.t.Context(), false)
	if err != nil {
		w.t.Fatal(err)
	}
	return got
}

func (w *world) sound() controller.StoreReport {
	w.t.Helper()
	got, err := w.CheckStore(w.t.Context())
	if err != nil || !got.Sound() {
		w.t.Fatalf("%+v, %v", got, err)
	}
	return got
}

func put(t *testing.T, store blob.Blobs, key, text string) {
	t.Helper()
	if err := store.Put(t.Context(), key, bytes.NewReader([]byte(text)), int64(len(text)), core.DigestOf([]byte(text))); err != nil {
		t.Fatal(err)
	}
}

// withoutPeriodicJobs has a controller do no periodic work.
type withoutPeriodicJobs struct{ *postgres.Store }

// RunPeriodicJobs implements controller.Store.
func (withoutPeriodicJobs) RunPeriodicJobs(ctx context.Context, _ []controller.PeriodicJob, _ *slog.Logger) error {
	<-ctx.Done()
	return nil
}

func TestCollectGarbage(t *testing.T) {
	t.Parallel()
	files, store := withStore(t)
	var cfg controller.Config
	w := newWorld(t, store, func(c *controller.Config, _ *runnertest.Config) {
		c.StoreGrace = time.Hour
		cfg = *c
	})
	w.stop()
	w.Controller, w.stop = w.startOn(withoutPeriodicJobs{w.store}, cfg) // nobody else collects
	ws := w.create("a")
	a, b := w.checkpoint(ws.ID), w.checkpoint(ws.ID)
	w.seal(files, ws.Parent, a.ID, b.ID) // three objects each
	c := w.checkpoint(ws.ID)
	given := w.begin(files, c.ID)
	if err := given.Write(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if err := given.Fail(t.Context(), errors.New("x")); err != nil {
		t.Fatal(err)
	}
	under := w.begin(files, c.ID)
	if err := under.Write(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if got := w.sound(); got.Objects != 9 || got.Uploading != 3 || got.Debris != 3 {
		t.Errorf("%+v", got)
	}
	if err := w.DeleteCheckpoint(t.Context(), w.project, a.ID); err != nil {
		t.Fatal(err)
	}
	plan, err := w.CollectGarbage(t.Context(), true)
	if err != nil || plan.Condemned != 1 || plan.Objects != 0 || plan.DebrisWaiting != 1 { // its manifest: b and the attempt of c build on its packs
		t.Errorf("%+v, %v", plan, err)
	}
	if got := w.collect(); got.Condemned != 1 || got.Waiting != 1 || got.Objects != 0 || got.DebrisObjects != 0 {
		t.Errorf("within the grace: %+v", got)
	}
	w.sql(`UPDATE store_objects SET condemned_at = condemned_at - interval '2 hours' WHERE condemned_at IS NOT NULL`)
	w.sql(`UPDATE store_debris SET since = since - interval '2 hours'`)
	plan, err = w.CollectGarbage(t.Context(), true)
	if err != nil || plan.Objects != 1 || plan.DebrisObjects != 3 || len(keys(t, files)) != 15 {
		t.Errorf("%+v, %v", plan, err)
	}
	if got := w.collect(); got.Objects != 1 || got.DebrisObjects != 3 || got.Debris != 0 || len(keys(t, files)) != 11 {
		t.Errorf("%+v", got)
	}
	if got := w.collect(); got.Objects+got.DebrisObjects != 0 || got.Debris != 1 { // a last look
		t.Errorf("%+v", got)
	}
	if err := under.End(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, id := range []core.CheckpointID{ws.Parent, b.ID, c.ID} {
		if err := runnertest.Restorable(t.Context(), files, *w.get(id).Stored); err != nil {
			t.Error(err)
		}
	}
	w.collect()
	if n := w.number(`SELECT count(*) FROM store_released`); n != 0 {
		t.Errorf("%d losses were not looked at", n)
	}
	if got := w.sound(); got.Objects != 11 || got.Uploading+got.Debris != 0 {
		t.Errorf("%+v", got)
	}
}

// TestCheckStore finds what is missing, what has another size and what belongs to nothing.
func TestCheckStore(t *testing.T) {
	t.Parallel()
	files, store := withStore(t)
	w := newWorld(t, store, atOnce)
	a := w.checkpoint(w.create("a").ID)
	w.seal(files, a.ID)
	list := keys(t, files)
	put(t, files, "v1/a/b", "nobody's")
	put(t, files, "v1/z", "nobody's")
	put(t, files, "other/z", "somebody else's")
	if err := files.Delete(t.Context(), list[0]); err != nil {
		t.Fatal(err)
	}
	w.sql(`UPDATE store_objects SET bytes = bytes + 1 WHERE key = $1`, list[1])
	got, err := w.CheckStore(t.Context())
	if err != nil || got.Sound() || len(got.Missing) != 1 || got.Missing[0].Key != list[0] || len(got.Resized) != 1 || got.Resized[0].Key != list[1] ||
		len(got.Foreign) != 2 || got.Foreign[0].Key != "v1/a/b" || got.Foreign[1].Bytes != 8 || got.Objects != 1 {
		t.Errorf("%+v, %v", got, err)
	}
	w.collect()
	if left := keys(t, files); len(left) != 5 {
		t.Errorf("a collection removed what it does not know: %v", left)
	}
}

// unsafeStore is a store whose deletions end half way, and with which a controller may die.
type unsafeStore struct {
	*dir.Store
	random func(n int) int
	die    atomic.Pointer[context.CancelFunc] // of whoever collects
}

func (s *unsafeStore) Delete(ctx context.Context, keys ...string) error {
	switch s.random(6) {
	case 0: // half of it
		return errors.Join(s.Store.Delete(ctx, keys[:len(keys)/2]...), core.Errorf(core.Unavailable, core.CodeStoreUnavailable, "away"))
	case 1: // all of it, and nobody hears so
		err := s.Store.Delete(ctx, keys...)
		if die := s.die.Load(); die != nil {
			(*die)()
		}
		return err
	case 2:
		return core.Errorf(core.Unavailable, core.CodeStoreUnavailable, "away")
	}
	return s.Store.Delete(ctx, keys...)
}

// model is what a test of random sequences has made.
type model struct {
	*world
	files  *unsafeStore
	random *rand.Rand
	spaces []core.WorkspaceID
	living map[core.CheckpointID]bool // true: sealed
	open   []*runnertest.Upload
	read   map[core.CheckpointID]runnerapi.Stored // what the runner fetches from the store, some of it deleted since
}

func newModel(t *testing.T, seed uint64) *model {
	t.Helper()
	files, err := dir.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = files.Close() })
	var mu sync.Mutex
	faults := rand.New(rand.NewPCG(seed, 2))
	m := &model{random: rand.New(rand.NewPCG(seed, 1)), living: map[core.CheckpointID]bool{}, read: map[core.CheckpointID]runnerapi.Stored{}}
	m.files = &unsafeStore{Store: files, random: func(n int) int {
		mu.Lock()
		defer mu.Unlock()
		return faults.IntN(n)
	}}
	m.world = newWorld(t, atOnce, func(c *controller.Config, _ *runnertest.Config) { c.Store = m.files })
	for i := range 2 {
		m.spaces = append(m.spaces, m.create(fmt.Sprintf("w-%d", i)).ID)
	}
	template := m.runner.Checkpoints()[0]
	m.seal(m.files, template)
	m.living[template] = true
	return m
}

// any returns a checkpoint of which that is true.
func (m *model) any(ok func(id core.CheckpointID, sealed bool) bool) core.CheckpointID {
	var list []core.CheckpointID
	for id, sealed := range m.living {
		if ok(id, sealed) {
			list = append(list, id)
		}
	}
	if len(list) == 0 {
		return ""
	}
	slices.Sort(list)
	return list[m.random.IntN(len(list))]
}

// crash collects garbage as a controller does that is killed at any step.
func (m *model) crash() {
	ctx, cancel := context.WithCancel(m.t.Context())
	defer cancel()
	m.files.die.Store(&cancel)
	_, err := m.CollectGarbage(ctx, false)
	m.files.die.Store(nil)
	if err != nil && ctx.Err() == nil && core.CodeOf(err) != core.CodeStoreUnavailable {
		m.t.Errorf("collection: %v", err)
	}
}

func (m *model) step() string {
	ctx, t := m.t.Context(), m.t
	switch n := m.random.IntN(14); n {
	case 0, 1:
		id := m.checkpoint(m.spaces[m.random.IntN(len(m.spaces))]).ID
		m.living[id] = false
		return "captured " + string(id)
	case 2, 3, 4: // also one that is under way already, which ends that
		id := m.any(func(_ core.CheckpointID, sealed bool) bool { return !sealed })
		if id == "" {
			return "nothing to begin"
		}
		m.open = append(m.open, m.begin(m.files, id))
		return fmt.Sprintf("began %s, attempt %d", id, m.open[len(m.open)-1].Begun.Attempt)
	case 5, 6, 7:
		if len(m.open) == 0 {
			return "nothing to end"
		}
		i := m.random.IntN(len(m.open))
		u := m.open[i]
		m.open = slices.Delete(m.open, i, i+1)
		id := u.Commit.Stored.CheckpointID
		// Less than its reference needed is needed now and then, as after many changes.
		err := u.Write(ctx, func(string) bool { return m.random.IntN(8) == 0 })
		current, gone := m.Tree.Checkpoint(ctx, m.project, id)
		if gone == nil && current.State == core.CheckpointCaptured && current.Seal.Attempt == u.Begun.Attempt && current.Seal.State == controller.SealUploading {
			if err == nil && n == 7 {
				if err = u.Fail(ctx, errors.New("given up")); err != nil {
					t.Errorf("fail: %v", err)
				}
				return "gave up " + string(id)
			}
			if err == nil {
				err = u.End(ctx)
			}
			if err != nil {
				t.Errorf("attempt %d at %s: %v", u.Begun.Attempt, id, err)
			} else {
				m.living[id] = true
			}
			return "sealed " + string(id)
		}
		end := func() error { return u.End(ctx) }
		if err != nil { // what it built on is not there any more
			end = func() error { return u.Fail(ctx, err) }
		}
		if end() == nil && m.get(id).Seal.State != controller.SealFailed {
			t.Errorf("a stale attempt %d at %s was taken", u.Begun.Attempt, id)
		}
		return "stale end of " + string(id)
	case 8:
		id := m.any(func(id core.CheckpointID, _ bool) bool { return m.get(id).Kind == controller.KindUser })
		if id == "" {
			return "nothing to delete"
		}
		if err := m.DeleteCheckpoint(ctx, m.project, id); err != nil {
			t.Errorf("delete: %v", err)
		}
		delete(m.living, id)
		return "deleted " + string(id)
	case 9:
		if m.random.IntN(4) > 0 {
			return "nothing"
		}
		m.register()
		eventually(t, "the attempts of the runner's last life are given up", func() bool {
			return m.number(`SELECT count(*) FROM seals s JOIN runners r ON r.id = s.runner_id WHERE s.state = 'uploading' AND s.lease_epoch <> r.lease_epoch`) == 0
		})
		return "registered again"
	case 10:
		id := m.any(func(_ core.CheckpointID, sealed bool) bool { return sealed })
		m.read[id] = *m.get(id).Stored
		m.fetches()
		return "fetches " + string(id)
	case 11:
		for id := range m.read {
			delete(m.read, id)
			m.fetches()
			return "has fetched " + string(id)
		}
		return "nothing is fetched"
	default:
		m.crash()
		return "collected"
	}
}

// fetches has the runner say what it fetches.
func (m *model) fetches() {
	m.fetching = slices.Sorted(maps.Keys(m.read))
	m.beat()
}

// check looks at every checkpoint that is sealed, and at what each attempt under way builds on.
func (m *model) check(after string) {
	for id, sealed := range m.living {
		if sealed {
			if err := runnertest.Restorable(m.t.Context(), m.files, *m.get(id).Stored); err != nil {
				m.t.Fatalf("after it %s: %v", after, err)
			}
		}
	}
	for id, at := range m.read {
		if err := runnertest.Restorable(m.t.Context(), m.files, at); err != nil {
			m.t.Fatalf("after it %s: %s, which is being fetched: %v", after, id, err)
		}
	}
	for _, u := range m.open {
		at := m.number(`SELECT count(*) FROM seals WHERE checkpoint_id = $1 AND attempt = $2 AND state = 'uploading'`, u.Commit.Stored.CheckpointID, u.Begun.Attempt)
		if at == 1 && u.Begun.Reference != nil {
			if err := runnertest.Restorable(m.t.Context(), m.files, *u.Begun.Reference); err != nil {
				m.t.Fatalf("after it %s: the reference of an attempt under way: %v", after, err)
			}
		}
	}
}

// rest deletes everything; then nothing may be left.
func (m *model) rest() {
	for id := range m.living {
		if m.get(id).Kind == controller.KindTemplate {
			if err := m.store.InTx(m.t.Context(), controller.System(), func(tx controller.AllTx) error { return tx.DropTemplate(m.t.Context(), id) }); err != nil {
				m.t.Fatal(err)
			}
		} else if err := m.DeleteCheckpoint(m.t.Context(), m.project, id); err != nil {
			m.t.Fatal(err)
		}
	}
	clear(m.living)
	for range 5 {
		m.crash()
	}
	m.check("deleted everything")
	clear(m.read)
	m.fetches()
	for range 200 { // half of what is deleted is not, at the first try
		if m.crash(); m.number(`SELECT (SELECT count(*) FROM store_objects) + (SELECT count(*) FROM store_released) + (SELECT count(*) FROM store_debris)`) == 0 {
			break
		}
	}
	if left := keys(m.t, m.files.Store); len(left) > 0 {
		m.t.Errorf("%d objects are left: %v", len(left), left[:min(len(left), 10)])
	}
	for _, table := range []string{"store_objects", "checkpoint_objects", "store_released", "store_debris", "seals", "store_holds"} {
		if n := m.number(`SELECT count(*) FROM ` + table); n != 0 {
			m.t.Errorf("%d rows are left in %s", n, table)
		}
	}
}

// TestGarbageAgainstModel runs random sequences of captures, attempts, ends, deletions, fetches and collections that die half way: what a
// living checkpoint, an attempt under way or a fetch needs is never removed, and of what is deleted nothing stays.
func TestGarbageAgainstModel(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	m := newModel(t, seed)
	var steps []string
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("seed %d:\n%s", seed, strings.Join(steps, "\n"))
		}
	})
	rounds := 100
	if *long {
		rounds = 400
	}
	for range rounds {
		steps = append(steps, m.step())
		m.check(steps[len(steps)-1])
	}
	m.rest()
}

// TestGarbageRaces lets several seal, delete and collect at once.
func TestGarbageRaces(t *testing.T) {
	t.Parallel()
	m := newModel(t, uint64(time.Now().UnixNano()))
	ctx := t.Context()
	const chains = 3
	var group sync.WaitGroup
	var sealed sync.Map
	stop := make(chan struct{})
	for range 2 {
		group.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := m.CollectGarbage(ctx, false); err != nil && core.CodeOf(err) != core.CodeStoreUnavailable {
					t.Errorf("collection: %v", err)
				}
			}
		})
	}
	var writers sync.WaitGroup
	for i := range chains {
		writers.Go(func() {
			ws := m.create(fmt.Sprintf("chain-%d", i))
			var before core.CheckpointID
			for range 15 {
				cp := m.checkpoint(ws.ID)
				u, err := m.runner.BeginSeal(ctx, m, m.files, m.epoch, cp.ID)
				if err != nil {
					t.Errorf("begin: %v", err)
					return
				}
				// What it builds on is deleted while it uploads.
				var deleting sync.WaitGroup
				if id := before; id != "" {
					deleting.Go(func() {
						if err := m.DeleteCheckpoint(ctx, m.project, id); err != nil {
							t.Errorf("delete: %v", err)
						}
						sealed.Delete(id)
					})
				}
				if err := errors.Join(u.Write(ctx, nil), u.End(ctx)); err != nil {
					t.Errorf("seal: %v", err)
					return
				}
				sealed.Store(cp.ID, true)
				deleting.Wait()
				before = cp.ID
			}
		})
	}
	writers.Wait()
	close(stop)
	group.Wait()
	sealed.Range(func(id, _ any) bool {
		m.living[id.(core.CheckpointID)] = true
		return true
	})
	m.check("the race")
	if len(m.living) != chains+1 {
		t.Errorf("%d are left", len(m.living))
	}
	m.rest()
}
