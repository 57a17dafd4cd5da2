package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/daemon"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// `bench control` measures the control plane: a PostgreSQL as durable as a real one, a controller with its REST API,
// and runners without real machines. Nothing of it needs root.

// quantiles are in milliseconds.
type quantiles struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
	N   int     `json:"n"`
}

func (s samples) quantiles() quantiles {
	return quantiles{P50: s.median(), P99: s.quantile(0.99), N: len(s)}
}

// controlReport is control.json.
type controlReport struct {
	head
	Postgres string `json:"postgres"`

	ForkOpMS       quantiles `json:"fork_op_ms"`          // one client: POST to its answer, both transactions committed
	ForkOpCPUMS    float64   `json:"fork_op_cpu_ms"`      // of controller, client and PostgreSQL together, which foreign load moves less
	ForkOpsPerS    float64   `json:"fork_ops_per_s"`      // several clients, sustained
	ForkOpBusyMS   quantiles `json:"fork_op_busy_ms"`     // the same clients, each operation
	ForkOpBusyCPU  float64   `json:"fork_op_busy_cpu_ms"` // CPU time per operation meanwhile
	Parallel1000S  float64   `json:"parallel_1000_s"`     // the real runner on fake machines: all READY
	LineageMS      quantiles `json:"lineage_ms"`          // a page of 1,000 ancestors
	LineagePageMS  quantiles `json:"lineage_page_ms"`     // a page of 100, as by default
	TreePageMS     quantiles `json:"tree_page_ms"`        // the first page of the whole tree
	TreeNodes      int       `json:"tree_nodes"`
	TreeDepth      int       `json:"tree_depth"`
	SustainClients int       `json:"sustain_clients"`

	Aims []aim `json:"aims"`
}

func (r *controlReport) judge() {
	r.Aims = []aim{
		aim{Figure: "fork_op_ms.p50", Aim: 5}.judged(r.ForkOpMS.P50),
		aim{Figure: "fork_ops_per_s", Aim: 300, AtLeast: true}.judged(r.ForkOpsPerS),
		aim{Figure: "parallel_1000_s", Aim: 60}.judged(r.Parallel1000S),
		aim{Figure: "lineage_ms.p99", Aim: 20}.judged(r.LineageMS.P99),
	}
}

func (r *controlReport) show(w io.Writer) error {
	p := &printer{w: w}
	p.head("make bench-control", r.head, databaseLine(r.Postgres))
	p.line("")
	p.columns([][]string{
		{"milliseconds", "n", "p50", "p99"},
		r.ForkOpMS.row("fork of 1, one client: POST to answer"),
		r.ForkOpBusyMS.row(fmt.Sprintf("the same, %d clients", r.SustainClients)),
		r.LineageMS.row("lineage, page of 1,000"),
		r.LineagePageMS.row("lineage, page of 100"),
		r.TreePageMS.row("tree, first page of 100"),
	})
	p.line("\nfork operations, %d clients: %s a second; CPU time of each %s ms (one client: %s)",
		r.SustainClients, number(r.ForkOpsPerS), number(r.ForkOpBusyCPU), number(r.ForkOpCPUMS))
	p.line("1,000 parallel forks of one checkpoint, real runner, fake machines: all READY in %s s", number(r.Parallel1000S))
	p.line("tree: %d checkpoints, %d deep", r.TreeNodes, r.TreeDepth)
	p.aims("Aims", r.Aims)
	return p.err
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
	only     selection // of sections
}

var controlSections = []string{"forks", "parallel", "tree"}

func controlMain(ctx context.Context, arguments []string, out, progress io.Writer) error {
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
	if cfg.only, err = choose("section", *only, controlSections); err != nil {
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
	say := progressOf(progress, began)
	r := &controlReport{head: begin(began), SustainClients: cfg.clients, TreeNodes: cfg.wide * cfg.deep, TreeDepth: cfg.deep}
	say("start PostgreSQL")
	plane, err := openPlane(ctx, cfg.out, cfg.pgBin)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, plane.close(ctx)) }()
	r.Postgres = plane.version
	if cfg.only.wants("forks") {
		say("single forks")
		if err := plane.with(ctx, fakeRunner, func(w *world) error { return w.measureForks(ctx, cfg, r) }); err != nil {
			return nil, err
		}
	}
	if cfg.only.wants("parallel") {
		say("%d parallel forks", cfg.parallel)
		if err := plane.with(ctx, realRunner(cfg.parallel+16), func(w *world) error { return w.measureParallel(ctx, cfg, r) }); err != nil {
			return nil, err
		}
	}
	if cfg.only.wants("tree") {
		say("a tree of %d checkpoints, %d deep", r.TreeNodes, r.TreeDepth)
		if err := plane.with(ctx, fakeRunner, func(w *world) error { return w.measureTree(ctx, cfg, r) }); err != nil {
			return nil, err
		}
	}
	r.finish(began)
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
	var times samples
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
		times.add(took)
	}
	used, err := meter.used()
	if err != nil {
		return err
	}
	r.ForkOpMS, r.ForkOpCPUMS = times.quantiles(), used.all()/float64(len(times))

	if meter, err = w.plane.meter(); err != nil {
		return err
	}
	busy, err := sustained(cfg.clients, cfg.sustain, func() (float64, error) { return w.fork(ctx, id) })
	if err != nil {
		return err
	}
	if used, err = meter.used(); err != nil {
		return err
	}
	r.ForkOpsPerS = float64(len(busy)) / used.wall.Seconds()
	r.ForkOpBusyMS, r.ForkOpBusyCPU = busy.quantiles(), used.all()/float64(len(busy))
	return nil
}

// together runs a function n times at once and collects its measurements.
func together(n int, run func(n int) (samples, error)) (samples, error) {
	var mu sync.Mutex // guards what follows
	var all samples
	var failed error
	var group sync.WaitGroup
	for i := range n {
		group.Go(func() {
			got, err := run(i)
			mu.Lock()
			defer mu.Unlock()
			all.add(got...)
			failed = errors.Join(failed, err)
		})
	}
	group.Wait()
	return all, failed
}

// sustained has several clients do something again and again for as long as that.
func sustained(clients int, long time.Duration, do func() (float64, error)) (samples, error) {
	start := time.Now()
	return together(clients, func(int) (samples, error) {
		var mine samples
		for time.Since(start) < long {
			took, err := do()
			if err != nil {
				return nil, err
			}
			mine.add(took)
		}
		return mine, nil
	})
}

// measureParallel asks for many forks of one checkpoint at once, each a request of its own, and waits until all are ready.
func (w *world) measureParallel(ctx context.Context, cfg controlConfig, r *controlReport) error {
	_, id, err := seed(ctx, w.client)
	if err != nil {
		return err
	}
	start := time.Now()
	if _, err := together(cfg.parallel, func(int) (samples, error) {
		took, err := w.fork(ctx, id)
		return samples{took}, err
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
