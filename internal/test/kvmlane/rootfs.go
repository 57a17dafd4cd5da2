package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images/build"
)

// rootFS is what the machine boots from.
type rootFS struct {
	kernel, initrd, disk string
	release              string // of the kernel
	origin               string // where the kernel is from, for people
	emulator             string // directory of the QEMU that emulates the machine
}

// recipe is all that the machine's disk depends on but the versions that the archives have.
type recipe struct {
	Version  int      `json:"version"`
	Suite    string   `json:"suite"`
	Sources  string   `json:"sources"`
	Packages []string `json:"packages"`
	Pins     string   `json:"pins"` // apt's preferences
	Origin   string   `json:"origin"`
}

const recipeVersion = 3

// packages are what the tests run and what one wants at hand when they fail.
var packages = []string{
	kernelPackage, "qemu-system-x86", "iproute2", "nftables", "kmod", "procps", "util-linux", "mount", "e2fsprogs", "xfsprogs", "erofs-utils",
	"postgresql", "python3", "strace",
	// Kernel packages want something that makes initial roots; this one is told to make none.
	"initramfs-tools",
}

const kernelPackage = "linux-image-cloud-amd64"

// pinned are the source packages that are taken from the backports.
const pinned = "src:linux src:linux-signed-amd64 src:qemu src:seabios"

// readRecipe finds out what the disk is to be made of here. Kernel and QEMU are those of the release's backports, where there
// are any: Debian 12's own kernel lacks PAGEMAP_SCAN, and its QEMU emulates badly. The host's apt sources stay as they are.
func readRecipe(ctx context.Context, dir string, log io.Writer) (recipe, error) {
	if runtime.GOARCH != "amd64" {
		return recipe{}, core.Errorf(core.FailedPrecondition, core.CodeUnsupported, "the lane emulates AMD's virtualisation, and its machine's packages are taken from this host, which is %s", runtime.GOARCH)
	}
	suite, archives, err := build.HostArchives(ctx, dir)
	if err != nil {
		return recipe{}, err
	}
	r := recipe{
		Version: recipeVersion, Suite: suite, Packages: packages,
		Origin: suite + " itself",
	}
	backports := suite + "-backports"
	for _, a := range archives {
		if a.Release != suite {
			continue
		}
		a.Release, a.Components = backports, []string{"main"}
		has, err := look(ctx, dir, a)
		if err != nil {
			_, _ = fmt.Fprintf(log, "kvmlane: nothing from %s: %v\n", backports, err)
			continue
		}
		archives = append(archives, a)
		r.Pins = fmt.Sprintf("Package: %s\nPin: release n=%s\nPin-Priority: 500\n", pinned, backports)
		if has {
			r.Origin = backports
		}
		break
	}
	r.Sources = string(build.Deb822(archives))
	return r, nil
}

// look finds out whether an archive can be had, and has the kernel. apt verifies its signature.
func look(ctx context.Context, dir string, a build.Archive) (has bool, err error) {
	private := filepath.Join(dir, "look")
	sources := filepath.Join(private, "lane.sources")
	for _, d := range []string{"lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(private, d), 0o700); err != nil {
			return false, err
		}
	}
	if err := os.WriteFile(sources, build.Deb822([]build.Archive{a}), 0o600); err != nil {
		return false, err
	}
	options := []string{
		"-o", "Dir::Etc::sourcelist=" + sources, "-o", "Dir::Etc::sourceparts=/dev/null", "-o", "APT::Sandbox::User=root",
		"-o", "Dir::State::lists=" + filepath.Join(private, "lists"), "-o", "Dir::Cache=" + filepath.Join(private, "cache"),
		"-o", "Dir::State::status=/dev/null", "-o", "Dir::Etc::preferences=/dev/null", "-o", "Dir::Etc::preferencesparts=/dev/null",
	}
	if out, err := exec.CommandContext(ctx, "apt-get", append(options, "--error-on=any", "update")...).CombinedOutput(); err != nil { //nolint:gosec // G204: constant but for paths
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		return false, fmt.Errorf("apt-get update: %w: %s", err, core.Clip(lines[len(lines)-1]))
	}
	out, err := exec.CommandContext(ctx, "apt-cache", append(options, "pkgnames")...).Output() //nolint:gosec // G204: see above
	if err != nil {
		return false, fmt.Errorf("apt-cache pkgnames: %w", err)
	}
	return slices.Contains(strings.Fields(string(out)), kernelPackage), nil
}

// The machine's disk is sparse: this is what its root file system may grow to.
const diskMiB = 24 << 10

// makeRoot returns what the machine boots from. The disk and the kernel are made once and kept in cache; the first program is
// always that of this tree and goes with tmp.
func makeRoot(ctx context.Context, cache, tmp string, fresh bool, log io.Writer) (rootFS, error) {
	if err := os.MkdirAll(cache, 0o700); err != nil {
		return rootFS{}, err
	}
	unlock, err := lock(filepath.Join(cache, "lock"))
	if err != nil {
		return rootFS{}, err
	}
	defer unlock()
	aptDir, err := os.MkdirTemp(tmp, "apt")
	if err != nil {
		return rootFS{}, err
	}
	r, err := readRecipe(ctx, aptDir, log)
	if err != nil {
		return rootFS{}, err
	}
	raw, err := json.Marshal(r)
	if err != nil {
		return rootFS{}, err
	}
	dir := filepath.Join(cache, "root-"+core.DigestOf(raw).Hex()[:16])
	if _, err := os.Stat(dir); err != nil || fresh {
		if err := buildRoot(ctx, r, cache, dir, log); err != nil {
			return rootFS{}, err
		}
	}
	return openRoot(ctx, r, dir, tmp)
}

// buildRoot makes the disk and publishes it as dir, in the place of all that were made before.
func buildRoot(ctx context.Context, r recipe, cache, dir string, log io.Writer) error {
	old, err := filepath.Glob(filepath.Join(cache, "root-*"))
	if err != nil {
		return err
	}
	part := filepath.Join(cache, "root-new.part")
	for _, d := range append(old, part) {
		if err := os.RemoveAll(d); err != nil {
			return err
		}
	}
	if err := os.Mkdir(part, 0o700); err != nil {
		return err
	}
	tree := filepath.Join(part, "tree")
	if err := installTree(ctx, r, part, tree, log); err != nil {
		return err
	}
	found, err := filepath.Glob(filepath.Join(tree, "lib", "modules", "*"))
	if err != nil || len(found) != 1 {
		return errors.Join(fmt.Errorf("the machine has %d kernels instead of one", len(found)), err)
	}
	if err := build.KernelOfTree(ctx, tree, filepath.Base(found[0]), filepath.Join(part, "kernel")); err != nil {
		return err
	}
	if err := takeEmulator(ctx, tree, filepath.Join(part, emulatorDir)); err != nil {
		return err
	}
	if err := makeDisk(ctx, tree, filepath.Join(part, rootDisk), diskMiB); err != nil {
		return err
	}
	if err := os.RemoveAll(tree); err != nil {
		return err
	}
	return os.Rename(part, dir)
}

const (
	rootDisk    = "root.ext4"
	emulatorDir = "emulator"
)

// installTree installs Debian into tree. Namespaces of its own see to it that nothing stays mounted when it is cut off.
func installTree(ctx context.Context, r recipe, dir, tree string, log io.Writer) error {
	sources := filepath.Join(dir, "lane.sources")
	if err := os.WriteFile(sources, []byte(r.Sources), 0o600); err != nil {
		return err
	}
	args := []string{
		"--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL", "--propagation", "private", "--",
		"mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory",
		"--include=" + strings.Join(r.Packages, ","),
		`--aptopt=APT::Install-Recommends "false"`,
		"--dpkgopt=force-confold", "--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*/*", "--dpkgopt=path-exclude=/usr/share/locale/*",
		fmt.Sprintf(`--setup-hook=mkdir -p "$1/etc/apt/preferences.d" && printf %%s '%s' >"$1/etc/apt/preferences.d/lane"`, r.Pins),
		`--essential-hook=mkdir -p "$1/etc/initramfs-tools" && echo update_initramfs=no >"$1/etc/initramfs-tools/update-initramfs.conf"`,
		// Neither a cluster nor a server of PostgreSQL: the tests have their own.
		`--essential-hook=mkdir -p "$1/etc/postgresql-common" && echo create_main_cluster=false >"$1/etc/postgresql-common/createcluster.conf"`,
		r.Suite, tree, sources,
	}
	cmd := exec.CommandContext(ctx, "unshare", args...) //nolint:gosec // G204: of our own making
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("install the machine's packages: %w", err)
	}
	return nil
}

// makeDisk makes a sparse file system of a tree. Without a journal: what is written to it never outlives a boot.
func makeDisk(ctx context.Context, tree, disk string, sizeMiB int) error {
	args := []string{
		"-q", "-F", "-L", "lane", "-m", "0", "-O", "^has_journal,^metadata_csum", "-E", "lazy_itable_init=1,root_owner=0:0",
		"-d", tree, disk, fmt.Sprintf("%dM", sizeMiB),
	}
	b, err := exec.CommandContext(ctx, "mkfs.ext4", args...).CombinedOutput() //nolint:gosec // G204: constant but for paths
	if err != nil {
		return fmt.Errorf("make the disk %s: %w: %s", filepath.Base(disk), err, core.Clip(string(b)))
	}
	return nil
}

const guestProgram = "github.com/coppice-dev/coppice/internal/test/kvmlane/guest"

func openRoot(ctx context.Context, r recipe, dir, tmp string) (rootFS, error) {
	k, err := build.OpenKernel(filepath.Join(dir, "kernel"))
	if err != nil {
		return rootFS{}, err
	}
	program, initrd := filepath.Join(tmp, "guest"), filepath.Join(tmp, "initrd")
	if err := os.Remove(initrd); err != nil && !errors.Is(err, os.ErrNotExist) {
		return rootFS{}, err
	}
	if err := goBuild(ctx, "build", "-o", program, guestProgram); err != nil {
		return rootFS{}, err
	}
	if err := k.WriteInitrd(initrd, program); err != nil {
		return rootFS{}, err
	}
	return rootFS{kernel: k.VMLinuz, initrd: initrd, disk: filepath.Join(dir, rootDisk), release: k.Release, origin: r.Origin, emulator: filepath.Join(dir, emulatorDir)}, nil
}

// goBuild runs the go command for programs that run in the machine: static ones.
func goBuild(ctx context.Context, verb string, args ...string) error {
	cmd := exec.CommandContext(ctx, "go", append([]string{verb, "-trimpath", "-ldflags=-s -w"}, args...)...) //nolint:gosec // G204: constant but for paths
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if b, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go %s %s: %w\n%s", verb, args[len(args)-1], err, b)
	}
	return nil
}

// lock takes a lock that the kernel gives back when this process dies.
func lock(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX)
		if err == nil {
			return func() { _ = f.Close() }, nil
		}
		if !errors.Is(err, unix.EINTR) {
			return nil, errors.Join(err, f.Close())
		}
	}
}
