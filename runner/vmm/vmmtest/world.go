package vmmtest

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sparse"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/vmm"
)

const (
	rootDisk  = 0 // read-only
	ownDisk   = 1 // writable
	diskBytes = 1 << 20
)

// world is shared by the machines of one run.
type world struct {
	Fixture
	dir        string
	caps       vmm.Capabilities
	bases      *memory.BaseStore
	root       string // path of the read-only disk
	template   *snapshot
	baseDigest core.Digest
}

// machine is a machine with additional data for the test.
type machine struct {
	vmm.Machine
	w    *world
	spec vmm.Spec
	base *memory.Base
	disk *os.File

	released bool // another machine has taken over
}

// snapshot is a captured machine.
type snapshot struct {
	base  *memory.Base
	delta *memory.Delta // nil if the base is the whole memory
	state string        // path
	disk  string        // path
}

// newWorld boots a machine and captures it.
func newWorld(t *testing.T, f Fixture) *world {
	t.Helper()
	w := &world{Fixture: f}
	var err error
	if w.dir, err = os.MkdirTemp("", "vmm"); err != nil { //nolint:usetesting // t.TempDir is too long for the path of a unix socket
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(w.dir); err != nil {
			t.Error(err)
		}
	})
	if _, err := f.Driver.Fingerprint(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.caps = f.Driver.Capabilities()
	if w.bases, err = memory.NewBaseStore(filepath.Join(w.dir, "bases"), !w.caps.ReadOnlyBase); err != nil {
		t.Fatal(err)
	}
	w.root = w.newDisk(t, "")
	if err := os.Chmod(w.root, 0o444); err != nil { //nolint:gosec // G302: VMMs with users of their own read it
		t.Fatal(err)
	}
	m := w.spawn(t, w.zero(t), "", false)
	if err := m.Boot(t.Context()); err != nil {
		t.Fatal(err)
	}
	m.want(t, "1", "inc")
	m.ask(t, "fill 1")
	m.want(t, "ok", fmt.Sprintf("write %d 0 1", ownDisk))
	w.template = m.capture(t)
	w.template.rebase(t, w)
	w.baseDigest = digest(t, w.template.base.File())
	m.kill(t)
	return w
}

func (w *world) path() string { return filepath.Join(w.dir, core.Short(core.NewID[core.SandboxID]())) }

func (w *world) zero(t *testing.T) *memory.Base {
	t.Helper()
	zero, err := w.bases.Zero(int64(w.MemoryMiB) << 20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeAll(t, zero) })
	return zero
}

// newDisk makes a disk with the bytes of another, or an empty one.
func (w *world) newDisk(t *testing.T, from string) string {
	t.Helper()
	path := w.path()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if from == "" {
		if err := f.Truncate(diskBytes); err != nil {
			t.Fatal(err)
		}
		return path
	}
	src := open(t, from, os.O_RDONLY)
	if _, err := sparse.Clone(f, src); err != nil {
		t.Fatal(err)
	}
	return path
}

// newSpec describes a machine on a base with a copy of a disk.
func (w *world) newSpec(t *testing.T, base *memory.Base, disk string, restore bool) vmm.Spec {
	t.Helper()
	id := core.NewID[core.SandboxID]()
	dir := filepath.Join(w.dir, core.Short(id))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	spec := vmm.Spec{
		ID: id, Cluster: "vmmtest", Dir: dir, VCPUs: 1, MemoryMiB: w.MemoryMiB, Base: base.File(),
		Disks: []vmm.Disk{
			{File: open(t, w.root, os.O_RDONLY), ReadOnly: true, Serial: "root"},
			{File: open(t, w.newDisk(t, disk), os.O_RDWR), Serial: "own"},
		},
		MAC: "02:00:00:00:00:01", UID: w.UID, GID: w.UID, Restore: restore,
	}
	if w.Kernel != "" && !restore {
		spec.Kernel, spec.Initrd = open(t, w.Kernel, os.O_RDONLY), open(t, w.Initrd, os.O_RDONLY)
		spec.CommandLine = w.CommandLine
	}
	return spec
}

// spawn starts a machine that is killed with the test.
func (w *world) spawn(t *testing.T, base *memory.Base, disk string, restore bool) *machine {
	t.Helper()
	spec := w.newSpec(t, base, disk, restore)
	v, err := w.Driver.Spawn(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	m := &machine{Machine: v, w: w, spec: spec, base: base, disk: spec.Disks[ownDisk].File}
	t.Cleanup(func() { m.kill(t) })
	return m
}

// shell starts a machine that waits to be restored from the snapshot.
func (w *world) shell(t *testing.T, s *snapshot) *machine {
	t.Helper()
	return w.spawn(t, s.base, s.disk, true)
}

func (s *snapshot) restoreSpec(t *testing.T) vmm.RestoreSpec {
	t.Helper()
	spec := vmm.RestoreSpec{State: open(t, s.state, os.O_RDONLY)}
	if d := s.delta; d != nil {
		spec.Inject = func(_ context.Context, r memory.Region) error { return d.Inject(r) }
	}
	return spec
}

// restored starts a machine that is restored from the snapshot, paused.
func (w *world) restored(t *testing.T, s *snapshot) *machine {
	t.Helper()
	m := w.shell(t, s)
	if err := m.Restore(t.Context(), s.restoreSpec(t)); err != nil {
		t.Fatal(err)
	}
	return m
}

// fork starts a machine that is restored from the snapshot and runs.
func (w *world) fork(t *testing.T, s *snapshot) *machine {
	t.Helper()
	m := w.restored(t, s)
	m.resume(t)
	return m
}

// capture captures a running machine, which goes on.
func (m *machine) capture(t *testing.T) *snapshot {
	t.Helper()
	region, err := m.Memory()
	if err != nil {
		t.Fatal(err)
	}
	c, err := memory.Prepare(region)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s := &snapshot{base: m.base, state: m.w.path()}
	m.pause(t)
	m.save(t, s.state)
	if err := c.Copy(); err != nil {
		t.Fatal(err)
	}
	s.disk = m.w.newDisk(t, m.disk.Name())
	m.resume(t)
	path := m.w.path()
	if err := c.Delta().WriteFile(path); err != nil {
		t.Fatal(err)
	}
	if s.delta, err = memory.OpenDelta(path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.delta.Close)
	return s
}

// rebase makes one base from base and delta.
func (s *snapshot) rebase(t *testing.T, w *world) {
	t.Helper()
	base, err := w.bases.Rebase(s.base, s.delta)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeAll(t, base) })
	s.base, s.delta = base, nil
}

func (m *machine) save(t *testing.T, path string) {
	t.Helper()
	if err := m.SaveState(t.Context(), open(t, path, os.O_WRONLY|os.O_CREATE|os.O_EXCL)); err != nil {
		t.Fatal(err)
	}
}

func (m *machine) pause(t *testing.T) {
	t.Helper()
	if err := m.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func (m *machine) resume(t *testing.T) {
	t.Helper()
	if err := m.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func (m *machine) kill(t *testing.T) {
	t.Helper()
	if m.released {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), prompt)
	defer cancel()
	if err := m.Kill(ctx); err != nil {
		t.Errorf("kill: %v", err)
	}
}

// open opens a file that is closed with the test.
func open(t *testing.T, path string, flag int) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, flag, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeAll(t, f) })
	return f
}

func closeAll(t *testing.T, list ...io.Closer) {
	t.Helper()
	for _, c := range list {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}

func digest(t *testing.T, f *os.File) core.Digest {
	t.Helper()
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	d, _, err := core.DigestReader(io.NewSectionReader(f, 0, info.Size()))
	if err != nil {
		t.Fatal(err)
	}
	return d
}
