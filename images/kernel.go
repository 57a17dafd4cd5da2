package images

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/coppice-dev/coppice/core"
)

// KernelPackage is one concrete kernel in the archive.
type KernelPackage struct {
	Package string `json:"package"` // linux-image-6.1.0-56-cloud-amd64
	Version string `json:"version"` // 6.1.192-2
}

// Release is the future output of uname -r.
func (k KernelPackage) Release() string { return strings.TrimPrefix(k.Package, "linux-image-") }

// String returns name=version.
func (k KernelPackage) String() string { return k.Package + "=" + k.Version }

// KernelBundle is an unpacked kernel, reduced to what an image needs: a directory with vmlinuz, the wanted modules and
// this index.
type KernelBundle struct {
	Kernel  KernelPackage `json:"kernel"`
	Modules []string      `json:"modules"` // base names in modules/, in insmod order
	VMLinuz core.Digest   `json:"vmlinuz"`
	dir     string
}

const bundleFile = "kernel.json"

// OpenBundle reads a cached bundle; an error means that it must be made again.
func OpenBundle(dir string) (KernelBundle, error) {
	raw, err := os.ReadFile(filepath.Join(dir, bundleFile))
	if err != nil {
		return KernelBundle{}, err
	}
	b := KernelBundle{dir: dir}
	if err := json.Unmarshal(raw, &b); err != nil {
		return KernelBundle{}, err
	}
	f, err := HashFile(b.Path())
	if err == nil && f.Digest != b.VMLinuz {
		err = errors.New("the cached kernel is damaged")
	}
	return b, err
}

// Path returns the path of the kernel.
func (b KernelBundle) Path() string { return filepath.Join(b.dir, KernelFile) }

// Module returns the path of a module.
func (b KernelBundle) Module(name string) string { return filepath.Join(b.dir, "modules", name) }

// NewKernelBundle returns the bundle of a kernel whose files are about to be put into a directory.
func NewKernelBundle(pkg KernelPackage, dir string) KernelBundle {
	return KernelBundle{Kernel: pkg, dir: dir}
}

// Write writes the index, when all files are in the directory.
func (b KernelBundle) Write() error {
	f, err := HashFile(b.Path())
	if err != nil {
		return err
	}
	b.VMLinuz = f.Digest
	raw, err := json.Marshal(b)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(b.dir, bundleFile), raw, 0o600)
}
