package previews

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sandboxhost"
)

// table is a store with previews of port 1 of every workspace whose id is in it. A read waits for gate, if there is one.
type table struct {
	Tx

	mu      sync.Mutex // guards there
	there   map[core.WorkspaceID]Preview
	gate    chan struct{}
	reads   atomic.Int64
	now     atomic.Int64 // reads under way
	most    atomic.Int64 // at the same time
	reached model.Workspace
}

func (t *table) InSystem(_ context.Context, fn func(Tx) error) error { return fn(t) }

func (t *table) InProject(_ context.Context, _ core.ProjectID, fn func(Tx) error) error { return fn(t) }

func (t *table) Workspace(context.Context, core.WorkspaceID) (model.Workspace, error) {
	return t.reached, nil
}

func (t *table) Preview(ctx context.Context, workspace core.WorkspaceID, _ int) (Preview, error) {
	t.reads.Add(1)
	n := t.now.Add(1)
	defer t.now.Add(-1)
	for most := t.most.Load(); n > most && !t.most.CompareAndSwap(most, n); most = t.most.Load() {
	}
	if t.gate != nil {
		select {
		case <-t.gate:
		case <-ctx.Done():
			return Preview{}, context.Cause(ctx) // as package postgres does
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if p, ok := t.there[workspace]; ok {
		return p, nil
	}
	return Preview{}, Absent()
}

func (t *table) set(n int, p Preview) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.there == nil {
		t.there = map[core.WorkspaceID]Preview{}
	}
	t.there[core.WorkspaceID(prefix+name(n).ID)] = p
}

func name(n int) sandboxhost.Target {
	return sandboxhost.Target{ID: fmt.Sprintf("%026d", n), Port: 1}
}

// look looks a name up, with what is known first, and reports whether there is a preview.
func look(t *testing.T, m *Manager, n int) bool {
	t.Helper()
	_, known, err := m.Recent(name(n))
	if !known {
		_, err = m.Lookup(t.Context(), name(n))
	}
	if err != nil && core.CategoryOf(err) != core.NotFound {
		t.Errorf("%d: %v", n, err)
	}
	return err == nil
}

// TestRecent: what was found is not read again for a moment. It is forgotten after that, at the end of the preview, and when this process changes
// the previews of the workspace.
func TestRecent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := &table{}
		m := New(Config{}, store, nil)
		store.set(1, Preview{})
		ends := time.Now().Add(time.Second)
		store.set(2, Preview{Port: model.Port{ExpiresAt: &ends}})
		want := func(what string, n int, there bool, reads int64) {
			t.Helper()
			store.reads.Store(0)
			if got := look(t, m, n); got != there || store.reads.Load() != reads {
				t.Errorf("%s: %v with %d reads, want %v with %d", what, got, store.reads.Load(), there, reads)
			}
		}
		want("a preview", 1, true, 1)
		want("again", 1, true, 0)
		want("one that ends", 2, true, 1)
		want("no preview", 3, false, 1)
		want("again", 3, false, 0)
		time.Sleep(absentFor)
		want("later", 3, false, 1)
		want("a preview, later", 1, true, 0)
		want("after its end", 2, true, 1) // the database decides
		time.Sleep(foundFor)
		want("much later", 1, true, 1)
		store.set(3, Preview{})
		m.Changed(core.WorkspaceID(prefix + name(3).ID))
		want("when it is opened", 3, true, 1)
		want("another one", 1, true, 0)

		// A change during a read: the answer may be older than the change.
		store.gate = make(chan struct{})
		done := make(chan bool)
		go func() { done <- look(t, m, 4) }()
		synctest.Wait()
		m.Changed(core.WorkspaceID(prefix + name(4).ID))
		close(store.gate)
		<-done
		store.gate = nil
		want("after a change during a read", 4, false, 1)
	})
}

// TestLookupsAreBounded: requests for one name share a read. Unknown names have few reads at the same time, and a bounded queue. A name that had a
// preview does not wait for them, and a client that goes away does not leave a read for the next one to repeat.
func TestLookupsAreBounded(t *testing.T) {
	t.Parallel()
	const reads, queue = 4, 1024 // the bounds, not as the code has them
	synctest.Test(t, func(t *testing.T) {
		store := &table{}
		m := New(Config{}, store, nil)
		store.set(0, Preview{})
		look(t, m, 0)
		time.Sleep(foundFor)
		store.reads.Store(0)
		store.gate = make(chan struct{})
		var all sync.WaitGroup
		ctx, cancel := context.WithCancel(t.Context())
		for i := 1; i <= reads+queue; i++ {
			for range 2 {
				all.Go(func() { _, _ = m.Lookup(ctx, name(i)) })
			}
		}
		synctest.Wait()
		if n := store.most.Load(); n != reads {
			t.Errorf("%d reads at the same time, want %d", n, reads)
		}
		if _, err := m.Lookup(t.Context(), name(queue+reads+1)); core.CategoryOf(err) != core.Unavailable {
			t.Errorf("beyond the queue: %v", err)
		}
		if _, err := m.Queue(t.Context()); core.CategoryOf(err) != core.Unavailable {
			t.Errorf("another read beyond the queue: %v", err)
		}
		all.Go(func() {
			if !look(t, m, 0) {
				t.Error("a name that had a preview is not found")
			}
		})
		synctest.Wait()
		if n := store.now.Load(); n != reads+1 {
			t.Errorf("%d reads, want one more than %d: a name that had a preview waits for others", n, reads)
		}
		cancel()
		close(store.gate)
		all.Wait()
		synctest.Wait()
		if n := store.reads.Load(); n != reads+queue+1 {
			t.Errorf("%d reads for %d names", n, reads+queue+1)
		}
		store.gate = nil
		for range 2 * reads {
			leave, err := m.Queue(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			leave()
		}
		for i := range 3 * maxRecent {
			store.set(i, Preview{})
			look(t, m, i)
			look(t, m, 10*maxRecent+i)
		}
		if len(m.recent.found) > maxRecent || len(m.recent.absent) > maxRecent {
			t.Errorf("%d and %d names are remembered", len(m.recent.found), len(m.recent.absent))
		}
	})
}

// TestSlowDatabase: a lookup that takes too long has failed because of the database, whether it was read or waited.
func TestSlowDatabase(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := New(Config{}, &table{gate: make(chan struct{})}, nil)
		var all sync.WaitGroup
		for i := range 2 * maxLookups {
			all.Go(func() {
				if _, err := m.Lookup(t.Context(), name(i)); core.CategoryOf(err) != core.Unavailable {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if _, known, _ := m.Recent(name(0)); known {
			t.Error("a failure is remembered")
		}
	})
}

// TestSignedLinksDoNotResume: a signed link does not resume a workspace that was suspended after the link was judged.
func TestSignedLinksDoNotResume(t *testing.T) {
	t.Parallel()
	resumed := 0
	store := &table{reached: model.Workspace{State: core.WorkspaceSuspended, IdlePolicy: model.IdlePolicy{AutoResume: true}}}
	m := New(Config{
		Reach: func(context.Context, core.ProjectID, core.WorkspaceID) (model.Workspace, error) {
			resumed++
			return model.Workspace{State: core.WorkspaceReady}, nil
		},
		Used: func(model.Workspace) {},
	}, store, nil)
	for _, v := range []model.Visibility{model.VisibilitySigned, model.VisibilityPrivate, model.VisibilityPublic} {
		resumed = 0
		_, err := m.Reach(t.Context(), Preview{Port: model.Port{Visibility: v}})
		if signed := v == model.VisibilitySigned; (core.CategoryOf(err) == core.NotFound) != signed || (resumed == 0) != signed {
			t.Errorf("%s: %v, and %d resumes", v, err, resumed)
		}
	}
	store.reached.IdlePolicy.AutoResume = false
	if _, err := m.Reach(t.Context(), Preview{Port: model.Port{Visibility: model.VisibilityPublic}}); err == nil || !strings.Contains(err.Error(), "suspended") {
		t.Errorf("without auto-resume: %v", err)
	}
}
