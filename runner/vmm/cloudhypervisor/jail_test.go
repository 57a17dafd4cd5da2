package cloudhypervisor_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testvm"
	"github.com/coppice-dev/coppice/runner/vmm/cloudhypervisor"
	"github.com/coppice-dev/coppice/runner/vmm/kvm"
	"github.com/coppice-dev/coppice/runner/vmm/vmmtest"
)

// TestJail checks a machine's process from inside. From the directories that it has inherited, it cannot reach anything
// above them. It runs as root here, because not every test machine has a group for /dev/kvm; TestRealConfinement runs
// as its own user.
func TestJail(t *testing.T) {
	t.Parallel()
	require.Root(t)
	fake := testvm.BuildFakeCloudHypervisor(t)
	w := &faulty{fake: fake}
	var err error
	if w.dir, err = os.MkdirTemp("", "chj"); err != nil { //nolint:usetesting // t.TempDir is too long for the path of a unix socket
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(w.dir) })
	w.base = w.file(t, "base", faultyMiB<<20)
	spec := w.spec(t, false)
	m := w.spawn(t, cloudhypervisor.New(cloudhypervisor.Config{Binary: fake.Path}), spec)
	vmmtest.CheckJail(t, vmmtest.Jailed{
		PID:     m.Handle().PID,
		Visible: []string{fake.Path, "/lib", "/usr/lib", "/etc/ld.so.cache", os.DevNull, "/dev/urandom", kvm.Device},
		Hidden:  []string{spec.Dir, filepath.Join(spec.Dir, "api.sock"), filepath.Join(w.dir, "base"), "/dev/net/tun"},
	})
}
