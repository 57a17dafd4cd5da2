package build

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"

	"github.com/coppice-dev/coppice/images"
)

// Kernel is a guest kernel with the modules that a guest loads, for programs that boot a kernel without an image.
type Kernel struct {
	Release     string // the output of uname -r
	VMLinuz     string // absolute path; its directory has all files of the kernel
	CommandLine string // the same as that of an image
	bundle      images.KernelBundle
}

// FetchKernel returns the kernel that an image built now would have: from the store's cache, or downloaded and unpacked,
// never installed. It needs no root.
func FetchKernel(ctx context.Context, store *images.Store, log io.Writer) (_ Kernel, err error) {
	if err := checkPrograms(images.SourceTar); err != nil {
		return Kernel{}, err
	}
	staging, err := store.Stage(ctx)
	if err != nil {
		return Kernel{}, err
	}
	defer func() { err = errors.Join(err, staging.Close()) }()
	tmp := staging.Dir
	b := &builder{store: staging, source: images.SourceTar, tmp: tmp}
	if log != nil {
		b.log = &lockedWriter{w: log}
	}
	aptDir := filepath.Join(tmp, "apt")
	if err := os.Mkdir(aptDir, 0o700); err != nil {
		return Kernel{}, err
	}
	if b.apt, err = readAptConfig(ctx, "", aptDir, b.log); err != nil {
		return Kernel{}, err
	}
	resolved, err := b.resolve(ctx)
	if err != nil {
		return Kernel{}, err
	}
	bundle, err := b.kernel(ctx, resolved.Kernel, tmp)
	if err != nil {
		return Kernel{}, err
	}
	return Kernel{
		Release: resolved.Kernel.Release(), VMLinuz: bundle.Path(), CommandLine: commandLine(b.apt.arch), bundle: bundle,
	}, nil
}

// WriteInitrd writes an initial root to a new file: the program, a static executable, as /init, and the kernel's modules
// with their list.
func (k Kernel) WriteInitrd(file, program string) error {
	return writeInitrd(file, program, k.bundle)
}

// KernelOfTree moves the kernel of an unpacked Debian tree, with the modules that a guest loads, into a new directory,
// from which OpenKernel reads it. It is for machines that are not guests but boot like one.
func KernelOfTree(ctx context.Context, tree, release, dir string) error {
	b := &builder{source: images.SourceTar}
	if err := b.makeBundle(ctx, images.KernelPackage{Package: "linux-image-" + release}, tree, dir); err != nil {
		return fmt.Errorf("unpack kernel %s: %w", release, err)
	}
	return nil
}

// OpenKernel returns the kernel in a directory that KernelOfTree has filled, or in a copy of a directory of
// FetchKernel.
func OpenKernel(dir string) (Kernel, error) {
	bundle, err := images.OpenBundle(dir)
	if err != nil {
		return Kernel{}, err
	}
	return Kernel{
		Release: bundle.Kernel.Release(), VMLinuz: bundle.Path(), CommandLine: commandLine(runtime.GOARCH), bundle: bundle,
	}, nil
}
