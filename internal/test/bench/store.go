package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/test/bench/report"
	"github.com/coppice-dev/coppice/internal/test/testpool"
	"github.com/coppice-dev/coppice/internal/test/tests3"
)

// `bench store` measures the store of checkpoints on a real S3 server. A machine works and is captured again and again.
// Then the store's own code alone writes the content of its memory to the store once more, so that the figures contain
// nothing else. After that, a checkpoint is forked on the host that has it and on hosts that have nothing.

// storeReport is store.json.
type storeReport struct {
	report.Head
	report.Body
	Server string `json:"server"` // that speaks S3
	Work   string `json:"work"`   // what the guest did between two checkpoints
}

// ratio records a ratio with its maximum; 0: no maximum.
func (r *storeReport) ratio(name string, value, most float64, of string) {
	r.Ratios[name] = report.Finite(value)
	if most > 0 {
		r.Aims = append(r.Aims, report.Aim{Ratio: name, Aim: most, Of: of}.Judged(r.Ratios[name]))
	}
}

func (r *storeReport) show(w io.Writer) error {
	p := report.NewPrinter(w)
	p.Head("make bench-store", r.Head, "VMM      "+r.Host.Machines(), fmt.Sprintf("store    %s, on this machine", r.Server))
	p.Line("work     %s", r.Work)
	p.Table(r.Groups)
	p.Stages(r.Stages, slices.Sorted(maps.Keys(r.Stages))...)
	for _, what := range r.NotMeasured {
		p.Line("\nNot measured: %s", what)
	}
	p.Aims("Aims", r.Aims)
	p.Sorted(r.Ratios)
	return p.Err
}

// storeConfig says how much to measure. Tests measure little.
type storeConfig struct {
	out, images, image, coppice string
	pgBin, vmm, accel           string
	depth                       int // checkpoints of the chain
	reads                       int
	rounds                      int // of forks
	chainMiB, forkMiB           int // RAM
	work                        string
}

// guestWork is the work of the machine between two checkpoints: $0 is the number of the checkpoint.
const guestWork = `ls -lR /etc /usr/lib/x86_64-linux-gnu | head -n 4000 | sed "s/^/$0 /" > /root/list; sort -r /root/list | gzip -1 > /root/list.gz
sha256sum /usr/bin/* > /root/sums; head -c 65536 /dev/urandom > /root/noise; date > /root/when`

func storeMain(ctx context.Context, arguments []string, out, progress io.Writer) error {
	cfg := storeConfig{depth: 64, reads: 9, rounds: 3, chainMiB: 256, forkMiB: 512, work: guestWork}
	f := flag.NewFlagSet("bench store", flag.ContinueOnError)
	f.SetOutput(progress)
	f.StringVar(&cfg.out, "out", "var/bench", "`directory` for store.json; everything is in it while the run lasts")
	f.StringVar(&cfg.images, "images-dir", "var/images", "image store `directory`")
	f.StringVar(&cfg.image, "image", "base", "`name` of the image")
	f.StringVar(&cfg.coppice, "coppice", "bin/coppice", "`path` of the program under test")
	f.StringVar(&cfg.pgBin, "pg-bin", "", "`directory` of PostgreSQL's programs; empty finds them")
	f.StringVar(&cfg.vmm, "vmm", "auto", "qemu, cloud-hypervisor or auto, as for coppice runner")
	f.StringVar(&cfg.accel, "accel", "auto", "tcg, kvm or auto, as for coppice runner")
	f.IntVar(&cfg.depth, "depth", cfg.depth, "checkpoints of the chain; the aims are for 64")
	f.IntVar(&cfg.rounds, "rounds", cfg.rounds, "how often each way to fork is measured")
	if err := f.Parse(arguments); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("measuring VMs on hosts of their own needs root: sudo -E make bench-store")
	}
	unlock, err := lock(&cfg.out, &cfg.images, &cfg.coppice)
	if err != nil {
		return err
	}
	defer unlock()
	r, err := measureStore(ctx, cfg, progress)
	if err != nil {
		return err
	}
	if err := atomicfile.WriteJSON(filepath.Join(cfg.out, "store.json"), r, 0o644); err != nil {
		return err
	}
	return r.show(out)
}

// storeBench is one run.
type storeBench struct {
	cfg    storeConfig
	report *storeReport
	say    func(format string, a ...any)
	pool   *testpool.Pool
	s3     *tests3.Server
	home   *testpool.Host // where everything is made
	dir    string
}

func measureStore(ctx context.Context, cfg storeConfig, progress io.Writer) (_ *storeReport, err error) {
	began := time.Now()
	r := &storeReport{Head: report.Begin(began), Body: report.NewBody(), Work: strings.ReplaceAll(cfg.work, "\n", "; ")}
	b := &storeBench{cfg: cfg, report: r, dir: filepath.Join(cfg.out, "store-data"), say: report.Progress(progress, began)}
	if err := errors.Join(testpool.RemoveDir(b.dir), os.MkdirAll(filepath.Join(b.dir, "s3"), 0o711)); err != nil { //nolint:gosec // G301: the database's user must pass
		return nil, err
	}
	defer func() { err = errors.Join(err, b.close(ctx)) }()
	if err := b.open(ctx); err != nil {
		return nil, err
	}
	for _, part := range []func(context.Context) error{b.measureChain, b.measureForks} {
		if err := part(ctx); err != nil {
			return nil, err
		}
	}
	r.Finish(began)
	return r, nil
}

func (b *storeBench) open(ctx context.Context) (err error) {
	b.say("start PostgreSQL, an S3 server, a controller and a runner")
	if b.s3, err = tests3.Open(ctx, filepath.Join(b.dir, "s3")); err != nil {
		return err
	}
	b.report.Server = b.s3.Program
	b.pool, err = testpool.Open(ctx, testpool.Config{
		Dir: b.dir, Coppice: b.cfg.coppice, Images: b.cfg.images, PGBin: b.cfg.pgBin, Store: b.s3, Controller: []string{"--log-level", "warn"},
		Runner: []string{"--disk-budget", "12G", "--vmm", b.cfg.vmm, "--accel", b.cfg.accel, "--log-level", "warn"},
	})
	if err != nil {
		return err
	}
	if b.home, err = b.pool.Join(ctx); err != nil {
		return err
	}
	for runner, err := range b.pool.Client.Runners(ctx) {
		if err != nil {
			return err
		}
		h := &b.report.Host
		h.VMM, h.VMMVersion, h.Accelerator, h.CPUModel, h.Why = runner.Class.VMM, runner.Class.VMMVersion, runner.Class.Accelerator, runner.Class.CPUModel, runner.KVM
	}
	return nil
}

func (b *storeBench) close(ctx context.Context) error {
	var errs []error
	if b.pool != nil {
		errs = append(errs, b.pool.Close(ctx))
	}
	if b.s3 != nil {
		b.s3.Close()
	}
	if err := errors.Join(errs...); err != nil {
		return err // the logs stay
	}
	return testpool.RemoveDir(b.dir)
}
