//go:build linux

package identity

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/smallfile"
)

// RunDir has the files that the guest's programs may read: generation, token, boot id.
const RunDir = "/run/coppice"

// The files with the machine's identity are bind mounts of files in dir, as in other containers. So a reseal
// writes a few bytes of memory. To replace a file of the image would need a copy on the disk, a new file and a rename:
// that was a quarter of all code that a reseal executed (docs/adr/0006).
const dir = RunDir + "/identity"

// CoverFiles mounts copies over the files with the machine's identity ([guestapi.IdentityPaths]), in the mount namespace of the calling
// thread, where the image has a plain file or nothing. A link (such as /etc/resolv.conf to a resolver's file) stays unchanged.
func CoverFiles() error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, path := range guestapi.IdentityPaths() {
		fi, err := os.Lstat(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			if err := smallfile.Write(path, nil, 0o644); err != nil {
				return err
			}
		case err != nil:
			return err
		case !fi.Mode().IsRegular(), fi.Size() > maxReported: // a part of it must not cover it
			continue
		}
		if err := cover(path, filepath.Join(dir, filepath.Base(path))); err != nil {
			return err
		}
	}
	return nil
}

// cover mounts a copy over a file. A copy that exists already belongs to an earlier workload and is kept.
func cover(path, with string) error {
	if !smallfile.Exists(with) {
		b, err := smallfile.Read(path)
		if err != nil {
			return err
		}
		if err := smallfile.Write(with, b, 0o644); err != nil {
			return err
		}
	}
	if err := unix.Mount(with, path, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount over %s: %w", path, err)
	}
	return nil
}

// maxReported bounds the size of a file whose content is reported. It is read while the workload is frozen.
const maxReported = 64 << 10

// Report describes the files that are covered. wrote is what the last reseal wrote to them. A file that is too large, or cannot be read,
// has no digest. If root in the workload has removed a file's cover, Report leaves the file out: it is on the disk.
func Report(wrote map[string]string) ([]guestapi.IdentityFile, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return nil, os.NewSyscallError("uname", err)
	}
	out := []guestapi.IdentityFile{}
	for _, path := range guestapi.IdentityPaths() {
		file, size, ok := coverOf(path)
		if !ok {
			continue
		}
		f := guestapi.IdentityFile{Path: path, Size: size}
		if size <= maxReported {
			if b, err := smallfile.Read(file); err == nil {
				was, known := wrote[path]
				f = Describe(path, string(b), was, known, unix.ByteSliceToString(u.Nodename[:]))
			}
		}
		out = append(out, f)
	}
	return out, nil
}

// coverOf returns the file that is mounted over a path, and its size. ok is false if nothing is mounted there, or something else.
func coverOf(path string) (file string, size int64, ok bool) {
	file = dir + "/" + filepath.Base(path)
	var here, there unix.Stat_t
	if unix.Stat(path, &here) != nil || unix.Stat(file, &there) != nil || here.Dev != there.Dev || here.Ino != there.Ino {
		return "", 0, false
	}
	return file, there.Size, true
}

// WriteFile writes one of the files: in place if the mount is there. Nothing of the workload runs that could see a
// partial file. Root in the workload may have removed the mount; then the file itself is replaced.
func WriteFile(path string, b []byte, mode uint32) error {
	if file, _, ok := coverOf(path); ok {
		return smallfile.Write(file, b, mode)
	}
	return smallfile.Replace(path, b, mode)
}

// The kernel's boot id, and the file that is mounted over it.
const (
	BootIDPath = "/proc/sys/kernel/random/boot_id"
	BootIDFile = RunDir + "/boot_id"
)

// CoverBootID mounts the file over the kernel's boot id, in the mount namespace of the calling thread.
func CoverBootID() error {
	if err := unix.Mount(BootIDFile, BootIDPath, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount over %s: %w", BootIDPath, err)
	}
	return nil
}

// FirstBootID gives a guest that has just booted a boot id that a reseal can change, in the agent's own view.
func FirstBootID() error {
	id, err := smallfile.Read(BootIDPath)
	if err != nil {
		return err
	}
	if err := smallfile.Write(BootIDFile, id, 0o444); err != nil {
		return err
	}
	return CoverBootID()
}
