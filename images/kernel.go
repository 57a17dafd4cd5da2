package images

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/coppice-dev/coppice/core"
)

// Kinds of cached parts and facts; each is the beginning of a cache key.
const (
	kindKernel  = "kernel"
	kindRootFS  = "rootfs"
	kindOverlay = "overlay"
	kindBuild   = "build"
	kindResolve = "resolve"
)

// kernelPackage is one concrete kernel in the archive.
type kernelPackage struct {
	Package string `json:"package"` // linux-image-6.1.0-56-cloud-amd64
	Version string `json:"version"` // 6.1.192-2
}

// release is the future output of uname -r.
func (k kernelPackage) release() string { return strings.TrimPrefix(k.Package, "linux-image-") }

func (k kernelPackage) String() string { return k.Package + "=" + k.Version }

var kernelDependency = regexp.MustCompile(`(linux-image-[0-9][^ ,|]*) \(= ([^)]+)\)`)

// newestKernel resolves Debian's cloud-kernel metapackage to the newest kernel in the host's archives. That may be one
// from backports, which apt would not install by itself.
func (a *aptConfig) newestKernel(ctx context.Context) (kernelPackage, error) {
	meta := "linux-image-cloud-" + a.arch
	text, err := output(ctx, tool{name: "apt-cache", args: a.args("show", "--all-versions", meta), log: a.log})
	if err != nil {
		return kernelPackage{}, fmt.Errorf("look for a kernel: %w", err)
	}
	var best kernelPackage
	metaVersion := ""
	for _, s := range stanzas([]byte(text)) {
		m := kernelDependency.FindStringSubmatch(s["depends"])
		if s["package"] != meta || m == nil {
			continue
		}
		newer := metaVersion == ""
		if !newer {
			if newer, err = versionGreater(ctx, s["version"], metaVersion); err != nil {
				return kernelPackage{}, err
			}
		}
		if newer {
			best, metaVersion = kernelPackage{m[1], m[2]}, s["version"]
		}
	}
	if metaVersion == "" {
		return kernelPackage{}, core.Errorf(core.FailedPrecondition, CodeImageBuildFailed,
			"the host's Debian archives have no package %s; cure: apt-get update", meta)
	}
	return best, nil
}

// versionGreater compares Debian versions by dpkg's rules.
func versionGreater(ctx context.Context, a, b string) (bool, error) {
	err := run(ctx, tool{name: "dpkg", args: []string{"--compare-versions", a, "gt", b}})
	if core.CodeOf(err) == CodeImageBuildFailed {
		return false, nil // exit status 1: not greater
	}
	return err == nil, err
}

// kernelBundle is an unpacked kernel, reduced to what an image needs: a directory with vmlinuz, the wanted modules and
// this index.
type kernelBundle struct {
	Kernel  kernelPackage `json:"kernel"`
	Modules []string      `json:"modules"` // base names in modules/, in insmod order
	VMLinuz core.Digest   `json:"vmlinuz"`
	dir     string
}

const bundleFile = "kernel.json"

// openBundle reads a cached bundle; an error means that it must be made again.
func openBundle(dir string) (kernelBundle, error) {
	raw, err := os.ReadFile(filepath.Join(dir, bundleFile))
	if err != nil {
		return kernelBundle{}, err
	}
	b := kernelBundle{dir: dir}
	if err := json.Unmarshal(raw, &b); err != nil {
		return kernelBundle{}, err
	}
	f, err := hashFile(b.vmlinuz())
	if err == nil && f.Digest != b.VMLinuz {
		err = errors.New("the cached kernel is damaged")
	}
	return b, err
}

func (b kernelBundle) vmlinuz() string { return filepath.Join(b.dir, kernelFile) }

func (b kernelBundle) module(name string) string { return filepath.Join(b.dir, "modules", name) }

// kernel returns the bundle of a kernel package: from the cache, or downloaded and unpacked in tmp.
func (b *builder) kernel(ctx context.Context, pkg kernelPackage, tmp string) (kernelBundle, error) {
	key, err := cacheKey(kindKernel, []any{pkg, guestModules})
	if err != nil {
		return kernelBundle{}, err
	}
	if bundle, err := openBundle(filepath.Join(b.store.dir, cacheDir, key)); err == nil {
		return bundle, nil
	}
	done := b.stage("kernel", "fetching "+pkg.String())
	tree, err := b.fetchKernel(ctx, pkg, tmp)
	if err != nil {
		return kernelBundle{}, err
	}
	out := filepath.Join(tmp, "bundle")
	if err := b.makeBundle(ctx, pkg, tree, out); err != nil {
		return kernelBundle{}, fmt.Errorf("unpack kernel %s: %w", pkg, err)
	}
	dir, err := b.store.cacheAdopt(ctx, key, out)
	if err != nil {
		return kernelBundle{}, err
	}
	done("unpacked " + pkg.String())
	return openBundle(dir)
}

// fetchKernel downloads the package and unpacks it into a directory, which it returns. Nothing is installed.
func (b *builder) fetchKernel(ctx context.Context, pkg kernelPackage, tmp string) (string, error) {
	download := filepath.Join(tmp, "kernel-deb")
	tree := filepath.Join(tmp, "kernel-tree")
	for _, d := range []string{download, tree} {
		if err := os.Mkdir(d, 0o700); err != nil {
			return "", err
		}
	}
	err := run(ctx, tool{name: "apt-get", args: b.apt.args("download", pkg.String()), dir: download, log: b.log})
	if err != nil {
		return "", fmt.Errorf("download kernel %s (if the archive no longer has it, run apt-get update): %w", pkg, err)
	}
	debs, err := filepath.Glob(filepath.Join(download, "*.deb"))
	if err != nil || len(debs) != 1 {
		return "", core.Errorf(core.FailedPrecondition, CodeImageBuildFailed, "apt-get download %s left %d packages instead of one", pkg, len(debs))
	}
	return tree, run(ctx, tool{name: "dpkg-deb", args: []string{"--extract", debs[0], tree}, log: b.log})
}

// makeBundle indexes the modules of the unpacked package in tree and copies the needed files to out.
func (b *builder) makeBundle(ctx context.Context, pkg kernelPackage, tree, out string) error {
	// Debian moves /lib into /usr/lib over time, and depmod reads only one of the two, so both paths must
	// lead to the modules.
	lib, usr := filepath.Join(tree, "lib"), filepath.Join(tree, "usr", "lib")
	var err error
	if _, statErr := os.Lstat(lib); statErr != nil {
		err = os.Symlink("usr/lib", lib)
	} else if _, statErr := os.Lstat(filepath.Join(usr, "modules")); statErr != nil {
		if err = os.MkdirAll(usr, 0o700); err == nil {
			err = os.Symlink("../../lib/modules", filepath.Join(usr, "modules"))
		}
	}
	if err != nil {
		return err
	}
	if err := run(ctx, tool{name: "depmod", args: []string{"--basedir", tree, pkg.release()}, log: b.log}); err != nil {
		return err
	}
	set, err := readModules(filepath.Join(lib, "modules", pkg.release()))
	if err != nil {
		return err
	}
	paths, missing, err := set.order(guestModules)
	if err != nil {
		return err
	}
	for _, m := range missing {
		if slices.Contains(requiredModules, m) {
			return core.Errorf(core.FailedPrecondition, CodeImageBuildFailed, "kernel %s has no %s, which every guest needs", pkg, m)
		}
	}
	if err := os.MkdirAll(filepath.Join(out, "modules"), 0o700); err != nil {
		return err
	}
	bundle := kernelBundle{Kernel: pkg, dir: out}
	for _, p := range paths {
		data, err := set.read(ctx, p)
		if err != nil {
			return err
		}
		name := moduleName(p) + ".ko"
		if err := os.WriteFile(bundle.module(name), data, 0o600); err != nil {
			return err
		}
		bundle.Modules = append(bundle.Modules, name)
	}
	if err := os.Rename(filepath.Join(tree, "boot", "vmlinuz-"+pkg.release()), bundle.vmlinuz()); err != nil {
		return err
	}
	f, err := hashFile(bundle.vmlinuz())
	if err != nil {
		return err
	}
	bundle.VMLinuz = f.Digest
	raw, err := json.Marshal(bundle)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(out, bundleFile), raw, 0o600)
}
