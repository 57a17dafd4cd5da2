// Package qemu drives QEMU, under TCG or KVM, by the contract of package vmm.
//
// The design uses two properties of QEMU. A memory-backend-file with share=off maps the base privately, so the kernel
// tracks what was written. And xen-save-devices-state, despite its name, writes the state of every device and vCPU and
// nothing else, on every accelerator; the same bytes are accepted by an incoming migration. So RAM never passes through
// QEMU.
package qemu

import (
	"context"
	"fmt"
	"os/exec"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/jail"
	"github.com/coppice-dev/coppice/runner/vmm/kvm"
)

// DriverName is the driver's name in fingerprints and handles.
const DriverName = "qemu"

// The accelerators.
const (
	acceleratorTCG = "tcg"
	acceleratorKVM = "kvm"
)

// Config says which QEMU to use and how.
type Config struct {
	Binary      string // path; empty finds qemu-system-<arch> on the usual paths
	Accelerator string // "tcg" or "kvm"; empty is tcg. Only Probe can tell whether kvm really works
	Detail      string // why that accelerator, for people
}

// Driver starts QEMU machines.
type Driver struct {
	cfg Config

	mu    sync.Mutex // guards found
	found *installation
}

var _ vmm.Driver = (*Driver)(nil)

// installation is what was found out about the QEMU binary.
type installation struct {
	path         string
	major, minor int
	version      string

	walls *jail.Jail // guarded by Driver.mu; nil until a machine is started
}

// New makes a driver. It does not check the host yet; Fingerprint does.
func New(cfg Config) *Driver {
	if cfg.Accelerator == "" {
		cfg.Accelerator = acceleratorTCG
	}
	return &Driver{cfg: cfg}
}

var versionForm = regexp.MustCompile(`QEMU emulator version (\d+)\.(\d+)\.(\d+)`)

// oldest is the first version of QEMU with which everything here was measured.
const oldestMajor, oldestMinor = 7, 2

func (d *Driver) installation(ctx context.Context) (*installation, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.found != nil {
		return d.found, nil
	}
	path := d.cfg.Binary
	if path == "" {
		name := "qemu-system-x86_64"
		if runtime.GOARCH == "arm64" {
			name = "qemu-system-aarch64"
		}
		p, err := exec.LookPath(name)
		if err != nil {
			return nil, core.Wrapf(err, core.FailedPrecondition, core.CodeVMMFailed, "%s is not installed; run `make setup`, or apt-get install qemu-system-x86", name)
		}
		path = p
	}
	out, err := exec.CommandContext(ctx, path, "--version").Output() //nolint:gosec // G204: the path comes from our configuration
	if err != nil {
		return nil, core.Wrapf(err, core.FailedPrecondition, core.CodeVMMFailed, "%s cannot be run", path)
	}
	m := versionForm.FindStringSubmatch(string(out))
	if m == nil {
		return nil, core.Errorf(core.FailedPrecondition, core.CodeVMMFailed, "%s does not print a known form of a version: %q", path, core.Clip(string(out)))
	}
	in := &installation{path: path, version: strings.Join(m[1:4], ".")}
	in.major, _ = strconv.Atoi(m[1]) // the expression matched digits
	in.minor, _ = strconv.Atoi(m[2])
	if in.major < oldestMajor || in.major == oldestMajor && in.minor < oldestMinor {
		return nil, core.Errorf(core.FailedPrecondition, core.CodeVMMFailed, "%s is version %s; Coppice needs %d.%d or later", path, in.version, oldestMajor, oldestMinor)
	}
	d.found = in
	return in, nil
}

// Find finds the binary, by its path or, if that is empty, on the PATH, and returns its version. It fails if the binary
// cannot be used.
func Find(ctx context.Context, binary string) (path, version string, err error) {
	in, err := New(Config{Binary: binary}).installation(ctx)
	if err != nil {
		return "", "", err
	}
	return in.path, in.version, nil
}

// readOnlyBase: from 8.2 on, a memory-backend-file may be opened read-only and still be written privately.
func (in *installation) readOnlyBase() bool { return in.major > 8 || in.major == 8 && in.minor >= 2 }

func (in *installation) machineType() string {
	return fmt.Sprintf("pc-i440fx-%d.%d", in.major, in.minor)
}

// Fingerprint implements vmm.Driver.
func (d *Driver) Fingerprint(ctx context.Context) (vmm.Fingerprint, error) {
	in, err := d.installation(ctx)
	if err != nil {
		return vmm.Fingerprint{}, err
	}
	fp := vmm.Fingerprint{
		VMM: DriverName, Version: in.version, MachineType: in.machineType(),
		Accelerator: d.cfg.Accelerator, CPUModel: tcgCPU, Detail: d.cfg.Detail,
	}
	if d.cfg.Accelerator == acceleratorKVM {
		if fp.CPUModel, err = kvm.HostCPU(); err != nil {
			return vmm.Fingerprint{}, err
		}
	}
	return fp, nil
}

// Capabilities implements vmm.Driver. Its answer is valid after Fingerprint has succeeded.
func (d *Driver) Capabilities() vmm.Capabilities {
	d.mu.Lock()
	defer d.mu.Unlock()
	return vmm.Capabilities{
		ReadOnlyBase: d.found != nil && d.found.readOnlyBase(),
		ResizeDisk:   true, RealGuest: true,
	}
}
