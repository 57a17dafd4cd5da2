package snapshotstore_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/blob/dir"
	"github.com/coppice-dev/coppice/snapshotstore/envelope"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

const page = manifest.PageSize

// image is a sparse image in memory.
type image struct {
	size  int64
	pages map[int64][]byte
}

func newImage(size int64) *image { return &image{size: size, pages: make(map[int64][]byte)} }

func (m *image) clone() *image { return &image{size: m.size, pages: maps.Clone(m.pages)} }

func (m *image) read(p []byte, off int64) error {
	for ; len(p) > 0; p, off = p[page:], off+page {
		clear(p[:page])
		copy(p[:page], m.pages[off/page])
	}
	return nil
}

// write changes n random pages: to content that compresses by half, to zeros, or to their present content. It returns
// where.
func (m *image) write(r *rand.Rand, n int) []snapshotstore.Range {
	seen := make(map[int64]bool)
	for range n {
		at := r.Int64N((m.size + page - 1) / page)
		seen[at] = true
		switch r.IntN(8) {
		case 0:
			delete(m.pages, at)
		case 1:
		default:
			m.pages[at] = content(r)
		}
	}
	var out []snapshotstore.Range
	for _, p := range slices.Sorted(maps.Keys(seen)) {
		out = append(out, snapshotstore.Range{Offset: p * page, Length: page})
	}
	return out
}

func content(r *rand.Rand) []byte {
	b := make([]byte, page)
	for i := range page / 2 {
		b[i] = byte(r.Uint32())
	}
	return b
}

func (m *image) whole() []snapshotstore.Range {
	return []snapshotstore.Range{{Offset: 0, Length: m.size}}
}

// rig is a store in a directory and a project.
type rig struct {
	t       *testing.T
	dir     string
	blobs   blob.Blobs
	project core.ProjectID
	secret  *core.DataKey // key of the project; nil: nothing is encrypted
	version int64         // of secret
	ring    envelope.Ring // keys of everything that was written
}

func newRig(t *testing.T) *rig {
	t.Helper()
	x := &rig{t: t, dir: t.TempDir(), project: core.NewID[core.ProjectID]()}
	store, err := dir.Open(x.dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	x.blobs = store
	return x
}

// seal writes a checkpoint with one image.
func (x *rig) seal(ref *snapshotstore.Snapshot, before, now *image, changed []snapshotstore.Range) *snapshotstore.Written {
	x.t.Helper()
	src := snapshotstore.Source{Name: "memory", Size: now.size, Changed: changed, Read: now.read}
	if before != nil {
		src.Reference = before.read
	}
	return x.sealAll(ref, src)
}

func (x *rig) sealAll(ref *snapshotstore.Snapshot, images ...snapshotstore.Source) *snapshotstore.Written {
	x.t.Helper()
	w, err := x.write(x.t.Context(), ref, images...)
	if err != nil {
		x.t.Fatal(err)
	}
	return w
}

// write writes a new checkpoint.
func (x *rig) write(ctx context.Context, ref *snapshotstore.Snapshot, images ...snapshotstore.Source) (*snapshotstore.Written, error) {
	id := core.NewID[core.CheckpointID]()
	h := manifest.Header{
		ProjectID: x.project, CheckpointID: id, CapturedAt: "2026-11-22T12:00:00Z", GuestImage: core.DigestOf([]byte("image")),
		Class: map[string]string{"arch": "amd64"}, Resources: core.Resources{VCPUs: 1, MemoryMiB: 128, DiskGiB: 1},
	}
	prefix := fmt.Sprintf("v1/%s/%s/1/", x.project, id)
	return snapshotstore.Write(ctx, x.store(), prefix, h, ref, images, snapshotstore.Options{Dir: x.t.TempDir(), Key: x.key(prefix)})
}

// load reads a whole image back, using only the store and the digest.
func (x *rig) load(ref manifest.Ref, name string) (*image, snapshotstore.Fetched, error) {
	x.t.Helper()
	s, err := snapshotstore.Open(x.t.Context(), x.store(), ref)
	if err != nil {
		return nil, snapshotstore.Fetched{}, err
	}
	tree := s.Image(name)
	m := newImage(tree.Size())
	var mu sync.Mutex
	got, err := snapshotstore.Fetch(x.t.Context(), x.store(), tree.Runs(), snapshotstore.FetchOptions{}, func(at int64, b []byte) error {
		mu.Lock()
		defer mu.Unlock()
		for ; len(b) > 0; b, at = b[page:], at+1 {
			m.pages[at] = bytes.Clone(b[:page])
		}
		return nil
	})
	return m, got, err
}

func (x *rig) check(ref manifest.Ref, name string, want *image) snapshotstore.Fetched {
	x.t.Helper()
	got, fetched, err := x.load(ref, name)
	if err != nil {
		x.t.Fatal(err)
	}
	got.wantEqual(x.t, want)
	return fetched
}

func (m *image) wantEqual(t *testing.T, want *image) {
	t.Helper()
	if m.size != want.size {
		t.Fatalf("the image has %d bytes instead of %d", m.size, want.size)
	}
	for at := range (want.size + page - 1) / page {
		a, b := make([]byte, page), make([]byte, page)
		_, _ = m.read(a, at*page), want.read(b, at*page)
		if !bytes.Equal(a, b) {
			t.Fatalf("page %d differs", at)
		}
	}
}

// TestGenerations: every checkpoint of a deep chain reads back unchanged, from its own manifest and at most eight
// others.
func TestGenerations(t *testing.T) {
	t.Parallel()
	x := newRig(t)
	r := rand.New(rand.NewPCG(1, 2))
	m := newImage(8<<20 + 12345)
	m.write(r, 750)
	w := x.seal(nil, nil, m, m.whole())
	type generation struct {
		ref manifest.Ref
		m   *image
	}
	chain := []generation{{w.Manifest, m.clone()}}
	ref := w.Snapshot
	var dirty, stored int64
	for range 64 {
		before := m.clone()
		changed := m.write(r, 100)
		w := x.seal(ref, before, m, changed)
		dirty, stored = dirty+w.Dirty, stored+w.Stored
		if n := len(w.Snapshot.Header().Shared); n > manifest.MaxShared {
			t.Fatalf("it takes nodes from %d manifests", n)
		}
		ref = w.Snapshot
		if len(chain)%7 == 0 { // like another process
			var err error
			if ref, err = snapshotstore.Open(t.Context(), x.store(), w.Manifest); err != nil {
				t.Fatal(err)
			}
		}
		chain = append(chain, generation{w.Manifest, m.clone()})
	}
	for _, g := range chain {
		x.check(g.ref, "memory", g.m)
	}
	t.Logf("stored %d of %d dirty bytes, %d a generation besides half of them", stored, dirty, (stored-dirty/2)/64)
	if most := dirty*6/10 + 64*(64<<10); stored > most {
		t.Errorf("stored %d bytes, more than %d", stored, most)
	}
}

// TestNothingTwice: a page that did not change is not stored again, wherever it came from; zeros are never stored.
func TestNothingTwice(t *testing.T) {
	t.Parallel()
	both(t, testNothingTwice)
}

func testNothingTwice(t *testing.T, x *rig) {
	t.Helper()
	r := rand.New(rand.NewPCG(3, 4))
	m := newImage(8 << 20)
	m.write(r, 500)
	first := x.seal(nil, nil, m, m.whole())
	if want := int64(len(m.pages)) * page; first.Dirty != want {
		t.Errorf("stored %d bytes of pages instead of %d", first.Dirty, want)
	}
	same := x.seal(first.Snapshot, m, m, m.whole())
	if same.Dirty != 0 || len(same.Objects) != 1 {
		t.Errorf("what has not changed is stored: %+v", same)
	}
	x.check(same.Manifest, "memory", m)
	if len(first.Needs) != 2 || len(same.Needs) != 3 {
		t.Errorf("needs %v, then %v", first.Needs, same.Needs)
	}
	empty := newImage(8 << 20)
	zeros := x.seal(same.Snapshot, m, empty, m.whole())
	if zeros.Dirty != 0 || len(zeros.Needs) != 1 {
		t.Errorf("zeros are stored: %+v", zeros)
	}
	x.check(zeros.Manifest, "memory", empty)
}

// TestSizes: an image may be of any size, grow and shrink.
func TestSizes(t *testing.T) {
	t.Parallel()
	both(t, testSizes)
}

func testSizes(t *testing.T, x *rig) {
	t.Helper()
	r := rand.New(rand.NewPCG(5, 6))
	var ref *snapshotstore.Snapshot
	var before *image
	for _, size := range []int64{0, 1, page, page + 1, manifest.LeafPages * page, manifest.LeafPages*page + 1, 70 << 20, 5 << 20, 17*page + 3, 0, 33 << 20} {
		m := newImage(size)
		if before != nil {
			m = before.clone()
			m.size = size
			maps.DeleteFunc(m.pages, func(at int64, _ []byte) bool { return at*page >= size })
		}
		if size > 0 {
			m.write(r, 50)
		}
		w := x.seal(ref, before, m, m.whole())
		x.check(w.Manifest, "memory", m)
		ref, before = w.Snapshot, m
	}
}

// TestImages: the images of a checkpoint do not mix.
func TestImages(t *testing.T) {
	t.Parallel()
	both(t, testImages)
}

func testImages(t *testing.T, x *rig) {
	t.Helper()
	r := rand.New(rand.NewPCG(7, 8))
	names := []string{"memory", "device_state", "disk"}
	var sources []snapshotstore.Source
	all := make(map[string]*image)
	for i, name := range names {
		m := newImage(int64(i+1) << 20)
		m.write(r, 100)
		all[name] = m
		sources = append(sources, snapshotstore.Source{Name: name, Size: m.size, Changed: m.whole(), Read: m.read})
	}
	w := x.sealAll(nil, sources...)
	for _, name := range names {
		x.check(w.Manifest, name, all[name])
	}
}

// TestEveryByte: a flipped bit in any byte of any object is found and the object named. The same holds for an object
// that was cut off or removed.
func TestEveryByte(t *testing.T) {
	t.Parallel()
	both(t, testEveryByte)
}

func testEveryByte(t *testing.T, x *rig) {
	t.Helper()
	r := rand.New(rand.NewPCG(11, 12))
	m := newImage(2 << 20)
	m.pages[3], m.pages[4], m.pages[300] = content(r)[:64], []byte("hello"), []byte("there")
	first := x.seal(nil, nil, m, m.whole())
	before := m.clone()
	m.pages[5] = []byte("more")
	second := x.seal(first.Snapshot, before, m, m.whole())
	x.check(second.Manifest, "memory", m)
	bytesSeen := 0
	for _, key := range second.Needs {
		path := filepath.Join(x.dir, filepath.FromSlash(key))
		whole, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		expect := func(what string, code core.Code) {
			t.Helper()
			_, _, err := x.load(second.Manifest, "memory")
			if core.CodeOf(err) != code || !strings.Contains(core.MessageOf(err), key) {
				t.Fatalf("%s of %s: %v", what, key, err)
			}
		}
		put := func(b []byte) {
			t.Helper()
			if err := errors.Join(os.Remove(path), os.WriteFile(path, b, 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		for i := range whole {
			b := bytes.Clone(whole)
			b[i] ^= 1 << (i % 8)
			put(b)
			expect("byte "+strconv.Itoa(i), core.CodeCheckpointCorrupt)
			bytesSeen++
		}
		put(whole[:len(whole)-1])
		expect("the end", core.CodeCheckpointCorrupt)
		put(append([]byte("something else altogether"), whole...)) // another object under the key
		expect("another object in the place", core.CodeCheckpointCorrupt)
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		expect("the whole", core.CodeCheckpointIncomplete)
		if err := os.WriteFile(path, whole, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d bytes of %d objects", bytesSeen, len(second.Needs))
	x.check(second.Manifest, "memory", m)
}

// flaky changes one byte of the first read of every object.
type flaky struct {
	blob.Blobs

	mu   sync.Mutex // guards seen
	seen map[string]bool
}

func (f *flaky) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	r, err := f.Blobs.Get(ctx, key, off, n)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.seen[key] {
		return r, nil
	}
	f.seen[key] = true
	b, err := io.ReadAll(r)
	b[len(b)/2] ^= 1
	return io.NopCloser(bytes.NewReader(b)), errors.Join(err, r.Close())
}

// TestReadAgain: bytes that were changed on the way, and not in the store, are read again.
func TestReadAgain(t *testing.T) {
	t.Parallel()
	both(t, testReadAgain)
}

func testReadAgain(t *testing.T, x *rig) {
	t.Helper()
	r := rand.New(rand.NewPCG(13, 14))
	m := newImage(2 << 20)
	m.write(r, 100)
	w := x.seal(nil, nil, m, m.whole())
	x.blobs = &flaky{Blobs: x.blobs, seen: make(map[string]bool)}
	x.check(w.Manifest, "memory", m)
}

// TestChanged: the maps of a checkpoint and of an ancestor show which pages a holder of the ancestor lacks.
func TestChanged(t *testing.T) {
	t.Parallel()
	both(t, testChanged)
}

func testChanged(t *testing.T, x *rig) {
	t.Helper()
	r := rand.New(rand.NewPCG(15, 16))
	m := newImage(16 << 20)
	m.write(r, 1500)
	root := x.seal(nil, nil, m, m.whole())
	rootImage := m.clone()
	ref := root.Snapshot
	for range 5 {
		before := m.clone()
		changed := m.write(r, 60)
		ref = x.seal(ref, before, m, changed).Snapshot
	}
	from, err := snapshotstore.Open(t.Context(), x.store(), root.Manifest)
	if err != nil {
		t.Fatal(err)
	}
	to, err := snapshotstore.Open(t.Context(), x.store(), ref.Ref())
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	got := rootImage.clone()
	fetched, err := snapshotstore.Fetch(t.Context(), x.store(), to.Image("memory").Changed(from.Image("memory")), snapshotstore.FetchOptions{}, func(at int64, b []byte) error {
		mu.Lock()
		defer mu.Unlock()
		for ; len(b) > 0; b, at = b[page:], at+1 {
			got.pages[at] = bytes.Clone(b[:page])
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	got.wantEqual(t, m)
	if fetched.Pages > 5*60 || fetched.Pages == 0 {
		t.Errorf("%d pages for 5 generations of at most 60", fetched.Pages)
	}
}

// TestFailedWrite: an unreadable source, a store that refuses writes, and the end of the context each end the write
// with their own error.
func TestFailedWrite(t *testing.T) {
	t.Parallel()
	x := newRig(t)
	broken := errors.New("the disk fails")
	m := newImage(24 << 20)
	r := rand.New(rand.NewPCG(17, 18))
	for at := range m.size / page {
		m.pages[at] = content(r)
	}
	write := func(ctx context.Context, blobs blob.Blobs, read func([]byte, int64) error) error {
		y := &rig{t: t, blobs: blobs, project: x.project}
		_, err := y.write(ctx, nil, snapshotstore.Source{Name: "memory", Size: m.size, Changed: m.whole(), Read: read})
		return err
	}
	err := write(t.Context(), x.blobs, func(p []byte, off int64) error {
		if off > 10<<20 {
			return broken
		}
		return m.read(p, off)
	})
	if !errors.Is(err, broken) {
		t.Errorf("a source that fails: %v", err)
	}
	if err := write(t.Context(), refusing{x.blobs, broken}, m.read); !errors.Is(err, broken) {
		t.Errorf("a store that fails: %v", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	err = write(ctx, x.blobs, func(p []byte, off int64) error {
		if off > 20<<20 {
			cancel(broken)
		}
		return m.read(p, off)
	})
	if !errors.Is(err, broken) {
		t.Errorf("a context that ends: %v", err)
	}
	for info, err := range x.blobs.List(t.Context(), "") {
		if err != nil || strings.HasSuffix(info.Key, "manifest") {
			t.Errorf("left: %+v, %v", info, err)
		}
	}
}

// refusing refuses every Put.
type refusing struct {
	blob.Blobs
	err error
}

func (r refusing) Put(context.Context, string, io.ReaderAt, int64, core.Digest) error { return r.err }

// TestCheck: every frame is in exactly one part, data that several checkpoints share is read once, and each fault is
// named.
func TestCheck(t *testing.T) {
	t.Parallel()
	x := newRig(t)
	r := rand.New(rand.NewPCG(19, 20))
	m := newImage(8 << 20)
	m.write(r, 800)
	first := x.seal(nil, nil, m, m.whole())
	before := m.clone()
	second := x.seal(first.Snapshot, before, m, m.write(r, 200))
	check := func(part snapshotstore.Part, refs ...manifest.Ref) (*snapshotstore.Checker, []error) {
		t.Helper()
		c := snapshotstore.NewChecker(x.store(), part)
		var faults []error
		for _, ref := range refs {
			found, err := c.Check(t.Context(), ref)
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range found {
				if !strings.Contains(core.MessageOf(f.Err), f.Object) {
					t.Errorf("%v names another object than %s", f.Err, f.Object)
				}
				faults = append(faults, f.Err)
			}
		}
		return c, faults
	}
	var err error
	whole, faults := check(snapshotstore.Whole, first.Manifest, second.Manifest)
	if len(faults) > 0 || whole.Manifests != 2 || whole.Frames == 0 {
		t.Fatalf("%+v, %v", whole, faults)
	}
	var parts int64
	for i := range uint64(5) {
		c, _ := check(snapshotstore.Part{Which: i + 1, Of: 5}, first.Manifest, second.Manifest)
		parts += c.Frames
	}
	none, _ := check(snapshotstore.Part{}, second.Manifest)
	if parts != whole.Frames || none.Frames != 0 || none.Manifests != 1 {
		t.Errorf("%d frames in parts, %d in all, %d in none", parts, whole.Frames, none.Frames)
	}
	for name, fresh := range map[string]bool{"one checker": false, "others": true} { // one request at a time
		c := snapshotstore.NewChecker(x.store(), snapshotstore.Whole)
		var steps, frames int64
		for from := new(snapshotstore.Position); from != nil; steps++ {
			if fresh {
				frames += c.Frames
				c = snapshotstore.NewChecker(x.store(), snapshotstore.Whole)
			}
			if _, from, err = c.CheckFrom(t.Context(), second.Manifest, *from, time.Unix(1, 0)); err != nil {
				t.Fatal(err)
			}
		}
		all, _ := check(snapshotstore.Whole, second.Manifest)
		if frames+c.Frames != all.Frames || steps < 2 {
			t.Errorf("%s: %d frames in %d steps, want %d", name, frames+c.Frames, steps, all.Frames)
		}
	}
	pack := first.Objects[0].Key
	path := filepath.Join(x.dir, filepath.FromSlash(pack))
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b[100] ^= 1
	if err := errors.Join(os.Remove(path), os.WriteFile(path, b, 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, faults := check(snapshotstore.Whole, second.Manifest); len(faults) != 1 || core.CodeOf(faults[0]) != core.CodeCheckpointCorrupt || !strings.Contains(core.MessageOf(faults[0]), pack) {
		t.Errorf("a changed pack: %v", faults)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if _, faults := check(snapshotstore.Whole, second.Manifest); len(faults) == 0 || core.CodeOf(faults[0]) != core.CodeCheckpointIncomplete {
		t.Errorf("a missing pack: %v", faults)
	}
}

// counting counts the reads from packs.
type counting struct {
	blob.Blobs
	packs atomic.Int64
}

func (c *counting) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	if strings.Contains(key, "/pack-") {
		c.packs.Add(1)
	}
	return c.Blobs.Get(ctx, key, off, n)
}

// TestTampered: a well-formed manifest that is not the sealed one is refused before anything else is read.
func TestTampered(t *testing.T) {
	t.Parallel()
	x := newRig(t)
	r := rand.New(rand.NewPCG(21, 22))
	m := newImage(2 << 20)
	m.write(r, 100)
	w := x.seal(nil, nil, m, m.whole())
	path := filepath.Join(x.dir, filepath.FromSlash(w.Manifest.Key))
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	h, nodes, err := manifest.Decode(b)
	if err != nil {
		t.Fatal(err)
	}
	h.Resources.MemoryMiB *= 2
	if b, err = manifest.Encode(h, nodes); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Remove(path), os.WriteFile(path, b, 0o600)); err != nil {
		t.Fatal(err)
	}
	c := &counting{Blobs: x.blobs}
	x.blobs = c
	if _, _, err := x.load(w.Manifest, "memory"); core.CodeOf(err) != core.CodeCheckpointCorrupt || c.packs.Load() != 0 {
		t.Errorf("after %d reads of packs: %v", c.packs.Load(), err)
	}
}
