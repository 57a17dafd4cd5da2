//go:build linux

package guestagent

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// The files with the machine's identity are bind mounts of files in identityDir, as in other containers. So a reseal
// writes a few bytes of memory. To replace a file of the image would need a copy on the disk, a new file and a rename:
// that was a quarter of all code that a reseal executed (docs/adr/0006).
const identityDir = runDir + "/identity"

// identityFiles are covered where the image has a plain file or nothing. A link (such as /etc/resolv.conf to a
// resolver's file) stays unchanged.
var identityFiles = []string{"/etc/machine-id", "/etc/hostname", "/etc/hosts", "/etc/resolv.conf"}

// coverIdentity mounts them in the mount namespace of the calling thread, and a boot id over the kernel's.
func coverIdentity() error {
	if err := os.MkdirAll(identityDir, 0o755); err != nil {
		return err
	}
	for _, path := range identityFiles {
		fi, err := os.Lstat(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			if err := writeSmall(path, nil, 0o644); err != nil {
				return err
			}
		case err != nil:
			return err
		case !fi.Mode().IsRegular():
			continue
		}
		if err := cover(path, filepath.Join(identityDir, filepath.Base(path))); err != nil {
			return err
		}
	}
	return nil
}

// cover mounts a copy over a file. A copy that exists already belongs to an earlier workload and is kept.
func cover(path, with string) error {
	if !exists(with) {
		b, err := readSmall(path)
		if err != nil {
			return err
		}
		if err := writeSmall(with, b, 0o644); err != nil {
			return err
		}
	}
	if err := unix.Mount(with, path, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount over %s: %w", path, err)
	}
	return nil
}

// writeIdentity writes one of the files: in place if the mount is there. Nothing of the workload runs that could see a
// partial file. Root in the workload may have removed the mount; then the file itself is replaced.
func writeIdentity(path string, b []byte, mode uint32) error {
	file := identityDir + "/" + filepath.Base(path)
	var here, there unix.Stat_t
	if unix.Stat(path, &here) == nil && unix.Stat(file, &there) == nil && here.Dev == there.Dev && here.Ino == there.Ino {
		return writeSmall(file, b, mode)
	}
	return replaceFile(path, b, mode)
}

const (
	bootIDPath = "/proc/sys/kernel/random/boot_id"
	bootIDFile = runDir + "/boot_id"
)

// newUUID returns a random UUID, version 4.
func newUUID() string {
	var u [16]byte
	_, _ = rand.Read(u[:])
	u[6], u[8] = u[6]&0x0f|0x40, u[8]&0x3f|0x80
	h := hex.EncodeToString(u[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// coverBootID mounts the file over the kernel's boot id, in the mount namespace of the calling thread.
func coverBootID() error {
	return wrap(unix.Mount(bootIDFile, bootIDPath, "", unix.MS_BIND, ""), "mount over "+bootIDPath)
}

// firstBootID gives a guest that has just booted a boot id that a reseal can change, in the agent's own view.
func firstBootID() error {
	id, err := readSmall(bootIDPath)
	if err != nil {
		return err
	}
	if err := writeSmall(bootIDFile, id, 0o444); err != nil {
		return err
	}
	return coverBootID()
}
