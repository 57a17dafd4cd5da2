package qemu

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/vmm/jail"
	"github.com/coppice-dev/coppice/runner/vmm/kvm"
)

// firmware are the files that our machines load from QEMU's data directories: the BIOS, the ROM that patches it for KVM
// and TCG, and the ROM that starts a kernel.
var firmware = []string{"bios-256k.bin", "kvmvapic.bin", "linuxboot_dma.bin", "linuxboot.bin"}

// jail returns the file system of this QEMU's machines, which is built once. It is nil for a runner that is not root,
// which can neither build one nor give a machine its own user.
func (d *Driver) jail(ctx context.Context, in *installation) (*jail.Jail, error) {
	if os.Geteuid() != 0 {
		return nil, nil //nolint:nilnil // see above
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if in.walls != nil {
		return in.walls, nil
	}
	program, err := filepath.Abs(in.path)
	if err != nil {
		return nil, err
	}
	cfg := jail.Config{Program: program, Modules: modules(program, d.cfg.Accelerator)}
	if d.cfg.Accelerator == acceleratorKVM {
		cfg.Devices = []string{kvm.Device}
	}
	if cfg.Files, err = firmwareOf(ctx, in.path); err != nil {
		return nil, err
	}
	if in.walls, err = jail.New(ctx, cfg); err != nil {
		return nil, core.Wrapf(err, core.FailedPrecondition, core.CodeVMMFailed, "QEMU's machines cannot be confined: %v", err)
	}
	return in.walls, nil
}

// modules are the shared objects that a modular build of QEMU, such as Debian's, loads when it starts a machine: the
// accelerator.
func modules(program, accelerator string) []string {
	arch := strings.TrimPrefix(filepath.Base(program), "qemu-system-")
	prefix := filepath.Dir(filepath.Dir(program))
	var found []string
	for _, dir := range []string{"lib/*/qemu", "lib/qemu", "lib64/qemu", "lib64/qemu-kvm"} {
		list, err := filepath.Glob(filepath.Join(prefix, dir, fmt.Sprintf("accel-%s-%s.so", accelerator, arch)))
		if err == nil { // the only error is a bad pattern
			found = append(found, list...)
		}
	}
	return found
}

// firmwareOf finds the firmware in the directories that QEMU searches, in their order.
func firmwareOf(ctx context.Context, program string) ([]string, error) {
	out, err := exec.CommandContext(ctx, program, "-L", "help").Output()
	if err != nil {
		return nil, fmt.Errorf("ask %s where its firmware is: %w", program, err)
	}
	var found []string
	for _, name := range firmware {
		for dir := range strings.FieldsSeq(string(out)) {
			path := filepath.Join(dir, name)
			if _, err := os.Stat(path); err == nil && filepath.IsAbs(path) {
				found = append(found, path)
				break
			}
		}
	}
	return found, nil
}
