// Command guest is the first and only program of the machines that package vmmtest tests a driver with: it loads the
// modules of its initrd, opens the agent's channel, a virtio-serial port or a port of vsock, and serves package line on
// it. It is built and packed by internal/test/testvm.
//
// With coppice.probe=1 on the kernel's command line, it does the same as the guest agent: it prints COPPICE_PROBE_OK on
// the console and powers off.
package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/mdlayher/vsock"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/runner/vmm/vmmtest/line"
)

const (
	portName  = "coppice.agent"
	vsockPort = 1024
	memory    = 64 << 20 // reserved for the program; only what it writes is used
)

func main() {
	err := run()
	fmt.Fprintln(os.Stderr, "guest:", err)
	off(false)
}

func off(crash bool) {
	if crash {
		os.Exit(1) // the kernel panics when PID 1 ends
	}
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	select {} // the machine ends meanwhile
}

func run() error {
	for _, m := range []struct{ kind, at string }{{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}} {
		if err := unix.Mount(m.kind, m.at, m.kind, 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mount %s: %w", m.at, err)
		}
	}
	cmdline, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return err
	}
	if strings.Contains(" "+string(cmdline)+" ", "coppice.probe=1") {
		fmt.Fprintln(os.Stderr, "COPPICE_PROBE_OK")
		off(false)
	}
	if err := loadModules(func(name string) bool {
		return strings.HasPrefix(name, "virtio") && name != "virtio_net.ko" && name != "virtio_rng.ko"
	}); err != nil {
		return err
	}
	overVsock, err := hasVsock()
	if err == nil && overVsock {
		err = loadModules(func(name string) bool { return strings.Contains(name, "vsock") })
	}
	if err != nil {
		return err
	}
	g, err := newGuest()
	if err != nil {
		return err
	}
	go g.tick()
	go g.background()
	if overVsock {
		return g.serveVsock()
	}
	return g.serve()
}

// hasVsock reports whether the machine has a vsock device. Then it has no port.
func hasVsock() (bool, error) {
	const vsockDevice = "0x0013"
	devices, err := filepath.Glob("/sys/bus/virtio/devices/*/device")
	if err != nil {
		return false, err
	}
	for _, d := range devices {
		if b, err := os.ReadFile(d); err == nil && strings.TrimSpace(string(b)) == vsockDevice {
			return true, nil
		}
	}
	return false, nil
}

// loadModules loads the modules whose names are wanted: those for the disks and the channel, and none that only cost
// time.
func loadModules(want func(name string) bool) error {
	list, err := os.ReadFile("/etc/coppice/modules")
	if err != nil {
		return err
	}
	for path := range strings.FieldsSeq(string(list)) {
		name := filepath.Base(path)
		if !want(name) {
			continue
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		_ = f.Close()
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("load %s: %w", name, err)
		}
	}
	return nil
}

type guest struct {
	mu   sync.Mutex // one call of the program at a time
	prog line.Program

	portMu sync.Mutex // guards port
	port   io.Writer  // port of the last host; nil if there is none
}

func newGuest() (*guest, error) {
	mem, err := unix.Mmap(-1, 0, memory, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		return nil, err
	}
	g := &guest{}
	g.prog = line.Program{
		Memory:  mem,
		Disks:   []line.Disk{disk("/dev/vda"), disk("/dev/vdb")},
		Console: func(b []byte) { _, _ = os.Stderr.Write(b) },
		Channel: func(b []byte) {
			g.portMu.Lock()
			p := g.port
			g.portMu.Unlock()
			if p != nil {
				_, _ = p.Write(b)
			}
		},
		Off:    off,
		Uptime: uptime,
	}
	g.prog.Start()
	return g, nil
}

func uptime() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // never fails
	return time.Duration(ts.Nano())
}

func (g *guest) tick() {
	for range time.Tick(time.Millisecond) {
		g.mu.Lock()
		g.prog.Tick()
		g.mu.Unlock()
	}
}

func (g *guest) background() {
	for range time.Tick(time.Millisecond) {
		for more := true; more; {
			g.mu.Lock()
			more = g.prog.Background()
			g.mu.Unlock()
		}
	}
}

// serve opens the port again whenever its host has disconnected.
func (g *guest) serve() error {
	for range time.Tick(5 * time.Millisecond) {
		path, err := findPort()
		if err != nil {
			return err
		}
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			continue // the port does not exist yet
		}
		g.portMu.Lock()
		g.port = f
		g.portMu.Unlock()
		g.session(f)
		g.portMu.Lock()
		g.port = nil
		g.portMu.Unlock()
		_ = f.Close()
	}
	return nil
}

// serveVsock serves every host that connects.
func (g *guest) serveVsock() error {
	l, err := vsock.Listen(vsockPort, nil)
	if err != nil {
		return err
	}
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		g.portMu.Lock()
		g.port = c
		g.portMu.Unlock()
		go func() {
			defer c.Close()
			g.session(c)
		}()
	}
}

func (g *guest) session(f io.ReadWriter) {
	for lines := bufio.NewScanner(f); lines.Scan(); {
		g.mu.Lock()
		answer, ok := g.prog.Do(lines.Text())
		g.mu.Unlock()
		if ok {
			if _, err := fmt.Fprintln(f, answer); err != nil {
				return
			}
		}
	}
}

// findPort waits for the agent's port.
func findPort() (string, error) {
	for range time.Tick(5 * time.Millisecond) {
		names, err := filepath.Glob("/sys/class/virtio-ports/*/name")
		if err != nil {
			return "", err
		}
		for _, n := range names {
			if b, err := os.ReadFile(n); err == nil && strings.TrimSpace(string(b)) == portName {
				return filepath.Join("/dev", filepath.Base(filepath.Dir(n))), nil
			}
		}
	}
	return "", nil
}

// disk is a block device that is read and written past the page cache.
type disk string

func (d disk) block(b *[line.BlockSize]byte, number int64, write bool) error {
	f, err := os.OpenFile(string(d), os.O_RDWR|unix.O_DIRECT, 0)
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EROFS) || errors.Is(err, unix.EPERM) {
		if write {
			return err
		}
		f, err = os.OpenFile(string(d), os.O_RDONLY|unix.O_DIRECT, 0)
	}
	if err != nil {
		return err
	}
	defer f.Close()
	page, err := unix.Mmap(-1, 0, line.BlockSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Munmap(page) }()
	if write {
		copy(page, b[:])
		_, err = f.WriteAt(page, number*line.BlockSize)
		return err
	}
	_, err = f.ReadAt(page, number*line.BlockSize)
	copy(b[:], page)
	return err
}

func (d disk) ReadBlock(b *[line.BlockSize]byte, number int64) error {
	return d.block(b, number, false)
}

func (d disk) WriteBlock(b *[line.BlockSize]byte, number int64) error {
	return d.block(b, number, true)
}

func (d disk) Size() (int64, error) {
	f, err := os.Open(string(d))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	var size uint64
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), unix.BLKGETSIZE64, uintptr(unsafe.Pointer(&size))); errno != 0 {
		return 0, errno
	}
	return int64(size), nil
}
