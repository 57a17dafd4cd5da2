//go:build linux

package mark

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/guestagent/smallfile"
)

// Bounds. A guest that is beyond one of them has no mark.
const (
	maxFiles  = 8192    // in memory
	maxMounts = 1 << 18 // bytes of the list of mounts
)

// Guest is what a mark is made of.
type Guest struct {
	Disk string                // where the file system of the writable disk is mounted
	Root string                // the root of the workload, as the agent sees it
	Proc string                // the workload's /proc, as the agent sees it
	PIDs func() ([]int, error) // the processes of the workload
}

var errNone = errors.New("there is no mark")

// Make makes a mark of a guest whose disk is flushed. It is empty if a program runs, or if the guest has something that a mark
// cannot cover.
func (g Guest) Make() (string, error) { return g.make(g.idle, g.disk, g.mounts, g.ipc, g.idle) }

// make joins the sums of the parts, so that whoever compares two marks sees which part differs.
func (Guest) make(parts ...func(io.Writer) error) (string, error) {
	var sums []string
	for _, part := range parts {
		sum := sha256.New()
		switch err := part(sum); {
		case errors.Is(err, errNone), errors.Is(err, fs.ErrNotExist):
			return "", nil
		case err != nil:
			return "", err
		}
		sums = append(sums, hex.EncodeToString(sum.Sum(nil)[:16]))
	}
	return strings.Join(sums, "."), nil
}

func (g Guest) idle(io.Writer) error {
	pids, err := g.PIDs()
	if err == nil && len(pids) > 0 {
		err = errNone
	}
	return err
}

// disk adds how much was written to the disk and discarded from it.
func (g Guest) disk(sum io.Writer) error {
	device, err := deviceOf(g.Disk)
	if err != nil {
		return err
	}
	b, err := smallfile.Read(fmt.Sprintf("/sys/dev/block/%s/stat", device))
	if err != nil {
		return err
	}
	f := strings.Fields(string(b))
	if len(f) < 14 {
		return errNone
	}
	_, err = fmt.Fprintln(sum, f[6], f[13]) // sectors that were written, and discarded. A flush counts as a write without sectors
	return err
}

func deviceOf(path string) (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return "", smallfile.PathError("stat", path, err)
	}
	return fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)), nil
}

// mounts adds the mounts of the workload, and what is in those whose files are in memory.
func (g Guest) mounts(sum io.Writer) error {
	path := g.Proc + "/1/mountinfo"
	fd, err := smallfile.Open(path, unix.O_RDONLY, 0)
	if err != nil {
		return smallfile.PathError("open", path, err)
	}
	b, err := smallfile.ReadToEnd(fd, maxMounts)
	_ = unix.Close(fd)
	switch {
	case err != nil:
		return smallfile.PathError("read", path, err)
	case len(b) >= maxMounts:
		return errNone
	}
	if _, err := sum.Write(b); err != nil {
		return err
	}
	disk, err := deviceOf(g.Disk)
	if err != nil {
		return err
	}
	var inMemory []string
	for line := range strings.Lines(string(b)) {
		before, after, _ := strings.Cut(line, " - ")
		f, kind := strings.Fields(before), strings.Fields(after)
		if len(f) < 6 || len(kind) == 0 {
			return errNone
		}
		switch device, at := f[2], f[4]; kind[0] {
		case "tmpfs", "devtmpfs":
			inMemory = append(inMemory, at)
		case "proc", "sysfs", "devpts", "cgroup2", "overlay", "erofs", "mqueue": // their files are the kernel's, or on what is covered
		case "ext4":
			if device != disk && !strings.HasPrefix(f[5]+",", "ro,") {
				return errNone
			}
		default:
			return errNone
		}
	}
	left := maxFiles
	for _, at := range inMemory {
		if strings.Contains(at, `\`) { // a name with a space
			return errNone
		}
		if err := files(sum, g.Root+at, &left); err != nil {
			return err
		}
	}
	return nil
}

// files adds the names and the states of all files of one file system. Another that is mounted below has an entry of its own.
func files(sum io.Writer, top string, left *int) error {
	var first unix.Stat_t
	if err := unix.Lstat(top, &first); err != nil {
		return smallfile.PathError("lstat", top, err)
	}
	return filepath.WalkDir(top, func(path string, d os.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil {
			err = unix.Lstat(path, &st)
		}
		switch {
		case errors.Is(err, fs.ErrNotExist) && path != top: // removed meanwhile, which the times of its directory say
			return nil
		case err != nil:
			return err
		case st.Dev != first.Dev:
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		if *left--; *left < 0 {
			return errNone
		}
		_, err = fmt.Fprintln(sum, path, st.Ino, st.Mode, st.Uid, st.Gid, st.Rdev, st.Size, st.Mtim, st.Ctim)
		return err
	})
}

// ipc adds nothing. There is no mark if there are objects of System V IPC.
func (g Guest) ipc(sum io.Writer) error {
	for _, kind := range []string{"shm", "msg", "sem"} {
		b, err := smallfile.Read("/proc/sysvipc/" + kind)
		if errors.Is(err, fs.ErrNotExist) { // a kernel without them
			continue
		}
		if err != nil {
			return err
		}
		if strings.Count(string(b), "\n") > 1 { // what is in a segment is not read
			return errNone
		}
	}
	return nil
}
