package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/coppice-dev/coppice/internal/test/kvmlane/wire"
)

// shape is what a first-level machine has.
type shape struct {
	emulator  emulator
	memoryMiB int
	cpus      int
	payload   string // an ext4 image; empty for none
	dir       string // its sockets, console and what it writes to its disk; private
}

func (s shape) socket() string  { return filepath.Join(s.dir, "lane.sock") }
func (s shape) monitor() string { return filepath.Join(s.dir, "monitor.sock") }
func (s shape) console() string { return filepath.Join(s.dir, "console.log") }
func (s shape) pidFile() string { return filepath.Join(s.dir, "pid") }

// The first level is emulated with AMD's virtualisation and nested paging, which is all that it is for. What emulation does
// badly is left out, for the reasons that runner/vmm/qemu has; the mitigations of a processor that speculates protect nothing
// here, in neither level.
const (
	// QEMU 7.2 leaves garbage in the flags after cmpxchg16b, of which a 6.12 kernel's allocator dies; a second level that sees PKU
	// or MPX finds the sizes of its XSAVE areas wrong; and walks of page tables are short without LA57.
	laneCPU     = "max,erms=off,fsrm=off,cx16=off,la57=off,pku=off,mpx=off"
	laneCmdline = "console=ttyS0 panic=-1 reboot=t quiet mitigations=off tsc=unstable random.trust_cpu=on"
)

// arguments is QEMU's command line.
func arguments(s shape, r rootFS) []string {
	a := []string{
		"-name", "coppice-kvmlane", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-M", "q35,usb=off,vmport=off,graphics=off", "-accel", s.emulator.accelerator(), "-cpu", laneCPU,
		"-smp", strconv.Itoa(s.cpus), "-m", strconv.Itoa(s.memoryMiB) + "M",
		"-kernel", r.kernel, "-initrd", r.initrd, "-append", laneCmdline,
		"-chardev", "file,id=console,path=" + s.console(), "-serial", "chardev:console",
		"-qmp", "unix:" + s.monitor() + ",server=on,wait=off", "-pidfile", s.pidFile(),
		// Written to a file without a name; the one that is kept stays as it is.
		"-drive", "if=none,id=root,format=raw,snapshot=on,cache=unsafe,discard=unmap,file=" + r.disk,
		"-device", "virtio-blk-pci,drive=root,disable-legacy=on",
		"-device", "virtio-serial-pci,disable-legacy=on",
		"-chardev", "socket,id=lane,server=on,wait=off,path=" + s.socket(),
		"-device", "virtserialport,chardev=lane,name=" + wire.Port,
		"-object", "rng-random,id=rng,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=rng,disable-legacy=on",
	}
	if s.payload != "" {
		a = append(a,
			"-drive", "if=none,id=payload,format=raw,snapshot=on,cache=unsafe,file="+s.payload,
			"-device", "virtio-blk-pci,drive=payload,disable-legacy=on")
	}
	return a
}

// start starts QEMU. With attached it ends with this process, else it goes on without it.
func start(s shape, r rootFS, attached bool) (*exec.Cmd, error) {
	for _, f := range []string{s.socket(), s.monitor(), s.pidFile()} {
		if err := os.Remove(f); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
	}
	log, err := os.OpenFile(filepath.Join(s.dir, "qemu.log"), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	args := slices.Concat(s.emulator.command[1:], arguments(s, r))
	cmd := exec.Command(s.emulator.command[0], args...) //nolint:gosec,noctx // G204: of our own making; ended by whoever started it
	cmd.Env = append(os.Environ(), "TMPDIR="+s.dir)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if attached {
		cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	}
	if err := startBound(cmd); err != nil {
		return nil, fmt.Errorf("start the machine's QEMU: %w", err)
	}
	return cmd, nil
}

// startBound starts a command from a thread that lasts as long as this process: a child gets its Pdeathsig when the thread that
// started it ends.
func startBound(cmd *exec.Cmd) error {
	err := make(chan error)
	go func() {
		runtime.LockOSThread()
		err <- cmd.Start()
		select {}
	}()
	return <-err
}

// machine is one that ends with this process.
type machine struct {
	cmd    *exec.Cmd
	client *client
}

// boot starts a machine and waits until it answers.
func boot(ctx context.Context, s shape, r rootFS) (*machine, error) {
	cmd, err := start(s, r, true)
	if err != nil {
		return nil, err
	}
	m := &machine{cmd: cmd}
	ctx, cancel := context.WithTimeoutCause(ctx, bootLimit, fmt.Errorf("it did not boot within %s", bootLimit))
	defer cancel()
	if m.client, err = connect(ctx, s); err != nil {
		said, _ := os.ReadFile(s.console())
		return nil, errors.Join(fmt.Errorf("%w; its console ends with:\n%s", err, said[max(0, len(said)-4<<10):]), m.end())
	}
	return m, nil
}

// end ends the machine. Nothing in it is worth shutting down for.
func (m *machine) end() error {
	var err error
	if m.client != nil {
		err = m.client.Close()
	}
	err = errors.Join(err, m.cmd.Process.Kill())
	_ = m.cmd.Wait() // killed
	return err
}

// down ends a machine that was left running.
func down(s shape) error {
	pid, ok := pidOf(s)
	if !ok {
		return nil
	}
	p, err := os.FindProcess(pid)
	if err != nil {
		return err
	}
	if _, ok := pidOf(s); !ok { // now that the process is held, is it still the machine's?
		return nil
	}
	return p.Kill()
}

// connect waits until the machine answers.
func connect(ctx context.Context, s shape) (*client, error) {
	for {
		c, err := dial(ctx, s.socket())
		if err == nil {
			if _, err = c.run(ctx, wire.Run{Command: []string{"true"}}, os.Stderr, os.Stderr); err == nil {
				return c, nil
			}
			return nil, errors.Join(fmt.Errorf("the machine does not answer: %w", err), c.Close())
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(context.Cause(ctx), err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// pidOf returns the process of the machine, if it runs: the one in its file, and only if it names the machine's monitor.
func pidOf(s shape) (int, bool) {
	b, err := os.ReadFile(s.pidFile())
	if err != nil {
		return 0, false
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || pid <= 1 {
		return 0, false
	}
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return pid, err == nil && strings.Contains(string(line), s.monitor())
}
