package pgcluster

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
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
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return core.Wrapf(err, core.FailedPrecondition, core.CodeIncompatibleHost,
			"user %s, who runs PostgreSQL, cannot enter %s, and this machine allows no mount namespace to help it: use a directory that it can reach, such as one under /var/lib", u.name, binds[0].below)
	}
	// Slave: nothing that is mounted here reaches the host, and what is unmounted there is unmounted here.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("cut off the host's mounts: %w", err)
	}
	if err := dropForeign(append(slices.Clone(paths), program)); err != nil {
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
		if !slices.ContainsFunc(covered, func(c string) bool { return within(b.below, c) }) {
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

// dropForeign detaches, from the namespace of the calling thread, every mount that holds neither a needed path nor a part of the system. A
// copy of a mount keeps the device and the file system alive after their owner has unmounted them: the volume of another
// coppice dev, say, which could then not be mounted again.
func dropForeign(needed []string) error {
	b, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line) // id, parent, major:minor, root, mount point
		if len(f) < 5 {
			continue
		}
		point := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(f[4])
		holds := func(path string) bool { return within(path, point) }
		belongs := func(path string) bool { return within(point, path) || within(path, point) }
		if slices.ContainsFunc(needed, holds) || slices.ContainsFunc(system, belongs) {
			continue
		}
		if err := unix.Unmount(point, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("detach %s: %w", point, err) // EINVAL: it went with the one it was in
		}
	}
	return nil
}

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

func within(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}
