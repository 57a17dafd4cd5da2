package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/daemon"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// `bench control` measures the control plane: PostgreSQL that is as durable as a real one, a controller with its REST API, and
// runners without real machines. Nothing of it needs root.

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
	StartedAt time.Time `json:"started_at"`
	WallS     float64   `json:"wall_s"`
	Host      host      `json:"host"`
	Load      load      `json:"load"`
	Postgres  string    `json:"postgres"`

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

	Aims []target `json:"aims"`
}

func (r *controlReport) judge() {
	r.Aims = []target{
		atMost("fork_op_ms.p50", r.ForkOpMS.P50, 5),
		atLeast("fork_ops_per_s", r.ForkOpsPerS, 300),
		atMost("parallel_1000_s", r.Parallel1000S, 60),
		atMost("lineage_ms.p99", r.LineageMS.P99, 20),
	}
}

func (r *controlReport) show(w io.Writer) error {
	p := &printer{w: w}
	p.heading("make bench-control", r.Postgres, r.StartedAt, r.WallS, r.Host, r.Load)
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
	p.targets("Aims", r.Aims)
	return p.err
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
	only     []string // sections; empty: all
}

var controlSections = []string{"forks", "parallel", "tree"}

func (c controlConfig) wants(section string) bool {
	return len(c.only) == 0 || slices.Contains(c.only, section)
}

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
	if *only != "" {
		cfg.only = strings.Split(*only, ",")
	}
	for _, section := range cfg.only {
		if !slices.Contains(controlSections, section) {
			return fmt.Errorf("there is no section %q; there are %s", section, strings.Join(controlSections, ", "))
		}
	}
	r, err := measureControl(ctx, cfg, progress)
	if err != nil {
		return err
	}
	if len(cfg.only) > 0 {
		return r.show(out)
	}
	if err := atomicfile.WriteJSON(filepath.Join(cfg.out, "control.json"), r, 0o644); err != nil {
		return err
	}
	return r.show(out)
}

// measureControl runs everything. The runner's clients and the controller share this process, as the CPUs do anyway.
func measureControl(ctx context.Context, cfg controlConfig, progress io.Writer) (_ *controlReport, err error) {
	began := time.Now()
	say := func(format string, a ...any) {
		fmt.Fprintf(progress, "%6.1f s  %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, a...))
	}
	base := &report{}
	base.begin(began)
	r := &controlReport{StartedAt: base.StartedAt, Host: base.Host, SustainClients: cfg.clients, TreeNodes: cfg.wide * cfg.deep, TreeDepth: cfg.deep}
	say("start PostgreSQL")
	plane, err := openPlane(ctx, cfg.out, cfg.pgBin)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, plane.close(ctx)) }()
	r.Postgres = plane.version
	if cfg.wants("forks") {
		say("single forks")
		if err := plane.withFakeRunner(ctx, func(w *world) error { return w.measureForks(ctx, cfg, r) }); err != nil {
			return nil, err
		}
	}
	if cfg.wants("parallel") {
		say("%d parallel forks", cfg.parallel)
		if err := plane.withRealRunner(ctx, cfg, func(w *world) error { return w.measureParallel(ctx, cfg, r) }); err != nil {
			return nil, err
		}
	}
	if cfg.wants("tree") {
		say("a tree of %d checkpoints, %d deep", r.TreeNodes, r.TreeDepth)
		if err := plane.withFakeRunner(ctx, func(w *world) error { return w.measureTree(ctx, cfg, r) }); err != nil {
			return nil, err
		}
	}
	base.finish(began)
	r.WallS, r.Load = base.WallS, base.Load
	r.judge()
	return r, nil
}

// checkpoint makes a workspace and a checkpoint of it to fork from.
func (w *world) checkpoint(ctx context.Context) (coppice.CheckpointID, error) {
	ws, err := w.client.CreateWorkspace(ctx, coppice.CreateWorkspaceRequest{Resources: coppice.ResourcesRequest{MemoryMiB: new(128)}})
	if err != nil {
		return "", err
	}
	cp, err := w.client.CreateCheckpoint(ctx, ws.ID, coppice.CreateCheckpointRequest{})
	return cp.ID, err
}

func (w *world) fork(ctx context.Context, id coppice.CheckpointID) (float64, error) {
	start := time.Now()
	got, err := w.client.ForkCheckpoint(ctx, id, coppice.ForkCheckpointRequest{Count: new(1)})
	took := since(start)
	switch {
	case err != nil:
		return 0, err
	case len(got.Children) != 1 || got.Children[0].Problem != nil:
		return 0, fmt.Errorf("a fork answered %+v", got.Children)
	}
	return took, nil
}

// measureForks measures fork operations with a runner that answers at once: what the control plane adds.
func (w *world) measureForks(ctx context.Context, cfg controlConfig, r *controlReport) error {
	id, err := w.checkpoint(ctx)
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
	start := time.Now()
	busy, err := together(cfg.clients, func(n int) (samples, error) {
		var mine samples
		for time.Since(start) < cfg.sustain {
			took, err := w.fork(ctx, id)
			if err != nil {
				return nil, err
			}
			mine.add(took)
		}
		return mine, nil
	})
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

// together runs a function n times at once and gathers what it measured.
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

// measureParallel asks for many forks of one checkpoint at once, each a request of its own, and waits until all are ready.
func (w *world) measureParallel(ctx context.Context, cfg controlConfig, r *controlReport) error {
	id, err := w.checkpoint(ctx)
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
