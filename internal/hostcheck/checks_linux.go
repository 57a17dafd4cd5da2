package hostcheck

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images/build"
	"github.com/coppice-dev/coppice/internal/pgcluster"
	"github.com/coppice-dev/coppice/internal/sparse"
	"github.com/coppice-dev/coppice/runner/memory"
)

const (
	cureRoot  = "run it as root: sudo coppice doctor"
	cureSetup = "make setup"
)

// Checks returns every check, what matters most first.
func Checks(cfg Config) []Check {
	f := files{proc: "/proc", sys: "/sys", dev: "/dev"}
	checks := []Check{root, qemu(cfg), f.kvm(cfg.KVM)}
	if cfg.FindCloudHypervisor != nil {
		checks = append(checks, cloudHypervisor(cfg.FindCloudHypervisor, cfg.BootCloudHypervisor))
	}
	if cfg.Choice != nil {
		checks = append(checks, choice(cfg.Choice))
	}
	checks = append(checks, f.isolation(f.controllers())...)
	checks = append(checks,
		jails,
		networkNamespaces,
		settings,
		rules,
		tap,
		f.vhostVsock,
		pageScan,
		f.reflink(cfg.DataDir),
		diskSpace(cfg.DataDir),
	)
	if !cfg.RunnerOnly {
		checks = append(checks, postgres(cfg.PGBin), imageTools)
	}
	return checks
}

// files is where the kernel's files are; tests have their own.
type files struct{ proc, sys, dev string }

func root(context.Context) Result {
	const name = "root"
	if os.Geteuid() == 0 {
		return ok(name, "running as root; VMs and PostgreSQL run as users of their own")
	}
	return fail(name, cureRoot, "namespaces, taps and the VMs' own users need root; what follows was tried as user %d", os.Geteuid())
}

var qemuVersion = regexp.MustCompile(`version (\d+)\.(\d+)\.(\d+)`)

// qemu is needed unless VMs would run on something else.
func qemu(cfg Config) Check {
	return func(ctx context.Context) Result {
		r := runQEMU(ctx, cfg.QEMU)
		if r.Status != Fail || cfg.Choice == nil {
			return r
		}
		if vmm, _, err := cfg.Choice(ctx); err == nil && vmm != r.Name {
			r.Status, r.Detail = Warn, r.Detail+"; VMs would run on "+vmm+" without it"
		}
		return r
	}
}

func runQEMU(ctx context.Context, program string) Result {
	const name = "qemu"
	if program == "" {
		program = "qemu-system-x86_64"
		if runtime.GOARCH == "arm64" {
			program = "qemu-system-aarch64"
		}
	}
	out, err := exec.CommandContext(ctx, program, "--version").Output()
	if err != nil {
		return fail(name, cureSetup+", or apt-get install --no-install-recommends qemu-system-x86", "%s does not run: %s", program, cause(err))
	}
	return judgeQEMU(string(out))
}

func judgeQEMU(printed string) Result {
	const name = "qemu"
	m := qemuVersion.FindStringSubmatch(printed)
	if m == nil {
		return fail(name, cureSetup, "it says no version that is known: %q", core.Clip(printed))
	}
	major, _ := strconv.Atoi(m[1]) // digits, by the expression
	minor, _ := strconv.Atoi(m[2])
	version := strings.Join(m[1:4], ".")
	const newer = "QEMU 8.2 or later; on Debian 12 that is in the backports suite, on Debian 13 the ordinary one"
	switch {
	case major < 7 || major == 7 && minor < 2:
		return fail(name, newer, "%s; 7.2 is the oldest that works", version)
	case major < 8 || major == 8 && minor < 2:
		return warn(name, newer, "%s opens a base image for writing even to read it; bases are kept in sealed memory instead of files, which costs their size in RAM", version)
	}
	return ok(name, "%s maps base images from files that it cannot write", version)
}

func (f files) kvm(probe func(context.Context) (string, error)) Check {
	const name = "kvm"
	const cure = "none needed; for speed, use a machine (or an instance type with nested virtualisation) whose KVM works"
	return func(ctx context.Context) Result {
		if _, err := os.Stat(filepath.Join(f.dev, "kvm")); err != nil {
			return warn(name, cure, "no /dev/kvm; VMs are emulated (TCG), which is slower")
		}
		if probe == nil {
			return warn(name, "coppice image build", "/dev/kvm is there, which proves nothing, and there is no image yet to boot under it; until then VMs run under TCG")
		}
		detail, err := probe(ctx)
		if err != nil {
			return warn(name, cure, "/dev/kvm is there, but a guest does not boot under it (%s); VMs are emulated (TCG), which is slower", cause(err))
		}
		return ok(name, "a guest booted under KVM: %s", detail)
	}
}

const cureSetupKVM = "make setup-kvm"

func cloudHypervisor(find func(context.Context) (path, version string, err error), boot func(context.Context) (string, error)) Check {
	const name = "cloud-hypervisor"
	return func(ctx context.Context) Result {
		path, version, err := find(ctx)
		switch {
		case err != nil && path == "":
			return warn(name, cureSetupKVM+" where KVM works; none needed elsewhere", "%s", core.MessageOf(err))
		case err != nil:
			return warn(name, cureSetupKVM, "%s cannot be used: %s", path, core.MessageOf(err))
		case boot == nil:
			return warn(name, "coppice image build", "%s is version %s, which is supported; there is no image yet to boot under it", path, version)
		}
		detail, err := boot(ctx)
		if err != nil {
			return warn(name, "none needed; see kvm", "%s is version %s, which is supported, but a guest does not boot under it: %s", path, version, cause(err))
		}
		return ok(name, "%s is version %s, which is supported; %s", path, version, detail)
	}
}

// choice says what all of that comes to.
func choice(choose func(context.Context) (vmm, why string, err error)) Check {
	const name = "vmm"
	return func(ctx context.Context) Result {
		_, why, err := choose(ctx)
		if err != nil {
			return fail(name, "unset COPPICE_VMM and COPPICE_ACCEL, or "+cureSetupKVM, "%s", core.MessageOf(err))
		}
		return ok(name, "VMs would run on %s", why)
	}
}

func (f files) vhostVsock(context.Context) Result {
	const name = "vhost-vsock"
	const cure = "none needed; modprobe vhost_vsock where the kernel has it"
	fd, err := unix.Open(filepath.Join(f.dev, "vhost-vsock"), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return warn(name, cure, "/dev/vhost-vsock cannot be opened (%v); guests are reached over a serial port instead", err)
	}
	_ = unix.Close(fd)
	return ok(name, "/dev/vhost-vsock can be opened")
}

func pageScan(context.Context) Result {
	const name = "page-scan"
	if memory.ScanMethod() == memory.MethodPagemapScan {
		return ok(name, "the kernel lists written pages by ioctl PAGEMAP_SCAN")
	}
	return warn(name, "Linux 6.7 or later", "ioctl PAGEMAP_SCAN does not work; written pages are found by reading /proc/PID/pagemap, which takes longer in a pause")
}

func (f files) reflink(dataDir string) Check {
	const name = "reflink"
	return func(context.Context) Result {
		dir, err := nearest(dataDir)
		if err != nil {
			return fail(name, "choose a data directory that can be made", "%s: %s", dataDir, cause(err))
		}
		can, err := sparse.CanReflink(dir)
		switch {
		case err != nil:
			return fail(name, cureOf(err, "make the data directory writable, or choose another with --data-dir"), "%s: %s", dir, cause(err))
		case can:
			return ok(name, "files in %s share extents", dir)
		}
		var missing []string
		if _, err := exec.LookPath("mkfs.xfs"); err != nil {
			missing = append(missing, "mkfs.xfs")
		}
		if _, err := os.Stat(filepath.Join(f.dev, "loop-control")); err != nil {
			missing = append(missing, "/dev/loop-control")
		}
		if len(missing) == 0 {
			return warn(name, "none needed; or a data directory on XFS or btrfs", "files in %s share no extents; coppice dev puts an XFS in a file there and mounts it", dir)
		}
		return warn(name, cureSetup+", or a data directory on XFS or btrfs", "files in %s share no extents and without %s there can be no XFS in a file; disks are copied at every checkpoint and fork", dir, strings.Join(missing, " and "))
	}
}

// nearest returns the directory itself or the closest one above it that exists.
func nearest(dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	for {
		fi, err := os.Stat(dir)
		switch {
		case err == nil && fi.IsDir():
			return dir, nil
		case err == nil:
			return "", fmt.Errorf("%s is not a directory", dir)
		case !errors.Is(err, os.ErrNotExist) || dir == "/":
			return "", err
		}
		dir = filepath.Dir(dir)
	}
}

const (
	leastDisk = 4 << 30
	fairDisk  = 16 << 30
)

func diskSpace(dataDir string) Check {
	return func(context.Context) Result {
		const name = "disk"
		dir, err := nearest(dataDir)
		if err != nil {
			return fail(name, "choose a data directory that can be made", "%s: %s", dataDir, cause(err))
		}
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			return fail(name, "choose another data directory with --data-dir", "%s: %v", dir, err)
		}
		return judgeDisk(dir, st.Bavail*uint64(st.Bsize)) //nolint:gosec // G115: a block size
	}
}

func judgeDisk(dir string, free uint64) Result {
	const name = "disk"
	switch {
	case free < leastDisk:
		return fail(name, "free some space, or choose another data directory with --data-dir", "%s free in %s; an image and a few checkpoints need %s", gib(free), dir, gib(leastDisk))
	case free < fairDisk:
		return warn(name, "free some space, or choose another data directory with --data-dir", "%s free in %s; a big tree may need more", gib(free), dir)
	}
	return ok(name, "%s free in %s", gib(free), dir)
}

func postgres(hint string) Check {
	const name = "postgres"
	return func(ctx context.Context) Result {
		bins, err := pgcluster.Find(ctx, hint)
		if err != nil {
			return fail(name, cureSetup, "%s", core.MessageOf(err))
		}
		if _, err := user.Lookup("postgres"); err != nil && os.Geteuid() == 0 {
			return fail(name, cureSetup, "PostgreSQL %s is there, but no user postgres to run it", bins.Version)
		}
		return ok(name, "%s in %s", bins.Version, filepath.Dir(bins.Postgres))
	}
}

func imageTools(context.Context) Result {
	const name = "image-tools"
	var names, packages []string
	for _, p := range build.MissingPrograms() {
		names = append(names, p.Name)
		packages = append(packages, p.Package)
	}
	if len(names) == 0 {
		return ok(name, "everything that builds an image is there")
	}
	slices.Sort(packages)
	return fail(name, cureSetup+", or apt-get install --no-install-recommends "+strings.Join(slices.Compact(packages), " "), "missing: %s", strings.Join(names, " "))
}
