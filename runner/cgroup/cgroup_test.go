package cgroup_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/runner/cgroup"
)

func TestTree(t *testing.T) {
	require.Root(t)
	mount, err := cgroup.Find()
	if err != nil {
		t.Fatal(err)
	}
	require.That(t, "cgroup2", mount != "", "mount cgroup v2: mount -t cgroup2 none /sys/fs/cgroup/unified")
	tree, err := cgroup.Open(mount, fmt.Sprintf("coppice-test-%d", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("limits: %v", tree.Controllers())
	g, err := tree.Make("one", cgroup.Limits{MemoryBytes: 64 << 20, Processes: 16})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "sleep", "1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(g.FD().Fd())}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", cmd.Process.Pid))
	if err != nil || !strings.Contains(string(b), "/one\n") {
		t.Errorf("the process is in %q, %v", b, err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	if err := g.Remove(t.Context()); err != nil {
		t.Errorf("remove a group with a living process: %v", err)
	}
	var exit *exec.ExitError
	if err := <-ended; !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Errorf("the process ended with %v", err)
	}
	if err := g.Remove(t.Context()); err != nil {
		t.Errorf("remove it again: %v", err)
	}
	for _, name := range []string{"kept", "left"} {
		if _, err := tree.Make(name, cgroup.Limits{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := tree.Reconcile(t.Context(), map[string]bool{"kept": true}); err != nil {
		t.Fatal(err)
	}
	left, err := filepath.Glob(filepath.Join(mount, "coppice-test-*", "*", "cgroup.procs"))
	if err != nil || len(left) != 1 || !strings.Contains(left[0], "/kept/") {
		t.Errorf("after a reconcile that keeps one: %v, %v", left, err)
	}
	if err := errors.Join(tree.Reconcile(t.Context(), nil), tree.Close(), tree.Close()); err != nil {
		t.Error(err)
	}
}

// TestBeside: what runs beside the VMMs is in none of their groups, nor in this process's, stays when theirs are cleared, and ends with nothing
// left of it.
func TestBeside(t *testing.T) {
	require.Root(t)
	mount, err := cgroup.Find()
	if err != nil {
		t.Fatal(err)
	}
	require.That(t, "cgroup2", mount != "", "mount cgroup v2: mount -t cgroup2 none /sys/fs/cgroup/unified")
	name := fmt.Sprintf("coppice-beside-%d", os.Getpid())
	tree, err := cgroup.Open(mount, name)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "sleep", "1000")
	for range 2 { // the second takes over what the first has made
		dir, err := tree.Beside("helper")
		if err != nil {
			t.Fatal(err)
		}
		defer dir.Close()
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", cmd.Process.Pid))
	if err != nil || !strings.HasSuffix(strings.TrimSpace(string(b)), "/"+name+".helper") {
		t.Errorf("the process is in %q, %v", b, err)
	}
	groups := func() []string {
		found, err := filepath.Glob(filepath.Join(mount, name+"*"))
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	if err := errors.Join(tree.Reconcile(t.Context(), nil), tree.Close()); err != nil {
		t.Error(err)
	}
	if left := groups(); len(left) != 1 || cmd.Process.Signal(syscall.Signal(0)) != nil {
		t.Errorf("with a process that lives, there are %v", left)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	if err := tree.Close(); err != nil || len(groups()) > 0 {
		t.Errorf("after its end there are %v, %v", groups(), err)
	}
}

func TestHostWithoutCgroups(t *testing.T) {
	t.Parallel()
	tree, err := cgroup.Open("", "x")
	if err != nil || tree != nil {
		t.Fatalf("Open = %v, %v", tree, err)
	}
	g, err := tree.Make("x", cgroup.Limits{})
	if err != nil || g.FD() != nil {
		t.Errorf("Make = %v, %v", g, err)
	}
	if dir, err := tree.Beside("x"); err != nil || dir != nil {
		t.Errorf("Beside = %v, %v", dir, err)
	}
	if err := errors.Join(g.Remove(t.Context()), tree.Reconcile(t.Context(), nil), tree.Close()); err != nil {
		t.Error(err)
	}
}
