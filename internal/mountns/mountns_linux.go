// Package mountns gives a thread a mount namespace of its own, for a program that it starts, without the mounts of other programs. A copy
// of a mount keeps the device and the file system in use after their owner has unmounted them: the volume of another coppice dev, say,
// whose loop device then stays until the program ends.
package mountns

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Mount is a mount of the calling thread.
type Mount struct {
	Point  string
	Source string // a device, for example /dev/loop0
}

// Holds reports whether a path is the mount point or below it.
func (m Mount) Holds(path string) bool { return Within(path, m.Point) }

// Loop reports whether the mount is of a file.
func (m Mount) Loop() bool { return strings.HasPrefix(m.Source, "/dev/loop") }

// Within reports whether a path is dir or below it. Both are clean.
func Within(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}

// Enter moves the calling thread into a copy of its mount namespace. Mounts made in the copy do not appear on the host. If the
// host's mounts are shared, as systemd makes them, an unmount on the host also happens in the copy. The thread must not be used for anything else: see package osthread.
func Enter() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("cut off the host's mounts: %w", err)
	}
	return nil
}

// Detach detaches the mounts that foreign chooses from the calling thread's namespace, which must be its own.
func Detach(foreign func(Mount) bool) error {
	b, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(b)) {
		m, ok := parse(line)
		if !ok || !foreign(m) {
			continue
		}
		err := unix.Unmount(m.Point, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) { // EINVAL: it went with the one that it was in
			return fmt.Errorf("detach %s: %w", m.Point, err)
		}
	}
	return nil
}

// unescape decodes what mountinfo has in place of characters that separate its fields.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace

// parse reads a line of mountinfo: id, parent, major:minor, root, mount point, options, tags, a dash, type, source, options.
func parse(line string) (Mount, bool) {
	f := strings.Fields(line)
	if len(f) < 5 {
		return Mount{}, false
	}
	m := Mount{Point: unescape(f[4])}
	for i, field := range f[5:] {
		if field == "-" && len(f) > 5+i+2 {
			m.Source = unescape(f[5+i+2])
			break
		}
	}
	return m, true
}
