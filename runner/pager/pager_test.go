package pager_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/internal/test/tests3"
	"github.com/coppice-dev/coppice/runner/pager"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/blob/bloburl"
	"github.com/coppice-dev/coppice/snapshotstore/blob/peers"
	"github.com/coppice-dev/coppice/snapshotstore/blob/s3"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// settings are sent to a test's pager on its standard input.
type settings struct {
	Dir, Store, AccessKey, SecretKey string
	Peer                             string // a directory with the objects that another runner has
}

const beAPager = "be-a-pager"

// TestMain runs the tests. When this binary is started again with an argument, it is the pager: a process that maps its
// own file system would wait for itself.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == beAPager {
		if err := serve(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	testleak.Main(m)
}

func serve() (err error) {
	var cfg settings
	if err := json.NewDecoder(os.Stdin).Decode(&cfg); err != nil {
		return err
	}
	store, err := open(cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	blobs, err := peers.New(store, peerDir(cfg.Peer), slog.New(slog.NewTextHandler(os.Stderr, nil)), nil)
	if err != nil {
		return err
	}
	s, err := pager.New(pager.Config{Dir: cfg.Dir, Blobs: blobs, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	return s.Run(ctx)
}

// peerDir is another runner.
type peerDir string

// Ask implements peers.Asker.
func (d peerDir) Ask(_ context.Context, _ peers.Peer, key string, off, n int64) ([]byte, error) {
	b, err := os.ReadFile(filepath.Join(string(d), key))
	if err != nil || off > int64(len(b)) {
		return nil, blob.NotFound(key)
	}
	return b[off:min(off+n, int64(len(b)))], nil
}

// TestPeers: an image comes from a runner that is named with it; the store no longer has any of its pages.
func TestPeers(t *testing.T) {
	files, peer := t.TempDir(), t.TempDir()
	x := newRig(t, settings{Store: "dir:" + files, Peer: peer})
	b := memory(rand.New(rand.NewPCG(10, 1)), 512)
	w := x.seal(b, nil, nil)
	if err := os.CopyFS(peer, os.DirFS(files)); err != nil {
		t.Fatal(err)
	}
	for _, o := range w.Objects {
		if o.Key != w.Manifest.Key {
			if err := os.Remove(filepath.Join(files, o.Key)); err != nil {
				t.Fatal(err)
			}
		}
	}
	x.put(pager.Image{ID: "a", Source: sourceOf(w), Peers: []peers.Peer{{ID: core.NewID[core.RunnerID](), Endpoint: "https://other:1"}}}, x.part(len(b)))
	wantEqual(t, x.mapped("a", len(b)), b, "the image whose pages a peer has")
}

func open(cfg settings) (bloburl.Store, error) {
	return bloburl.Dial(cfg.Store, s3.Credentials{AccessKey: cfg.AccessKey, SecretKey: cfg.SecretKey})
}

const page = manifest.PageSize

// rig is a store, a checkpoint in it and a pager.
type rig struct {
	t      *testing.T
	cfg    settings
	blobs  bloburl.Store
	client *pager.Client
	pid    int
}

func newRig(t *testing.T, cfg settings) *rig {
	t.Helper()
	require.Root(t)
	require.That(t, "fuse", unix.Access("/dev/fuse", unix.R_OK) == nil, "modprobe fuse")
	dir, err := os.MkdirTemp("", "pager") //nolint:usetesting // the path of a socket must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	cfg.Dir = dir
	x := &rig{t: t, cfg: cfg}
	if x.blobs, err = open(cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = x.blobs.Close() })
	x.start()
	return x
}

func newDirRig(t *testing.T) *rig {
	t.Helper()
	return newRig(t, settings{Store: "dir:" + t.TempDir()})
}

func (x *rig) start() {
	x.t.Helper()
	config, err := json.Marshal(x.cfg)
	if err != nil {
		x.t.Fatal(err)
	}
	client, fresh, err := pager.Ensure(x.t.Context(), pager.Process{Dir: x.cfg.Dir, Command: []string{os.Args[0], beAPager}, Config: config})
	if err != nil || !fresh {
		x.t.Fatal(fresh, err)
	}
	hello, err := client.Hello(x.t.Context())
	if err != nil || hello.Instance == "" {
		x.t.Fatal(hello, err)
	}
	x.client, x.pid = client, hello.PID
	x.t.Cleanup(func() {
		if x.t.Failed() {
			log, _ := os.ReadFile(filepath.Join(x.cfg.Dir, "log"))
			x.t.Logf("the pager said:\n%s", log)
		}
		_ = client.Stop(context.Background())
		x.waitGone(hello.PID)
	})
}

func (x *rig) waitGone(pid int) {
	x.t.Helper()
	eventually.True(x.t, fmt.Sprintf("pager %d ends", pid), func() bool { return syscall.Kill(pid, 0) != nil })
}

// memory returns random bytes with some pages of zeros.
func memory(r *rand.Rand, pages int) []byte {
	b := make([]byte, pages*page)
	for p := range pages {
		if r.IntN(3) == 0 {
			continue
		}
		for i := 0; i < page; i += 2 {
			b[p*page+i] = byte(r.Uint32())
		}
	}
	return b
}

func source(b []byte) snapshotstore.Source {
	return snapshotstore.Source{Name: "memory", Size: int64(len(b)), Changed: []snapshotstore.Range{{Length: int64(len(b))}}, Read: func(p []byte, off int64) error {
		clear(p[copy(p, b[off:]):])
		return nil
	}}
}

// seal stores bytes as a checkpoint's memory.
func (x *rig) seal(now []byte, ref *snapshotstore.Written, before []byte) *snapshotstore.Written {
	x.t.Helper()
	id, project := core.NewID[core.CheckpointID](), core.NewID[core.ProjectID]()
	h := manifest.Header{
		ProjectID: project, CheckpointID: id, CapturedAt: "2026-11-22T12:00:00Z", GuestImage: core.DigestOf([]byte("image")),
		Class: map[string]string{"arch": "amd64"}, Resources: core.Resources{VCPUs: 1, MemoryMiB: 128, DiskGiB: 1},
	}
	src := source(now)
	var reference *snapshotstore.Snapshot
	if ref != nil {
		src.Reference, reference = source(before).Read, ref.Snapshot
	}
	w, err := snapshotstore.Write(x.t.Context(), x.blobs, fmt.Sprintf("v1/%s/%s/1/", project, id), h, reference, []snapshotstore.Source{src}, snapshotstore.Options{Dir: x.t.TempDir()})
	if err != nil {
		x.t.Fatal(err)
	}
	return w
}

func sourceOf(w *snapshotstore.Written) pager.Source {
	return pager.Source{Manifest: w.Manifest, CheckpointID: w.Snapshot.Header().CheckpointID, Image: "memory"}
}

func (x *rig) part(size int) *os.File {
	x.t.Helper()
	f, err := os.Create(filepath.Join(x.t.TempDir(), "part"))
	if err != nil {
		x.t.Fatal(err)
	}
	x.t.Cleanup(func() { _ = f.Close() })
	if err := f.Truncate(int64(size)); err != nil {
		x.t.Fatal(err)
	}
	return f
}

func (x *rig) put(im pager.Image, part *os.File) pager.Status {
	x.t.Helper()
	st, err := x.client.Put(x.t.Context(), im, part)
	if err != nil {
		x.t.Fatal(err)
	}
	return st
}

// mapped maps an image privately, like a VMM.
func (x *rig) mapped(id string, size int) []byte {
	x.t.Helper()
	f, err := x.client.Open(x.t.Context(), id)
	if err != nil {
		x.t.Fatal(err)
	}
	defer f.Close()
	m, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		x.t.Fatal(err)
	}
	x.t.Cleanup(func() { _ = unix.Munmap(m) })
	return m
}

// await waits until want accepts the image's status, or until the image is not served any more: then it returns nil.
func (x *rig) await(id string, want func(*pager.Status) bool) *pager.Status {
	x.t.Helper()
	ctx, cancel := context.WithTimeout(x.t.Context(), time.Minute)
	defer cancel()
	var got *pager.Status
	found := errors.New("found")
	ctx, stop := context.WithCancelCause(ctx)
	err := x.client.Watch(ctx, func(all []pager.Status) {
		var now *pager.Status
		if i := slices.IndexFunc(all, func(s pager.Status) bool { return s.ID == id }); i >= 0 {
			now = &all[i]
		}
		if want(now) {
			got = now
			stop(found)
		}
	})
	if !errors.Is(err, found) {
		x.t.Fatal(err)
	}
	return got
}

func gone(s *pager.Status) bool { return s == nil }

func wantEqual(t *testing.T, got, want []byte, where string) {
	t.Helper()
	for p := 0; p < len(want); p += page {
		if !bytes.Equal(got[p:p+page], want[p:p+page]) {
			t.Fatalf("%s: page %d differs", where, p/page)
		}
	}
}

func TestRead(t *testing.T) {
	x := newDirRig(t)
	r := rand.New(rand.NewPCG(1, 1))
	b := memory(r, 5000)
	w := x.seal(b, nil, nil)
	part := x.part(len(b))
	x.put(pager.Image{ID: "a", Source: sourceOf(w)}, part)
	m := x.mapped("a", len(b))
	for range 300 {
		p := r.IntN(len(b)/page) * page
		if !bytes.Equal(m[p:p+page], b[p:p+page]) {
			t.Fatalf("page %d differs: %x instead of %x", p/page, m[p:p+8], b[p:p+8])
		}
	}
	m[0]++ // changes only the private mapping
	other := x.mapped("a", len(b))
	wantEqual(t, other, b, "another mapping")
	st := x.await("a", func(s *pager.Status) bool { return s != nil && s.Whole })
	if st.Here != st.Pages || st.Problem != nil || st.Opened != 2 || st.Demanded == 0 {
		t.Errorf("status %+v", st)
	}
	whole := make([]byte, len(b))
	if _, err := part.ReadAt(whole, 0); err != nil {
		t.Fatal(err)
	}
	wantEqual(t, whole, b, "the image's own file")
	var fs unix.Stat_t
	if err := unix.Fstat(int(part.Fd()), &fs); err != nil || fs.Blocks*512 > int64(len(b))*3/4 {
		t.Errorf("pages of zeros take room: %d of %d bytes, %v", fs.Blocks*512, len(b), err)
	}
}

// TestReadOnly: a file can be opened for writing and cannot be written.
func TestReadOnly(t *testing.T) {
	x := newDirRig(t)
	b := memory(rand.New(rand.NewPCG(2, 1)), 64)
	x.put(pager.Image{ID: "a", Source: sourceOf(x.seal(b, nil, nil))}, x.part(len(b)))
	f, err := x.client.Open(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	again, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), os.O_RDWR, 0) // like a QEMU before 8.2
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if n, err := again.WriteAt([]byte("x"), 0); !errors.Is(err, unix.EROFS) || n != 0 {
		t.Errorf("a write: %d, %v", n, err)
	}
	if err := again.Truncate(0); !errors.Is(err, unix.EROFS) {
		t.Errorf("a truncation: %v", err)
	}
	first := x.mapped("a", len(b))
	wantEqual(t, first, b, "a mapping")
	first[0]++
	for name, file := range map[string]*os.File{"for reading": f, "for writing": again} {
		if _, err := unix.Mmap(int(file.Fd()), 0, page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
			t.Errorf("a file that is open %s can be mapped for writing to all", name)
		}
	}
	private, err := unix.Mmap(int(again.Fd()), 0, len(b), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(private) }()
	wantEqual(t, private, b, "a private mapping of what is open for writing")
	if first[0] != b[0]+1 {
		t.Error("what a mapping has of its own is gone")
	}
	wantEqual(t, first[page:], b[page:], "the first mapping")
	got := make([]byte, len(b))
	if _, err := again.ReadAt(got, 0); err != nil {
		t.Fatal(err)
	}
	wantEqual(t, got, b, "the file")
}

// TestRetire: an image ends when it is complete, nobody has it open, and it was taken, in any order.
func TestRetire(t *testing.T) {
	x := newDirRig(t)
	b := memory(rand.New(rand.NewPCG(3, 1)), 500)
	w := x.seal(b, nil, nil)
	part := x.part(len(b))
	info, err := part.Stat()
	if err != nil {
		t.Fatal(err)
	}
	if st := x.put(pager.Image{ID: "a", Source: sourceOf(w)}, part); st.Part != info.Sys().(*syscall.Stat_t).Ino {
		t.Errorf("the pager names inode %d as its part", st.Part)
	}
	f, err := x.client.Open(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	if err := x.client.Taken(t.Context(), "b"); err != nil { // there is no such image
		t.Error(err)
	}
	x.await("a", func(s *pager.Status) bool { return s != nil && s.Whole && s.Opened == 1 })
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	x.await("a", func(s *pager.Status) bool { return s != nil && s.Opened == 0 })
	if f, err = x.client.Open(t.Context(), "a"); err != nil {
		t.Fatalf("what nobody has taken has ended: %v", err)
	}
	if err := x.client.Taken(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	x.await("a", func(s *pager.Status) bool { return s != nil && s.Taken })
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	x.await("a", gone)
	if _, err := x.client.Open(t.Context(), "a"); core.CategoryOf(err) != core.NotFound {
		t.Errorf("opened again: %v", err)
	}
	if err := x.client.Drop(t.Context(), "a"); err != nil {
		t.Error(err)
	}
}

// TestSeed begins with the bytes of another image.
func TestSeed(t *testing.T) {
	x := newDirRig(t)
	r := rand.New(rand.NewPCG(4, 1))
	before := memory(r, 2000)
	first := x.seal(before, nil, nil)
	now := bytes.Clone(before)
	for range 100 {
		p := r.IntN(2000) * page
		if r.IntN(4) == 0 {
			clear(now[p : p+page])
		} else {
			now[p+r.IntN(page)]++
		}
	}
	second := x.seal(now, first, before)
	part := x.part(len(now))
	if _, err := part.WriteAt(before, 0); err != nil {
		t.Fatal(err)
	}
	seed := sourceOf(first)
	st := x.put(pager.Image{ID: "b", Source: sourceOf(second), Seed: &seed}, part)
	if lacking := st.Pages - st.Here; lacking > 100 {
		t.Errorf("%d pages lack", lacking)
	}
	wantEqual(t, x.mapped("b", len(now)), now, "the image")
	if st := x.await("b", func(s *pager.Status) bool { return s != nil && s.Whole }); st.Bytes > 120*page*2 {
		t.Errorf("%d bytes were read for 100 pages", st.Bytes)
	}
}

// TestWant: wanted pages arrive before anybody reads them.
func TestWant(t *testing.T) {
	x := newDirRig(t)
	b := memory(rand.New(rand.NewPCG(5, 1)), 4000)
	x.put(pager.Image{ID: "a", Source: sourceOf(x.seal(b, nil, nil)), Want: []pager.Range{{First: 100, Count: 200}, {First: 3990, Count: 1 << 40}}}, x.part(len(b)))
	m := x.mapped("a", len(b))
	x.await("a", func(s *pager.Status) bool { return s != nil && s.Whole })
	wantEqual(t, m[2100*page:2101*page], b[2100*page:2101*page], "what is not wanted") // the first read: now the kernel is given the wanted pages
	x.resident(m, 100, 200)
	wantEqual(t, m[100*page:300*page], b[100*page:300*page], "what is wanted")
	wantEqual(t, m[2000*page:2001*page], b[2000*page:2001*page], "what is not wanted")
	touched, err := x.client.Touched(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	if len(touched) > 0 {
		t.Errorf("%v was asked for before it was here, but all was", touched)
	}
}

// resident waits until pages of a mapped image are in the kernel's cache.
func (x *rig) resident(m []byte, first, count int) {
	x.t.Helper()
	vec := make([]byte, count)
	eventually.True(x.t, fmt.Sprintf("%d pages from page %d on are in memory", count, first), func() bool {
		_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&m[first*page])), uintptr(count*page), uintptr(unsafe.Pointer(&vec[0])))
		if errno != 0 {
			x.t.Fatal(errno)
		}
		return !slices.ContainsFunc(vec, func(b byte) bool { return b&1 == 0 })
	})
}

// TestStoreAway: a reader waits while the store is unreachable, and goes on when it is back.
func TestStoreAway(t *testing.T) {
	server := tests3.Start(t)
	proxy, bucket := server.Proxy(t), server.Bucket(t)
	x := newRig(t, settings{Store: proxy.URL(bucket), AccessKey: server.AccessKey, SecretKey: server.SecretKey})
	b := memory(rand.New(rand.NewPCG(6, 1)), 20000)
	written := x.seal(b, nil, nil)
	x.put(pager.Image{ID: "a", Source: sourceOf(written)}, x.part(len(b)))
	f, err := x.client.Open(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	proxy.Down(t)
	read := make(chan bool)
	go func() { // not through a mapping: the collector would wait for a thread that waits for a page
		got := make([]byte, len(b))
		_, err := f.ReadAt(got, 0)
		read <- err == nil && bytes.Equal(got, b)
	}()
	st := x.await("a", func(s *pager.Status) bool { return s != nil && len(s.Waiters) > 0 })
	if w := st.Waiters[0]; len(st.Waiters) != 1 || time.Since(w.Since) < time.Second || !slices.ContainsFunc(written.Objects, func(o snapshotstore.Object) bool { return o.Key == w.Object }) {
		t.Errorf("those who wait are %+v", st.Waiters)
	} else if _, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", w.Thread)); err != nil {
		t.Errorf("who waits is none of this process's threads: %v", err)
	}
	st = x.await("a", func(s *pager.Status) bool { return s != nil && s.Problem != nil })
	if st.Damaged() || st.Problem.Code != core.CodeStoreUnavailable {
		t.Errorf("status %+v", st)
	}
	select {
	case <-read:
		t.Error("it was read without a store")
	default:
	}
	proxy.Up(t)
	if !<-read {
		t.Error("the bytes differ")
	}
	x.await("a", func(s *pager.Status) bool { return s != nil && s.Problem == nil && s.Whole && len(s.Waiters) == 0 })
}

// faults reads a page and reports whether that caused a signal.
func faults(m []byte, at int) (faulted bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() { faulted = recover() != nil }()
	sink = m[at]
	return false
}

var sink byte // so that the compiler does not remove the read

// TestDamaged: a frame with one wrong bit is never shown, and the error names the object.
func TestDamaged(t *testing.T) {
	x := newDirRig(t)
	b := memory(rand.New(rand.NewPCG(7, 1)), 512)
	w := x.seal(b, nil, nil)
	i := slices.IndexFunc(w.Objects, func(o snapshotstore.Object) bool { return o.Key != w.Manifest.Key })
	path := filepath.Join(strings.TrimPrefix(x.cfg.Store, "dir:"), w.Objects[i].Key)
	object, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	object[len(object)/2] ^= 1
	if err := errors.Join(os.Chmod(path, 0o600), os.WriteFile(path, object, 0o600)); err != nil {
		t.Fatal(err)
	}
	x.put(pager.Image{ID: "a", Source: sourceOf(w)}, x.part(len(b)))
	m := x.mapped("a", len(b))
	shown, refused := 0, 0
	for p := 0; p < len(b); p += page {
		switch {
		case faults(m, p):
			refused++
		case !bytes.Equal(m[p:p+page], b[p:p+page]):
			t.Errorf("page %d is shown wrong", p/page)
		default:
			shown++
		}
	}
	if refused == 0 {
		t.Error("every page was shown")
	}
	st := x.await("a", func(s *pager.Status) bool { return s != nil && s.Problem != nil })
	if !st.Damaged() || st.Problem.Code != core.CodeCheckpointCorrupt || !strings.Contains(st.Problem.Message, w.Objects[i].Key) {
		t.Errorf("status %+v, %+v", st, st.Problem)
	}
	t.Logf("%d pages shown, %d refused", shown, refused)
}

// TestRefused: bad requests change nothing.
func TestRefused(t *testing.T) {
	x := newDirRig(t)
	b := memory(rand.New(rand.NewPCG(9, 1)), 64)
	w := x.seal(b, nil, nil)
	wrong := sourceOf(w)
	wrong.CheckpointID = core.NewID[core.CheckpointID]()
	missing := sourceOf(w)
	missing.Manifest.Digest = core.DigestOf(nil)
	for _, c := range []struct {
		name string
		im   pager.Image
		size int
		code core.Code
	}{
		{"a path", pager.Image{ID: "../a", Source: sourceOf(w)}, len(b), core.CodeInvalidField},
		{"another size", pager.Image{ID: "a", Source: sourceOf(w)}, 2 * len(b), core.CodeManifestInvalid},
		{"another checkpoint", pager.Image{ID: "a", Source: wrong}, len(b), core.CodeManifestInvalid},
		{"another digest", pager.Image{ID: "a", Source: missing}, len(b), core.CodeCheckpointCorrupt},
	} {
		if _, err := x.client.Put(t.Context(), c.im, x.part(c.size)); core.CodeOf(err) != c.code {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	x.await("a", gone)
}

// TestRecord: for memory, exactly the pages that are read are recorded, and the kernel reads no others.
func TestRecord(t *testing.T) {
	x := newDirRig(t)
	b := memory(rand.New(rand.NewPCG(12, 1)), 512)
	part := x.part(len(b))
	if _, err := part.WriteAt(b, 0); err != nil {
		t.Fatal(err)
	}
	st, err := x.client.Put(t.Context(), pager.Image{ID: "a", Memory: true, Record: true}, part)
	if err != nil || !st.Record || st.Whole || st.Here != st.Pages {
		t.Fatal(st, err)
	}
	f, err := x.client.Open(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	got := make([]byte, page)
	for _, p := range []int64{300, 5, 18, 17, 5, 511} {
		if _, err := f.ReadAt(got, p*page); err != nil {
			t.Fatal(err)
		}
		wantEqual(t, got, b[p*page:(p+1)*page], fmt.Sprint("page ", p))
	}
	touched, err := x.client.Touched(t.Context(), "a")
	if want := []pager.Range{{First: 5, Count: 1}, {First: 17, Count: 2}, {First: 300, Count: 1}, {First: 511, Count: 1}}; err != nil || !slices.Equal(touched, want) {
		t.Errorf("touched: %v, %v; want %v", touched, err, want)
	}
	if err := errors.Join(f.Close(), x.client.Drop(t.Context(), "a")); err != nil {
		t.Error(err)
	}
	if _, err := x.client.Open(t.Context(), "a"); core.CategoryOf(err) != core.NotFound {
		t.Errorf("opened after it was dropped: %v", err)
	}
	// An image in the store cannot be recorded.
	w := x.seal(b, nil, nil)
	if _, err := x.client.Put(t.Context(), pager.Image{ID: "b", Source: sourceOf(w), Record: true}, x.part(len(b))); core.CodeOf(err) != core.CodeInvalidField {
		t.Errorf("an image of the store is recorded: %v", err)
	}
}
