package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/cloudhypervisor"
	"github.com/coppice-dev/coppice/runner/vmm/kvm"
	"github.com/coppice-dev/coppice/runner/vmm/qemu"
)

// What HostConfig.VMM and HostConfig.Accelerator may be besides the names of drivers.
const (
	choiceAuto     = "auto"
	acceleratorTCG = "tcg"
	acceleratorKVM = "kvm"
)

// How long a probe waits for a guest kernel. Where KVM works it says so in a second or two. Who asks for cloud-hypervisor by name may
// have a KVM that is slow and no other choice: KVM in a machine that is emulated itself takes half a minute.
const (
	probeTime      = 15 * time.Second
	askedProbeTime = 2 * time.Minute
)

// setupKVMBinary is where `make setup-kvm` puts cloud-hypervisor.
const setupKVMBinary = "/usr/local/lib/coppice/cloud-hypervisor"

// ChooseVMM settles what is left to "auto": cloud-hypervisor where it really boots a guest, else QEMU, with KVM where a guest really boots under
// that and with software emulation everywhere else. Why says what decided. A VMM that was asked for and cannot be had is an error.
func (c *HostConfig) ChooseVMM(ctx context.Context) error {
	c.resolve()
	p := newProbe(*c)
	p.kept = filepath.Join(c.DataDir, probeFile)
	got, err := choose(ctx, c.VMM, c.Accelerator, p)
	if err != nil {
		return err
	}
	c.VMM, c.Accelerator, c.Why = got.vmm, got.accelerator, got.why
	return nil
}

// resolve makes paths of the programs that were named: a VMM is started in another directory.
func (c *HostConfig) resolve() {
	for _, name := range []*string{&c.Binary, &c.CloudHypervisor} {
		if *name == "" {
			continue
		}
		if path, err := exec.LookPath(*name); err == nil { // otherwise its start reports this
			if path, err = filepath.Abs(path); err == nil {
				*name = path
			}
		}
	}
}

// VMMText says for people what runs the machines, once it is chosen.
func (c HostConfig) VMMText() string {
	name := c.VMM
	if name == qemu.DriverName {
		name = "QEMU"
	}
	return fmt.Sprintf("%s, %s (%s)", name, c.Accelerator, c.Why)
}

// Drivers are the one that machines are started with, and those of machines that an earlier runner may have left.
func (c HostConfig) Drivers() (vmm.Driver, map[string]vmm.Driver) {
	q := qemu.New(qemu.Config{Binary: c.Binary, Accelerator: c.Accelerator, Detail: c.Why})
	ch := cloudhypervisor.New(cloudhypervisor.Config{Binary: c.cloudHypervisor(), Detail: c.Why})
	if c.VMM == cloudhypervisor.DriverName {
		return ch, map[string]vmm.Driver{qemu.DriverName: q}
	}
	return q, map[string]vmm.Driver{cloudhypervisor.DriverName: ch}
}

// cloudHypervisor is the path of the binary: that of the configuration, or what `make setup-kvm` has installed; "" leaves it to the PATH.
func (c HostConfig) cloudHypervisor() string {
	if c.CloudHypervisor != "" {
		return c.CloudHypervisor
	}
	if _, err := os.Stat(setupKVMBinary); err == nil {
		return setupKVMBinary
	}
	return ""
}

// choice is what a runner's machines run on.
type choice struct{ vmm, accelerator, why string }

// choose is the rule.
func choose(ctx context.Context, name, accelerator string, p *probe) (choice, error) {
	if err := validChoice(&name, &accelerator); err != nil {
		return choice{}, err
	}
	if name == cloudhypervisor.DriverName {
		return chooseCloudHypervisor(ctx, p)
	}
	if accelerator == acceleratorTCG || accelerator == acceleratorKVM && name == qemu.DriverName {
		return choice{qemu.DriverName, accelerator, "as asked"}, nil
	}
	without := choice{qemu.DriverName, acceleratorTCG, ""} // what it is where no guest boots under KVM
	why := func(format string, a ...any) (choice, error) {
		without.why = fmt.Sprintf(format, a...)
		if accelerator == acceleratorKVM {
			without.accelerator, without.why = acceleratorKVM, "KVM as asked; not cloud-hypervisor: "+without.why
		}
		return without, nil
	}
	if err := p.usable(); err != nil {
		return why("%s", err)
	}
	img, ok := p.image()
	if !ok {
		return why("%s proves nothing, and there is no image yet to boot under it", kvm.Device)
	}
	var not string // why cloud-hypervisor is not used
	if name != qemu.DriverName {
		got, err := p.try(ctx, cloudhypervisor.DriverName, img)
		if err != nil {
			return choice{}, err
		}
		if got.Works {
			return choice{cloudhypervisor.DriverName, acceleratorKVM, got.Why}, nil
		}
		if not = got.Why; accelerator == acceleratorKVM {
			return why("%s", not)
		}
		not = "; not cloud-hypervisor: " + not
	}
	got, err := p.try(ctx, qemu.DriverName, img)
	if err != nil {
		return choice{}, err
	}
	if got.Works {
		return choice{qemu.DriverName, acceleratorKVM, got.Why + not}, nil
	}
	return why("KVM does not run a guest here: %s%s", got.Why, not)
}

func validChoice(name, accelerator *string) error {
	for _, f := range []struct {
		what    string
		value   *string
		allowed []string
	}{
		{"VMM", name, []string{choiceAuto, qemu.DriverName, cloudhypervisor.DriverName}},
		{"accelerator", accelerator, []string{choiceAuto, acceleratorTCG, acceleratorKVM}},
	} {
		if *f.value == "" {
			*f.value = choiceAuto
		}
		if !slices.Contains(f.allowed, *f.value) {
			return core.Errorf(core.Invalid, core.CodeInvalidField, "the %s is %q; it must be one of: %s", f.what, core.Clip(*f.value), strings.Join(f.allowed, ", "))
		}
	}
	if *name == cloudhypervisor.DriverName && *accelerator == acceleratorTCG {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "cloud-hypervisor cannot do without KVM: --vmm %s and --accel %s contradict one another; software emulation is QEMU's", *name, *accelerator)
	}
	return nil
}

// chooseCloudHypervisor is for who asked for it by name: what is in the way is an error, not a reason for another VMM.
func chooseCloudHypervisor(ctx context.Context, p *probe) (choice, error) {
	refuse := func(why string) (choice, error) {
		return choice{}, core.Errorf(core.FailedPrecondition, core.CodeIncompatibleHost, "cloud-hypervisor, which was asked for, cannot be used: %s; without --vmm, QEMU is used where it must be", why)
	}
	if _, _, err := p.find(ctx, cloudhypervisor.DriverName); err != nil {
		return refuse(core.MessageOf(err))
	}
	if err := p.usable(); err != nil {
		return refuse(err.Error())
	}
	img, ok := p.image()
	if !ok {
		return choice{cloudhypervisor.DriverName, acceleratorKVM, "as asked; there is no image yet to boot under it"}, nil
	}
	p.limit, p.again = askedProbeTime, true
	got, err := p.try(ctx, cloudhypervisor.DriverName, img)
	if err != nil {
		return choice{}, err
	}
	if !got.Works {
		return refuse(got.Why)
	}
	return choice{cloudhypervisor.DriverName, acceleratorKVM, "as asked; " + got.Why}, nil
}

// probe finds out what works on this host. A device node and a version prove nothing: a guest is booted.
type probe struct {
	usable func() error // why the VMs cannot use KVM, by its device
	image  func() (images.Image, bool)
	find   func(ctx context.Context, name string) (path, version string, err error) // of a VMM; an error if it cannot be used
	boot   func(ctx context.Context, name, path string, img images.Image, limit time.Duration) (works bool, why string)

	kept  string        // file of what was found before; "" for none
	again bool          // do not believe a failure that was found before
	limit time.Duration // of one boot
}

func newProbe(c HostConfig) *probe {
	return &probe{
		usable: kvmUsable, limit: probeTime,
		image: func() (images.Image, bool) { return BootableImage(c.imagesDir()) },
		find: func(ctx context.Context, name string) (path, version string, err error) {
			if name == qemu.DriverName {
				return qemu.Find(ctx, c.Binary)
			}
			if path, version, err = cloudhypervisor.Find(ctx, c.cloudHypervisor()); err != nil {
				return path, version, err
			}
			return path, version, cloudhypervisor.Check(version)
		},
		boot: func(ctx context.Context, name, path string, img images.Image, limit time.Duration) (bool, string) {
			if name == qemu.DriverName {
				return qemu.New(qemu.Config{Binary: path}).ProbeKVM(ctx, img.Kernel, img.Initrd, limit)
			}
			return cloudhypervisor.New(cloudhypervisor.Config{Binary: path}).Probe(ctx, img.Kernel, img.Initrd, limit)
		},
	}
}

// kvmUsable says why the VMs cannot use KVM, as far as that shows without a guest.
func kvmUsable() error {
	if _, err := os.Stat(kvm.Device); errors.Is(err, os.ErrNotExist) {
		return errors.New("there is no " + kvm.Device)
	}
	if err := kvm.Open(kvm.Device); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return nil
	}
	_, err := kvm.Group(kvm.Device) // the machines themselves run as users of their own
	return err
}

// probeFile keeps what was found, in the data directory: as long as the machine is up and image and program are the same it stays
// true, and a start need not wait for it.
const probeFile = "kvm-probe.json"

// found is what became of booting a guest under KVM.
type found struct {
	VMM      string      `json:"vmm"`
	Path     string      `json:"path"`
	Version  string      `json:"version"`
	Modified time.Time   `json:"modified"` // the program
	Image    core.Digest `json:"image"`
	Works    bool        `json:"works"`
	Why      string      `json:"why"`
}

func (f found) isOf(o found) bool {
	return f.VMM == o.VMM && f.Path == o.Path && f.Version == o.Version && f.Modified.Equal(o.Modified) && f.Image == o.Image
}

type keptProbes struct {
	BootID string  `json:"boot_id"` // of the host's kernel
	Found  []found `json:"found"`
}

// try boots a guest under a VMM and KVM, or knows the result from an earlier start. That a VMM cannot be used is no error.
func (p *probe) try(ctx context.Context, name string, img images.Image) (found, error) {
	path, version, err := p.find(ctx, name)
	if err != nil {
		return found{VMM: name, Why: core.MessageOf(err)}, nil
	}
	info, err := os.Stat(path)
	if err != nil {
		return found{}, err
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return found{}, err
	}
	got := found{VMM: name, Path: path, Version: version, Modified: info.ModTime(), Image: img.Digest}
	list := keptProbes{BootID: strings.TrimSpace(string(boot))}
	var kept keptProbes
	if p.kept != "" && atomicfile.ReadJSON(p.kept, &kept) == nil && kept.BootID == list.BootID {
		list = kept
	}
	if at := slices.IndexFunc(list.Found, got.isOf); at >= 0 && (list.Found[at].Works || !p.again) {
		return list.Found[at], nil
	}
	got.Works, got.Why = p.boot(ctx, name, path, img, p.limit)
	if ctx.Err() != nil {
		return found{}, context.Cause(ctx) // it says nothing about the host
	}
	if p.kept == "" {
		return got, nil
	}
	if err := os.MkdirAll(filepath.Dir(p.kept), 0o711); err != nil { //nolint:gosec // G301: the database's user must pass
		return found{}, err
	}
	list.Found = append(slices.DeleteFunc(list.Found, func(f found) bool { return f.VMM == name }), got)
	return got, atomicfile.WriteJSON(p.kept, list, 0o600)
}

func (c *HostConfig) imagesDir() string {
	if c.ImagesDir != "" {
		return c.ImagesDir
	}
	return filepath.Join(c.DataDir, "images")
}

// BootableImage returns an image of the store in dir to boot: any has a kernel.
func BootableImage(dir string) (images.Image, bool) {
	if _, err := os.Stat(dir); err != nil {
		return images.Image{}, false
	}
	store, err := images.Open(dir)
	if err != nil {
		return images.Image{}, false
	}
	list, err := store.List()
	if err != nil || len(list) == 0 {
		return images.Image{}, false
	}
	return list[0], true
}

// Doctor tries what ChooseVMM would, for `coppice doctor`: whatever an earlier start has found, and each thing once.
type Doctor struct {
	cfg HostConfig
	p   *probe
}

// NewDoctor makes one for a host with this configuration.
func NewDoctor(c HostConfig) *Doctor {
	type result struct {
		works bool
		why   string
	}
	c.resolve()
	p, done := newProbe(c), map[string]result{}
	if c.VMM == cloudhypervisor.DriverName {
		p.limit = askedProbeTime
	}
	boot := p.boot
	p.boot = func(ctx context.Context, name, path string, img images.Image, limit time.Duration) (bool, string) {
		r, ok := done[name]
		if !ok {
			r.works, r.why = boot(ctx, name, path, img, limit)
			done[name] = r
		}
		return r.works, r.why
	}
	return &Doctor{c, p}
}

// HasImage reports whether there is an image to boot. Without one, coppice cannot try what works under KVM.
func (d *Doctor) HasImage() bool {
	_, ok := d.p.image()
	return ok
}

// KVM boots a guest under KVM, by QEMU.
func (d *Doctor) KVM(ctx context.Context) (detail string, err error) {
	return d.boot(ctx, qemu.DriverName)
}

// FindCloudHypervisor returns the binary that would be used; an error says why it cannot be.
func (d *Doctor) FindCloudHypervisor(ctx context.Context) (path, version string, err error) {
	return d.p.find(ctx, cloudhypervisor.DriverName)
}

// BootCloudHypervisor boots a guest under it.
func (d *Doctor) BootCloudHypervisor(ctx context.Context) (detail string, err error) {
	return d.boot(ctx, cloudhypervisor.DriverName)
}

func (d *Doctor) boot(ctx context.Context, name string) (string, error) {
	if err := d.p.usable(); err != nil {
		return "", err
	}
	img, ok := d.p.image()
	if !ok {
		return "", errors.New("there is no image yet to boot under it")
	}
	got, err := d.p.try(ctx, name, img)
	if err == nil && !got.Works {
		err = errors.New(got.Why)
	}
	return got.Why, err
}

// Choice is the VMM that a start would choose, and why, with its name.
func (d *Doctor) Choice(ctx context.Context) (name, why string, err error) {
	c := d.cfg
	got, err := choose(ctx, c.VMM, c.Accelerator, d.p)
	if err != nil {
		return "", "", err
	}
	c.VMM, c.Accelerator, c.Why = got.vmm, got.accelerator, got.why
	return c.VMM, c.VMMText(), nil
}
