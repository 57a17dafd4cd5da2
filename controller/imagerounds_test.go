package controller_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/tests3"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/blob/dir"
	"github.com/coppice-dev/coppice/snapshotstore/blob/s3"
)

// work is a piece of work, which may be killed or stand still between any two of its steps.
type work struct {
	what  string
	fate  *fate // nil: it comes to its end
	do    func(ctx context.Context) error
	valid func(err error) bool // whether an error may be; nil: never
	done  chan struct{}
}

// fated draws what becomes of a piece of work.
func (m *images) fated() *fate {
	switch f := (&fate{left: m.random.IntN(14)}); m.random.IntN(5) {
	case 0, 1:
		return f
	case 2:
		f.stop = make(chan struct{})
		return f
	}
	return nil
}

func (m *images) begin(busy *sync.WaitGroup, w *work) {
	ctx := m.t.Context()
	busy.Add(1)
	still := sync.OnceFunc(busy.Done)
	w.done = make(chan struct{})
	if w.fate != nil {
		ctx = with(ctx, w.fate)
		w.fate.paused = func() {
			m.mu.Lock()
			m.asleep = append(m.asleep, w)
			m.mu.Unlock()
			m.count("stood still")
			still()
		}
	}
	m.working.Go(func() {
		defer close(w.done)
		defer still()
		err := w.do(ctx)
		killed := w.fate != nil && w.fate.killed()
		m.said("%s: %v (killed: %v)", w.what, err, killed)
		kind, _, _ := strings.Cut(w.what, " ")
		m.count(kind)
		if killed {
			m.count("killed")
		}
		if err != nil && !killed && (w.valid == nil || !w.valid(err)) {
			m.t.Errorf("%s: %v", w.what, err)
		}
	})
}

// wake lets go on what stands still, if so drawn.
func (m *images) wake(busy *sync.WaitGroup, all bool) {
	m.mu.Lock()
	list := m.asleep
	m.asleep = nil
	m.mu.Unlock()
	for _, w := range list {
		if !all && m.random.IntN(2) == 0 {
			m.mu.Lock()
			m.asleep = append(m.asleep, w)
			m.mu.Unlock()
			continue
		}
		m.said("%s goes on", w.what)
		busy.Go(func() { <-w.done })
		close(w.fate.stop)
	}
}

// round is some work at once, after what changes with all at rest.
func (m *images) round() {
	m.change()
	var busy sync.WaitGroup
	m.wake(&busy, false)
	used := map[core.WorkspaceID]bool{}
	for range 4 + m.random.IntN(4) {
		if w := m.draw(used); w != nil {
			m.begin(&busy, w)
		}
	}
	busy.Wait()
}

// change moves the time on, loses hosts and has them come back, starts their processes again and says where forks go.
func (m *images) change() {
	if m.random.IntN(2) == 0 {
		m.age()
	}
	h := m.hosts[m.random.IntN(len(m.hosts))]
	switch lost := slices.IndexFunc(m.hosts, func(h *host) bool { return h.lost }); {
	case lost >= 0 && m.random.IntN(3) == 0:
		m.said("host %d is back", lost)
		m.prune(m.hosts[lost])
		m.join(m.hosts[lost])
	case lost < 0 && m.random.IntN(7) == 0:
		m.said("host %d is lost", slices.Index(m.hosts, h))
		m.lose(h)
	case !h.lost && m.random.IntN(5) == 0:
		m.said("host %d starts again", slices.Index(m.hosts, h))
		m.join(h)
	}
	var full []*host
	at := m.hosts[m.random.IntN(len(m.hosts))] // where forks go
	for _, h := range m.hosts {
		if h != at && !at.lost && m.random.IntN(4) > 0 {
			full = append(full, h)
		}
	}
	m.drain(full...)
}

func (m *images) age() {
	m.sql(`UPDATE store_objects SET condemned_at = condemned_at - interval '2 hours' WHERE condemned_at IS NOT NULL`)
	m.sql(`UPDATE store_debris SET since = since - interval '2 hours'`)
}

// lose cuts a host off for longer than its lease and its fence: its workspaces are gone.
func (m *images) lose(h *host) {
	m.t.Helper()
	m.sql(`UPDATE runners SET lease_expires_at = now() - interval '2 hours' WHERE id = $1`, h.ID())
	eventually(m.t, "the runner is given up", func() bool {
		return m.number(`SELECT count(*) FROM runners WHERE id = $1 AND fenced_at IS NOT NULL`, h.ID()) == 1
	})
	h.mu.Lock()
	h.lost = true
	h.mu.Unlock()
	maps.DeleteFunc(m.spaces, func(_ core.WorkspaceID, s *space) bool { return s.host == h })
	m.prune(h)
}

// prune has a host without machines forget what nothing there needs: what it has captured and not sealed needs its base.
func (m *images) prune(h *host) {
	needed := map[core.CheckpointID]bool{}
	for _, id := range m.captured(h) {
		needed[m.grown[id]] = true
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for id := range h.lazy {
		if !needed[id] {
			delete(h.lazy, id)
		}
	}
}

// row is a checkpoint, if it lives.
func (m *images) row(id core.CheckpointID) (controller.Checkpoint, bool) {
	cp, err := m.Tree.Checkpoint(context.WithoutCancel(m.t.Context()), m.project, id)
	if err != nil && core.CategoryOf(err) != core.NotFound {
		m.t.Errorf("checkpoint %s: %v", id, err)
	}
	return cp, err == nil && (cp.State == core.CheckpointCaptured || cp.State == core.CheckpointSealed)
}

// captured are the checkpoints that live on a host alone.
func (m *images) captured(h *host) []core.CheckpointID {
	m.mu.Lock()
	nodes := slices.Clone(m.nodes)
	m.mu.Unlock()
	return slices.DeleteFunc(nodes, func(id core.CheckpointID) bool {
		cp, lives := m.row(id)
		return !lives || cp.State != core.CheckpointCaptured || cp.RunnerID != h.ID()
	})
}

// draw returns something to do, or nothing. What it does with a workspace nothing else does in this round.
func (m *images) draw(used map[core.WorkspaceID]bool) *work {
	m.mu.Lock()
	nodes, spaces := slices.Clone(m.nodes), slices.Sorted(maps.Keys(m.spaces))
	m.mu.Unlock()
	spaces = slices.DeleteFunc(spaces, func(id core.WorkspaceID) bool { return used[id] })
	h := m.hosts[m.random.IntN(len(m.hosts))]
	switch n := m.random.IntN(18); {
	case n < 4 && len(spaces) > 0:
		id := spaces[m.random.IntN(len(spaces))]
		used[id] = true
		if len(spaces) > 8 {
			return m.terminating(id)
		}
		return m.capturing(id)
	case n < 8:
		return m.forking(m.some(nodes, func(cp controller.Checkpoint) bool { return cp.State == core.CheckpointSealed }))
	case n < 13:
		for _, i := range m.random.Perm(len(m.hosts)) {
			if w := m.sealing(m.hosts[i]); w != nil {
				return w
			}
		}
	case n < 15 || len(nodes) > 25:
		return m.deleting(m.some(nodes, func(cp controller.Checkpoint) bool {
			return cp.Kind == controller.KindUser && (cp.State == core.CheckpointCaptured || m.fetched(cp.ID))
		}))
	case n < 17:
		return &work{what: "collect", fate: m.fated(), do: func(ctx context.Context) error {
			_, err := m.CollectGarbage(ctx, false)
			return err
		}}
	case !h.lost:
		h.mu.Lock()
		lazy := slices.Sorted(maps.Keys(h.lazy))
		h.mu.Unlock()
		if len(lazy) > 0 {
			id := lazy[m.random.IntN(len(lazy))]
			return &work{what: "whole " + string(id), do: func(ctx context.Context) error { return m.whole(ctx, h, id) }}
		}
	}
	return nil
}

// some returns one of the nodes: mostly one of which that is true.
func (m *images) some(nodes []core.CheckpointID, prefer func(cp controller.Checkpoint) bool) core.CheckpointID {
	var list []core.CheckpointID
	for _, id := range nodes {
		if cp, lives := m.row(id); lives && prefer(cp) {
			list = append(list, id)
		}
	}
	if len(list) == 0 || m.random.IntN(4) == 0 {
		list = nodes
	}
	return list[m.random.IntN(len(list))]
}

// fetched reports whether a host has not all of a checkpoint that it grows.
func (m *images) fetched(id core.CheckpointID) bool {
	return slices.ContainsFunc(m.hosts, func(h *host) bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		_, is := h.lazy[id]
		return is
	})
}

func (m *images) deleting(id core.CheckpointID) *work {
	return &work{
		what: "delete " + string(id), fate: m.fated(),
		do: func(ctx context.Context) error { return m.DeleteCheckpoint(ctx, m.project, id) },
		valid: func(err error) bool {
			return core.CodeOf(err) == core.CodeCheckpointInUse || core.CodeOf(err) == core.CodeCheckpointNotFound
		},
	}
}

func (m *images) terminating(id core.WorkspaceID) *work {
	return &work{what: "terminate " + string(id), do: func(ctx context.Context) error {
		m.mu.Lock()
		delete(m.spaces, id)
		m.mu.Unlock()
		_, err := m.Terminate(ctx, m.project, id, wait)
		return err
	}}
}

func (m *images) capturing(id core.WorkspaceID) *work {
	random := rand.New(rand.NewPCG(m.random.Uint64(), 1))
	return &work{what: "capture of " + string(id), do: func(ctx context.Context) error {
		m.mu.Lock()
		s := m.spaces[id]
		m.mu.Unlock()
		now := s.guest.write(random, 1+random.IntN(40))
		a, err := m.CreateCheckpoint(ctx, m.project, id, controller.CheckpointRequest{}, wait)
		if err != nil {
			return err
		}
		cp := a.Result.Checkpoint.ID
		m.said("captured %s of %s, which grew on %q", cp, id, s.lazy)
		m.mu.Lock()
		defer m.mu.Unlock()
		s.guest, m.guests[cp], m.grown[cp] = now, now, s.lazy
		m.nodes = append(m.nodes, cp)
		return nil
	}}
}

func (m *images) forking(id core.CheckpointID) *work {
	return &work{what: "fork of " + string(id), do: func(ctx context.Context) error {
		a, err := m.ForkCheckpoint(ctx, m.project, id, controller.ForkRequest{Count: 1}, wait)
		if err != nil {
			return err
		}
		child := a.Result.Children[0]
		if child.Problem != nil {
			return child.Problem
		}
		h := m.hosts[slices.IndexFunc(m.hosts, func(h *host) bool { return h.ID() == child.Workspace.Sandbox.RunnerID })]
		h.mu.Lock()
		_, lazy := h.lazy[id]
		h.mu.Unlock()
		m.mu.Lock()
		defer m.mu.Unlock()
		s := &space{guest: m.guests[id], host: h, lazy: m.grown[id]}
		if lazy {
			s.lazy = id
			m.counts["fork of what is fetched"]++
		}
		m.spaces[child.Workspace.ID] = s
		return nil
	}, valid: func(err error) bool { // it was deleted, or the only host that has it is away or full
		_, lives := m.row(id)
		return !lives || slices.Contains([]core.Code{core.CodeCheckpointNotFound, core.CodeNoRunner, core.CodeRunnerUnreachable, core.CodeRunnerLost}, core.CodeOf(err))
	}}
}

// sealing has a host seal one of its checkpoints, unless it does so with another. What becomes of the process becomes of the attempt.
func (m *images) sealing(h *host) *work {
	list := m.captured(h)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.lost || h.sealing || len(list) == 0 {
		return nil
	}
	id, epoch, scratch := list[m.random.IntN(len(list))], h.epoch, m.t.TempDir()
	h.sealing = true
	return &work{
		what: fmt.Sprintf("seal of %s on host %d at %d", id, slices.Index(m.hosts, h), epoch), fate: m.fated(),
		do: func(ctx context.Context) error {
			defer func() {
				h.mu.Lock()
				defer h.mu.Unlock()
				if h.epoch == epoch {
					h.sealing = false
				}
			}()
			return m.seal(ctx, h, epoch, id, scratch)
		},
		valid: func(error) bool {
			h.mu.Lock()
			stale := h.lost || h.epoch != epoch
			h.mu.Unlock()
			cp, lives := m.row(id)
			return stale || !lives || cp.State == core.CheckpointSealed
		},
	}
}

// check reads every byte of what lives, from the store alone.
func (m *images) check() {
	m.t.Helper()
	ctx := m.t.Context()
	var living []core.CheckpointID
	for _, id := range m.nodes {
		cp, lives := m.row(id)
		if !lives {
			continue
		}
		living = append(living, id)
		if cp.State == core.CheckpointSealed {
			m.count("read")
			if err := m.guests[id].wantStored(ctx, m.blobs, *cp.Stored); err != nil {
				m.t.Fatalf("checkpoint %s, which is sealed: %v", id, err)
			}
		}
	}
	m.nodes = living
	for i, h := range m.hosts {
		for id, s := range h.lazy {
			if _, lives := m.row(id); !lives {
				m.count("read of what is deleted")
			}
			if err := m.guests[id].wantImage(ctx, m.blobs, s, "memory"); err != nil && (!h.lost || m.needed(h, id)) {
				m.t.Fatalf("checkpoint %s, which host %d fetches: %v", id, i, err)
			}
		}
	}
}

func (m *images) needed(h *host, base core.CheckpointID) bool {
	return slices.ContainsFunc(m.captured(h), func(id core.CheckpointID) bool { return m.grown[id] == base })
}

// rest has everything come to its end: what was captured is sealed, whatever happened to its host; and when all is deleted nothing is left.
func (m *images) rest() {
	t, ctx := m.t, m.t.Context()
	var busy sync.WaitGroup
	for len(m.asleep) > 0 {
		m.wake(&busy, true)
		busy.Wait()
	}
	m.working.Wait()
	for _, h := range m.hosts {
		m.join(h)
		for _, id := range m.captured(h) {
			if err := m.seal(ctx, h, h.epoch, id, t.TempDir()); err != nil {
				t.Fatalf("seal of %s, at the end: %v", id, err)
			}
			if m.get(id).State != core.CheckpointSealed {
				t.Fatalf("%s is not sealed at the end", id)
			}
		}
	}
	m.check()
	for _, id := range m.nodes {
		var err error
		if m.get(id).Kind == controller.KindTemplate {
			err = m.store.InTx(ctx, controller.System(), func(tx controller.AllTx) error { return tx.DropTemplate(ctx, id) })
		} else {
			err = m.DeleteCheckpoint(ctx, m.project, id)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, h := range m.hosts {
		clear(h.lazy)
		if err := m.heartbeat(ctx, h); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		m.age()
		m.collect()
	}
	for info, err := range m.blobs.List(ctx, "") {
		t.Errorf("left in the store: %s, %v", info.Key, err)
	}
	for _, table := range []string{"store_objects", "checkpoint_objects", "store_released", "store_debris", "seals", "store_holds"} {
		if n := m.number(`SELECT count(*) FROM ` + table); n != 0 {
			t.Errorf("%d rows are left in %s", n, table)
		}
	}
}

// TestImagesAgainstModel runs random sequences of forks, writes, checkpoints, seals, fetches, deletions and collections, several at once, on
// three hosts that start again, are lost and come back, with real images in a real store; what is killed between two of its steps does nothing
// any more, and what stood still goes on when others have taken its place. Every checkpoint that is sealed reads as what its workspace was,
// byte by byte; what was captured can be sealed in the end; and when all is deleted nothing is left.
func TestImagesAgainstModel(t *testing.T) {
	t.Parallel()
	run := func(t *testing.T, rounds int, blobs blob.Blobs) {
		t.Helper()
		if *long {
			rounds *= 10
		}
		m := newImages(t, blobs, uint64(time.Now().UnixNano()))
		for i := range rounds {
			m.round()
			if i%4 == 3 {
				m.check()
			}
			if t.Failed() {
				break
			}
		}
		m.rest()
		t.Logf("%v", m.counts)
	}
	t.Run("dir", func(t *testing.T) {
		t.Parallel()
		blobs, err := dir.Open(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = blobs.Close() })
		run(t, 30, blobs)
	})
	t.Run("s3", func(t *testing.T) {
		t.Parallel()
		server := tests3.Start(t)
		blobs, err := s3.New(s3.Config{
			Endpoint: "http://" + server.Address, Region: tests3.Region, Bucket: server.Bucket(t), PathStyle: true,
			Credentials: s3.Credentials{AccessKey: server.AccessKey, SecretKey: server.SecretKey},
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = blobs.Close() })
		run(t, 20, blobs)
	})
}
