package images

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
)

// Kernel is a guest kernel with the modules that a guest loads, for whoever boots one without an image.
type Kernel struct {
	Release     string // what uname -r says
	VMLinuz     string // absolute path; the directory has all that the kernel is made of
	CommandLine string // as of an image
	bundle      kernelBundle
}

// FetchKernel returns the kernel that an image built now would have: from the store's cache, or downloaded and unpacked,
// never installed. It needs no root.
func FetchKernel(ctx context.Context, store *Store, log io.Writer) (_ Kernel, err error) {
	if err := checkPrograms(SourceTar); err != nil {
		return Kernel{}, err
	}
	unlock, err := store.lock(ctx)
	if err != nil {
		return Kernel{}, err
	}
	defer unlock()
	if err := store.cleanTemp(); err != nil {
		return Kernel{}, err
	}
	tmp, err := store.newTemp()
	if err != nil {
		return Kernel{}, err
	}
	defer func() { err = errors.Join(err, removeTree(tmp)) }()
	b := &builder{store: store, source: SourceTar, tmp: tmp}
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
		Release: resolved.Kernel.release(), VMLinuz: bundle.vmlinuz(), CommandLine: commandLine(b.apt.arch), bundle: bundle,
	}, nil
}

// WriteInitrd writes an initial root to a new file: the program, a static executable, as /init, and the kernel's modules
// with their list.
func (k Kernel) WriteInitrd(file, program string) error {
	return writeInitrd(file, program, k.bundle)
}

// KernelOfTree moves the kernel of an unpacked Debian tree, with the modules that a guest loads, into a new directory, from
// which OpenKernel takes it. It is for machines that are no guests but boot like one.
func KernelOfTree(ctx context.Context, tree, release, dir string) error {
	b := &builder{source: SourceTar}
	if err := b.makeBundle(ctx, kernelPackage{Package: "linux-image-" + release}, tree, dir); err != nil {
		return fmt.Errorf("unpack kernel %s: %w", release, err)
	}
	return nil
}

// OpenKernel returns the kernel that KernelOfTree has put into a directory, or a copy of the directory that FetchKernel's is in.
func OpenKernel(dir string) (Kernel, error) {
	bundle, err := openBundle(dir)
	if err != nil {
		return Kernel{}, err
	}
	return Kernel{
		Release: bundle.Kernel.release(), VMLinuz: bundle.vmlinuz(), CommandLine: commandLine(runtime.GOARCH), bundle: bundle,
	}, nil
}
