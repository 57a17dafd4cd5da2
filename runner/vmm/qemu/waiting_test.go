package qemu

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/runner/threads"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// silentFile is a file of zeros that blocks its readers while it is silent.
type silentFile struct {
	fs.Inode

	silent atomic.Pointer[chan struct{}] // closed when it answers again
}

var (
	_ fs.NodeOpener    = (*silentFile)(nil)
	_ fs.NodeReader    = (*silentFile)(nil)
	_ fs.NodeGetattrer = (*silentFile)(nil)
)

func (*silentFile) Open(context.Context, uint32) (fs.FileHandle, uint32, syscall.Errno) {
	return nil, fuse.FOPEN_DIRECT_IO, 0
}

func (*silentFile) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	out.Mode, out.Size = syscall.S_IFREG|0o666, testMiB<<20
	return 0
}

func (f *silentFile) Read(_ context.Context, _ fs.FileHandle, dest []byte, _ int64) (fuse.ReadResult, syscall.Errno) {
	if c := f.silent.Load(); c != nil {
		<-*c
	}
	clear(dest)
	return fuse.ReadResultData(dest), 0
}

// silentRoot is a directory with one silentFile.
type silentRoot struct {
	fs.Inode

	file *silentFile
}

func (r *silentRoot) OnAdd(ctx context.Context) {
	r.AddChild("base", r.NewPersistentInode(ctx, r.file, fs.StableAttr{Mode: syscall.S_IFREG}), false)
}

// TestRecoverWaiting adopts a QEMU whose main thread waits for a page: QEMU answers nothing until the page comes. An
// earlier runner took such a QEMU for dead and killed it, and then had to wait for its end until the page came.
func TestRecoverWaiting(t *testing.T) { //nolint:paralleltest // it waits until a QEMU is late
	require.Root(t)
	d, dir, root := real(t), shortDir(t), &silentRoot{file: &silentFile{}}
	mounted, err := fs.Mount(dir, root, &fs.Options{MountOptions: fuse.MountOptions{AllowOther: true, DirectMountStrict: true}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := mounted.Unmount(); err != nil {
			t.Error(err)
		}
	})
	base, err := os.OpenFile(filepath.Join(dir, "base"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer base.Close()
	spec := vmm.Spec{
		ID: core.NewID[core.SandboxID](), Cluster: "qemutest", Dir: shortDir(t), VCPUs: 1, MemoryMiB: testMiB, Base: base, Restore: true,
	}
	m, err := d.Spawn(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { kill(t, m) }()
	speak := make(chan struct{})
	spoken := sync.OnceFunc(func() { close(speak) })
	defer spoken()
	root.file.silent.Store(&speak)
	touch, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	// The main thread reads the guest's memory itself.
	_, err = m.(*machine).execute(touch, "human-monitor-command", map[string]any{"command-line": "xp /1xb 0x4000000"})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("QEMU was to wait for a page of its guest: %v", err)
	}
	pid := m.Handle().PID
	eventually.True(t, "its main thread waits", func() bool { return threads.Blocked(pid) == pid })
	if err := m.Stop(); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "all the others stand still", func() bool { return threads.Standing(pid) })
	for i := range 4 { // more than the queues of its sockets have room for
		m.Release()
		again, err := d.Recover(t.Context(), m.Handle())
		if err != nil {
			t.Fatalf("a machine that waits was not taken over by runner %d: %v", i+2, err)
		}
		m = again
	}
	if _, err := m.Running(t.Context()); !errors.Is(err, vmm.ErrWaits) {
		t.Errorf("whether it runs: %v", err)
	}
	spoken()
	if running, err := m.Running(t.Context()); err != nil || running {
		t.Errorf("it has its page: running %v, %v", running, err)
	}
}
