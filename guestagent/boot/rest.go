//go:build linux

package boot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// mountRest mounts the file systems that programs expect, in the new root.
func mountRest() error {
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make the mounts private: %w", err)
	}
	err := errors.Join(
		mount("shm", "/dev/shm", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777"),
		mount("devpts", "/dev/pts", "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=0620,gid=5,ptmxmode=0666"),
		mount("cgroup2", "/sys/fs/cgroup", "cgroup2", flags, ""),
	)
	if err != nil {
		return err
	}
	for link, target := range map[string]string{
		"/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0", "/dev/stdout": "/proc/self/fd/1", "/dev/stderr": "/proc/self/fd/2",
	} {
		if err := os.Symlink(target, link); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	for _, d := range []struct {
		path string
		mode fs.FileMode
	}{{"/tmp", 0o777 | fs.ModeSticky}, {"/run/lock", 0o777 | fs.ModeSticky}, {"/etc", 0o755}, {"/root", 0o700}} {
		if _, err := os.Stat(d.path); err == nil {
			continue // the image's own mode stays
		}
		if err := os.MkdirAll(d.path, 0o755); err != nil {
			return err
		}
		if err := os.Chmod(d.path, d.mode); err != nil {
			return err
		}
	}
	return nil
}

// configure sets parameters that must be set before anything else runs.
func configure() error {
	if err := loopbackUp(); err != nil {
		return fmt.Errorf("bring up the loopback device: %w", err)
	}
	for path, value := range map[string]string{
		"/proc/sys/net/ipv6/conf/all/disable_ipv6":     "1",
		"/proc/sys/net/ipv6/conf/default/disable_ipv6": "1",
		"/proc/sys/kernel/printk":                      "1 4 1 7", // the host keeps the console, and a guest must not fill it
		"/proc/sys/vm/stat_interval":                   "3600",    // otherwise a timer runs every second on each CPU
		"/proc/sys/vm/overcommit_memory":               "1",
		"/proc/sys/fs/inotify/max_user_watches":        "524288",
		// A user must not trick root through what the user makes in a shared directory.
		"/proc/sys/fs/protected_hardlinks": "1",
		"/proc/sys/fs/protected_symlinks":  "1",
		"/proc/sys/fs/protected_fifos":     "1",
		"/proc/sys/fs/protected_regular":   "1",
	} {
		if err := os.WriteFile(path, []byte(value), 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := unix.Sethostname([]byte("coppice")); err != nil {
		return fmt.Errorf("set the hostname: %w", err)
	}
	limit := &unix.Rlimit{Cur: 1024, Max: 1 << 20}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, limit); err != nil {
		return fmt.Errorf("set the limit of open files: %w", err)
	}
	return nil
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr)
}

// AwaitDevices waits until the device nodes exist. The kernel creates them while it probes, which may continue after
// the drivers were loaded.
func AwaitDevices(timeout time.Duration, paths ...string) error {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	if _, err := unix.InotifyAddWatch(fd, filepath.Dir(paths[0]), unix.IN_CREATE); err != nil {
		return err
	}
	deadline := time.Now().Add(timeout)
	for {
		missing := ""
		for _, p := range paths {
			if _, err := os.Stat(p); err != nil {
				missing = p
			}
		}
		if missing == "" {
			return nil
		}
		left := time.Until(deadline)
		if left <= 0 {
			return fmt.Errorf("the device %s has not appeared within %s: is the disk attached, and its driver among the modules?", missing, timeout)
		}
		if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(left.Milliseconds())+1); err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		var buf [4096]byte
		_, _ = unix.Read(fd, buf[:])
	}
}
