// Package cloudhypervisor drives unmodified releases of cloud-hypervisor under KVM, by the contract of package vmm.
//
// The design uses three properties of cloud-hypervisor. First, it maps a memory zone with a file and shared=false
// privately, so the kernel tracks which pages were written. Second, a snapshot writes the state of every device and
// vCPU before it creates the file for memory, and fails only at that file if the file exists already: see strategy.go.
// Third, a restore reads only the parts of a snapshot's memory file that are not holes, so that file can be a
// checkpoint's delta. So RAM never passes through cloud-hypervisor, except for the delta of a fork.
//
// It runs as its own user, in the sandbox's network namespace, under its seccomp filters and Landlock. It opens files
// by path. All its paths lead through inherited descriptors (/proc/self/fd/N), so none of them can be exchanged, and it
// cannot reach the directories of other machines.
package cloudhypervisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/jail"
	"github.com/coppice-dev/coppice/runner/vmm/kvm"
	"github.com/coppice-dev/coppice/runner/vmm/vmmproc"
)

// DriverName is the driver's name in fingerprints and handles.
const DriverName = "cloud-hypervisor"

// Program is the name of the binary on the PATH.
const Program = "cloud-hypervisor"

// Supported are the versions that the driver works with, for people. Before 53, a pause does not drain block requests,
// so a write could be torn in a checkpoint. Newer versions were not checked: the order in which they write a snapshot
// may differ.
const Supported = "v53"

// deviceLayout identifies the devices that config makes and their order, in the place of a machine type. Device state
// can be loaded only into the same devices.
const deviceLayout = "coppice-pci-1"

const accelerator = "kvm"

// Config says which cloud-hypervisor to use.
type Config struct {
	Binary string // path; empty finds cloud-hypervisor on the PATH
	Detail string // why this VMM was chosen, for people
}

// Driver starts cloud-hypervisor machines.
type Driver struct {
	cfg Config

	mu    sync.Mutex // guards found
	found *installation
}

var _ vmm.Driver = (*Driver)(nil)

// installation is what was found out about the binary.
type installation struct {
	path     string
	version  string // "53.0"
	landlock bool   // whether the kernel's Landlock is new enough for it

	walls *jail.Jail // guarded by Driver.mu; nil until a machine is started
}

// New makes a driver. It does not check the host yet; Fingerprint does.
func New(cfg Config) *Driver { return &Driver{cfg: cfg} }

func (d *Driver) installation(ctx context.Context) (*installation, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.found != nil {
		return d.found, nil
	}
	path, version, err := Find(ctx, d.cfg.Binary)
	if err != nil {
		return nil, err
	}
	if err := Check(version); err != nil {
		return nil, core.Wrapf(err, core.FailedPrecondition, core.CodeVMMFailed, "%s cannot be used: %s", path, core.MessageOf(err))
	}
	d.found = &installation{path: path, version: version, landlock: landlockVersion() >= landlockNeeded}
	return d.found, nil
}

var versionForm = regexp.MustCompile(`^cloud-hypervisor v(\d+\.\d+(?:\.\d+)?)\b`)

// Find finds the binary, by its path or, if that is empty, on the PATH, and asks it for its version, such as "53.0". It
// does not check the version.
func Find(ctx context.Context, binary string) (path, version string, err error) {
	path = binary
	if path == "" {
		if path, err = exec.LookPath(Program); err != nil {
			return "", "", core.Wrapf(err, core.FailedPrecondition, core.CodeVMMFailed, "%s is not installed; run `make setup-kvm`", Program)
		}
	}
	out, err := exec.CommandContext(ctx, path, "--version").Output()
	if err != nil {
		if ctx.Err() != nil {
			err = errors.Join(context.Cause(ctx), err)
		}
		return path, "", core.Wrapf(err, core.FailedPrecondition, core.CodeVMMFailed, "%s cannot be run", path)
	}
	m := versionForm.FindStringSubmatch(string(out))
	if m == nil {
		return path, "", core.Errorf(core.FailedPrecondition, core.CodeVMMFailed, "%s does not print a known form of a version: %q", path, core.Clip(string(out)))
	}
	return path, m[1], nil
}

// Check returns why a version cannot be used; nil if it can.
func Check(version string) error {
	_, err := strategyFor(version)
	return err
}

// major returns the first number of a version.
func major(version string) int {
	first, _, _ := strings.Cut(version, ".")
	n, _ := strconv.Atoi(first) // a version of versionForm begins with digits
	return n
}

// Fingerprint implements vmm.Driver.
func (d *Driver) Fingerprint(ctx context.Context) (vmm.Fingerprint, error) {
	in, err := d.installation(ctx)
	if err != nil {
		return vmm.Fingerprint{}, err
	}
	fp := vmm.Fingerprint{VMM: DriverName, Version: in.version, MachineType: deviceLayout, Accelerator: accelerator, Detail: d.cfg.Detail}
	if fp.CPUModel, err = kvm.HostCPU(); err != nil {
		return vmm.Fingerprint{}, err
	}
	return fp, nil
}

// Capabilities implements vmm.Driver. The thread of a network device ends at the first frame that a tap refuses because
// it is down, and then a pause waits for that thread for ever.
func (d *Driver) Capabilities() vmm.Capabilities {
	return vmm.Capabilities{ReadOnlyBase: true, TapUp: true, ResizeDisk: true, RealGuest: true}
}

// Probe boots a guest kernel and initrd, given as paths, because neither a device node nor a binary proves anything.
// why explains the result to people in both cases. It takes at most the timeout, and leaves no process.
func (d *Driver) Probe(ctx context.Context, kernel, initrd string, timeout time.Duration) (ok bool, why string) {
	if err := kvm.Open(kvm.Device); err != nil {
		return false, err.Error()
	}
	in, err := d.installation(ctx)
	if err != nil {
		return false, core.MessageOf(err)
	}
	start := time.Now()
	if err := vmmproc.Probe(ctx, vmmproc.Command{
		Path: in.path, Name: Program + ":coppice-probe", Dir: "/",
		Args: []string{
			"--cpus", "boot=1", "--memory", "size=256M", "--console", "off", "--serial", "tty", "--kernel", kernel, "--initramfs", initrd,
			"--cmdline", "console=ttyS0 panic=-1 reboot=t quiet " + vmmproc.ProbeWord,
		},
	}, timeout); err != nil {
		return false, err.Error()
	}
	why = fmt.Sprintf("cloud-hypervisor %s booted a guest kernel under KVM in %s", in.version, time.Since(start).Round(time.Millisecond))
	if !in.landlock {
		why += "; machines run without Landlock, which needs Linux 6.2 or later"
	}
	if os.Geteuid() == 0 { // the machines themselves run as their own users
		if _, err := kvm.Group(kvm.Device); err != nil {
			return false, why + ", but " + err.Error()
		}
	}
	return true, why
}

// landlockNeeded is the version of Landlock's interface that cloud-hypervisor requires: the third, of Linux 6.2.
const landlockNeeded = 3

// landlockVersion returns the kernel's version of Landlock; 0 if it has none.
func landlockVersion() int {
	const versionFlag = 1 // LANDLOCK_CREATE_RULESET_VERSION
	n, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, versionFlag)
	if errno != 0 {
		return 0
	}
	return int(n)
}
