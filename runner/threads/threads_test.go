package threads_test

import (
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/runner/threads"
)

// TestStop stops a process, asks about its threads, and kills it.
func TestStop(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), "sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	if !threads.Of(pid, pid) || threads.Of(pid, os.Getpid()) {
		t.Error("a process has its first thread, and no thread of another process")
	}
	if threads.Kernel(pid) || threads.Killed(pid) {
		t.Error("a process that sleeps is no thread of the kernel and is not killed")
	}
	// While it is loaded it may wait for the disk.
	eventually.True(t, "it waits for nothing that no signal ends", func() bool { return threads.Blocked(pid) == 0 })
	if err := threads.Stop(pid); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "it stands still", func() bool { return threads.Standing(pid) })
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	if !threads.Killed(pid) {
		t.Error("a process that has ended counts as killed")
	}
}

// TestKernel knows a thread of the kernel where one can be seen, as outside of containers.
func TestKernel(t *testing.T) {
	t.Parallel()
	const kthreadd = 2
	if b, err := os.ReadFile("/proc/2/comm"); err == nil && string(b) == "kthreadd\n" && !threads.Kernel(kthreadd) {
		t.Error("kthreadd is a thread of the kernel")
	}
}
