// Package controlplane measures the control plane for `bench`: alone (`bench control`), and in a cell with a thousand simulated runners
// and a million checkpoints (`bench scale`). Nothing of it needs a virtual machine.
package controlplane

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/test/bench/report"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// `bench control` measures the control plane: a PostgreSQL as durable as a real one, a controller with its REST API,
// and runners without real machines. Nothing of it needs root.

// controlReport is control.json.
type controlReport struct {
	report.Head
	Postgres string `json:"postgres"`

	ForkOpMS       report.Quantiles `json:"fork_op_ms"`          // one client: POST to its answer, both transactions committed
	ForkOpCPUMS    float64          `json:"fork_op_cpu_ms"`      // of controller, client and PostgreSQL together, which foreign load moves less
	ForkOpsPerS    float64          `json:"fork_ops_per_s"`      // several clients, sustained
	ForkOpBusyMS   report.Quantiles `json:"fork_op_busy_ms"`     // the same clients, each operation
	ForkOpBusyCPU  float64          `json:"fork_op_busy_cpu_ms"` // CPU time per operation meanwhile
	Parallel1000S  float64          `json:"parallel_1000_s"`     // the real runner on fake machines: all READY
	LineageMS      report.Quantiles `json:"lineage_ms"`          // a page of 1,000 ancestors
	LineagePageMS  report.Quantiles `json:"lineage_page_ms"`     // a page of 100, as by default
	TreePageMS     report.Quantiles `json:"tree_page_ms"`        // the first page of the whole tree
	TreeNodes      int              `json:"tree_nodes"`
	TreeDepth      int              `json:"tree_depth"`
	SustainClients int              `json:"sustain_clients"`

	Aims []report.Aim `json:"aims"`
}

func (r *controlReport) judge() {
	r.Aims = []report.Aim{
		report.Aim{Figure: "fork_op_ms.p50", Aim: 5}.Judged(r.ForkOpMS.P50),
		report.Aim{Figure: "fork_ops_per_s", Aim: 300, AtLeast: true}.Judged(r.ForkOpsPerS),
		report.Aim{Figure: "parallel_1000_s", Aim: 60}.Judged(r.Parallel1000S),
		report.Aim{Figure: "lineage_ms.p99", Aim: 20}.Judged(r.LineageMS.P99),
	}
}

func (r *controlReport) show(w io.Writer) error {
	p := report.NewPrinter(w)
	p.Head("make bench-control", r.Head, databaseLine(r.Postgres))
	p.Line("")
	p.Columns([][]string{
		{"milliseconds", "n", "p50", "p99"},
		r.ForkOpMS.Row("fork of 1, one client: POST to answer"),
		r.ForkOpBusyMS.Row(fmt.Sprintf("the same, %d clients", r.SustainClients)),
		r.LineageMS.Row("lineage, page of 1,000"),
		r.LineagePageMS.Row("lineage, page of 100"),
		r.TreePageMS.Row("tree, first page of 100"),
	})
	p.Line("\nfork operations, %d clients: %s a second; CPU time of each %s ms (one client: %s)",
		r.SustainClients, report.Number(r.ForkOpsPerS), report.Number(r.ForkOpBusyCPU), report.Number(r.ForkOpCPUMS))
	p.Line("1,000 parallel forks of one checkpoint, real runner, fake machines: all READY in %s s", report.Number(r.Parallel1000S))
	p.Line("tree: %d checkpoints, %d deep", r.TreeNodes, r.TreeDepth)
	p.Aims("Aims", r.Aims)
	return p.Err
}

func databaseLine(version string) string {
	return "database PostgreSQL " + version + ", durable, on a unix socket"
}

// controlConfig says how much is measured. Tests measure little.
type controlConfig struct {
	out      string
	pgBin    string
	warmups  int
	singles  int
	sustain  time.Duration
	clients  int
	parallel int
	wide     int // nodes of each generation
	deep     int
	reads    int
	only     report.Selection // of sections
}

var controlSections = []string{"forks", "parallel", "tree"}

// Main is `bench control`.
func Main(ctx context.Context, arguments []string, out, progress io.Writer) error {
	daemon.RelaxGC() // as in the server
	cfg := controlConfig{warmups: 200, singles: 1000, clients: 8, parallel: 1000, wide: 100, deep: 1000, reads: 300}
	f := flag.NewFlagSet("bench control", flag.ContinueOnError)
	f.SetOutput(progress)
	f.StringVar(&cfg.out, "out", "var/bench", "`directory` for control.json; the database is in it while the run lasts")
	f.StringVar(&cfg.pgBin, "pg-bin", "", "`directory` of PostgreSQL's programs; empty finds them")
	f.DurationVar(&cfg.sustain, "sustain", 15*time.Second, "how long the sustained rate is measured")
	only := f.String("only", "", "the `sections` to measure, separated by commas: "+strings.Join(controlSections, ", ")+"; control.json is not written then")
	if err := f.Parse(arguments); err != nil {
		return err
	}
	var err error
	if cfg.only, err = report.Choose("section", *only, controlSections); err != nil {
		return err
	}
	r, err := measureControl(ctx, cfg, progress)
	if err != nil {
		return err
	}
	if len(cfg.only) == 0 {
		if err := atomicfile.WriteJSON(filepath.Join(cfg.out, "control.json"), r, 0o644); err != nil {
			return err
		}
	}
	return r.show(out)
}

// measureControl runs everything. The runner's clients and the controller share this process, because they share the
// CPUs anyway.
func measureControl(ctx context.Context, cfg controlConfig, progress io.Writer) (_ *controlReport, err error) {
	began := time.Now()
	say := report.Progress(progress, began)
	r := &controlReport{Head: report.Begin(began), SustainClients: cfg.clients, TreeNodes: cfg.wide * cfg.deep, TreeDepth: cfg.deep}
	say("start PostgreSQL")
	plane, err := openPlane(ctx, cfg.out, cfg.pgBin)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, plane.close(ctx)) }()
	r.Postgres = plane.version
	if cfg.only.Wants("forks") {
		say("single forks")
		if err := plane.with(ctx, fakeRunner, func(w *world) error { return w.measureForks(ctx, cfg, r) }); err != nil {
			return nil, err
		}
	}
	if cfg.only.Wants("parallel") {
		say("%d parallel forks", cfg.parallel)
		if err := plane.with(ctx, realRunner(cfg.parallel+16), func(w *world) error { return w.measureParallel(ctx, cfg, r) }); err != nil {
			return nil, err
		}
	}
	if cfg.only.Wants("tree") {
		say("a tree of %d checkpoints, %d deep", r.TreeNodes, r.TreeDepth)
		if err := plane.with(ctx, fakeRunner, func(w *world) error { return w.measureTree(ctx, cfg, r) }); err != nil {
			return nil, err
		}
	}
	r.Finish(began)
	r.judge()
	return r, nil
}

func (w *world) fork(ctx context.Context, id coppice.CheckpointID) (float64, error) {
	g, err := fork(ctx, w.client, id)
	return g.took, err
}

// measureForks measures fork operations with a runner that answers at once: this is the share of the control plane.
func (w *world) measureForks(ctx context.Context, cfg controlConfig, r *controlReport) error {
	_, id, err := seed(ctx, w.client)
	if err != nil {
		return err
	}
	var times report.Samples
	var meter *cpuMeter
	for i := range cfg.warmups + cfg.singles {
		if i == cfg.warmups {
			times = nil
			if meter, err = w.plane.meter(); err != nil {
				return err
			}
		}
		took, err := w.fork(ctx, id)
		if err != nil {
			return err
		}
		times.Add(took)
	}
	used, err := meter.used()
	if err != nil {
		return err
	}
	r.ForkOpMS, r.ForkOpCPUMS = times.Quantiles(), used.all()/float64(len(times))

	if meter, err = w.plane.meter(); err != nil {
		return err
	}
	busy, err := report.Sustained(cfg.clients, cfg.sustain, func() (float64, error) { return w.fork(ctx, id) })
	if err != nil {
		return err
	}
	if used, err = meter.used(); err != nil {
		return err
	}
	r.ForkOpsPerS = float64(len(busy)) / used.wall.Seconds()
	r.ForkOpBusyMS, r.ForkOpBusyCPU = busy.Quantiles(), used.all()/float64(len(busy))
	return nil
}

// measureParallel asks for many forks of one checkpoint at once, each a request of its own, and waits until all are ready.
func (w *world) measureParallel(ctx context.Context, cfg controlConfig, r *controlReport) error {
	_, id, err := seed(ctx, w.client)
	if err != nil {
		return err
	}
	start := time.Now()
	if _, err := report.Together(cfg.parallel, func(int) (report.Samples, error) {
		took, err := w.fork(ctx, id)
		return report.Samples{took}, err
	}); err != nil {
		return err
	}
	r.Parallel1000S = time.Since(start).Seconds()
	ready := 0
	for ws, err := range w.client.Workspaces(ctx, coppice.WorkspaceFilter{States: []coppice.WorkspaceState{"ready"}}) {
		if err != nil {
			return err
		}
		if ws.ParentCheckpointID == id {
			ready++
		}
	}
	if ready != cfg.parallel {
		return fmt.Errorf("%d of %d forks are ready", ready, cfg.parallel)
	}
	return nil
}
