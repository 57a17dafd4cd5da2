//go:build linux

package workload

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/guestagent/identity"
)

// DiskMount is where the file system of the writable disk is mounted for the agent. The workload does not see it.
const DiskMount = "/run/.coppice/disk"

// RunInit is PID 1 of the workload. It sets up the new namespaces, reports that on descriptor 3, and then reaps
// orphans of the workload. It returns only on failure. It must be called on the main thread, locked to it: a cgroup
// namespace belongs to a thread, and others join the one of this thread.
func RunInit() error {
	debug.SetGCPercent(-1) // nothing is allocated from here on, and a collection every two minutes would touch memory
	NameProcess("coppice-init")
	children := make(chan os.Signal, 1)
	SurviveSignals()
	signal.Notify(children, unix.SIGCHLD)
	if err := furnish(); err != nil {
		return err
	}
	ready := os.NewFile(3, "ready")
	if _, err := ready.Write([]byte{1}); err != nil {
		return err
	}
	if err := ready.Close(); err != nil {
		return err
	}
	for range children {
		for {
			pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
			if err != nil && !errors.Is(err, unix.EINTR) || err == nil && pid <= 0 {
				break
			}
		}
	}
	return nil
}

// SurviveSignals protects an init from signals that would end a program. The signals are caught and dropped, not
// ignored: an ignored signal would stay ignored in every process that is started from here.
func SurviveSignals() {
	signal.Notify(make(chan os.Signal, 1), unix.SIGHUP, unix.SIGINT, unix.SIGTERM, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2, unix.SIGPIPE, unix.SIGALRM, unix.SIGPWR)
}

// NameProcess sets the name under which this process is listed. Without it, that is the name of the link through which
// it was started.
func NameProcess(name string) {
	_ = os.WriteFile("/proc/self/comm", []byte(name), 0)
}

// furnish gives the workload a /proc with only its own processes, and a read-only view of its own cgroup.
func furnish() error {
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("make a cgroup namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	for _, m := range []struct{ target, fstype string }{{"/proc", "proc"}, {cgroupRoot, "cgroup2"}} {
		if err := unix.Unmount(m.target, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount the outer %s: %w", m.target, err)
		}
		if err := unix.Mount(m.fstype, m.target, m.fstype, flags, ""); err != nil {
			return fmt.Errorf("mount %s: %w", m.target, err)
		}
	}
	if err := unix.Mount("", cgroupRoot, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|flags, ""); err != nil {
		return fmt.Errorf("make %s read-only: %w", cgroupRoot, err)
	}
	if err := unix.Unmount(DiskMount, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("hide %s: %w", DiskMount, err)
	}
	if err := identity.CoverFiles(); err != nil {
		return fmt.Errorf("cover the files of the identity: %w", err)
	}
	return identity.CoverBootID()
}
