package daemon

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/runner/vmm/qemu"
)

// probeTime bounds the boot under KVM: a kernel that runs there says so in a second or two.
const probeTime = 15 * time.Second

// probeFile keeps what the probe found, in the data directory: as long as the machine is up and the image is the same, it
// stays true, and a start need not wait for it.
const probeFile = "kvm-probe.json"

type probeResult struct {
	BootID string      `json:"boot_id"`
	Image  core.Digest `json:"image"`
	Works  bool        `json:"works"`
	Why    string      `json:"why"`
}

// ChooseAccelerator settles "auto": KVM where a guest really boots under it, else software emulation. It says why.
func (c *HostConfig) ChooseAccelerator(ctx context.Context) error {
	switch c.Accelerator {
	case "tcg", "kvm":
		c.Why = "as asked"
		return nil
	case "auto":
	default:
		return core.Errorf(core.Invalid, core.CodeInvalidField, "the accelerator is %q; it must be tcg, kvm or auto", core.Clip(c.Accelerator))
	}
	c.Accelerator = "tcg"
	if _, err := os.Stat("/dev/kvm"); err != nil {
		c.Why = "there is no /dev/kvm"
		return nil //nolint:nilerr // Why has it
	}
	img, ok := BootableImage(c.imagesDir())
	if !ok {
		c.Why = "/dev/kvm proves nothing, and there is no image yet to boot under it"
		return nil
	}
	found, err := c.probe(ctx, img)
	if err != nil {
		return err
	}
	c.Why = found.Why
	if found.Works {
		c.Accelerator = "kvm"
	}
	return nil
}

func (c *HostConfig) imagesDir() string {
	if c.ImagesDir != "" {
		return c.ImagesDir
	}
	return filepath.Join(c.DataDir, "images")
}

func (c *HostConfig) probe(ctx context.Context, img images.Image) (probeResult, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return probeResult{}, err
	}
	want := probeResult{BootID: strings.TrimSpace(string(boot)), Image: img.Digest}
	path := filepath.Join(c.DataDir, probeFile)
	var kept probeResult
	if err := atomicfile.ReadJSON(path, &kept); err == nil && kept.BootID == want.BootID && kept.Image == want.Image {
		return kept, nil
	}
	want.Works, want.Why = ProbeKVM(ctx, img, c.Binary)
	if !want.Works {
		want.Why = "KVM does not run a guest here: " + want.Why
	}
	if err := os.MkdirAll(c.DataDir, 0o711); err != nil { //nolint:gosec // G301: the database's user must pass
		return probeResult{}, err
	}
	return want, atomicfile.WriteJSON(path, want, 0o600)
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

// ProbeKVM boots a guest image under KVM and says, for people, what came of it.
func ProbeKVM(ctx context.Context, img images.Image, binary string) (works bool, why string) {
	return qemu.New(qemu.Config{Binary: binary}).ProbeKVM(ctx, img.Kernel, img.Initrd, probeTime)
}
