// Package jail gives a process a file system with only the files that it needs, and its own
// namespaces.
//
// New builds a mount namespace once: an empty tmpfs, read-only, with a read-only bind of each file
// that the program needs: the program, its loader, its shared libraries, its firmware, its device
// nodes. Each process gets a copy of that namespace. A copy costs one system call, however many
// mounts the host has, and has no mount of the host or of anybody else.
package jail

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/osthread"
)

// Config lists the files of the process. Each path is the same inside as outside. A symbolic link becomes the file to
// which it leads.
type Config struct {
	Program string   // absolute path; its loader and shared libraries come with it
	Modules []string // shared objects that the program loads by itself; their libraries come with them
	Files   []string // only read
	Devices []string // character devices
}

// Jail is a built file system. Its methods are safe for concurrent use.
type Jail struct {
	mounts *os.File // the mount namespace that each process gets a copy of
	device uint64   // of its root directory
}

// hostname is the name of the host inside the jail.
const hostname = "vmm"

// ownProc is where the process finds its own directory of /proc. Nothing else of /proc is there.
const ownProc = "/proc/self"

// The flags of the mounts inside.
const (
	readOnly = unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV
	dataOnly = readOnly | unix.MS_NOEXEC
	device   = unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NOEXEC
)

// bind is a file that appears inside.
type bind struct {
	path  string
	flags uintptr
}

// New builds a jail. It needs root.
func New(ctx context.Context, cfg Config) (*Jail, error) {
	binds, err := bindsOf(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("find what %s needs: %w", cfg.Program, err)
	}
	j := &Jail{}
	if err := osthread.Do(func() (err error) { // the thread's namespace is changed permanently
		if j.mounts, err = build(binds); err != nil {
			return err
		}
		j.device, err = rootDevice()
		return err
	}); err != nil {
		return nil, fmt.Errorf("make a file system for %s: %w", cfg.Program, err)
	}
	if err := osthread.Do(j.lead); err != nil {
		return nil, errors.Join(fmt.Errorf("enter the file system for %s: %w", cfg.Program, err), j.mounts.Close())
	}
	return j, nil
}

// ErrChroot says that a process that enters the jail's mount namespace finds itself in the host's files. The root of such a process is that
// of the namespace. In a chroot, the new root was made below that, where only the thread that built the jail sees it.
var ErrChroot = errors.New("the root directory of this program is not that of its mounts, as in a chroot")

// rootDevice is the device of the calling thread's root directory. Each tmpfs has another one.
func rootDevice() (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat("/", &st); err != nil {
		return 0, &os.PathError{Op: "stat", Path: "/", Err: err}
	}
	return st.Dev, nil
}

// lead checks that the jail's namespace leads into the jail. The calling thread is changed permanently.
func (j *Jail) lead() error {
	if err := j.setns(); err != nil {
		return err
	}
	if device, err := rootDevice(); err != nil || device != j.device {
		return errors.Join(err, ErrChroot)
	}
	return nil
}

// bindsOf lists the files of a configuration, each path once.
func bindsOf(ctx context.Context, cfg Config) ([]bind, error) {
	programs := append([]string{cfg.Program}, cfg.Modules...)
	list := make([]bind, 0, 64)
	for _, p := range programs {
		list = append(list, bind{p, readOnly})
	}
	libraries, err := Libraries(ctx, cfg.Program, cfg.Modules)
	if err != nil {
		return nil, err
	}
	for _, l := range libraries {
		list = append(list, bind{l, readOnly})
	}
	for _, f := range cfg.Files {
		list = append(list, bind{f, dataOnly})
	}
	for _, d := range cfg.Devices {
		list = append(list, bind{d, device})
	}
	for i := range list {
		if !filepath.IsAbs(list[i].path) {
			return nil, fmt.Errorf("the path %q is not absolute", list[i].path)
		}
		list[i].path = filepath.Clean(list[i].path)
		if strings.HasPrefix(list[i].path+"/", "/proc/") {
			return nil, fmt.Errorf("the path %q is in /proc, where nothing of the host is shown", list[i].path)
		}
	}
	slices.SortStableFunc(list, func(a, b bind) int { return strings.Compare(a.path, b.path) })
	return slices.CompactFunc(list, func(a, b bind) bool { return a.path == b.path }), nil
}

// stage is a directory that exists on every host. The new root is built on it, in the thread's own copy of the host's
// mounts.
const stage = "/dev"

// build returns a mount namespace with the binds and nothing else. The calling thread ends up in it.
func build(binds []bind) (_ *os.File, err error) {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return nil, fmt.Errorf("make a mount namespace: %w", err)
	}
	own, err := os.Open("/proc/thread-self/ns/mnt") // now: there will be no /proc
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, own.Close())
		}
	}()
	if err := fill(binds); err != nil {
		return nil, err
	}
	return own, pivot()
}

// fill puts the binds on the stage, in the calling thread's copy of the host's mounts.
func fill(binds []bind) error {
	// Slave mounts: an unmount on the host also happens in this copy while it exists, and no mount of this copy reaches
	// the host.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); errors.Is(err, unix.EINVAL) { // the root directory is no mount at all
		return ErrChroot
	} else if err != nil {
		return fmt.Errorf("cut off the host's mounts: %w", err)
	}
	sources := make([]*os.File, len(binds)) // opened before the stage covers anything
	for i, b := range binds {
		fd, err := unix.Open(b.path, unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			return &os.PathError{Op: "open", Path: b.path, Err: err}
		}
		sources[i] = os.NewFile(uintptr(fd), b.path)
		defer sources[i].Close()
	}
	if err := unix.Mount("jail", stage, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0755,size=256k,nr_inodes=1k"); err != nil {
		return fmt.Errorf("mount an empty file system: %w", err)
	}
	if err := os.MkdirAll(stage+ownProc, 0o755); err != nil { //nolint:gosec // G301: the process reads it as a user of its own
		return err
	}
	for i, b := range binds {
		if err := place(sources[i], b); err != nil {
			return fmt.Errorf("bind %s: %w", b.path, err)
		}
	}
	return nil
}

// place binds a file at its path on the stage.
func place(source *os.File, b bind) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(source.Fd()), &st); err != nil {
		return err
	}
	wanted := uint32(unix.S_IFREG)
	if b.flags == device {
		wanted = unix.S_IFCHR
	}
	if st.Mode&unix.S_IFMT != wanted {
		return fmt.Errorf("it has the file type %#o, not %#o", st.Mode&unix.S_IFMT, wanted)
	}
	target := stage + b.path
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil { //nolint:gosec // G301: see build
		return err
	}
	f, err := os.OpenFile(target, os.O_CREATE|os.O_EXCL, 0o444) //nolint:gosec // G302: it is covered at once
	if err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	from := fmt.Sprintf("/proc/self/fd/%d", source.Fd()) // descriptors are the same in all threads
	if err := unix.Mount(from, target, "", unix.MS_BIND, ""); err != nil {
		return err
	}
	return unix.Mount("", target, "", unix.MS_REMOUNT|unix.MS_BIND|b.flags, "")
}

// pivotRoot is unix.PivotRoot, except in a test.
var pivotRoot = unix.PivotRoot

// pivot makes the stage the root, read-only, and drops everything else. The seccomp filters of container engines forbid
// pivot_root; there the stage is moved over the root. The mounts below it then stay, and nothing in the jail can reach
// them: that would need CAP_SYS_CHROOT or CAP_SYS_ADMIN, which no VMM has.
func pivot() error {
	if err := unix.Chdir(stage); err != nil {
		return err
	}
	switch err := pivotRoot(".", "."); { // the old root is on top of the new one then
	case err == nil:
		if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount the host's mounts: %w", err)
		}
	case errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSYS):
		if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move it over the root, as pivot_root is forbidden here: %w", err)
		}
		if err := unix.Chroot("."); err != nil {
			return fmt.Errorf("make it the root, as pivot_root is forbidden here: %w", err)
		}
	default:
		return fmt.Errorf("make it the root: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make its mounts private: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REMOUNT|dataOnly, ""); err != nil {
		return fmt.Errorf("make it read-only: %w", err)
	}
	return nil
}
