// Package volume gives a runner a directory on a file system that can share extents between files.
// If the data directory's own file system cannot (ext4), the package keeps an XFS in one sparse
// file and mounts that. Then checkpoints cost only what changed instead of a copy, and the file's
// size is the budget of all of them together.
package volume

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sparse"
)

// Volume is a directory for the runner's files.
type Volume struct {
	Path    string
	Reflink bool   // extents can be shared
	Detail  string // for people: what it is and why

	mounted bool
}

// MinBudget is the least that mkfs.xfs makes a file system of.
const MinBudget = 1 << 30

const (
	imageName = "volume.xfs"
	mountName = "volume"
)

// Open returns the volume in dir, which must exist. It is dir itself if its file system has reflink. Otherwise it is an XFS in a
// file in dir, which Open makes with budget bytes if it is missing. Without root or mkfs.xfs it is dir itself, without reflink.
// Open uses a mount of an earlier process as it is.
func Open(ctx context.Context, dir string, budget int64, log *slog.Logger) (*Volume, error) {
	ok, err := sparse.CanReflink(dir)
	if err != nil {
		return nil, fmt.Errorf("try whether %s has reflink: %w", dir, err)
	}
	if ok {
		return &Volume{Path: dir, Reflink: true, Detail: "the data directory's own file system, which has reflink"}, nil
	}
	if os.Geteuid() != 0 {
		return &Volume{Path: dir, Detail: "the data directory's own file system: it has no reflink, and mounting one needs root; every checkpoint copies its overlay"}, nil
	}
	mkfs := program("mkfs.xfs")
	if mkfs == "" {
		return &Volume{Path: dir, Detail: "the data directory's own file system: it has no reflink, and mkfs.xfs is not installed (apt-get install xfsprogs); every checkpoint copies its overlay"}, nil
	}
	image, target := filepath.Join(dir, imageName), filepath.Join(dir, mountName)
	if err := os.MkdirAll(target, 0o700); err != nil {
		return nil, err
	}
	v := &Volume{Path: target, Reflink: true, mounted: true, Detail: "an XFS in " + image + ", because the data directory's file system has no reflink"}
	if mounted, err := isMount(target); err != nil || mounted {
		return v, err
	}
	if err := makeImage(ctx, mkfs, image, budget); err != nil {
		return nil, err
	}
	if err := mountImage(image, target); err != nil {
		return nil, core.Wrapf(err, core.FailedPrecondition, core.CodeUnsupported, "the XFS in %s cannot be mounted: %v; use a data directory on XFS or btrfs instead", image, err)
	}
	log.InfoContext(ctx, "mounted the runner's volume", "path", target, "bytes", budget)
	return v, nil
}

// Locate returns the path of the volume that a runner has opened in dir, without opening one.
func Locate(dir string) (string, error) {
	target := filepath.Join(dir, mountName)
	if mounted, err := isMount(target); err == nil && mounted {
		return target, nil
	} else if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", err
	}
	if _, err := os.Stat(filepath.Join(dir, imageName)); err == nil {
		return "", core.Errorf(core.FailedPrecondition, core.CodeStateConflict,
			"the volume of %s is not mounted here; run this where its runner is visible, or start the runner", dir)
	}
	return dir, nil
}

// program returns the path of a program, or "".
func program(name string) string {
	path, err := exec.LookPath(name)
	if err != nil {
		return ""
	}
	return path
}

// isMount reports whether something is mounted on path.
func isMount(path string) (bool, error) {
	var here, above unix.Stat_t
	if err := errors.Join(unix.Stat(path, &here), unix.Stat(filepath.Dir(path), &above)); err != nil {
		return false, fmt.Errorf("examine %s: %w", path, err)
	}
	return here.Dev != above.Dev, nil
}

// makeImage makes the file system, whole or not at all.
func makeImage(ctx context.Context, mkfs, image string, budget int64) error {
	if _, err := os.Stat(image); err == nil || !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if budget < MinBudget {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "the disk budget is %d bytes; it must be at least %d", budget, int64(MinBudget))
	}
	part := image + ".part"
	f, err := os.OpenFile(part, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Truncate(budget), f.Close()); err != nil {
		return err
	}
	out, err := exec.CommandContext(ctx, mkfs, "-q", "-f", "-m", "reflink=1", part).CombinedOutput() //nolint:gosec // G204: fixed arguments and our path
	if err != nil {
		return fmt.Errorf("make an XFS in %s: %w: %s", part, err, core.Clip(string(out)))
	}
	return os.Rename(part, image)
}

// mountImage attaches the file to a free loop device that frees itself when it is unmounted, and mounts it. The device goes
// around the page cache of the file below, so that data is cached once.
func mountImage(image, target string) error {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer control.Close()
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if device, ok := attachedDevice(f); ok {
		if err := mountDevice(device, target); err == nil {
			return nil
		} // it has been freed meanwhile
	}
	const attempts = 16 // another process may take the device in between
	for range attempts {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return fmt.Errorf("get a free loop device: %w", err)
		}
		name := fmt.Sprintf("/dev/loop%d", n)
		err = attachAndMount(name, f, target)
		if !errors.Is(err, unix.EBUSY) {
			return err
		}
	}
	return errors.New("every loop device was taken by somebody else")
}

func attachAndMount(device string, image *os.File, target string) error {
	loop, err := os.OpenFile(device, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer loop.Close() // with the mount holding it open, this does not free it
	cfg := unix.LoopConfig{Fd: uint32(image.Fd())}
	cfg.Info.Flags = unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO
	copy(cfg.Info.File_name[:], image.Name())
	if err := unix.IoctlLoopConfigure(int(loop.Fd()), &cfg); err != nil {
		return fmt.Errorf("attach %s: %w", device, err)
	}
	return mountDevice(device, target)
}

func mountDevice(device, target string) error {
	if err := unix.Mount(device, target, "xfs", unix.MS_NOATIME|unix.MS_NODEV|unix.MS_NOSUID|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount %s: %w", device, err)
	}
	return nil
}

// attachedDevice finds the loop device that the image is still attached to. Some process that was started while the volume was
// mounted may have a copy of the mount in a namespace of its own; the same file system cannot be mounted from a second device then.
func attachedDevice(image *os.File) (string, bool) {
	var want unix.Stat_t
	if err := unix.Fstat(int(image.Fd()), &want); err != nil {
		return "", false
	}
	devices, err := filepath.Glob("/sys/block/loop*/loop")
	if err != nil {
		return "", false
	}
	for _, d := range devices {
		device := "/dev/" + filepath.Base(filepath.Dir(d))
		f, err := os.Open(device)
		if err != nil {
			continue
		}
		info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
		_ = f.Close() // only asked
		if err == nil && info.Device == want.Dev && info.Inode == want.Ino {
			return device, true
		}
	}
	return "", false
}

// Close unmounts what Open mounted. The files stay.
func (v *Volume) Close() error {
	if !v.mounted {
		return nil
	}
	v.mounted = false
	if err := unix.Unmount(v.Path, 0); err != nil {
		return fmt.Errorf("unmount %s: %w", v.Path, err)
	}
	return nil
}
