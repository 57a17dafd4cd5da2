// Command guest is the first program of the lane's first-level machine: it makes a Debian root usable, loads KVM and runs
// what the host asks for over a virtio-serial port.
package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	newRoot = "/newroot"

	// What this program is called says what it is to do; in the initial root it has another name.
	asInit   = "lane-init"
	asServer = "lane-serve"
)

func main() {
	err := run()
	fmt.Fprintln(os.Stderr, "lane:", err)
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	select {} // the machine ends meanwhile
}

func run() error {
	switch os.Args[0] {
	case asInit:
		if err := setUp(); err != nil {
			return err
		}
		return reap()
	case asServer:
		return serve()
	default:
		return enterRoot()
	}
}

// reap starts the server and collects what programs have orphaned, until the server ends. The server is a process of its own
// so that it alone waits for the programs that it starts.
func reap() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	server, err := os.StartProcess(self, []string{asServer}, &os.ProcAttr{Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}})
	if err != nil {
		return err
	}
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		case pid == server.Pid:
			return fmt.Errorf("the server ended with %v", status)
		}
	}
}

// enterRoot leaves the initial root for the one on the disk, and starts this program again there.
func enterRoot() error {
	if err := mount("proc", "/proc", "proc", 0, ""); err != nil {
		return err
	}
	if err := mount("sysfs", "/sys", "sysfs", 0, ""); err != nil {
		return err
	}
	if err := mount("devtmpfs", "/dev", "devtmpfs", 0, ""); err != nil {
		return err
	}
	list, err := os.ReadFile("/etc/coppice/modules")
	if err != nil {
		return err
	}
	for path := range strings.FieldsSeq(string(list)) {
		if err := loadModule(path); err != nil {
			return err
		}
	}
	if err := await("/dev/vda"); err != nil {
		return err
	}
	if err := mount("/dev/vda", newRoot, "ext4", unix.MS_NOATIME, "barrier=0"); err != nil {
		return err
	}
	self, err := os.ReadFile("/init")
	if err != nil {
		return err
	}
	const there = "/usr/local/sbin/lane-init"
	if err := os.WriteFile(newRoot+there, self, 0o755); err != nil {
		return err
	}
	for _, at := range []string{"/proc", "/sys", "/dev"} {
		if err := unix.Mount(at, newRoot+at, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move %s: %w", at, err)
		}
	}
	if err := unix.Chdir(newRoot); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	return unix.Exec(there, []string{asInit}, []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8", "TMPDIR=/tmp",
	})
}

func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("load %s: %w", filepath.Base(path), err)
	}
	return nil
}

// await waits for a device that its driver is still bringing up.
func await(path string) error {
	for range 1000 {
		if _, err := os.Stat(path); err == nil {
			return nil
		}
		<-time.After(10 * time.Millisecond)
	}
	return fmt.Errorf("%s does not appear", path)
}

func mount(source, at, kind string, flags uintptr, data string) error {
	if err := os.MkdirAll(at, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(source, at, kind, flags, data); err != nil && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("mount %s: %w", at, err)
	}
	return nil
}

// setUp does what an init system would.
func setUp() error {
	for _, m := range []struct {
		kind, at, data string
	}{
		{"tmpfs", "/run", "mode=0755"},
		{"tmpfs", "/dev/shm", ""},
		{"devpts", "/dev/pts", "gid=5,mode=620,ptmxmode=666"},
		{"cgroup2", "/sys/fs/cgroup", ""},
		{"debugfs", "/sys/kernel/debug", ""},
		{"tracefs", "/sys/kernel/tracing", ""},
	} {
		if err := mount(m.kind, m.at, m.kind, 0, m.data); err != nil {
			return err
		}
	}
	if _, err := os.Stat("/dev/vdb"); err == nil {
		if err := mount("/dev/vdb", "/payload", "ext4", unix.MS_NOATIME, "barrier=0"); err != nil {
			return err
		}
	}
	if err := unix.Sethostname([]byte("lane")); err != nil {
		return err
	}
	if err := cgroups("/sys/fs/cgroup"); err != nil {
		return err
	}
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/all/disable_ipv6", []byte("0"), 0o600); err != nil {
		fmt.Fprintln(os.Stderr, "lane: no IPv6:", err)
	}
	for _, m := range []string{"kvm_amd", "tun", "nf_tables", "veth", "loop", "xfs", "overlay", "erofs", "vhost_vsock", "vhost_net"} {
		if out, err := exec.Command("modprobe", m).CombinedOutput(); err != nil { //nolint:noctx // the machine's life is the context
			fmt.Fprintf(os.Stderr, "lane: no module %s: %s\n", m, strings.TrimSpace(string(out)))
		}
	}
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil { //nolint:noctx // see above
		return fmt.Errorf("bring lo up: %w: %s", err, out)
	}
	return openKVM()
}

// openKVM gives the device to its group, as udev does.
func openKVM() error {
	const device = "/dev/kvm"
	if _, err := os.Stat(device); err != nil {
		fmt.Fprintln(os.Stderr, "lane: no KVM:", err)
		return nil
	}
	group, err := user.LookupGroup("kvm")
	if err != nil {
		return err
	}
	gid, err := strconv.Atoi(group.Gid)
	if err != nil {
		return err
	}
	return errors.Join(os.Chown(device, 0, gid), os.Chmod(device, 0o660))
}

// cgroups moves this program out of the root group, which alone may then hand every controller to its children.
func cgroups(root string) error {
	own := filepath.Join(root, "lane")
	if err := os.MkdirAll(own, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(own, "cgroup.procs"), []byte("0"), 0o600); err != nil {
		return fmt.Errorf("leave the root cgroup: %w", err)
	}
	have, err := os.ReadFile(filepath.Join(root, "cgroup.controllers"))
	if err != nil {
		return err
	}
	for c := range strings.FieldsSeq(string(have)) {
		if err := os.WriteFile(filepath.Join(root, "cgroup.subtree_control"), []byte("+"+c), 0o600); err != nil {
			fmt.Fprintf(os.Stderr, "lane: no controller %s: %v\n", c, err)
		}
	}
	return nil
}
