package cloudhypervisor_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/osthread"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// TestAboveTheHole uses a machine with more RAM than fits below the hole for devices, so its RAM is mapped in two
// parts.
func TestAboveTheHole(t *testing.T) {
	t.Parallel()
	w := newFaulty(t)
	const (
		mib  = 3584
		high = int64(3300) << 20 // of what is above
	)
	bytes := []byte("above the hole")
	spec := w.spec(t, false)
	spec.MemoryMiB, spec.Base = mib, w.file(t, "large", mib<<20)
	m := w.spawn(t, w.driver(t), spec)
	if err := m.Boot(t.Context()); err != nil {
		t.Fatal(err)
	}
	region, err := m.Memory()
	if err != nil {
		t.Fatal(err)
	}
	if len(region.Parts) != 2 || region.Parts[1].Offset != 3<<30 {
		t.Fatalf("RAM is mapped as %+v", region.Parts)
	}
	poke(t, region, high, bytes)
	c, err := memory.Prepare(region)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	state := filepath.Join(t.TempDir(), "state")
	if err := errors.Join(m.Pause(t.Context()), w.save(m, state), c.Copy()); err != nil {
		t.Fatal(err)
	}
	kill(t, m)

	spec = w.spec(t, true)
	spec.MemoryMiB, spec.Base = mib, open(t, filepath.Join(w.dir, "large"))
	fork := w.spawn(t, w.driver(t), spec)
	if err := fork.Restore(t.Context(), vmm.RestoreSpec{
		State: open(t, state), Inject: func(_ context.Context, r memory.Region) error { return c.Delta().Inject(r) },
	}); err != nil {
		t.Fatal(err)
	}
	if region, err = fork.Memory(); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(bytes))
	if _, err := open(t, fmt.Sprintf("/proc/%d/mem", region.PID)).ReadAt(got, int64(region.Addr(high))); err != nil || string(got) != string(bytes) {
		t.Errorf("the fork has %q above the hole, %v", got, err)
	}
	private, err := memory.Scan(region)
	if err != nil || memory.TotalBytes(private) != c.Bytes() {
		t.Errorf("%d bytes are private, want the %d of the delta (%v)", memory.TotalBytes(private), c.Bytes(), err)
	}
	if err := fork.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, err := count(t, fork); err != nil || got != "0" {
		t.Errorf("the fork answers %q, %v", got, err)
	}
}

func open(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// poke writes into a machine's RAM from outside.
func poke(t *testing.T, r memory.Region, offset int64, b []byte) {
	t.Helper()
	f, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", r.PID), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(b, int64(r.Addr(offset))); err != nil {
		t.Fatal(err)
	}
}

// newTap makes a tap in a network namespace that is otherwise empty.
func newTap(t *testing.T) *os.File {
	t.Helper()
	var tap *os.File
	if err := osthread.Do(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open /dev/net/tun: %w", err)
		}
		tap = os.NewFile(uintptr(fd), "tap")
		request, err := unix.NewIfreq("tap0")
		if err != nil {
			return err
		}
		request.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
		return unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tap.Close() })
	return tap
}

// TestTap gives a tap to a machine that boots and to a machine that is restored, the second time by a runner that did
// not spawn it. The fake accepts only real taps.
func TestTap(t *testing.T) {
	t.Parallel()
	require.Root(t)
	_, err := os.Stat("/dev/net/tun")
	require.That(t, "netns", err == nil, "load the tun module: modprobe tun")
	w := newFaulty(t)
	d := w.driver(t)
	spec := w.spec(t, false)
	spec.Tap, spec.MAC = newTap(t), "02:00:00:00:00:01"
	m := w.spawn(t, d, spec)
	state := filepath.Join(t.TempDir(), "state")
	if err := errors.Join(m.Boot(t.Context()), m.Pause(t.Context()), w.save(m, state)); err != nil {
		t.Fatal(err)
	}
	kill(t, m)
	for _, recovered := range []bool{false, true} {
		spec := w.spec(t, true)
		spec.Tap, spec.MAC = newTap(t), "02:00:00:00:00:01"
		fork := w.spawn(t, d, spec)
		if recovered {
			h := fork.Handle()
			fork.Release()
			var err error
			if fork, err = d.Recover(t.Context(), h); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { kill(t, fork) })
		}
		if err := errors.Join(fork.Restore(t.Context(), vmm.RestoreSpec{State: open(t, state)}), fork.Resume(t.Context())); err != nil {
			t.Fatalf("recovered %t: %v", recovered, err)
		}
		if taps := tapsOf(t, fork.Handle().PID); taps < 2 {
			t.Errorf("recovered %t: the VMM has %d descriptors of taps, want its own and the one that it has inherited", recovered, taps)
		}
	}
	// A file that is not a tap is refused with the VMM's message, and nothing is left.
	spec = w.spec(t, false)
	spec.Tap = open(t, os.DevNull)
	m, err = d.Spawn(t.Context(), spec)
	if err == nil {
		t.Cleanup(func() { kill(t, m) })
		err = m.Boot(t.Context())
	}
	typed(t, "a tap that is none", err, "Using existing tap")
}

// tapsOf counts the descriptors of taps that a process has.
func tapsOf(t *testing.T, pid int) (n int) {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if to, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil && to == "/dev/net/tun" {
			n++
		}
	}
	return n
}
