package build

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
)

var kernelDependency = regexp.MustCompile(`(linux-image-[0-9][^ ,|]*) \(= ([^)]+)\)`)

// newestKernel resolves Debian's cloud-kernel metapackage to the newest kernel in the host's archives. That may be one
// from backports, which apt would not install by itself.
func (a *aptConfig) newestKernel(ctx context.Context) (images.KernelPackage, error) {
	meta := "linux-image-cloud-" + a.arch
	text, err := output(ctx, tool{name: "apt-cache", args: a.args("show", "--all-versions", meta), log: a.log})
	if err != nil {
		return images.KernelPackage{}, fmt.Errorf("look for a kernel: %w", err)
	}
	var best images.KernelPackage
	metaVersion := ""
	for _, s := range stanzas([]byte(text)) {
		m := kernelDependency.FindStringSubmatch(s["depends"])
		if s["package"] != meta || m == nil {
			continue
		}
		newer := metaVersion == ""
		if !newer {
			if newer, err = versionGreater(ctx, s["version"], metaVersion); err != nil {
				return images.KernelPackage{}, err
			}
		}
		if newer {
			best, metaVersion = images.KernelPackage{Package: m[1], Version: m[2]}, s["version"]
		}
	}
	if metaVersion == "" {
		return images.KernelPackage{}, core.Errorf(core.FailedPrecondition, images.CodeImageBuildFailed,
			"the host's Debian archives have no package %s; cure: apt-get update", meta)
	}
	return best, nil
}

// versionGreater compares Debian versions by dpkg's rules.
func versionGreater(ctx context.Context, a, b string) (bool, error) {
	err := run(ctx, tool{name: "dpkg", args: []string{"--compare-versions", a, "gt", b}})
	if core.CodeOf(err) == images.CodeImageBuildFailed {
		return false, nil // exit status 1: not greater
	}
	return err == nil, err
}

// kernel returns the bundle of a kernel package: from the cache, or downloaded and unpacked in tmp.
func (b *builder) kernel(ctx context.Context, pkg images.KernelPackage, tmp string) (images.KernelBundle, error) {
	key, err := images.CacheKey(images.KindKernel, []any{pkg, guestModules})
	if err != nil {
		return images.KernelBundle{}, err
	}
	if bundle, err := images.OpenBundle(b.store.Cached(key)); err == nil {
		return bundle, nil
	}
	done := b.stage("kernel", "fetching "+pkg.String())
	tree, err := b.fetchKernel(ctx, pkg, tmp)
	if err != nil {
		return images.KernelBundle{}, err
	}
	out := filepath.Join(tmp, "bundle")
	if err := b.makeBundle(ctx, pkg, tree, out); err != nil {
		return images.KernelBundle{}, fmt.Errorf("unpack kernel %s: %w", pkg, err)
	}
	dir, err := b.store.CacheAdopt(ctx, key, out)
	if err != nil {
		return images.KernelBundle{}, err
	}
	done("unpacked " + pkg.String())
	return images.OpenBundle(dir)
}

// fetchKernel downloads the package and unpacks it into a directory, which it returns. Nothing is installed.
func (b *builder) fetchKernel(ctx context.Context, pkg images.KernelPackage, tmp string) (string, error) {
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
		return "", core.Errorf(core.FailedPrecondition, images.CodeImageBuildFailed, "apt-get download %s left %d packages instead of one", pkg, len(debs))
	}
	return tree, run(ctx, tool{name: "dpkg-deb", args: []string{"--extract", debs[0], tree}, log: b.log})
}

// makeBundle indexes the modules of the unpacked package in tree and copies the needed files to out.
func (b *builder) makeBundle(ctx context.Context, pkg images.KernelPackage, tree, out string) error {
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
	if err := run(ctx, tool{name: "depmod", args: []string{"--basedir", tree, pkg.Release()}, log: b.log}); err != nil {
		return err
	}
	set, err := readModules(filepath.Join(lib, "modules", pkg.Release()))
	if err != nil {
		return err
	}
	paths, missing, err := set.order(guestModules)
	if err != nil {
		return err
	}
	for _, m := range missing {
		if slices.Contains(requiredModules, m) {
			return core.Errorf(core.FailedPrecondition, images.CodeImageBuildFailed, "kernel %s has no %s, which every guest needs", pkg, m)
		}
	}
	if err := os.MkdirAll(filepath.Join(out, "modules"), 0o700); err != nil {
		return err
	}
	bundle := images.NewKernelBundle(pkg, out)
	for _, p := range paths {
		data, err := set.read(ctx, p)
		if err != nil {
			return err
		}
		name := moduleName(p) + ".ko"
		if err := os.WriteFile(bundle.Module(name), data, 0o600); err != nil {
			return err
		}
		bundle.Modules = append(bundle.Modules, name)
	}
	if err := os.Rename(filepath.Join(tree, "boot", "vmlinuz-"+pkg.Release()), bundle.Path()); err != nil {
		return err
	}
	return bundle.Write()
}
