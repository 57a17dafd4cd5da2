// Command probe is a stand-in for the guest agent: the first program of an image under test. It does by the same
// contract what the agent does at boot, reports every step on the console as a line "PROBE <json>", runs what the
// kernel command line asks for and powers the guest off.
//
//	probe.mount=OPTIONS options for the mount of the overlay disk
//	probe.resize=BYTES  grow the overlay file system while it is mounted
//	probe.exec=PROGRAM  with "," between its arguments, run inside the root; may be repeated
//	probe.stat=PATH     report owner, mode and attributes of a file inside the root; may be repeated
//	probe.idle=SECONDS  do nothing for so long, between two lines that a host may measure at
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/guestagent/boot"
)

// monotonic is the time since the kernel's clock began, early in its boot.
func monotonic() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return time.Duration(ts.Nano())
}

func report(step string, more map[string]any) {
	out := map[string]any{"step": step, "ms": float64(monotonic().Microseconds()) / 1000}
	for k, v := range more {
		out[k] = v
	}
	raw, _ := json.Marshal(out)
	fmt.Printf("PROBE %s\n", raw)
}

func main() {
	// As a program inside the root, it reports whether the root is correct.
	if os.Getpid() != 1 {
		return
	}
	report("init", nil)
	if err := start(); err != nil {
		report("failed", map[string]any{"error": err.Error()})
	}
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

func start() error {
	for _, m := range []struct{ kind, at string }{{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}} {
		if err := unix.Mount(m.kind, m.at, m.kind, 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mount %s: %w", m.at, err)
		}
	}
	if err := loadModules(); err != nil {
		return err
	}
	report("modules", nil)
	if err := mountRoot(); err != nil {
		return err
	}
	report("mounted", map[string]any{"clocksource": read("/sys/devices/system/clocksource/clocksource0/current_clocksource"), "release": read("/proc/sys/kernel/osrelease")})
	for _, word := range strings.Fields(read("/proc/cmdline")) {
		key, value, _ := strings.Cut(word, "=")
		switch key {
		case "probe.exec":
			runIn(strings.Split(value, ","))
		case "probe.stat":
			if err := stat(value); err != nil {
				return err
			}
		case "probe.resize":
			if err := resize(value); err != nil {
				return err
			}
		case "probe.idle":
			seconds, err := strconv.Atoi(value)
			if err != nil {
				return err
			}
			report("idle-begin", map[string]any{"interrupts": interrupts()})
			time.Sleep(time.Duration(seconds) * time.Second)
			report("idle-end", map[string]any{"interrupts": interrupts()})
		}
	}
	report("done", nil)
	return nil
}

func loadModules() error {
	list, err := os.ReadFile("/etc/coppice/modules")
	if err != nil {
		return err
	}
	for _, path := range strings.Fields(string(list)) {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		start := monotonic()
		if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("insmod %s: %w", path, err)
		}
		_ = f.Close()
		report("module", map[string]any{"name": filepath.Base(path), "took_ms": float64((monotonic() - start).Microseconds()) / 1000})
	}
	return nil
}

func mountRoot() error {
	for _, dir := range []string{"/lower", "/disk", "/newroot"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if err := boot.AwaitDevices(2*time.Second, "/dev/vda", "/dev/vdb"); err != nil {
		return err
	}
	if err := unix.Mount("/dev/vda", "/lower", "erofs", unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("mount root: %w", err)
	}
	report("erofs", nil)
	if err := unix.Mount("/dev/vdb", "/disk", "ext4", unix.MS_NOATIME, option("probe.mount")); err != nil {
		return fmt.Errorf("mount overlay: %w", err)
	}
	for _, dir := range []string{"/disk/upper", "/disk/work"} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	if err := unix.Mount("overlay", "/newroot", "overlay", 0, "lowerdir=/lower,upperdir=/disk/upper,workdir=/disk/work"); err != nil {
		return fmt.Errorf("mount overlayfs: %w", err)
	}
	for _, m := range []struct{ kind, at string }{{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}, {"tmpfs", "/run"}} {
		if err := unix.Mount(m.kind, "/newroot"+m.at, m.kind, 0, ""); err != nil {
			return fmt.Errorf("mount %s in the root: %w", m.at, err)
		}
	}
	return nil
}

// option returns the value of a word on the kernel command line.
func option(key string) string {
	for _, word := range strings.Fields(read("/proc/cmdline")) {
		if k, v, _ := strings.Cut(word, "="); k == key {
			return v
		}
	}
	return ""
}

func runIn(argv []string) {
	var out, errOut bytes.Buffer
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Path = argv[0]
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8"}
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = &out, &errOut
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: "/newroot"}
	cmd.Err = nil
	start := monotonic()
	err := cmd.Run()
	result := map[string]any{"argv": argv, "stdout": out.String(), "stderr": errOut.String(), "took_ms": float64((monotonic() - start).Microseconds()) / 1000}
	if err != nil {
		result["error"] = err.Error()
	}
	report("exec", result)
}

func stat(name string) error {
	path := "/newroot" + name
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return fmt.Errorf("stat %s: %w", name, err)
	}
	var names [4096]byte
	n, err := unix.Llistxattr(path, names[:])
	if err != nil {
		return fmt.Errorf("attributes of %s: %w", name, err)
	}
	attrs := map[string]string{}
	for _, a := range strings.Split(strings.Trim(string(names[:n]), "\x00"), "\x00") {
		var value [256]byte
		if n, err := unix.Lgetxattr(path, a, value[:]); a != "" && err == nil {
			attrs[a] = fmt.Sprintf("%x", value[:n])
		}
	}
	report("stat", map[string]any{"path": name, "mode": st.Mode, "uid": st.Uid, "gid": st.Gid, "nlink": st.Nlink, "mtime": st.Mtim.Sec, "attrs": attrs})
	return nil
}

func resize(bytes string) error {
	size, err := strconv.ParseUint(bytes, 10, 64)
	if err != nil {
		return err
	}
	var before, after unix.Statfs_t
	f, err := os.Open("/disk")
	if err != nil {
		return err
	}
	if err := unix.Fstatfs(int(f.Fd()), &before); err != nil {
		return err
	}
	start := monotonic()
	blocks := size / 4096
	if err := ioctlResize(f, blocks); err != nil {
		return fmt.Errorf("resize to %d blocks: %w", blocks, err)
	}
	took := monotonic() - start
	if err := unix.Fstatfs(int(f.Fd()), &after); err != nil {
		return err
	}
	report("resize", map[string]any{
		"took_ms": float64(took.Microseconds()) / 1000, "before": before.Blocks * 4096, "after": after.Blocks * 4096,
		"threads": threads(),
	})
	return nil
}

// threads returns the names of the kernel's threads that belong to ext4.
func threads() []string {
	var out []string
	names, _ := filepath.Glob("/proc/[0-9]*/comm")
	for _, n := range names {
		if name := read(n); strings.HasPrefix(name, "ext4") {
			out = append(out, name)
		}
	}
	return out
}

// interrupts sums /proc/interrupts over all processors, by line.
func interrupts() map[string]uint64 {
	out := map[string]uint64{}
	for _, line := range strings.Split(read("/proc/interrupts"), "\n") {
		name, rest, ok := strings.Cut(line, ":")
		if !ok {
			continue
		}
		var sum uint64
		for _, f := range strings.Fields(rest) {
			n, err := strconv.ParseUint(f, 10, 64)
			if err != nil {
				break
			}
			sum += n
		}
		if sum > 0 {
			out[strings.TrimSpace(name)] = sum
		}
	}
	return out
}

func read(path string) string {
	raw, _ := os.ReadFile(path)
	return strings.TrimSpace(string(raw))
}
