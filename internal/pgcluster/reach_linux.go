package pgcluster

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/mountns"
)

// makeReachable covers each directory that is closed to u by an empty one and binds paths into it at their own
// places, for the calling thread only. The program is what will be run then.
func makeReachable(u serverUser, program string, paths []string) error {
	if !u.drop {
		return nil
	}
	type closed struct{ path, below string }
	var binds []closed
	for _, path := range paths {
		below, err := firstClosed(path, u)
		if err != nil {
			return err
		}
		if below != "" {
			binds = append(binds, closed{path: path, below: below})
		}
	}
	if len(binds) == 0 {
		return nil
	}
	if err := mountns.Enter(); err != nil {
		return core.Wrapf(err, core.FailedPrecondition, core.CodeIncompatibleHost,
			"user %s, who runs PostgreSQL, cannot enter %s, and this machine allows no mount namespace to help it: use a directory that it can reach, such as one under /var/lib", u.name, binds[0].below)
	}
	needed := append(slices.Clone(paths), program)
	if err := mountns.Detach(func(m mountns.Mount) bool {
		belongs := func(path string) bool { return mountns.Within(m.Point, path) || m.Holds(path) }
		return !slices.ContainsFunc(needed, m.Holds) && !slices.ContainsFunc(system, belongs)
	}); err != nil {
		return fmt.Errorf("leave other people's mounts: %w", err)
	}
	sources := make([]*os.File, len(binds)) // opened before anything is covered
	for i, b := range binds {
		f, err := os.OpenFile(b.path, unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		sources[i] = f
	}
	var covered []string
	for i, b := range binds {
		if !slices.ContainsFunc(covered, func(c string) bool { return mountns.Within(b.below, c) }) {
			if err := unix.Mount("tmpfs", b.below, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0711,size=64k"); err != nil {
				return fmt.Errorf("cover %s: %w", b.below, err)
			}
			covered = append(covered, b.below)
		}
		if err := os.MkdirAll(b.path, 0o711); err != nil { //nolint:gosec // G301: empty, in a namespace of its own
			return err
		}
		if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", sources[i].Fd()), b.path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind %s: %w", b.path, err)
		}
	}
	return nil
}

// system are the directories whose mounts PostgreSQL needs besides those of its own paths.
var system = []string{"/usr", "/lib", "/lib64", "/bin", "/etc", "/proc", "/dev", "/sys"}

// firstClosed returns the topmost directory above path that u may not pass, or "". It reads mode bits only: an ACL
// that says more makes no difference but an extra namespace.
func firstClosed(path string, u serverUser) (string, error) {
	var above []string
	for dir := filepath.Dir(path); ; dir = filepath.Dir(dir) {
		above = append(above, dir)
		if dir == "/" {
			break
		}
	}
	slices.Reverse(above)
	for _, dir := range above {
		fi, err := os.Stat(dir)
		if err != nil {
			return "", err
		}
		st, ok := fi.Sys().(*syscall.Stat_t)
		if !ok {
			return "", errors.New("stat gave no owner for " + dir)
		}
		bit := os.FileMode(0o001)
		switch {
		case int(st.Uid) == u.uid:
			bit = 0o100
		case int(st.Gid) == u.gid:
			bit = 0o010
		}
		if fi.Mode().Perm()&bit == 0 {
			return dir, nil
		}
	}
	return "", nil
}
