package qemu

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/coppice-dev/coppice/runner/vmm/kvm"
	"github.com/coppice-dev/coppice/runner/vmm/vmmproc"
)

// ProbeKVM boots a guest kernel and initrd, given as paths, under KVM, because a device node proves nothing. why
// explains the result to people in both cases. It takes at most the timeout, and leaves no process.
func (d *Driver) ProbeKVM(ctx context.Context, kernel, initrd string, timeout time.Duration) (ok bool, why string) {
	if err := kvm.Open(kvm.Device); err != nil {
		return false, err.Error()
	}
	start := time.Now()
	if err := d.probe(ctx, acceleratorKVM, kernel, initrd, timeout); err != nil {
		return false, err.Error()
	}
	why = fmt.Sprintf("a guest kernel booted under it in %s", time.Since(start).Round(time.Millisecond))
	if os.Geteuid() == 0 { // the machines themselves run as their own users
		if _, err := kvm.Group(kvm.Device); err != nil {
			return false, why + ", but " + err.Error()
		}
	}
	return true, why
}

// probe boots a machine that must power off by itself. Its error is for people.
func (d *Driver) probe(ctx context.Context, accelerator, kernel, initrd string, timeout time.Duration) error {
	in, err := d.installation(ctx)
	if err != nil {
		return err
	}
	return vmmproc.Probe(ctx, vmmproc.Command{Path: in.path, Args: probeArguments(in, accelerator, kernel, initrd), Dir: "/"}, timeout)
}

func probeArguments(in *installation, accelerator, kernel, initrd string) []string {
	accel, cpu, more := acceleratorArguments(profile{accelerator: accelerator})
	return []string{
		"-name", "coppice-probe", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-sandbox", sandbox,
		"-M", in.machineType() + ",usb=off,vmport=off,smm=off,hpet=off,graphics=off", "-accel", accel, "-cpu", cpu, "-smp", "1",
		"-m", "256M", "-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
		"-kernel", kernel, "-initrd", initrd, "-append", "console=ttyS0 panic=-1 reboot=t quiet " + vmmproc.ProbeWord + more,
	}
}
