package vmmtest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/osthread"
)

// Jailed says what a VMM's process may see of the host.
type Jailed struct {
	PID int
	UID int // 0: it runs as root, so only its namespaces and mounts are checked
	// Visible are prefixes of the paths that it may see. It sees these files read-only.
	Visible []string
	// Hidden are paths of the host that it must not reach.
	Hidden []string
}

// CheckJail checks a VMM from inside: what its own files in /proc say, and what a thread can reach that has joined its
// namespaces and become its user.
func CheckJail(t *testing.T, j Jailed) {
	t.Helper()
	for _, kind := range []string{"mnt", "pid", "ipc", "uts", "cgroup"} {
		ours, err := os.Readlink("/proc/self/ns/" + kind)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", j.PID, kind)); err != nil || got == ours {
			t.Errorf("it shares the %s namespace of the host, %s (%v)", kind, got, err)
		}
	}
	status := readText(t, fmt.Sprintf("/proc/%d/status", j.PID))
	if want := fmt.Sprintf("NSpid:\t%d\t1\n", j.PID); !strings.Contains(status, want) {
		t.Errorf("it is not the first process of a namespace of its own: there is no %q in its status", want)
	}
	if j.UID != 0 {
		checkUser(t, j.PID, status)
	}
	j.checkMounts(t)
	var faults []string
	if err := osthread.Do(func() error {
		if err := j.join(); err != nil {
			return err
		}
		faults = j.reach()
		return nil
	}); err != nil {
		t.Fatalf("join its namespaces: %v", err)
	}
	for _, f := range faults {
		t.Error(f)
	}
}

// checkUser checks that a VMM with its own user has no privileges, and that the resources of that user are bounded.
func checkUser(t *testing.T, pid int, status string) {
	t.Helper()
	for _, want := range []string{"CapEff:\t0000000000000000\n", "CapBnd:\t0000000000000000\n", "NoNewPrivs:\t1\n", "Seccomp:\t2\n"} {
		if !strings.Contains(status, want) {
			t.Errorf("there is no %q in its status", want)
		}
	}
	if limits := readText(t, fmt.Sprintf("/proc/%d/limits", pid)); !hasLimit(limits, "Max processes", "256") || !hasLimit(limits, "Max core file size", "0") {
		t.Errorf("its limits are\n%s", limits)
	}
}

func hasLimit(limits, name, want string) bool {
	for line := range strings.Lines(limits) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			fields := strings.Fields(rest)
			return len(fields) >= 2 && fields[0] == want && fields[1] == want
		}
	}
	return false
}

func readText(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// checkMounts checks that the VMM needs each of its mounts, that each is read-only, and that none receives anything
// from the host.
func (j Jailed) checkMounts(t *testing.T) {
	t.Helper()
	lines := strings.Split(strings.TrimSpace(readText(t, fmt.Sprintf("/proc/%d/mountinfo", j.PID))), "\n")
	for _, line := range lines {
		f := strings.Fields(line) // id, parent, device, root, mount point, options, tags..., "-", type, ...
		dash := slices.Index(f, "-")
		if len(f) < 7 || dash < 6 {
			t.Fatalf("a mount of the form %q", line)
		}
		point, options, tags := f[4], strings.Split(f[5], ","), f[6:dash]
		known := point == "/" || point == "/proc/self" || slices.ContainsFunc(j.Visible, func(v string) bool { return strings.HasPrefix(point, v) })
		if !known {
			t.Errorf("it has the mount %q", line)
		}
		if !slices.Contains(options, "ro") || !slices.Contains(options, "nosuid") {
			t.Errorf("its mount can be written, or has programs that change the user: %q", line)
		}
		if (point == "/" || point == "/proc/self") && !slices.Contains(options, "noexec") {
			t.Errorf("a program can be run from its mount: %q", line)
		}
		if len(tags) > 0 {
			t.Errorf("its mount hangs together with one of the host: %q", line)
		}
	}
	t.Logf("it has %d mounts", len(lines))
}

// join makes the calling thread a thread of the VMM's user in the VMM's namespaces, permanently.
func (j Jailed) join() error {
	names := []string{"uts", "ipc", "cgroup", "net", "mnt"}
	spaces := make([]*os.File, len(names)) // all are opened before, because inside the thread would find none
	for i, kind := range names {
		f, err := os.Open(fmt.Sprintf("/proc/%d/ns/%s", j.PID, kind))
		if err != nil {
			return err
		}
		defer f.Close()
		spaces[i] = f
	}
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return err
	}
	for _, f := range spaces {
		if err := unix.Setns(int(f.Fd()), 0); err != nil {
			return fmt.Errorf("%s: %w", f.Name(), err)
		}
	}
	if j.UID == 0 {
		return nil
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0); errno != 0 {
		return errno
	}
	for _, number := range []uintptr{unix.SYS_SETRESGID, unix.SYS_SETRESUID} {
		if _, _, errno := unix.RawSyscall(number, uintptr(j.UID), uintptr(j.UID), uintptr(j.UID)); errno != 0 {
			return errno
		}
	}
	return nil
}

// reach returns what can be reached and should not be. The calling thread has joined the VMM.
func (j Jailed) reach() (faults []string) {
	fault := func(format string, a ...any) { faults = append(faults, fmt.Sprintf(format, a...)) }
	fds, err := os.ReadDir("/proc/self/fd") // those of the VMM: the jail shows no other process
	if err != nil {
		fault("its descriptors cannot be seen: %v", err)
	}
	roots := []string{"/", "/proc/self/root/", "/proc/self/cwd/"}
	for _, fd := range fds {
		roots = append(roots, "/proc/self/fd/"+fd.Name()+"/../../../../../../")
	}
	hidden := append([]string{"/etc/passwd", "/etc/shadow", "/root", "/run", "/home", "/sys/kernel", "/proc/1/root", "/proc/cpuinfo", "/proc/sys", "/dev/mem", "/bin/sh"}, j.Hidden...)
	for _, root := range roots {
		for _, path := range hidden {
			var st unix.Stat_t
			err := unix.Lstat(root+strings.TrimPrefix(path, "/"), &st)
			if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENOTDIR) {
				fault("by %s it finds the host's %s (%v)", root, path, err)
			}
		}
	}
	for _, dir := range []string{"/", "/proc", "/proc/self"} {
		fd, err := unix.Open(filepath.Join(dir, "new"), unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
		if err == nil {
			_ = unix.Close(fd)
			fault("it makes a file in %s", dir)
		}
	}
	_ = filepath.WalkDir("/", func(path string, d fs.DirEntry, err error) error {
		if path == "/proc/self" {
			return fs.SkipDir
		}
		if err == nil && !d.IsDir() && !slices.ContainsFunc(j.Visible, func(v string) bool { return strings.HasPrefix(path, v) }) {
			fault("it sees %s", path)
		}
		return nil
	})
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil || unix.ByteSliceToString(name.Nodename[:]) != "vmm" {
		fault("it sees the host's name %q (%v)", unix.ByteSliceToString(name.Nodename[:]), err)
	}
	return faults
}
