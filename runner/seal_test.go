package runner

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/lease"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/blob/dir"
)

// ledger takes the messages of sealing by the rules of the wire, for several runners.
type ledger struct {
	project core.ProjectID

	mu       sync.Mutex // guards what follows
	attempts map[core.CheckpointID]int64
	stored   map[core.CheckpointID]runnerapi.Stored
	failed   []runnerapi.Problem
	deleted  map[core.CheckpointID]bool
	lose     int // answers to a commit that get lost
	changed  chan struct{}
}

func newLedger() *ledger {
	return &ledger{
		project: core.NewID[core.ProjectID](), attempts: map[core.CheckpointID]int64{}, stored: map[core.CheckpointID]runnerapi.Stored{},
		deleted: map[core.CheckpointID]bool{}, changed: make(chan struct{}, 1000),
	}
}

func (l *ledger) BeginSeal(_ context.Context, m runnerapi.BeginSeal) (runnerapi.SealBegun, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.deleted[m.CheckpointID] {
		return runnerapi.SealBegun{}, core.Errorf(core.NotFound, core.CodeCheckpointNotFound, "it was deleted")
	}
	if _, there := l.stored[m.CheckpointID]; there {
		return runnerapi.SealBegun{}, core.Errorf(core.Conflict, core.CodeStateConflict, "it is sealed")
	}
	l.attempts[m.CheckpointID]++
	n := l.attempts[m.CheckpointID]
	out := runnerapi.SealBegun{Attempt: n, ProjectID: l.project, Prefix: fmt.Sprintf("v1/%s/%s/%d/", l.project, m.CheckpointID, n)}
	for _, a := range m.Ancestors {
		if at, there := l.stored[a]; there {
			out.Reference = &at
			break
		}
	}
	return out, nil
}

func (l *ledger) CommitSeal(_ context.Context, id core.CheckpointID, m runnerapi.CommitSeal) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.attempts[id] != m.Attempt {
		return core.Errorf(core.Conflict, core.CodeStateConflict, "another attempt has begun")
	}
	l.stored[id] = m.Stored
	l.changed <- struct{}{}
	if l.lose > 0 {
		l.lose--
		return core.Errorf(core.Unavailable, core.CodeControllerUnreachable, "the answer was lost")
	}
	return nil
}

func (l *ledger) FailSeal(_ context.Context, _ core.CheckpointID, m runnerapi.FailSeal) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failed = append(l.failed, m.Problem)
	l.changed <- struct{}{}
	return nil
}

// wait until the ledger is as wanted.
func (l *ledger) wait(t *testing.T, what string, done func() bool) {
	t.Helper()
	late := time.After(time.Minute)
	for {
		l.mu.Lock()
		ok := done()
		l.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-l.changed:
		case <-late:
			t.Fatalf("not within a minute: %s; failures: %+v", what, l.failed)
		}
	}
}

func (l *ledger) sealed(t *testing.T, ids ...core.CheckpointID) {
	t.Helper()
	l.wait(t, "sealed", func() bool {
		return !slices.ContainsFunc(ids, func(id core.CheckpointID) bool { _, there := l.stored[id]; return !there })
	})
}

// sources are those of a fork: the checkpoint and its sealed ancestors.
func (l *ledger) sources(ids ...core.CheckpointID) []runnerapi.Stored {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []runnerapi.Stored
	for _, id := range ids {
		out = append(out, l.stored[id])
	}
	return out
}

// gate is a store that can be out of order.
type gate struct {
	blob.Blobs

	mu  sync.Mutex // guards err
	err error
}

func (g *gate) set(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.err = err
}

func (g *gate) Put(ctx context.Context, key string, body io.ReaderAt, size int64, digest core.Digest) error {
	g.mu.Lock()
	err := g.err
	g.mu.Unlock()
	if err != nil {
		return err
	}
	return g.Blobs.Put(ctx, key, body, size, digest)
}

// pool is several runners with one store.
type pool struct {
	*ledger
	t     *testing.T
	path  string
	blobs *gate
}

func newSealPool(t *testing.T) *pool {
	t.Helper()
	p := &pool{ledger: newLedger(), t: t, path: t.TempDir()}
	store, err := dir.Open(p.path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	p.blobs = &gate{Blobs: store}
	return p
}

// runner starts one that seals.
func (p *pool) runner(change func(*Config)) *fakeRig {
	p.t.Helper()
	r := newFakeRig(p.t, func(c *Config) {
		c.Store.Blobs = p.blobs
		if change != nil {
			change(c)
		}
	})
	p.seal(r)
	return r
}

func (p *pool) seal(r *fakeRig) (stop func()) {
	ctx, cancel := context.WithCancel(p.t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := r.Seal(ctx, p.ledger, func() (int64, bool) { return 1, true }); err != nil {
			p.t.Error(err)
		}
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		<-done
	})
	p.t.Cleanup(stop)
	return stop
}

// content is all bytes of a checkpoint on a runner.
func content(t *testing.T, r *fakeRig, id core.CheckpointID) (mem, disk, state []byte) {
	t.Helper()
	c, err := r.checkpoints.Open(id)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	base, err := r.bases.OpenFile(c.Base)
	if err != nil {
		t.Fatal(err)
	}
	defer base.Close()
	mem = make([]byte, c.Memory.Size)
	if err := memory.NewReader(memory.Image{Base: base, Delta: c.Delta}).ReadAt(mem, 0); err != nil {
		t.Fatal(err)
	}
	if disk, err = os.ReadFile(r.checkpoints.Path(id, checkpoints.OverlayFile)); err != nil {
		t.Fatal(err)
	}
	return mem, disk, c.State
}

func wantSame(t *testing.T, a, b *fakeRig, id core.CheckpointID) {
	t.Helper()
	memA, diskA, stateA := content(t, a, id)
	memB, diskB, stateB := content(t, b, id)
	if !bytes.Equal(memA, memB) || !bytes.Equal(diskA, diskB) || !bytes.Equal(stateA, stateB) {
		t.Errorf("checkpoint %s: memory %v, disk %v, state %v", id, bytes.Equal(memA, memB), bytes.Equal(diskA, diskB), bytes.Equal(stateA, stateB))
	}
}

// TestForkElsewhere: what was captured on one runner is forked on another with nothing but the store, and captured and forked again on
// the first.
func TestForkElsewhere(t *testing.T) {
	t.Parallel()
	p := newSealPool(t)
	a, b := p.runner(nil), p.runner(nil)
	template := a.boot()
	s := a.fork(template)
	var chain []core.CheckpointID
	for range 3 {
		c := a.capture(s)
		chain = append([]core.CheckpointID{c}, chain...)
		s = a.fork(c)
	}
	p.sealed(t, append(chain, template)...)
	forkFrom := func(r *fakeRig, ids ...core.CheckpointID) core.SandboxID {
		t.Helper()
		out, err := r.Fork(t.Context(), runnerapi.Fork{CheckpointID: ids[0], Children: []runnerapi.Child{r.child()}, Sources: p.sources(ids...)})
		if err != nil || out.Children[0].Problem != nil {
			t.Fatalf("%+v, %v", out, err)
		}
		return out.Children[0].SandboxID
	}
	there := forkFrom(b, append(chain, template)...)
	wantSame(t, a, b, chain[0])
	wantSame(t, a, b, template)
	recA, _ := a.Checkpoint(chain[0])
	recB, err := b.Checkpoint(chain[0])
	if err != nil || recB.Parent != recA.Parent || recB.Class != recA.Class || recB.Resources != recA.Resources || recB.DeltaBytes == 0 || recB.DeltaBytes > recA.DeltaBytes {
		t.Errorf("%+v\n%+v, %v", recA, recB, err)
	}
	// From then on it is one of b's own, and b forks it; a takes the result.
	next := b.capture(there)
	p.sealed(t, next)
	forkFrom(a, next, chain[0], template)
	wantSame(t, b, a, next)
	if n := p.attempts[next]; n != 1 {
		t.Errorf("%d attempts", n)
	}
	// A host that has nothing of the tree, and is told of no ancestor, brings the whole.
	c := p.runner(nil)
	forkFrom(c, chain[1])
	wantSame(t, a, c, chain[1])
}

// TestFetchOnce: many forks at once of a checkpoint that is not here bring it once.
func TestFetchOnce(t *testing.T) {
	t.Parallel()
	p := newSealPool(t)
	a, b := p.runner(nil), p.runner(func(c *Config) { c.Rebase.Off = true })
	template := a.boot()
	c := a.capture(a.fork(template))
	p.sealed(t, template, c)
	var wg sync.WaitGroup
	for range 8 {
		child := b.child()
		wg.Go(func() {
			out, err := b.Fork(t.Context(), runnerapi.Fork{CheckpointID: c, Children: []runnerapi.Child{child}, Sources: p.sources(c, template)})
			if err != nil || out.Children[0].Problem != nil {
				t.Errorf("%+v, %v", out, err)
			}
		})
	}
	wg.Wait()
	if list := b.Checkpoints(); len(list) != 2 {
		t.Errorf("%d checkpoints", len(list))
	}
	bases, err := b.bases.List()
	if err != nil || len(bases) != 1 {
		t.Errorf("%d bases, %v", len(bases), err)
	}
}

// TestSealAgain: a store that is out of order stops nothing on the host, is said to the controller, and gets everything when it is back;
// an answer that is lost leads to nothing twice; a runner that starts again goes on where it was.
func TestSealAgain(t *testing.T) {
	t.Parallel()
	p := newSealPool(t)
	a := newFakeRig(t, func(c *Config) { c.Store.Blobs = p.blobs })
	p.blobs.set(core.Errorf(core.Unavailable, core.CodeStoreUnavailable, "out of order"))
	stop := p.seal(a)
	template := a.boot()
	p.wait(t, "a failure is told", func() bool { return len(p.failed) > 0 })
	c := a.capture(a.fork(template)) // work goes on
	if p.failed[0].Code != core.CodeStoreUnavailable {
		t.Errorf("%+v", p.failed)
	}
	stop()
	a.stop()
	p.blobs.set(nil)
	p.lose = 1
	a.start()
	stop = p.seal(a)
	p.sealed(t, template, c)
	stop()
	attempts := p.attempts[template] + p.attempts[c]
	a.stop()
	a.start()
	stop = p.seal(a)
	later := a.capture(a.fork(c))
	p.sealed(t, later)
	stop()
	if n := p.attempts[template] + p.attempts[c]; n != attempts {
		t.Errorf("%d attempts, then %d", attempts, n)
	}
}

// TestFetchRefused: what is of another class, damaged or missing is refused, starts nothing and leaves nothing.
func TestFetchRefused(t *testing.T) {
	t.Parallel()
	p := newSealPool(t)
	a := p.runner(nil)
	template := a.boot()
	c := a.capture(a.fork(template))
	p.sealed(t, template, c)
	b := p.runner(nil)
	fork := func(r *fakeRig, sources ...runnerapi.Stored) error {
		t.Helper()
		out, err := r.Fork(t.Context(), runnerapi.Fork{CheckpointID: c, Children: []runnerapi.Child{r.child()}, Sources: sources})
		if err == nil {
			t.Errorf("it was forked: %+v", out)
		}
		if n := r.driver.Machines(); n != 0 {
			t.Errorf("%d machines", n)
		}
		return err
	}
	if err := fork(b); core.CodeOf(err) != core.CodeCheckpointNotFound {
		t.Errorf("without sources: %v", err)
	}
	wrong := p.sources(template)
	wrong[0].CheckpointID = c
	if err := fork(b, wrong...); core.CodeOf(err) != core.CodeManifestInvalid {
		t.Errorf("another's manifest: %v", err)
	}
	b.driver.Become(vmm.Fingerprint{Version: "2"})
	other := p.runner(func(cfg *Config) { cfg.Driver = b.driver })
	if err := fork(other, p.sources(c, template)...); core.CodeOf(err) != core.CodeIncompatibleHost {
		t.Errorf("another class: %v", err)
	}
	packs, err := filepath.Glob(filepath.Join(p.path, "v1", "*", string(c), "*", "pack-*"))
	if err != nil || len(packs) != 1 {
		t.Fatalf("%q, %v", packs, err)
	}
	whole, err := os.ReadFile(packs[0])
	if err != nil {
		t.Fatal(err)
	}
	bad := bytes.Clone(whole)
	bad[len(bad)/2] ^= 1
	for code, change := range map[core.Code]func() error{
		core.CodeCheckpointCorrupt:    func() error { return os.WriteFile(packs[0], bad, 0o600) },
		core.CodeCheckpointIncomplete: func() error { return os.Remove(packs[0]) },
	} {
		if err := errors.Join(os.RemoveAll(packs[0]), os.WriteFile(packs[0], whole, 0o600), change()); err != nil {
			t.Fatal(err)
		}
		if err := fork(b, p.sources(c, template)...); core.CodeOf(err) != code {
			t.Errorf("%s: %v", code, err)
		}
		if _, err := b.Checkpoint(c); core.CodeOf(err) != core.CodeCheckpointNotFound {
			t.Errorf("it is here: %v", err)
		}
	}
	b.wantOnly()
}

// slowPut is a store whose uploads take until they are broken off, or until it is let go.
type slowPut struct {
	blob.Blobs
	begun chan error // nil: an upload has begun; else why it was broken off
	going chan struct{}
}

func (s *slowPut) Put(ctx context.Context, key string, body io.ReaderAt, size int64, digest core.Digest) error {
	select {
	case <-s.going:
		return s.Blobs.Put(ctx, key, body, size, digest)
	default:
	}
	s.begun <- nil
	select {
	case <-s.going:
		return s.Blobs.Put(ctx, key, body, size, digest)
	case <-ctx.Done():
		s.begun <- context.Cause(ctx)
		return ctx.Err()
	}
}

// TestSealEndsWithTheLease: a runner that has no word of its controller stops writing to the store when its lease ends, and begins nothing
// there until the controller has answered.
func TestSealEndsWithTheLease(t *testing.T) {
	t.Parallel()
	p := newSealPool(t)
	slow := &slowPut{Blobs: p.blobs, begun: make(chan error, 1000), going: make(chan struct{})}
	r := newFakeRig(t, func(c *Config) { c.Store.Blobs = slow })
	if err := r.lease.Attempt()(time.Hour); err != nil {
		t.Fatal(err)
	}
	template := r.boot()
	looks := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- r.Seal(ctx, p.ledger, func() (int64, bool) {
			select { // nobody counts
			case looks <- struct{}{}:
			default:
			}
			return 1, true
		})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	wait := func(what string, ok func(error) bool) {
		t.Helper()
		late := time.After(time.Minute)
		for {
			select {
			case err := <-slow.begun:
				if ok(err) {
					return
				}
			case <-late:
				t.Fatalf("not within a minute: %s", what)
			}
		}
	}
	wait("an upload begins", func(err error) bool { return err == nil })
	if err := r.lease.Attempt()(time.Nanosecond); err != nil {
		t.Fatal(err)
	}
	wait("it is broken off", func(err error) bool { return errors.Is(err, lease.ErrFenced) })
	p.wait(t, "the controller is told, should it hear", func() bool { return len(p.failed) > 0 && p.failed[0].Code == lease.ErrFenced.Code })
	close(slow.going) // it would be written now
	for range 3 {
		select {
		case <-looks:
		case <-time.After(time.Minute):
			t.Fatal("it does not look whether it has a lease again")
		}
	}
	p.wait(t, "nothing is begun without a lease", func() bool { return p.attempts[template] == 1 && len(p.stored) == 0 })
	if err := r.lease.Attempt()(time.Hour); err != nil {
		t.Fatal(err)
	}
	p.wait(t, "it is sealed by the next attempt", func() bool { _, there := p.stored[template]; return there && p.attempts[template] == 2 })
}
