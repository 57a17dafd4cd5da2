// Command bench measures the promises of Coppice on real virtual machines, in one run: `make bench`.
//
// It starts a `coppice dev` of its own and measures through REST what a user sees: creating, forking, checkpoints. What
// cannot be measured through REST (a cold boot, a clone that is not sealed, QEMU's own savevm) it measures in turns
// with that, using the runner's own parts: driver, memory engine, guest client. The product has no way to make an
// unsealed fork; this program has one for comparison only.
//
// Every ratio is one of medians of measurements that were made in turns, so that other load on the host hits both
// sides. It does not wait for a quiet moment; it reports the load of the host. Results: a table on standard output, and
// in the output directory a report that is named after the VMM and the accelerator.
//
// `bench control` measures the control plane alone, without a virtual machine and without root: `make bench-control`.
// `bench store` measures the store of checkpoints, alone and between hosts: `make bench-store`. `bench scale` measures
// a database with a thousand simulated runners and a million checkpoints: `make bench-scale`. `bench egress` measures
// the cost of the egress process: `make bench-egress`.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/pace"
	"github.com/coppice-dev/coppice/internal/test/bench/controlplane"
	"github.com/coppice-dev/coppice/internal/test/bench/egress"
	"github.com/coppice-dev/coppice/internal/test/bench/report"
	"github.com/coppice-dev/coppice/internal/test/testpool"
	"github.com/coppice-dev/coppice/runner/vmm/qemu"
)

// config says what to measure with.
type config struct {
	out     string // directory for the report, the server's log and, while it runs, everything else
	images  string // image store
	image   string // name in it
	coppice string // the program under test
	vmm     string // auto, until it is chosen
	accel   string // likewise
	qemu    string // empty finds it
	ch      string // cloud-hypervisor; empty finds it
	only    string // sections, comma-separated; empty is all
	scale   float64
}

func main() {
	daemon.EnterConfined()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := command(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func command(ctx context.Context, arguments []string) error {
	if len(arguments) > 0 {
		switch arguments[0] {
		case "control":
			return controlplane.Main(ctx, arguments[1:], os.Stdout, os.Stderr)
		case "store":
			return storeMain(ctx, arguments[1:], os.Stdout, os.Stderr)
		case "scale":
			return controlplane.ScaleMain(ctx, arguments[1:], os.Stdout, os.Stderr)
		case "egress":
			return egress.Main(ctx, arguments[1:], os.Stdout, os.Stderr)
		case egress.ChildCommand:
			return egress.ChildMain(ctx, os.Stdin, os.Stdout)
		}
	}
	var cfg config
	flag.StringVar(&cfg.out, "out", "var/bench", "`directory` for the report; its data directory is removed at the end")
	flag.StringVar(&cfg.images, "images-dir", "var/images", "image store `directory`")
	flag.StringVar(&cfg.image, "image", "base", "`name` of the image")
	flag.StringVar(&cfg.coppice, "coppice", "bin/coppice", "`path` of the program under test")
	flag.StringVar(&cfg.vmm, "vmm", "auto", "qemu, cloud-hypervisor or auto, as for coppice dev; each VMM and accelerator has a report of its own")
	flag.StringVar(&cfg.accel, "accel", "auto", "tcg, kvm or auto, as for coppice dev")
	flag.StringVar(&cfg.qemu, "qemu", "", "`path` of QEMU; empty finds it")
	flag.StringVar(&cfg.ch, "cloud-hypervisor", "", "`path` of cloud-hypervisor; empty finds it")
	flag.StringVar(&cfg.only, "only", "", "`sections` to run, comma-separated: "+strings.Join(sectionNames(), ", "))
	flag.Float64Var(&cfg.scale, "scale", 1, "`factor` on the number of repeats")
	flag.Parse()
	return run(ctx, cfg, os.Stdout, os.Stderr)
}

// bench is one run.
type bench struct {
	cfg    config
	say    func(format string, a ...any)
	began  time.Time
	report vmReport
	server *server
	lab    *lab
}

func newBench(cfg config, progress io.Writer) *bench {
	began := time.Now()
	return &bench{cfg: cfg, say: report.Progress(progress, began), began: began}
}

// section is one group of measurements.
type section struct {
	name  string
	title string
	run   func(*bench, context.Context) error
	only  string // the VMM that it is about; empty: any
}

func sections() []section {
	return []section{
		{"boot", "cold boots, creating, and single forks, in turns", (*bench).measureBoots, ""},
		{"sealed", "sealed and unsealed forks, in turns", (*bench).measureSealed, ""},
		{"fork", "forks of 1, 8 and 32, in turns", (*bench).measureForks, ""},
		{"thinking", "forks after a thought, with prepared machines and without, in turns", (*bench).measureThinking, ""},
		{"pause", "checkpoint pauses by dirty memory and RAM, in turns", (*bench).measurePauses, ""},
		{"depth", "checkpoint to a child's first exec at depth 1 and 64, in turns", (*bench).measureDepth, ""},
		{"steps", "steps of a search", (*bench).measureSteps, ""},
		{"memory", "memory of an idle fork, and of a tree of 64 with a sandbox on each", (*bench).measureMemory, ""},
		{"loadvm", "savevm and loadvm of plain QEMU beside forks of the same state, in turns", (*bench).measureLoadVM, qemu.DriverName},
		{"delta", "what a delta costs: injecting, rebasing, carrying", (*bench).measureDelta, ""},
	}
}

func sectionNames() []string {
	var out []string
	for _, s := range sections() {
		out = append(out, s.name)
	}
	return out
}

func run(ctx context.Context, cfg config, out, progress io.Writer) (err error) {
	if os.Geteuid() != 0 {
		return errors.New("measuring VMs needs root, for network namespaces and a user of its own for each VM: sudo -E make bench")
	}
	chosen, err := report.Choose("section", cfg.only, sectionNames())
	if err != nil {
		return err
	}
	unlock, err := lock(&cfg.out, &cfg.images, &cfg.coppice)
	if err != nil {
		return err
	}
	defer unlock()
	data := filepath.Join(cfg.out, "data")
	if err := sweep(ctx, cfg, data, progress); err != nil {
		return fmt.Errorf("clean up after an earlier run that was killed: %w", err)
	}
	if err := os.MkdirAll(data, 0o711); err != nil { //nolint:gosec // G301: the database's user must pass
		return err
	}
	b := newBench(cfg, progress)
	defer func() { err = errors.Join(err, b.close(ctx), testpool.RemoveDir(data)) }()
	if err := b.open(ctx, data); err != nil {
		return err
	}
	for _, s := range sections() {
		if !chosen.Wants(s.name) {
			b.report.Partial = true
			continue
		}
		if s.only != "" && s.only != b.report.Host.VMM {
			b.say("%s: not measured on %s", s.title, b.report.Host.VMM)
			b.report.NotMeasured = append(b.report.NotMeasured, s.title)
			continue
		}
		b.say("%s", s.title)
		if err := s.run(b, ctx); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	b.report.Finish(b.began)
	if err := b.report.write(filepath.Join(cfg.out, b.report.Host.ReportName())); err != nil {
		return err
	}
	return b.report.show(out)
}

func (b *bench) open(ctx context.Context, data string) (err error) {
	b.report.Head, b.report.Body = report.Begin(b.began), report.NewBody()
	if b.report.Load.Before > 1 {
		b.say("the host is busy already: load %.1f on %d CPUs; the report says so too", b.report.Load.Before, b.report.Host.CPUs)
	}
	b.say("start coppice dev and a lab beside it")
	if err := b.chooseVMM(ctx, data); err != nil {
		return err
	}
	if b.lab, err = openLab(ctx, b.cfg, filepath.Join(data, "lab")); err != nil {
		return err
	}
	if b.server, err = startServer(ctx, b.cfg, filepath.Join(data, "server")); err != nil {
		return err
	}
	return b.describe(ctx)
}

// hostConfig is the part of a server's configuration that decides what its machines run on.
func (c config) hostConfig() daemon.HostConfig {
	return daemon.HostConfig{ImagesDir: c.images, Binary: c.qemu, CloudHypervisor: c.ch, VMM: c.vmm, Accelerator: c.accel}
}

// chooseVMM decides once, for the server and the lab, what is measured.
func (b *bench) chooseVMM(ctx context.Context, data string) error {
	host := b.cfg.hostConfig()
	host.DataDir = data
	if err := host.ChooseVMM(ctx); err != nil {
		return err
	}
	b.cfg.vmm, b.cfg.accel, b.cfg.qemu, b.cfg.ch = host.VMM, host.Accelerator, host.Binary, host.CloudHypervisor
	b.report.Host.Why = host.Why
	b.say("measured on %s", host.VMMText())
	return nil
}

// describe records the server's VMM, and checks that the lab has the same one, so that figures of different VMMs are
// never compared.
func (b *bench) describe(ctx context.Context) error {
	h := &b.report.Host
	for r, err := range b.server.client.Runners(ctx) {
		if err != nil {
			return err
		}
		h.VMM, h.VMMVersion, h.Accelerator, h.CPUModel = r.Class.VMM, r.Class.VMMVersion, r.Class.Accelerator, r.Class.CPUModel
	}
	h.Image, h.GuestKernel, h.Volume = b.lab.image.Digest.Short(), b.lab.image.KernelRelease, b.lab.volume.Detail
	fp, err := b.lab.driver.Fingerprint(ctx)
	if err != nil {
		return err
	}
	for _, f := range []struct{ what, server, lab string }{
		{"VMM", h.VMM, fp.VMM}, {"VMM's version", h.VMMVersion, fp.Version}, {"accelerator", h.Accelerator, fp.Accelerator}, {"CPU", h.CPUModel, fp.CPUModel},
	} {
		if f.server != f.lab {
			return fmt.Errorf("the server's %s is %s and the lab's %s: they cannot be compared", f.what, f.server, f.lab)
		}
	}
	return nil
}

const stopTime = 2 * time.Minute

func (b *bench) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTime)
	defer cancel()
	var errs []error
	if b.server != nil {
		errs = append(errs, b.server.stop())
	}
	if b.lab != nil {
		errs = append(errs, b.lab.close(ctx))
	}
	return errors.Join(errs...)
}

// lock makes paths absolute, and locks the first one, a directory, against a second run, which would also disturb the
// VMs that are named after it.
func lock(paths ...*string) (unlock func(), err error) {
	for _, path := range paths {
		if *path, err = filepath.Abs(*path); err != nil {
			return nil, err
		}
	}
	out := *paths[0]
	if err := os.MkdirAll(out, 0o711); err != nil { //nolint:gosec // G301: the database's user must pass
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(out, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("another bench runs on %s: %w", out, err), f.Close())
	}
	return func() { _ = f.Close() }, nil // closing the only descriptor gives the lock back
}

// sweep removes what an earlier run left that was killed: it opens that run's server and lab once more, and they remove
// everything of theirs from the host.
func sweep(ctx context.Context, cfg config, data string, progress io.Writer) error {
	if _, err := os.Stat(data); err != nil {
		return ignoreAbsent(err)
	}
	b := newBench(cfg, progress)
	b.say("clean up after an earlier run that was killed")
	if err := awaitUnlocked(ctx, filepath.Join(data, "server", "data", "lock")); err != nil { // its server may be stopping
		return err
	}
	err := b.open(ctx, data)
	if _, absent := os.Stat(preparingDir(cfg)); err == nil && absent == nil {
		var s *server
		if s, err = startServer(ctx, b.cfg, preparingDir(cfg)); err == nil {
			err = s.stop()
		}
	}
	return errors.Join(err, b.close(ctx), testpool.RemoveDir(data))
}

// awaitUnlocked waits until nobody holds a lock on a file, which may be absent.
func awaitUnlocked(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeout(ctx, stopTime)
	defer cancel()
	f, err := os.Open(path)
	if err != nil {
		return ignoreAbsent(err)
	}
	defer f.Close() // gives the lock back
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return err
		}
		if err := pace.Pause(ctx, 100*time.Millisecond); err != nil {
			return fmt.Errorf("%s is held by another process: %w", path, err)
		}
	}
}

// rounds is a number of repeats. It yields at least half of them, and the rest while the time lasts.
func (b *bench) rounds(n int, budget time.Duration) func(yield func(int) bool) {
	n = max(1, int(float64(n)*b.cfg.scale))
	return func(yield func(int) bool) {
		began := time.Now()
		for i := range n {
			if i >= (n+1)/2 && time.Since(began) > budget {
				b.say("  only %d of %d rounds: the time is up", i, n)
				return
			}
			if !yield(i) {
				return
			}
		}
	}
}
