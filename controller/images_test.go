package controller_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

var long = flag.Bool("long", false, "run ten times as many rounds of TestImagesAgainstModel, four times as many of TestGarbageAgainstModel, TestKilledStep with every transaction, TestMassFence, TestManyLiveWorkspaces and TestAmongManyLiveWorkspaces with 100,000")

// pages is an image; a page that is nil is zeros. Pages are never changed, but replaced.
type pages [][]byte

// guest is what a checkpoint or a workspace is.
type guest map[string]pages

func newGuest(r *rand.Rand) guest {
	g := guest{runnerapi.ImageMemory: make(pages, 128), runnerapi.ImageDisk: make(pages, 64)}
	return g.write(r, 100)
}

// write is the guest after n random pages of it were written: with what compresses by half, with zeros, or with what was there.
func (g guest) write(r *rand.Rand, n int) guest {
	out := guest{}
	for name, image := range g {
		out[name] = slices.Clone(image)
	}
	for range n {
		image := out[[]string{runnerapi.ImageMemory, runnerapi.ImageDisk}[r.IntN(2)]]
		at := r.IntN(len(image))
		switch r.IntN(8) {
		case 0:
			image[at] = nil
		case 1:
			image[at] = bytes.Clone(image[at])
		default:
			b := make([]byte, manifest.PageSize)
			for i := range b[:len(b)/2] {
				b[i] = byte(r.Uint32())
			}
			image[at] = b
		}
	}
	return out
}

func (p pages) read(b []byte, off int64) error {
	for ; len(b) > 0; b, off = b[manifest.PageSize:], off+manifest.PageSize {
		clear(b[:manifest.PageSize])
		if at := int(off / manifest.PageSize); at < len(p) {
			copy(b, p[at])
		}
	}
	return nil
}

// sources are the images, with the pages in which they may differ from another's: those that were written since.
func (g guest) sources(before guest) []snapshotstore.Source {
	var out []snapshotstore.Source
	for _, name := range slices.Sorted(maps.Keys(g)) {
		now, was := g[name], before[name]
		src := snapshotstore.Source{Name: name, Size: int64(len(now)) * manifest.PageSize, Read: now.read}
		if was != nil {
			src.Reference = was.read
		}
		for i, b := range now {
			if was == nil && b != nil || was != nil && (len(b) != len(was[i]) || len(b) > 0 && &b[0] != &was[i][0]) {
				src.Changed = append(src.Changed, snapshotstore.Range{Offset: int64(i) * manifest.PageSize, Length: manifest.PageSize})
			}
		}
		out = append(out, src)
	}
	return out
}

// wantImage reads an image of a checkpoint from a store, and compares every byte.
func (g guest) wantImage(ctx context.Context, blobs blob.Blobs, s *snapshotstore.Snapshot, name string) error {
	want, tree := g[name], s.Image(name)
	if tree == nil || tree.Size() != int64(len(want))*manifest.PageSize {
		return fmt.Errorf("%s has another size", name)
	}
	var mu sync.Mutex
	got := make(pages, len(want))
	_, err := snapshotstore.Fetch(ctx, blobs, tree.Runs(), snapshotstore.FetchOptions{Parallel: 2}, func(at int64, b []byte) error {
		mu.Lock()
		defer mu.Unlock()
		for ; len(b) > 0; b, at = b[manifest.PageSize:], at+1 {
			got[at] = bytes.Clone(b[:manifest.PageSize])
		}
		return nil
	})
	if err != nil {
		return err
	}
	a, b := make([]byte, manifest.PageSize), make([]byte, manifest.PageSize)
	for i := range want {
		_, _ = got.read(a, int64(i)*manifest.PageSize), want.read(b, int64(i)*manifest.PageSize)
		if !bytes.Equal(a, b) {
			return fmt.Errorf("page %d of %s is not what it was", i, name)
		}
	}
	return nil
}

// wantStored reads a whole checkpoint with nothing but a store and what its row says.
func (g guest) wantStored(ctx context.Context, blobs blob.Blobs, at runnerapi.Stored) error {
	s, err := snapshotstore.Open(ctx, blobs, refOf(at))
	if err != nil {
		return err
	}
	for name := range g {
		if err := g.wantImage(ctx, blobs, s, name); err != nil {
			return err
		}
	}
	return nil
}

func refOf(at runnerapi.Stored) manifest.Ref {
	return manifest.Ref{Key: at.Manifest, Digest: at.Digest, Bytes: at.Bytes}
}

// host is a runner, which has what it captured and, of what it fetched, the disk; memory comes when it is needed.
type host struct {
	*runnertest.Runner

	beats sync.Mutex // one at a time

	mu      sync.Mutex // guards what follows
	epoch   int64
	lost    bool
	sealing bool
	lazy    map[core.CheckpointID]*snapshotstore.Snapshot // whose memory is not whole
}

// space is a workspace.
type space struct {
	guest guest
	lazy  core.CheckpointID // whose memory it grew on; empty: all of it was on its host
	host  *host
}

// images is a controller, runners, and what everything should be.
type images struct {
	*world
	blobs  blob.Blobs // without steps
	random *rand.Rand
	hosts  []*host

	mu     sync.Mutex // guards what follows
	guests map[core.CheckpointID]guest
	grown  map[core.CheckpointID]core.CheckpointID // of what was captured: the lazy of its workspace
	spaces map[core.WorkspaceID]*space
	nodes  []core.CheckpointID // that may live, templates among them
	asleep []*work
	log    []string
	counts map[string]int // of what was done

	working sync.WaitGroup // everything that has begun
}

func newImages(t *testing.T, blobs blob.Blobs, seed uint64) *images {
	t.Helper()
	m := &images{
		blobs: blobs, random: rand.New(rand.NewPCG(seed, 1)), guests: map[core.CheckpointID]guest{}, grown: map[core.CheckpointID]core.CheckpointID{},
		spaces: map[core.WorkspaceID]*space{}, counts: map[string]int{},
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("seed %d:\n%s", seed, strings.Join(m.log, "\n"))
		}
	})
	var cfg controller.Config
	m.world = newWorld(t, func(c *controller.Config, r *runnertest.Config) {
		c.Store, c.StoreGrace, r.Fetch = crashingBlobs{blobs}, time.Hour, m.fetch
		c.RunnerLease = time.Hour
		cfg = *c
	})
	m.stop()
	m.Controller, m.stop = m.startOn(crashingStore{withoutPeriodicJobs{m.store}}, cfg)
	m.hosts = []*host{{Runner: m.runner}, {Runner: runnertest.Start(t, runnertest.Config{Fetch: m.fetch})}, {Runner: runnertest.Start(t, runnertest.Config{Fetch: m.fetch})}}
	for _, h := range m.hosts {
		h.lazy = map[core.CheckpointID]*snapshotstore.Snapshot{}
		m.join(h)
	}
	m.drain(m.hosts[1:]...)
	for i := range 2 {
		ws := m.create(fmt.Sprintf("w-%d", i))
		if m.guests[ws.Parent] == nil {
			m.guests[ws.Parent] = newGuest(m.random)
			m.nodes = append(m.nodes, ws.Parent)
		}
		m.spaces[ws.ID] = &space{guest: m.guests[ws.Parent], host: m.hosts[0]}
	}
	return m
}

func (m *images) said(format string, a ...any) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.log = append(m.log, fmt.Sprintf(format, a...))
}

func (m *images) count(what string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.counts[what]++
}

// join registers a host: as a process that has started, or one that is back.
func (m *images) join(h *host) {
	m.t.Helper()
	got, err := h.Announce(m.t.Context(), m.Fleet())
	if err != nil {
		m.t.Fatal(err)
	}
	h.mu.Lock()
	h.epoch, h.lost, h.sealing = got.LeaseEpoch, false, false
	h.mu.Unlock()
	if err := m.heartbeat(m.t.Context(), h); err != nil {
		m.t.Fatal(err)
	}
}

// drain has all forks that can go elsewhere go to others than the hosts that are given.
func (m *images) drain(list ...*host) {
	m.t.Helper()
	for _, h := range m.hosts {
		if _, err := m.Fleet().Drain(m.t.Context(), h.ID(), slices.Contains(list, h)); err != nil {
			m.t.Fatal(err)
		}
	}
}

// heartbeat stands still or is killed before it has the lock and after it has given it back: if it stood still with the lock, every other
// heartbeat of the host would wait for it, and with them the round that lets it go on.
func (m *images) heartbeat(ctx context.Context, h *host) error {
	if err := step(ctx); err != nil {
		return err
	}
	if err := m.beat(with(ctx, nil), h); err != nil {
		return err
	}
	return step(ctx)
}

func (m *images) beat(ctx context.Context, h *host) error {
	h.beats.Lock()
	defer h.beats.Unlock()
	h.mu.Lock()
	epoch, lost, fetching := h.epoch, h.lost, slices.Sorted(maps.Keys(h.lazy))
	h.mu.Unlock()
	if lost {
		return nil
	}
	beat := h.NextBeat(epoch)
	beat.Fetching = fetching
	out, err := m.Fleet().Heartbeat(ctx, h.ID(), beat)
	if err == nil {
		h.Obey(beat, out)
	}
	return err
}

// fetch is how a runner begins to have a checkpoint that it is to grow: it says so, and reads the disk.
func (m *images) fetch(ctx context.Context, id core.RunnerID, at runnerapi.Stored) (cp runnerapi.Checkpoint, err error) {
	defer func() {
		if err != nil {
			m.t.Errorf("fetch of %s, which is in use: %v", at.CheckpointID, err)
		}
	}()
	h := m.hosts[slices.IndexFunc(m.hosts, func(h *host) bool { return h.ID() == id })]
	h.mu.Lock()
	h.lazy[at.CheckpointID] = nil
	h.mu.Unlock()
	if err := m.heartbeat(ctx, h); err != nil {
		return cp, err
	}
	s, err := snapshotstore.Open(ctx, m.blobs, refOf(at))
	if err != nil {
		return cp, err
	}
	h.mu.Lock()
	h.lazy[at.CheckpointID] = s
	h.mu.Unlock()
	if err := m.guest(at.CheckpointID).wantImage(ctx, m.blobs, s, runnerapi.ImageDisk); err != nil {
		return cp, err
	}
	return cp, json.Unmarshal(s.Header().Record, &cp)
}

// whole is the rest of a fetch.
func (m *images) whole(ctx context.Context, h *host, id core.CheckpointID) error {
	h.mu.Lock()
	s := h.lazy[id]
	h.mu.Unlock()
	if s == nil {
		return nil
	}
	if err := m.guest(id).wantImage(ctx, crashingBlobs{m.blobs}, s, runnerapi.ImageMemory); err != nil {
		return err
	}
	h.mu.Lock()
	delete(h.lazy, id)
	h.mu.Unlock()
	return m.heartbeat(ctx, h)
}

func (m *images) guest(id core.CheckpointID) guest {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.guests[id]
}

// seal uploads a checkpoint as its host does.
func (m *images) seal(ctx context.Context, h *host, epoch int64, id core.CheckpointID, scratch string) error {
	m.mu.Lock()
	base, now := m.grown[id], m.guests[id]
	m.mu.Unlock()
	if err := m.whole(ctx, h, base); err != nil {
		return fmt.Errorf("what it grew on: %w", err)
	}
	cp, ok := h.Held(id)
	if !ok {
		return core.Errorf(core.NotFound, core.CodeCheckpointNotFound, "it was dropped")
	}
	u, err := h.BeginSeal(ctx, m, nil, epoch, id)
	if core.CodeOf(err) == core.CodeStateConflict {
		return nil
	}
	if err != nil {
		return err
	}
	out, err := m.write(ctx, cp, now, u.Begun, scratch)
	if err != nil {
		return errors.Join(err, u.Fail(ctx, err))
	}
	u.Commit.Stored = runnerapi.Stored{CheckpointID: id, Manifest: out.Manifest.Key, Digest: out.Manifest.Digest, Bytes: out.Manifest.Bytes}
	u.Commit.Needs = out.Needs
	for _, o := range out.Objects {
		u.Commit.Written = append(u.Commit.Written, runnerapi.StoredObject{Key: o.Key, Bytes: o.Bytes})
	}
	return u.End(ctx)
}

func (m *images) write(ctx context.Context, cp runnerapi.Checkpoint, now guest, begun runnerapi.SealBegun, scratch string) (*snapshotstore.Written, error) {
	var reference *snapshotstore.Snapshot
	var before guest
	if begun.Reference != nil {
		var err error
		if reference, err = snapshotstore.Open(ctx, crashingBlobs{m.blobs}, refOf(*begun.Reference)); err != nil {
			return nil, fmt.Errorf("the reference: %w", err)
		}
		before = m.guest(begun.Reference.CheckpointID)
	}
	record, err := json.Marshal(cp)
	if err != nil {
		return nil, err
	}
	h := manifest.Header{
		ProjectID: begun.ProjectID, CheckpointID: cp.ID, Parent: cp.Parent, CapturedAt: cp.CreatedAt.UTC().Format(time.RFC3339Nano),
		GuestImage: runnertest.DefaultImage.Digest, Class: cp.Class.Fields(), Resources: cp.Resources, Record: record,
	}
	return snapshotstore.Write(ctx, crashingBlobs{m.blobs}, begun.Prefix, h, reference, now.sources(before), snapshotstore.Options{Dir: scratch, Workers: 1})
}
