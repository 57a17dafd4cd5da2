package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/kvm"
	"github.com/coppice-dev/coppice/runner/vmm/vmmproc"
)

// probeOK is what a guest says on its console when its kernel's command line has coppice.probe=1; it powers off then.
const probeOK = "COPPICE_PROBE_OK"

// ProbeKVM is Driver.ProbeKVM for the QEMU on the usual paths.
func ProbeKVM(ctx context.Context, kernel, initrd string, timeout time.Duration) (ok bool, why string) {
	return New(Config{}).ProbeKVM(ctx, kernel, initrd, timeout)
}

// ProbeKVM boots a guest kernel and initrd, given as paths, under KVM, because a device node proves nothing. why is for people,
// in both cases. It takes at most the timeout, and leaves no process.
func (d *Driver) ProbeKVM(ctx context.Context, kernel, initrd string, timeout time.Duration) (ok bool, why string) {
	if err := kvm.Open(kvm.Device); err != nil {
		return false, err.Error()
	}
	start := time.Now()
	if err := d.probe(ctx, acceleratorKVM, kernel, initrd, timeout); err != nil {
		return false, err.Error()
	}
	why = fmt.Sprintf("a guest kernel booted under it in %s", time.Since(start).Round(time.Millisecond))
	if os.Geteuid() == 0 { // the machines themselves run as users of their own
		if _, err := kvm.Group(kvm.Device); err != nil {
			return false, why + ", but " + err.Error()
		}
	}
	return true, why
}

// probe boots a machine that is to power off by itself. Its error is for people.
func (d *Driver) probe(ctx context.Context, accelerator, kernel, initrd string, timeout time.Duration) (err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	in, err := d.installation(ctx)
	if err != nil {
		return err
	}
	read, write, err := os.Pipe()
	if err != nil {
		return err
	}
	defer read.Close()
	proc, err := vmmproc.Start(vmmproc.Command{Path: in.path, Args: probeArguments(in, accelerator, kernel, initrd), Log: write, Dir: "/"})
	_ = write.Close() // QEMU has its own copy
	if err != nil {
		return err
	}
	console := &probeConsole{Tail: vmm.NewTail(logBytes), seen: make(chan struct{})}
	var reader sync.WaitGroup
	reader.Go(func() { console.follow(read) })
	defer reader.Wait()
	defer func() {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), commandTime)
		defer cancel()
		err = errors.Join(err, proc.Kill(clean))
		_ = read.SetReadDeadline(time.Now().Add(logDrain)) // a process that cannot be killed must not hold the reader
	}()
	select {
	case <-console.seen:
		return nil
	case <-proc.Done():
		_ = read.SetReadDeadline(time.Now().Add(logDrain)) // see above
		reader.Wait()
		if console.ok() {
			return nil
		}
		status, _ := proc.Status()
		return fmt.Errorf("qemu ended with %s before a guest kernel had booted; %s", status, console.end())
	case <-ctx.Done():
		if context.Cause(ctx) != context.DeadlineExceeded { //nolint:errorlint // ours, not wrapped
			return fmt.Errorf("given up: %w", context.Cause(ctx))
		}
		return fmt.Errorf("a guest kernel did not boot within %s; %s", timeout, console.end())
	}
}

func probeArguments(in *installation, accelerator, kernel, initrd string) []string {
	accel, cpu, more := acceleratorArguments(accelerator)
	return []string{
		"-name", "coppice-probe", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-sandbox", sandbox,
		"-M", in.machineType() + ",usb=off,vmport=off,smm=off,hpet=off,graphics=off", "-accel", accel, "-cpu", cpu, "-smp", "1",
		"-m", "256M", "-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
		"-kernel", kernel, "-initrd", initrd, "-append", "console=ttyS0 panic=-1 reboot=t quiet coppice.probe=1" + more,
	}
}

// probeConsole looks for the guest's word.
type probeConsole struct {
	*vmm.Tail
	seen chan struct{} // closed when it was said
}

func (c *probeConsole) ok() bool { return strings.Contains(c.String(), probeOK) }

func (c *probeConsole) follow(r *os.File) {
	buf := make([]byte, 4096)
	for said := false; ; {
		n, err := r.Read(buf)
		_, _ = c.Write(buf[:n]) // never fails
		if !said && c.ok() {
			said = true
			close(c.seen)
		}
		if err != nil {
			return
		}
	}
}

// end is what QEMU and the guest's console said last, for people.
func (c *probeConsole) end() string {
	said := strings.TrimSpace(c.String())
	if said == "" {
		return "it said nothing"
	}
	lines := strings.Split(said, "\n")
	return fmt.Sprintf("it said last: %q", core.Clip(strings.Join(lines[max(0, len(lines)-2):], " / ")))
}
