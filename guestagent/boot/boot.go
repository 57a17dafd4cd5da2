//go:build linux

package boot

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/guestagent/workload"
)

const (
	modulesList = "/etc/coppice/modules"
	rootDevice  = "/dev/vda"
	diskDevice  = "/dev/vdb"
	newRoot     = "/newroot"
	lowerDir    = "/lower"
	diskDir     = "/disk"
	deviceWait  = 20 * time.Second
)

// Main is the whole program of PID 1. It does not return. An error before the agent runs is printed on the console, and
// then the machine is powered off.
func Main(agentArgs []string) {
	console := openConsole()
	if err := prepare(); err != nil {
		die(console, err)
	}
	cmdline, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		die(console, err)
	}
	if option(string(cmdline), "coppice.probe") == "1" {
		_, _ = console.WriteString("\n" + ProbeOK + "\n")
		powerOff()
	}
	if err := furnish(string(cmdline)); err != nil {
		die(console, err)
	}
	supervise(console, agentArgs)
}

// openConsole returns the console, or standard error while there is none.
func openConsole() *os.File {
	_ = os.MkdirAll("/dev", 0o755)
	if err := unix.Mount("dev", "/dev", "devtmpfs", unix.MS_NOSUID, "mode=0755"); err != nil && !errors.Is(err, unix.EBUSY) {
		return os.Stderr
	}
	f, err := os.OpenFile("/dev/console", os.O_WRONLY|unix.O_NOCTTY, 0)
	if err != nil {
		return os.Stderr
	}
	return f
}

func die(console *os.File, err error) {
	_, _ = fmt.Fprintf(console, "\ncoppice: the guest cannot start: %v\n", err)
	powerOff()
}

func powerOff() {
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	select {} // the kernel cannot power off: stay, because PID 1 must not end
}

// option returns the value of name=value on the kernel's command line; the last one counts.
func option(cmdline, name string) string {
	value := ""
	for f := range strings.FieldsSeq(cmdline) {
		if v, ok := strings.CutPrefix(f, name+"="); ok {
			value = v
		}
	}
	return value
}

// mount makes the directory and mounts on it.
func mount(source, target, fstype string, flags uintptr, data string) error {
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(source, target, fstype, flags, data); err != nil {
		return fmt.Errorf("mount %s on %s: %w", fstype, target, err)
	}
	return nil
}

// prepare mounts the file systems that the next steps need.
func prepare() error {
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	return errors.Join(mount("proc", "/proc", "proc", flags, ""), mount("sys", "/sys", "sysfs", flags, ""))
}

// furnish builds the root that the guest lives in, and changes into it.
func furnish(cmdline string) error {
	if err := loadModules(modulesList); err != nil {
		return err
	}
	if err := AwaitDevices(deviceWait, rootDevice, diskDevice); err != nil {
		return err
	}
	if err := mountRoot(option(cmdline, "coppice.rootfstype")); err != nil {
		return err
	}
	if err := mountOverlay(); err != nil {
		return err
	}
	if err := switchRoot(); err != nil {
		return err
	}
	if err := mountRest(); err != nil {
		return err
	}
	return configure()
}

// loadModules loads the modules of a list, in its order.
func loadModules(list string) error {
	b, err := os.ReadFile(list)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // all that is needed is built in
	}
	if err != nil {
		return err
	}
	for path := range strings.FieldsSeq(string(b)) {
		if err := loadModule(path); err != nil {
			return fmt.Errorf("load %s: %w", path, err)
		}
	}
	return nil
}

func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	err = unix.FinitModule(int(f.Fd()), "", 0)
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	return err
}

// mountRoot mounts the read-only root, with the given type or the first type that fits.
func mountRoot(kind string) error {
	types := []string{"erofs", "ext4"}
	if kind != "" {
		types = []string{kind}
	}
	var errs []error
	for _, t := range types {
		data := ""
		if t == "ext4" {
			data = "noload" // a journal must not be replayed into a shared, read-only image
		}
		err := mount(rootDevice, lowerDir, t, unix.MS_RDONLY|unix.MS_NOATIME, data)
		if err == nil {
			return nil
		}
		errs = append(errs, err)
	}
	return fmt.Errorf("the root file system on %s: %w", rootDevice, errors.Join(errs...))
}

// mountOverlay mounts the writable disk and lays it over the root.
func mountOverlay() error {
	// No lazy initialization: a thread of the kernel would go on writing to an idle guest's disk.
	if err := mount(diskDevice, diskDir, "ext4", unix.MS_NOATIME, "noinit_itable"); err != nil {
		return fmt.Errorf("the writable disk: %w", err)
	}
	upper, work := filepath.Join(diskDir, "upper"), filepath.Join(diskDir, "work")
	for _, d := range []string{upper, work} {
		if err := os.Mkdir(d, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("the writable disk: %w", err)
		}
	}
	data := "lowerdir=" + lowerDir + ",upperdir=" + upper + ",workdir=" + work
	// With redirect_dir, a directory of the image can be renamed as on any disk.
	err := mount("overlay", newRoot, "overlay", unix.MS_NOATIME, data+",redirect_dir=on")
	if errors.Is(err, unix.EINVAL) {
		err = mount("overlay", newRoot, "overlay", unix.MS_NOATIME, data)
	}
	return err
}

// switchRoot moves the mounts into the new root, frees the initrd, and changes into the new root.
func switchRoot() error {
	if err := os.MkdirAll(newRoot+"/run", 0o755); err != nil {
		return err
	}
	if err := mount("run", newRoot+"/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		return err
	}
	for _, m := range []struct{ from, to string }{
		{"/dev", newRoot + "/dev"},
		{"/proc", newRoot + "/proc"},
		{"/sys", newRoot + "/sys"},
		{diskDir, newRoot + workload.DiskMount},
	} {
		if err := os.MkdirAll(m.to, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.from, m.to, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move %s to the new root: %w", m.from, err)
		}
	}
	if err := os.Chmod(newRoot+filepath.Dir(workload.DiskMount), 0o700); err != nil {
		return err
	}
	freeInitrd()
	if err := os.Chdir(newRoot); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the new root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("chroot: %w", err)
	}
	return os.Chdir("/")
}

// freeInitrd removes the module files, because the loaded modules are in memory. This program's file is in use and is
// not freed.
func freeInitrd() {
	b, err := os.ReadFile(modulesList)
	if err != nil {
		return
	}
	for f := range bytes.FieldsSeq(b) {
		_ = os.Remove(string(f))
	}
}
