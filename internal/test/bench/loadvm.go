package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/coppice-dev/coppice/internal/osthread"
	"github.com/coppice-dev/coppice/internal/pace"
	"github.com/coppice-dev/coppice/internal/test/bench/report"
	"github.com/coppice-dev/coppice/runner/guest"
	"github.com/coppice-dev/coppice/runner/vmm/qemu"
)

// The guest with which QEMU's own snapshots are compared.
const (
	bigMiB   = 1024
	inUseMiB = 600
	snapshot = "bench"
)

// occupy is a command that makes a guest keep n MiB of memory that is not zero, in a process that goes on.
func occupy(n int) []string {
	program := fmt.Sprintf(`import os, time
pages = %d * 256
held = bytearray(pages * 4096)
held[::4096] = os.urandom(pages).replace(b"\0", b"\1")
open("/dev/shm/held", "w").close()
time.sleep(1e6)`, n)
	script := `python3 -c "$1" </dev/null >/dev/null 2>&1 & while [ ! -e /dev/shm/held ]; do sleep 0.1; done`
	return []string{"sh", "-c", script, "sh", program}
}

// measureLoadVM compares a sealed fork with the means of plain QEMU: savevm, and a new process with -loadvm.
func (b *bench) measureLoadVM(ctx context.Context) (err error) {
	w, _, err := b.server.create(ctx, bigMiB)
	if err != nil {
		return err
	}
	if _, err := b.server.exec(ctx, w, occupy(inUseMiB)...); err != nil {
		return err
	}
	cp, err := b.server.checkpoint(ctx, w)
	if err != nil {
		return err
	}
	if err := b.server.end(ctx, w); err != nil {
		return err
	}
	p, save, err := b.lab.plainSnapshot(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.remove()) }()
	var answer, load, ready, fork, first report.Samples
	var where report.Stages
	for i := range b.rounds(6, 90*time.Second) {
		a, f, err := p.load(ctx)
		if err != nil {
			return err
		}
		answer.Add(a)
		load.Add(f)
		if i > 0 { // by its size the delta has become a base after the first fork, in the background
			if err := b.server.awaitBase(ctx, bigMiB, inUseMiB); err != nil {
				return err
			}
		}
		if err := b.server.settle(ctx, bigMiB); err != nil {
			return err
		}
		began := time.Now()
		child, err := b.server.forkOne(ctx, cp.ID)
		if err != nil {
			return err
		}
		toReady := report.Since(began)
		if _, err := b.server.exec(ctx, child.Workspace.ID, "true"); err != nil {
			return err
		}
		if i == 0 {
			first.Add(report.Since(began))
		} else {
			ready.Add(toReady)
			fork.Add(report.Since(began))
			where.Public(child.Timings)
		}
		if err := b.server.end(ctx, child.Workspace.ID); err != nil {
			return err
		}
	}
	b.report.Group(fmt.Sprintf("QEMU's own snapshots (qcow2) beside a fork, guest of %d MiB with %d MiB in use", bigMiB, inUseMiB),
		report.Samples{save}.MS("savevm: the guest stands still", ""),
		answer.MS("fresh QEMU with -loadvm, to the agent's answer", ""),
		load.MS("fresh QEMU with -loadvm, to first exec", ""),
		report.Samples{cp.PauseMS}.MS("checkpoint: the guest stands still", fmt.Sprintf("delta %d MiB", cp.DeltaBytes>>20)),
		first.MS("first sealed fork, to first exec", "the whole delta is injected, and rebased then"),
		ready.MS("sealed fork, to READY", "later ones, on the new base"),
		fork.MS("sealed fork, to first exec", "later ones, on the new base"),
	)
	b.report.Stages["fork of 1 GiB"] = where.Medians()
	b.report.over("loadvm_over_fork", load, fork, "fresh QEMU with -loadvm over sealed fork through REST, both to first exec, ms")
	return b.server.endAll(ctx)
}

// plain is a QEMU without Coppice, with the same kernel, image, CPU and devices.
type plain struct {
	lab  *lab
	dir  string
	path string
	args []string
}

// plainSnapshot boots a plain QEMU, lets its guest use memory, and saves it. It returns how long that stopped the
// guest.
func (l *lab) plainSnapshot(ctx context.Context) (_ *plain, saved float64, err error) {
	p, err := l.newPlain(ctx)
	if err != nil {
		return nil, 0, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.remove())
		}
	}()
	r, err := p.start(ctx, "-kernel", l.image.Kernel, "-initrd", l.image.Initrd, "-append", l.image.CommandLine)
	if err != nil {
		return nil, 0, err
	}
	defer func() { err = errors.Join(err, r.kill()) }()
	if err := r.connect(ctx); err != nil {
		return nil, 0, err
	}
	if err := r.exec(ctx, occupy(inUseMiB)...); err != nil {
		return nil, 0, err
	}
	began := time.Now()
	if err := monitor(ctx, p.socket("qmp"), "savevm "+snapshot); err != nil {
		return nil, 0, err
	}
	return p, report.Since(began), nil
}

func (l *lab) newPlain(ctx context.Context) (*plain, error) {
	fp, err := l.driver.Fingerprint(ctx)
	if err != nil {
		return nil, err
	}
	cpu := fp.CPUModel // under TCG it is the name of the model
	if fp.Accelerator == "kvm" {
		cpu = "host,migratable=on"
	}
	path := l.cfg.qemu
	if path == "" {
		if path, err = exec.LookPath("qemu-system-x86_64"); err != nil {
			return nil, err
		}
	}
	// The directory is not on the volume: its files do not use the page cache below, and savevm must not pay for that.
	dir, err := os.MkdirTemp(filepath.Dir(filepath.Dir(l.volume.Path)), "plain-*")
	if err != nil {
		return nil, err
	}
	p := &plain{lab: l, dir: dir, path: path}
	disk := filepath.Join(dir, "overlay.qcow2")
	if err := writeQCOW2(disk, l.image.Overlay, l.overlayBytes()); err != nil {
		return nil, errors.Join(err, p.remove())
	}
	p.args = []string{
		"-name", "coppice-" + l.cluster + "-plain", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-M", fp.MachineType + ",usb=off,vmport=off,smm=off,hpet=off,graphics=off", "-accel", fp.Accelerator, "-cpu", cpu,
		"-smp", "1", "-m", fmt.Sprintf("%dM", bigMiB),
		"-qmp", "unix:" + p.socket("qmp") + ",server=on,wait=off",
		"-device", "virtio-serial-pci,max_ports=2,disable-legacy=on",
		"-chardev", "socket,id=agent,path=" + p.socket("agent") + ",server=on,wait=off",
		"-device", "virtserialport,nr=1,chardev=agent,name=" + qemu.AgentPort,
		"-object", "rng-builtin,id=rng", "-device", "virtio-rng-pci,rng=rng,disable-legacy=on",
		"-drive", "if=none,id=root,format=raw,readonly=on,file=" + l.image.RootFS, "-device", "virtio-blk-pci,drive=root,serial=root,disable-legacy=on",
		"-drive", "if=none,id=overlay,format=qcow2,file=" + disk, "-device", "virtio-blk-pci,drive=overlay,serial=overlay,disable-legacy=on",
	}
	return p, nil
}

func (p *plain) socket(name string) string { return filepath.Join(p.lab.runDir, name+".sock") }
func (p *plain) remove() error             { return os.RemoveAll(p.dir) }

// plainRun is one process of it.
type plainRun struct {
	machine // for its agent
	plain   *plain
	cmd     *exec.Cmd
	said    strings.Builder
	ended   chan struct{}
}

func (p *plain) start(ctx context.Context, more ...string) (*plainRun, error) {
	r := &plainRun{plain: p, ended: make(chan struct{})}
	for _, s := range []string{"qmp", "agent"} {
		if err := ignoreAbsent(os.Remove(p.socket(s))); err != nil {
			return nil, err
		}
	}
	r.cmd = exec.Command(p.path, append(append([]string{}, p.args...), more...)...) //nolint:gosec,noctx // G204: fixed arguments; kill ends it
	r.cmd.Stdout, r.cmd.Stderr = &r.said, &r.said
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	osthread.Go(func() { // it lives as long as the process: the kernel signals a child whose starter has ended
		if err := r.cmd.Start(); err != nil {
			started <- err
			return
		}
		started <- nil
		_ = r.cmd.Wait() // its state says it
		close(r.ended)
	})
	if err := <-started; err != nil {
		return nil, err
	}
	return r, ctx.Err()
}

func (r *plainRun) kill() error {
	if r.agent != nil {
		_ = r.agent.Close() // the guest is about to end anyway
	}
	err := r.cmd.Process.Kill()
	<-r.ended
	if errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("plain qemu ended by itself: %s", r.said.String())
	}
	return err
}

// connect waits for the socket and for the agent.
func (r *plainRun) connect(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, guestTime)
	defer cancel()
	for {
		r.agent, err = guest.Dial(ctx, func(ctx context.Context) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", r.plain.socket("agent"))
		})
		if err == nil || !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ECONNREFUSED) {
			return err
		}
		select {
		case <-r.ended:
			return fmt.Errorf("plain qemu ended: %s", r.said.String())
		default:
		}
		if err := pace.Pause(ctx, time.Millisecond); err != nil {
			return err
		}
	}
}

// load starts a new process from the snapshot. It returns the times to the agent's answer and to the end of a command.
func (p *plain) load(ctx context.Context) (answer, first float64, err error) {
	began := time.Now()
	r, err := p.start(ctx, "-loadvm", snapshot)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, r.kill()) }()
	if err := r.connect(ctx); err != nil {
		return 0, 0, err
	}
	answer = report.Since(began)
	if err := r.exec(ctx, "true"); err != nil {
		return 0, 0, err
	}
	return answer, report.Since(began), nil
}
