// Package testvm gives tests the parts of real virtual machines: a kernel, an initrd with a test program, and a store
// with the real image. Everything is made once per machine and kept below the user's cache directory, under the digest
// of its inputs. Test binaries that run at the same time share it.
package testvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/images/build"
	"github.com/coppice-dev/coppice/internal/test/require"
)

// The requirement's name for tests, and how to meet it.
const (
	Requirement = "vm"
	cure        = "make setup (it installs QEMU and the tools that build a guest from Debian's packages)"
)

// vmmGuest is the main package of the machine that drivers are tested with.
const vmmGuest = "runner/vmm/vmmtest/guest"

// keep is how long a cached image without a name is kept: another checkout may be using it.
const keep = 48 * time.Hour

// Machine is the input of a VMM: paths of files that anyone may read.
type Machine struct {
	Kernel      string
	Initrd      string
	CommandLine string
}

// QEMU returns the path of the QEMU to test: binary, or the one on the PATH. If there is none, it skips the test.
func QEMU(t testing.TB, binary string) string {
	t.Helper()
	if binary == "" {
		name := "qemu-system-x86_64"
		if runtime.GOARCH == "arm64" {
			name = "qemu-system-aarch64"
		}
		binary = name
	}
	path, err := exec.LookPath(binary)
	require.That(t, Requirement, err == nil, cure)
	return path
}

// Kernel returns the kernel that a newly built guest image would have.
func Kernel(t testing.TB) build.Kernel {
	t.Helper()
	k, err := kernel()
	require.That(t, Requirement, err == nil, fmt.Sprintf("%s; without it: %v", cure, err))
	return k
}

var kernel = sync.OnceValues(func() (build.Kernel, error) {
	if dir := Prepared(); dir != "" {
		return preparedKernel(dir)
	}
	store, err := openStore()
	if err != nil {
		return build.Kernel{}, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	return build.FetchKernel(ctx, store, nil)
})

// Guest returns the machine with which package vmmtest tests drivers.
func Guest(t testing.TB) Machine {
	t.Helper()
	return Boot(t, vmmGuest)
}

// Boot returns a machine whose first program is a main package of this module, such as cmd/coppice-guest, built for the guest.
func Boot(t testing.TB, pkg string) Machine {
	t.Helper()
	k := Kernel(t)
	m, err := pack(k, program(t, pkg))
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// program builds a main package of this module for the guest, or returns the prepared program.
func program(t testing.TB, pkg string) string {
	t.Helper()
	if dir := Prepared(); dir != "" {
		path, err := PreparedProgram(dir, pkg)
		if err != nil {
			t.Fatal(err)
		}
		return path
	}
	out := filepath.Join(t.TempDir(), "program")
	if err := Compile(t.Context(), out, module+pkg); err != nil {
		t.Fatal(err)
	}
	return out
}

// pack writes the initrd into the cache, unless it is there.
func pack(k build.Kernel, binary string) (Machine, error) {
	raw, err := os.ReadFile(binary)
	if err != nil {
		return Machine{}, err
	}
	dir, err := cacheDir("initrd")
	if err != nil {
		return Machine{}, err
	}
	key := core.DigestOf([]byte(k.Release + " " + string(core.DigestOf(raw)))).Hex()
	m := Machine{Kernel: k.VMLinuz, Initrd: filepath.Join(dir, key), CommandLine: k.CommandLine}
	unlock, err := lock(dir)
	if err != nil {
		return Machine{}, err
	}
	defer unlock()
	now := time.Now()
	if os.Chtimes(m.Initrd, now, now) == nil {
		return m, nil
	}
	if err := removeOld(dir); err != nil {
		return Machine{}, err
	}
	part := m.Initrd + ".part"
	err = errors.Join(os.RemoveAll(part), k.WriteInitrd(part, binary))
	if err == nil {
		err = errors.Join(os.Chmod(part, 0o644), os.Rename(part, m.Initrd)) //nolint:gosec // G302: a VMM with a user of its own reads it
	}
	return m, err
}

// removeOld removes files that were not used for a long time.
func removeOld(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || e.Name() == lockFile || time.Since(info.ModTime()) < keep {
			continue
		}
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// cacheDir returns a directory below the user's cache that a VMM with its own user can reach by a descriptor.
func cacheDir(name string) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, "coppice-test", name)
	return dir, os.MkdirAll(dir, 0o755) //nolint:gosec // G301: see above
}

func openStore() (*images.Store, error) {
	dir, err := cacheDir("images")
	if err != nil {
		return nil, err
	}
	return images.Open(dir)
}

const lockFile = "lock"

// lock takes the directory's lock; the kernel gives it back when the process dies.
func lock(dir string) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX)
		if err == nil {
			return func() { _ = f.Close() }, nil // closing the only descriptor gives the lock back
		}
		if !errors.Is(err, unix.EINTR) {
			return nil, errors.Join(err, f.Close())
		}
	}
}
