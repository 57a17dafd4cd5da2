package lazy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sidecar"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testhalt"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/pager"
	"github.com/coppice-dev/coppice/runner/room"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/blob/bloburl"
	"github.com/coppice-dev/coppice/snapshotstore/blob/s3"
	"github.com/coppice-dev/coppice/snapshotstore/envelope"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

const beAPager = "be-a-pager"

// TestMain runs the tests, or, started again with an argument, is a pager.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == beAPager {
		if err := servePages(os.Stdin); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// pagerSettings are what that pager is told on its standard input.
type pagerSettings struct {
	Dir, Store string
	Silence    string // a file: while it is there, the store gives no pages, only what is said of them
	Refusal    string // while that is there, it fails
	Version    int    // see pager.Config

	Pulse sidecar.Pulse `json:"-"` // of the runner
}

func servePages(config io.Reader) (err error) {
	var cfg pagerSettings
	if err := json.NewDecoder(config).Decode(&cfg); err != nil {
		return err
	}
	store, err := bloburl.Dial(cfg.Store, s3.Credentials{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	s, err := pager.New(pager.Config{Dir: cfg.Dir, Blobs: moody{store, cfg}, Log: slog.New(slog.NewTextHandler(os.Stderr, nil)), Version: cfg.Version})
	if err != nil {
		return err
	}
	return s.Run(context.Background())
}

// moody is a store that can be silent or fail.
type moody struct {
	blob.Blobs
	cfg pagerSettings
}

// Get implements blob.Blobs.
func (m moody) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	if _, err := os.Stat(m.cfg.Refusal); err == nil {
		return nil, core.Errorf(core.Unavailable, core.CodeStoreUnavailable, "the store is out of order")
	}
	for {
		if _, err := os.Stat(m.cfg.Silence); err != nil || path.Base(key) == "manifest" {
			return m.Blobs.Get(ctx, key, off, n)
		}
		again := time.NewTimer(250 * time.Millisecond) // hundreds of images may wait here: the machine must not be busy with that
		select {
		case <-again.C:
		case <-ctx.Done():
			again.Stop()
			return nil, context.Cause(ctx)
		}
	}
}

// rig is a runner's images and bases, with a pager and a checkpoint in a store. It is the host of the images.
type rig struct {
	mu       sync.Mutex         // guards the next two
	machines map[string]Machine // by a name
	reasons  map[string]string  // for the end of those that were ended

	t        *testing.T
	images   *Images
	bases    *memory.BaseStore
	cfg      Config
	stop     func() // ends the runner
	settings pagerSettings
	memory   []byte
	from     pager.Source
	ended    chan struct{}
}

func newRig(t *testing.T) *rig {
	t.Helper()
	require.Root(t)
	require.That(t, "fuse", unix.Access("/dev/fuse", unix.R_OK) == nil, "modprobe fuse")
	dir, err := os.MkdirTemp("", "lazy") //nolint:usetesting // the path of a socket must be short
	if err != nil {
		t.Fatal(err)
	}
	x := &rig{t: t, settings: pagerSettings{Dir: filepath.Join(dir, "p"), Store: "dir:" + t.TempDir(), Silence: filepath.Join(dir, "silence"), Refusal: filepath.Join(dir, "refusal")}}
	x.cfg = Config{DataDir: t.TempDir(), Room: room.New(t.TempDir(), 0), Keys: new(envelope.Ring), Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Host: x}
	t.Cleanup(func() {
		x.say(x.settings.Refusal, false)
		x.say(x.settings.Silence, false)
		x.end()
		if err := x.images.Stop(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	x.seal()
	x.begin()
	return x
}

// seal puts a checkpoint's memory into the store.
func (x *rig) seal() {
	x.t.Helper()
	store, err := bloburl.Dial(x.settings.Store, s3.Credentials{})
	if err != nil {
		x.t.Fatal(err)
	}
	defer store.Close()
	x.memory = make([]byte, 8<<20)
	r := rand.NewChaCha8([32]byte{1})
	_, _ = r.Read(x.memory)
	id, project := core.NewID[core.CheckpointID](), core.NewID[core.ProjectID]()
	h := manifest.Header{
		ProjectID: project, CheckpointID: id, CapturedAt: "2026-11-22T12:00:00Z", GuestImage: core.DigestOf([]byte("image")),
		Class: map[string]string{"arch": "amd64"}, Resources: core.Resources{VCPUs: 1, MemoryMiB: 128, DiskGiB: 1},
	}
	read := func(p []byte, off int64) error { copy(p, x.memory[off:]); return nil }
	src := snapshotstore.Source{Name: runnerapi.ImageMemory, Size: int64(len(x.memory)), Changed: []snapshotstore.Range{{Length: int64(len(x.memory))}}, Read: read}
	w, err := snapshotstore.Write(x.t.Context(), store, fmt.Sprintf("v1/%s/%s/1/", project, id), h, nil, []snapshotstore.Source{src}, snapshotstore.Options{Dir: x.t.TempDir()})
	if err != nil {
		x.t.Fatal(err)
	}
	x.from = pager.Source{Manifest: w.Manifest, CheckpointID: id, Image: runnerapi.ImageMemory}
}

// begin is a runner's start.
func (x *rig) begin() {
	x.t.Helper()
	config, err := json.Marshal(x.settings)
	if err != nil {
		x.t.Fatal(err)
	}
	x.cfg.Pager = &pager.Process{Dir: x.settings.Dir, Command: []string{os.Args[0], beAPager}, Config: config, Pulse: x.settings.Pulse}
	life, stop := context.WithCancel(context.Background())
	x.stop = stop
	if x.images, err = Open(life, x.cfg); err != nil {
		x.t.Fatal(err)
	}
	if x.bases, err = memory.NewBaseStore(filepath.Join(x.cfg.DataDir, "bases"), false); err != nil {
		x.t.Fatal(err)
	}
	x.bases.Await(x.images.Bases())
	x.images.FindPager(x.t.Context(), false)
	x.ended = make(chan struct{})
	go func(l *Images, ended chan<- struct{}) {
		defer close(ended)
		l.Run(life)
	}(x.images, x.ended)
}

// pager is the client of the pager that there is.
func (x *rig) pager() *pager.Client {
	x.images.mu.Lock()
	defer x.images.mu.Unlock()
	return x.images.client
}

// OpenBase implements Host.
func (x *rig) OpenBase(id core.BaseID) (*os.File, error) { return x.bases.OpenFile(id) }

// ImageArrived implements Host.
func (x *rig) ImageArrived() {}

// EndMachines implements Host.
func (x *rig) EndMachines(_ context.Context, why string, match func(Machine) bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for name, m := range x.machines {
		if match(m) {
			x.reasons[name] = why
		}
	}
}

// wantEnded waits until the machine "user" has been ended for a reason, and no other machine.
func (x *rig) wantEnded(reason string) {
	x.t.Helper()
	x.await("the machine is ended", func() bool {
		x.mu.Lock()
		defer x.mu.Unlock()
		return strings.Contains(x.reasons["user"], reason)
	})
	x.mu.Lock()
	defer x.mu.Unlock()
	if len(x.reasons) != 1 {
		x.t.Errorf("machines that were ended: %v", x.reasons)
	}
}

// run has machines run.
func (x *rig) run(machines map[string]Machine) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.machines, x.reasons = machines, map[string]string{}
}

// PagerEnded implements Host.
func (x *rig) PagerEnded(context.Context, string) { x.bases.ForgetArriving() }

// end is a runner's, without its pager's.
func (x *rig) end() {
	x.t.Helper()
	x.stop()
	<-x.ended
}

// say makes a file, or removes it.
func (x *rig) say(file string, is bool) {
	x.t.Helper()
	var err error
	if is {
		err = os.WriteFile(file, nil, 0o600)
	} else {
		err = ignoreAbsent(os.Remove(file))
	}
	if err != nil {
		x.t.Fatal(err)
	}
}

// fetch begins to fetch the memory as a base.
func (x *rig) fetch() core.BaseID {
	x.t.Helper()
	if !x.images.Ready(x.t.Context()) {
		x.t.Fatal("there is no pager")
	}
	id := core.NewID[core.BaseID]()
	if err := x.images.Begin(x.t.Context(), &Image{Image: pager.Image{ID: string(id), Source: x.from}, Size: int64(len(x.memory)), To: x.bases.Name(id)}); err != nil {
		x.t.Fatal(err)
	}
	return id
}

// look compares a base with what was stored.
func (x *rig) look(id core.BaseID, arriving bool) {
	x.t.Helper()
	b, err := x.bases.Open(id)
	if err != nil {
		x.t.Fatal(err)
	}
	got := make([]byte, len(x.memory))
	if _, err := b.File().ReadAt(got, 0); err != nil || !bytes.Equal(got, x.memory) || b.Arriving() != arriving {
		x.t.Errorf("%v; it is the same: %t; it arrives: %t, want %t", err, bytes.Equal(got, x.memory), b.Arriving(), arriving)
	}
	if err := b.Close(); err != nil {
		x.t.Error(err)
	}
}

func (x *rig) await(what string, is func() bool) {
	x.t.Helper()
	eventually.True(x.t, what, is)
}

// taken waits until a base is a file like any other, and nothing else is left of its coming.
func (x *rig) taken(id core.BaseID) {
	x.t.Helper()
	x.await("the base is a file", func() bool { return !x.images.Has(string(id)) })
	x.look(id, false)
	x.await("nothing else is left", func() bool {
		left, err := os.ReadDir(x.images.dir)
		return err == nil && len(left) == 0
	})
	x.await("the pager has forgotten it", func() bool {
		f, err := x.pager().Open(x.t.Context(), string(id))
		if err == nil {
			err = f.Close()
		}
		return core.CategoryOf(err) == core.NotFound
	})
}

func (x *rig) part(id core.BaseID) uint64 {
	x.t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(x.images.dir, string(id)+partSuffix), &st); err != nil {
		x.t.Fatal(err)
	}
	return st.Ino
}

// TestLazy: a base can be used while it comes, and is a file in the end.
func TestLazy(t *testing.T) {
	x := newRig(t)
	id := x.fetch()
	x.look(id, true)
	x.taken(id)
	if _, err := x.images.OpenFile(string(core.NewID[core.BaseID]())); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("what never came: %v", err)
	}
}

// TestLazyRestart: a runner that is started again finds what its predecessor had begun, with the same pager and the same file; even what became
// whole, or was to be taken, while there was none.
func TestLazyRestart(t *testing.T) {
	x := newRig(t)
	x.say(x.settings.Silence, true)
	id := x.fetch()
	part, instance := x.part(id), x.images.instance
	for range 2 {
		x.end()
		x.begin()
		if x.images.instance != instance || x.part(id) != part {
			t.Errorf("pager %s became %s, part %d became %d", instance, x.images.instance, part, x.part(id))
		}
	}
	x.end()
	x.say(x.settings.Silence, false)
	client := pager.NewClient(pager.SocketPath(x.settings.Dir))
	x.awaitStatus(client, func(list []pager.Status) bool { return len(list) == 1 && list[0].Whole })
	x.begin()
	x.taken(id)

	// It ends between putting the file where it belongs and saying so.
	x.end()
	other := core.NewID[core.BaseID]()
	im := &Image{Image: pager.Image{ID: string(other), Source: x.from}, Size: int64(len(x.memory)), To: x.bases.Name(other)}
	if err := x.images.Begin(t.Context(), im); err != nil {
		t.Fatal(err)
	}
	x.awaitStatus(client, func(list []pager.Status) bool { return len(list) == 1 && list[0].Whole })
	if err := os.Rename(filepath.Join(x.images.dir, im.ID+partSuffix), filepath.Join(x.cfg.DataDir, im.To)); err != nil {
		t.Fatal(err)
	}
	x.begin()
	x.taken(other)
}

func (x *rig) awaitStatus(c *pager.Client, is func([]pager.Status) bool) {
	x.t.Helper()
	ctx, stop := context.WithTimeout(x.t.Context(), time.Minute)
	defer stop()
	found := false
	err := c.Watch(ctx, func(list []pager.Status) {
		if is(list) {
			found = true
			stop()
		}
	})
	if !found {
		x.t.Fatal(err)
	}
}

// TestLazyPagerKilled: the machines of a pager that is killed are ended. Another pager goes on with what came, as soon as it can: one that
// fails is asked again.
func TestLazyPagerKilled(t *testing.T) {
	x := newRig(t)
	x.say(x.settings.Silence, true)
	id := x.fetch()
	hello, err := x.pager().Hello(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	x.run(map[string]Machine{"user": {Pager: hello.Instance, Base: id}, "another pager's": {Pager: "other", Base: id}, "nobody's": {Base: id}})
	x.say(x.settings.Refusal, true)
	if err := syscall.Kill(hello.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	x.wantEnded("the pager of its runner ended")
	refused := func() error {
		x.images.mu.Lock()
		defer x.images.mu.Unlock()
		return x.images.images[string(id)].refused
	}
	x.await("another pager was asked, and failed", func() bool { return core.CodeOf(refused()) == core.CodeStoreUnavailable })
	x.say(x.settings.Silence, false)
	opened := make(chan error)
	go func() { // it waits for the pager
		f, err := x.images.OpenFile(string(id))
		if err == nil {
			err = f.Close()
		}
		opened <- err
	}()
	x.say(x.settings.Refusal, false)
	if err := <-opened; err != nil {
		t.Error(err)
	}
	x.look(id, true)
	x.taken(id)
}

// TestLazyPagerHung: a pager that stands still is killed, and what follows is what follows a pager's death.
func TestLazyPagerHung(t *testing.T) {
	x := newRig(t)
	x.end()
	x.settings.Pulse = sidecar.Pulse{Every: 20 * time.Millisecond, Limit: time.Second}
	x.begin()
	x.say(x.settings.Silence, true)
	id := x.fetch()
	hello, err := x.pager().Hello(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	testhalt.Halt(t, hello.PID)
	x.say(x.settings.Silence, false)
	x.await("it was killed", func() bool { s := testhalt.State(t, hello.PID); return s == "" || s == "Z" })
	x.await("there is another pager", func() bool { is := x.pagerNow(); return is != "" && is != hello.Instance })
	x.look(id, x.images.Has(string(id)))
	x.taken(id)
	if got := x.metrics(); got["hung_total"] != 1 || got["unheard_total"] != 0 {
		t.Errorf("metrics: %v", got)
	}
}

// TestLazyForeign: a runner goes on with a pager of another version for what that serves, until nobody has anything of it open, and has one of
// its own then.
func TestLazyForeign(t *testing.T) {
	x := newRig(t)
	x.settings.Version = 1
	x.end()
	x.begin()
	if x.images.Ready(t.Context()) || pager.Runs(t.Context(), *x.cfg.Pager) { // the program was replaced under the runner
		t.Error("a pager of another version was started and stays")
	}
	x.end()
	x.say(x.settings.Silence, true)
	client, _, err := pager.Ensure(t.Context(), *x.cfg.Pager)
	if err != nil {
		t.Fatal(err)
	}
	hello, err := client.Hello(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	x.images.client, x.images.instance = client, hello.Instance // as a runner of its version has it
	id := core.NewID[core.BaseID]()
	im := &Image{Image: pager.Image{ID: string(id), Source: x.from}, Size: int64(len(x.memory)), To: x.bases.Name(id)}
	if err := x.images.Begin(t.Context(), im); err != nil {
		t.Fatal(err)
	}
	instance := hello.Instance
	x.settings.Version = 0
	x.begin()
	if x.images.instance != instance || instance == "" {
		t.Fatalf("pager %q became %q: machines of it would not be adopted", instance, x.images.instance)
	}
	machine, err := x.images.OpenFile(string(id))
	if err != nil {
		t.Fatal(err)
	}
	if x.images.Ready(t.Context()) {
		t.Error("it is ready for images")
	}
	x.say(x.settings.Silence, false)
	x.await("the base is a file", func() bool { return !x.images.Has(string(id)) })
	x.look(id, false)
	if h, err := x.pager().Hello(t.Context()); err != nil || h.Instance != instance {
		t.Errorf("while a machine has memory from it: %+v, %v", h, err)
	}
	if err := machine.Close(); err != nil {
		t.Fatal(err)
	}
	x.await("it has ended", func() bool {
		x.images.mu.Lock()
		defer x.images.mu.Unlock()
		return x.images.instance == ""
	})
	other := x.fetch()
	if x.images.foreign || x.images.instance == instance {
		t.Error("the next one is of another version, too")
	}
	x.taken(other)
}

// TestLazyDrop: what nothing needs ends, in the pager too, when it is served and when it could not be.
func TestLazyDrop(t *testing.T) {
	x := newRig(t)
	id := x.fetch()
	if err := x.bases.Remove(id); err != nil {
		t.Fatal(err)
	}
	x.awaitStatus(x.pager(), func(list []pager.Status) bool { return len(list) == 0 })
	x.say(x.settings.Silence, true)
	// A runner ends while the pager has not answered yet: the next one has no record of it.
	part, err := os.Create(filepath.Join(t.TempDir(), "part"))
	if err != nil {
		t.Fatal(err)
	}
	defer part.Close()
	if err := part.Truncate(int64(len(x.memory))); err != nil {
		t.Fatal(err)
	}
	if _, err := x.pager().Put(t.Context(), pager.Image{ID: "orphan", Source: x.from}, part); err != nil {
		t.Fatal(err)
	}
	x.awaitStatus(x.pager(), func(list []pager.Status) bool { return len(list) == 0 })
}

// metrics are what the runner shows of its pager, by name and state.
func (x *rig) metrics() map[string]float64 {
	x.t.Helper()
	reg := prometheus.NewRegistry()
	reg.MustRegister(x.images.Collector())
	families, err := reg.Gather()
	if err != nil {
		x.t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			name := strings.TrimPrefix(f.GetName(), "coppice_pager_")
			for _, l := range m.Label {
				name += " " + l.GetValue()
			}
			out[name] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return out
}

// TestPagerMetrics: they tell a store that is silent from one that gives, and keep the sums when an image is whole and gone.
func TestPagerMetrics(t *testing.T) {
	x := newRig(t)
	if got := x.metrics(); got["up"] != 0 || len(got) != 3 {
		t.Errorf("without a pager: %v", got)
	}
	x.say(x.settings.Silence, true)
	id := x.fetch()
	read := make(chan error, 1)
	go func() {
		b, err := x.bases.Open(id)
		if err == nil {
			_, err = b.File().ReadAt(make([]byte, memory.PageSize), 0)
			err = errors.Join(err, b.Close())
		}
		read <- err
	}()
	x.await("somebody waits", func() bool { return x.metrics()["waiters"] == 1 })
	pages := float64(len(x.memory) / memory.PageSize)
	if got := x.metrics(); got["up"] != 1 || got["images stalled"] != 1 || got["images arriving"] != 0 || got["pages"] != pages || got["pages_here"] != 0 || got["read_bytes_total"] != 0 || got["demanded_pages_total"] < 1 {
		t.Errorf("while the store is silent: %v", got)
	}
	x.say(x.settings.Silence, false)
	if err := <-read; err != nil {
		t.Error(err)
	}
	x.taken(id)
	got := x.metrics()
	if got["waiters"] != 0 || got["images stalled"]+got["images arriving"]+got["images whole"] != 0 || got["pages"] != 0 ||
		got["read_bytes_total"] < float64(len(x.memory)) || got["requests_total"] < 1 || got["demanded_pages_total"] < 1 {
		t.Errorf("when it is whole and gone: %v", got)
	}
}
