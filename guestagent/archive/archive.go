//go:build linux

// Package archive writes files of a guest as a tar. A tar of any directory ends: pseudo file systems such as /proc are
// left out, and so are devices, sockets and pipes.
package archive

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// maxNamed bounds the names in a LeftOut.
const maxNamed = 16

// smallFile is the size up to which a file is read before its header is written, so that it may change meanwhile.
const smallFile = 64 << 10

// pseudo are the types of file systems whose files the kernel generates when they are read. The
// sizes of these files mean nothing, and some of the files never end.
var pseudo = map[int64]string{
	unix.PROC_SUPER_MAGIC: "proc", unix.SYSFS_MAGIC: "sysfs", unix.CGROUP_SUPER_MAGIC: "cgroup", unix.CGROUP2_SUPER_MAGIC: "cgroup2",
	unix.DEVPTS_SUPER_MAGIC: "devpts", unix.DEBUGFS_MAGIC: "debugfs", unix.TRACEFS_MAGIC: "tracefs", unix.SECURITYFS_MAGIC: "securityfs",
	unix.SELINUX_MAGIC: "selinuxfs", unix.SMACK_MAGIC: "smackfs", unix.BPF_FS_MAGIC: "bpf", unix.PSTOREFS_MAGIC: "pstore",
	unix.EFIVARFS_MAGIC: "efivarfs", unix.BINFMTFS_MAGIC: "binfmt_misc", unix.HUGETLBFS_MAGIC: "hugetlbfs", unix.NSFS_MAGIC: "nsfs",
	unix.RDTGROUP_SUPER_MAGIC: "resctrl", unix.AUTOFS_SUPER_MAGIC: "autofs", unix.BINDERFS_SUPER_MAGIC: "binder", unix.XENFS_SUPER_MAGIC: "xenfs",
	0x62656570: "configfs", 0x65735543: "fusectl", 0x19800202: "mqueue", 0x67596969: "rpc_pipefs",
}

// pseudoAt returns the type of the pseudo file system that a path is on, else "".
func pseudoAt(p string) (string, error) {
	var st unix.Statfs_t
	err := unix.Statfs(p, &st)
	for errors.Is(err, unix.EINTR) {
		err = unix.Statfs(p, &st)
	}
	if err != nil {
		return "", &fs.PathError{Op: "statfs", Path: p, Err: err}
	}
	return pseudo[int64(uint32(st.Type))], nil
}

// Check refuses a path that cannot become a tar: it does not exist, or it is on a pseudo file system.
func Check(top string) error {
	fi, err := os.Lstat(top)
	if err != nil || fi.Mode()&fs.ModeSymlink != 0 {
		return err
	}
	kind, err := pseudoAt(top)
	if err == nil && kind != "" {
		err = core.Errorf(core.Conflict, guestapi.CodeFileConflict,
			"read %s: it is on a pseudo file system (%s), whose files the kernel generates; list it, or read its files one by one", core.Clip(top), kind)
	}
	return err
}

// Write writes a file or a directory as a tar of at most the given number of bytes. Its names start at the last element of the path ("."
// for the root). A tar without its end mark is not complete, and the error says why.
func Write(ctx context.Context, to io.Writer, top string, most int64) (guestapi.LeftOut, error) {
	w := writer{tar: tar.NewWriter(&bounded{to: to, left: most, most: most}), top: top, base: filepath.Base(top), devices: map[uint64]string{}}
	if w.base == "/" {
		w.base = "."
	}
	err := filepath.WalkDir(top, func(p string, d fs.DirEntry, err error) error {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return w.visit(p, d, err)
	})
	if err != nil {
		return w.left, err
	}
	return w.left, w.tar.Close()
}

// bounded fails when more is written to it than it has room for.
type bounded struct {
	to         io.Writer
	left, most int64
}

func (b *bounded) Write(p []byte) (int, error) {
	if b.left -= int64(len(p)); b.left < 0 {
		return 0, TooLarge(b.most)
	}
	return b.to.Write(p)
}

// TooLarge is the error of a transfer that is larger than its bound.
func TooLarge(most int64) error {
	return core.Errorf(core.Invalid, core.CodeBodyTooLarge, "the transfer is larger than its bound of %d bytes; ask for less, or raise the bound with max_bytes", most)
}

type writer struct {
	tar       *tar.Writer
	top, base string
	devices   map[uint64]string // the pseudo file system behind a device number, or ""
	left      guestapi.LeftOut
}

// visit writes an entry of a walk.
func (w *writer) visit(p string, d fs.DirEntry, err error) error {
	if errors.Is(err, fs.ErrNotExist) && p != w.top {
		return nil // removed meanwhile
	}
	if err != nil {
		return err
	}
	rel, err := filepath.Rel(w.top, p)
	if err != nil {
		return err
	}
	fi, err := d.Info()
	if errors.Is(err, fs.ErrNotExist) && p != w.top {
		return nil
	}
	if err != nil {
		return err
	}
	name := path.Join(w.base, filepath.ToSlash(rel))
	switch mode := fi.Mode(); {
	case mode.IsDir():
		return w.dir(p, name, fi)
	case mode.IsRegular():
		return w.file(p, name, fi)
	case mode&fs.ModeSymlink != 0:
		target, err := os.Readlink(p)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		return w.header(name, fi, target, 0)
	}
	w.left.Special++
	return nil
}

// dir writes a directory. Of a pseudo file system it writes only the mount point.
func (w *writer) dir(p, name string, fi fs.FileInfo) error {
	kind, err := w.pseudo(p, fi)
	if err != nil {
		return err
	}
	if err := w.header(name+"/", fi, "", 0); err != nil || kind == "" {
		return err
	}
	w.leaveOut(p)
	return fs.SkipDir
}

func (w *writer) leaveOut(p string) {
	if len(w.left.Pseudo) == maxNamed {
		w.left.More++
		return
	}
	w.left.Pseudo = append(w.left.Pseudo, core.Clip(p))
}

// pseudo says which pseudo file system a file is on. It asks the kernel once for every device number.
func (w *writer) pseudo(p string, fi fs.FileInfo) (string, error) {
	device := deviceOf(fi)
	kind, known := w.devices[device]
	if known {
		return kind, nil
	}
	kind, err := pseudoAt(p)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err == nil {
		w.devices[device] = kind
	}
	return kind, err
}

// file writes a regular file with the size that it has now.
func (w *writer) file(p, name string, seen fs.FileInfo) error {
	// O_NONBLOCK and O_NOFOLLOW, because a pipe or a link may have taken its place.
	f, err := os.OpenFile(p, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ELOOP) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	fi, err := f.Stat()
	if err != nil || !fi.Mode().IsRegular() {
		return err
	}
	if kind, err := w.pseudo(p, seen); err != nil || kind != "" { // a file of a pseudo file system, mounted on a file
		w.leaveOut(p)
		return err
	}
	if fi.Size() <= smallFile {
		b, err := io.ReadAll(io.LimitReader(f, smallFile))
		if err != nil {
			return err
		}
		if err := w.header(name, fi, "", int64(len(b))); err != nil {
			return err
		}
		_, err = w.tar.Write(b)
		return err
	}
	if err := w.header(name, fi, "", fi.Size()); err != nil {
		return err
	}
	n, err := io.Copy(w.tar, io.LimitReader(f, fi.Size()))
	if err == nil && n < fi.Size() {
		err = fmt.Errorf("%s shrank while it was read", core.Clip(p))
	}
	return err
}

func (w *writer) header(name string, fi fs.FileInfo, target string, size int64) error {
	h, err := tar.FileInfoHeader(fi, target)
	if err != nil {
		return err
	}
	h.Name, h.Format, h.Size = name, tar.FormatPAX, size
	h.AccessTime, h.ChangeTime = time.Time{}, time.Time{}
	h.Uname, h.Gname = "", ""
	return w.tar.WriteHeader(h)
}

func deviceOf(fi fs.FileInfo) uint64 {
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		return st.Dev
	}
	return 0
}
