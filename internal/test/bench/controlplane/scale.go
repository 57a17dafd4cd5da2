package controlplane

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/test/bench/report"
	"github.com/coppice-dev/coppice/internal/undo"
)

// `bench scale` measures a cell: one PostgreSQL as durable as a real one, three controllers, and simulated runners that
// answer over HTTP and send heartbeats like real ones. docs/SCALE.md has the results.

// scaleReport is scale.json.
type scaleReport struct {
	report.Head
	Partial  bool    `json:"partial,omitempty"` // only some stages were run
	Scale    float64 `json:"scale"`             // 1 is what the limits are for
	Postgres string  `json:"postgres"`

	Controllers int   `json:"controllers"`
	Runners     int   `json:"runners"`
	Slots       int   `json:"slots"` // of a runner
	Projects    int64 `json:"projects"`
	Workspaces  int64 `json:"workspaces"` // live
	Checkpoints int64 `json:"checkpoints"`

	ForkOpMS            map[string]report.Quantiles `json:"fork_op_ms"`             // by number of runners: one client, POST to its answer
	ForkOpsPerS         float64                     `json:"fork_ops_per_s"`         // several clients, all runners
	ForkOpsPerSBy       map[string]float64          `json:"fork_ops_per_s_by"`      // number of runners
	ForkOpBusyMS        report.Quantiles            `json:"fork_op_busy_ms"`        // of the same
	ForkOpBusyCPU       float64                     `json:"fork_op_busy_cpu_ms"`    // of an operation: PostgreSQL, controllers, runners and clients
	ForkOpBusyDBCPU     float64                     `json:"fork_op_busy_db_ms"`     // of which PostgreSQL
	ForkP99Ratio        float64                     `json:"fork_op_p99_ratio"`      // all runners over one
	Grew                []growth                    `json:"grew"`                   // statements of a fork that cost more with all runners than with one
	HeartbeatDBCPUShare float64                     `json:"heartbeat_db_cpu_share"` // of one core
	Heartbeats          heartbeatLoad               `json:"heartbeats"`
	Churn               churn                       `json:"churn"`
	Retention1M         float64                     `json:"retention_1m_s"` // one round; 0: it failed
	Retention           retentionRound              `json:"retention"`
	FenceAllS           float64                     `json:"fence_all_s"` // 0: it did not end
	Fence               massFence                   `json:"fence"`
	BytesPerCheckpoint  float64                     `json:"bytes_per_checkpoint"`
	Tables              []tableSize                 `json:"tables"`

	Limits []report.Aim `json:"limits"`
}

func (r *scaleReport) judge(wants func(stage string) bool) {
	one, all := r.ForkOpMS["1"], r.ForkOpMS[fmt.Sprint(r.Runners)]
	if one.P99 > 0 {
		r.ForkP99Ratio = all.P99 / one.P99
	}
	for _, l := range []struct {
		stage string
		limit report.Aim
		value float64
	}{
		{"forks", report.Aim{Figure: "fork_op_p99_ratio", Aim: 1.5}, r.ForkP99Ratio},
		{"heartbeats", report.Aim{Figure: "heartbeat_db_cpu_share", Aim: 0.2}, r.HeartbeatDBCPUShare},
		{"fence", report.Aim{Figure: "fence_all_s", Aim: 30}, r.FenceAllS},
	} {
		if wants(l.stage) {
			r.Limits = append(r.Limits, l.limit.Judged(l.value))
		}
	}
}

func (r *scaleReport) show(w io.Writer) error {
	p := report.NewPrinter(w)
	p.Head(fmt.Sprintf("make bench-scale, scale %g", r.Scale), r.Head, databaseLine(r.Postgres))
	p.Line("\ncell     %d controllers, %d runners with %d slots, %d projects, %d live workspaces, %d checkpoints\n",
		r.Controllers, r.Runners, r.Slots, r.Projects, r.Workspaces, r.Checkpoints)
	rows := [][]string{{"milliseconds", "n", "p50", "p99"}}
	for _, n := range r.steps() {
		rows = append(rows, r.ForkOpMS[n].Row("fork of 1, one client, runners: "+n))
	}
	if r.ForkOpsPerS > 0 {
		p.Columns(append(rows, r.ForkOpBusyMS.Row("the same, several clients")))
		p.Line("\nfork operations: %s a second; CPU time of each %s ms, of which PostgreSQL %s", report.Number(r.ForkOpsPerS), report.Number(r.ForkOpBusyCPU), report.Number(r.ForkOpBusyDBCPU))
	}
	h := r.Heartbeats
	p.Line("runners: %d joined at once, all had told everything after %s s; %d heartbeats were not answered%s", r.Runners-r.Runners/10, report.Number(h.JoinS), h.JoinRefused, orWhy(h.Problem))
	if h.Beats > 0 {
		p.Line("heartbeats: %d in %s s (%d of them whole): PostgreSQL %.3f of a core, %.3f without them; controllers and simulated runners %.2f; usage of %d sandboxes: %s MiB",
			h.Beats, report.Number(h.Seconds), h.Whole, r.HeartbeatDBCPUShare, h.IdleDBShare, h.ProcessShare, h.UsageRows, report.Number(float64(h.UsageBytes)/(1<<20)))
		p.Line("  by process of PostgreSQL: %s; without heartbeats: %s", shares(h.DBShares), shares(h.IdleDBShares))
	}
	ch := r.Churn
	if ch.Cycles > 0 {
		p.Line("churn: an hour at %g forks a second, %d of its %d cycles in %s s: %s bytes a cycle", ch.PerSecond, ch.Cycles, ch.Asked, report.Number(ch.Seconds), report.Number(ch.BytesPerCycle))
	}
	if t := r.Retention; t.Nodes > 0 {
		p.Line("retention of a tree of %d: plan %s s, plan and delete %d %s s%s", t.Nodes, report.Number(t.PlanS), t.Deleted, report.Number(t.PruneS), orWhy(t.Problem))
	}
	if f := r.Fence; f.Runners > 0 {
		p.Line("mass fence: %d runners marked after %s s, %d workspaces lost after %s s, %d left", f.Runners, report.Number(f.MarkedS), f.Workspaces-f.Left, report.Number(r.FenceAllS), f.Left)
	}
	p.Line("a checkpoint: %s bytes", report.Number(r.BytesPerCheckpoint))
	if ch.Cycles > 0 {
		p.Line("")
		showSizes(p, ch.Before, ch.After)
	}
	if h.Beats > 0 {
		showStatements(p, "The most expensive statements while no runner sends heartbeats", h.Idle, h.IdleSeconds)
		showStatements(p, "The most expensive statements during heartbeats", h.Statements, h.Seconds)
	}
	if len(r.Grew) > 0 {
		p.Line("\nA fork's statements that cost more with all runners than with one")
		rows = [][]string{{"calls", "pages", "rows", "ms", "statement"}}
		for _, g := range r.Grew {
			rows = append(rows, []string{
				fmt.Sprint(g.Calls), report.Number(g.PagesBefore) + " -> " + report.Number(g.PagesAfter), report.Number(g.RowsBefore) + " -> " + report.Number(g.RowsAfter),
				report.Number(g.MSBefore) + " -> " + report.Number(g.MSAfter), g.Query[:min(len(g.Query), 100)],
			})
		}
		p.Columns(rows)
	}
	p.Aims("Limits", r.Limits)
	if r.Scale != 1 {
		p.Line("the limits are those of scale 1")
	}
	return p.Err
}

// steps returns the numbers of runners, smallest first.
func (r *scaleReport) steps() []string {
	var list []string
	for n := range r.ForkOpMS {
		list = append(list, n)
	}
	slices.SortFunc(list, func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), strings.Compare(a, b)) })
	return list
}

// shares lists parts of a core, largest first.
func shares(by map[string]float64) string {
	kinds := slices.SortedFunc(maps.Keys(by), func(a, b string) int { return cmp.Or(cmp.Compare(by[b], by[a]), strings.Compare(a, b)) })
	parts := make([]string, len(kinds))
	for i, kind := range kinds {
		parts[i] = fmt.Sprintf("%s %.3f", kind, by[kind])
	}
	return strings.Join(parts, ", ")
}

func orWhy(problem string) string {
	if problem == "" {
		return ""
	}
	return "; FAILED " + problem
}

// sizes is the table of what grew, largest first.
func showSizes(p *report.Printer, before, after []tableSize) {
	was := map[string]tableSize{}
	for _, t := range before {
		was[t.Table] = t
	}
	rows := [][]string{{"MiB before -> after the churn", "table", "indexes", "dead rows", "autovacuums"}}
	for _, t := range after[:min(len(after), 12)] {
		b := was[t.Table]
		rows = append(rows, []string{
			t.Table, report.Number(float64(b.TableBytes)/(1<<20)) + " -> " + report.Number(float64(t.TableBytes)/(1<<20)), report.Number(float64(b.IndexBytes)/(1<<20)) + " -> " + report.Number(float64(t.IndexBytes)/(1<<20)),
			fmt.Sprintf("%d -> %d", b.Dead, t.Dead), fmt.Sprintf("%d -> %d", b.Vacuums, t.Vacuums),
		})
	}
	p.Columns(rows)
}

// scaleConfig says how much to measure. Tests measure little.
type scaleConfig struct {
	out         string
	pgBin       string
	scale       float64
	runners     int
	searchNodes int
	warmups     int
	singles     int
	clients     int
	sustain     time.Duration
	beats       time.Duration    // of measured heartbeats: whole minutes, in each of which a sample of each sandbox is due
	beatEvery   time.Duration    // of a runner, unless the controllers want it sooner
	churnRate   float64          // forks a second of the hour that is replayed
	churnPart   float64          // of the hour
	churnTime   time.Duration    // at most
	fenceTime   time.Duration    // likewise
	only        report.Selection // of stages
}

var scaleStages = []string{"forks", "heartbeats", "churn", "retention", "fence"}

func (c scaleConfig) withScale(scale float64) scaleConfig {
	c.scale = scale
	c.runners = max(2, int(1000*scale))
	c.searchNodes = max(1000, int(1_000_000*scale))
	c.churnPart = scale
	return c
}

// steps returns the numbers of runners with which forks are measured.
func (c scaleConfig) steps() []int {
	return slices.Compact([]int{1, max(1, c.runners/10), c.runners})
}

// ScaleMain is `bench scale`.
func ScaleMain(ctx context.Context, arguments []string, out, progress io.Writer) error {
	daemon.RelaxGC() // as in the server
	cfg := scaleConfig{warmups: 100, clients: 8, beatEvery: 5 * time.Second, churnRate: 5, churnTime: 5 * time.Minute, fenceTime: 3 * time.Minute}
	f := flag.NewFlagSet("bench scale", flag.ContinueOnError)
	f.SetOutput(progress)
	f.StringVar(&cfg.out, "out", "var/bench", "`directory` for scale.json; the database is in it while the run lasts: 12 GiB at scale 1")
	f.StringVar(&cfg.pgBin, "pg-bin", "", "`directory` of PostgreSQL's programs; empty finds them")
	f.IntVar(&cfg.singles, "forks", 3000, "`number` of forks by one client, with each number of runners")
	f.DurationVar(&cfg.sustain, "sustain", 15*time.Second, "how long the sustained rate is measured")
	f.DurationVar(&cfg.beats, "beats", 2*time.Minute, "how long heartbeats are measured: whole minutes, because each sandbox is sampled once in one")
	f.Float64Var(&cfg.churnRate, "churn", cfg.churnRate, "forks a second of the hour that is replayed")
	scale := f.Float64("scale", 1, "`factor` on runners, projects, workspaces, checkpoints and the hour")
	only := f.String("only", "", "the `stages` to measure, separated by commas: "+strings.Join(scaleStages, ", ")+"; scale.json is not written then")
	if err := f.Parse(arguments); err != nil {
		return err
	}
	if *scale <= 0 || *scale > 1 {
		return errors.New("-scale is more than 0 and at most 1")
	}
	var err error
	if cfg.only, err = report.Choose("stage", *only, scaleStages); err != nil {
		return err
	}
	r, err := measureScale(ctx, cfg.withScale(*scale), progress)
	if err != nil {
		if r != nil {
			fmt.Fprintln(progress, "what was measured until it failed:")
			err = errors.Join(err, r.show(progress))
		}
		return err
	}
	if len(cfg.only) == 0 {
		if err := atomicfile.WriteJSON(filepath.Join(cfg.out, "scale.json"), r, 0o644); err != nil {
			return err
		}
	}
	return r.show(out)
}

// measureScale runs the stages. When one fails, the report has what was measured before. Controllers, simulated runners and clients share this process, as the CPUs do anyway.
func measureScale(ctx context.Context, cfg scaleConfig, progress io.Writer) (_ *scaleReport, err error) {
	began := time.Now()
	say := report.Progress(progress, began)
	r := &scaleReport{
		Head: report.Begin(began), Scale: cfg.scale, Partial: len(cfg.only) > 0, Controllers: scaleControllers, Runners: cfg.runners, Slots: scaleSlots,
		ForkOpMS: map[string]report.Quantiles{}, ForkOpsPerSBy: map[string]float64{},
	}
	say("start PostgreSQL and %d controllers", scaleControllers)
	plane, err := openPlane(ctx, cfg.out, cfg.pgBin, "pg_stat_statements")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, plane.close(ctx)) }()
	r.Postgres = plane.version
	var steps undo.Stack
	defer func() { err = errors.Join(err, steps.Undo(ctx)) }()
	c, err := openCell(ctx, plane, cfg, &steps)
	if err != nil {
		return nil, err
	}
	defer func() {
		r.Finish(began)
		r.Heartbeats.Problem = c.beats.firstProblem()
		r.judge(cfg.only.Wants)
	}()
	if err := c.growAll(ctx, r, say); err != nil {
		return r, err
	}
	for _, stage := range []struct {
		name, says string
		run        func(context.Context, *scaleReport) error
	}{
		{"heartbeats", fmt.Sprintf("heartbeats of %d runners", cfg.runners), c.measureHeartbeats},
		{"churn", fmt.Sprintf("an hour at %g forks a second", cfg.churnRate), c.measureChurn},
		{"retention", fmt.Sprintf("retention of a tree of %d", cfg.searchNodes), c.measureRetention},
		{"fence", fmt.Sprintf("all %d runners are lost", cfg.runners), c.measureFence},
	} {
		if !cfg.only.Wants(stage.name) {
			continue
		}
		say("%s", stage.says)
		if err := stage.run(ctx, r); err != nil {
			return r, fmt.Errorf("%s: %w", stage.name, err)
		}
	}
	return r, nil
}

// growAll inserts the fleet in steps, and measures forks after each step.
func (c *cell) growAll(ctx context.Context, r *scaleReport, say func(string, ...any)) error {
	if err := c.begin(ctx); err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	var first []statement
	var err error
	from := 0
	for step, to := range c.cfg.steps() {
		say("plant what belongs to %d runners", to-from)
		if err := c.grow(ctx, step, from, to); err != nil {
			return fmt.Errorf("plant for %d runners: %w", to, err)
		}
		from = to
		refused := c.beats.refused.Load()
		if r.Heartbeats.JoinS, err = c.settle(ctx); err != nil {
			return err
		}
		r.Heartbeats.JoinRefused = c.beats.refused.Load() - refused
		if !c.cfg.only.Wants("forks") {
			continue
		}
		say("forks with %d runners", to)
		list, err := c.measureForks(ctx, r)
		if err != nil {
			return fmt.Errorf("forks with %d runners: %w", to, err)
		}
		if first == nil {
			first = list
		}
		r.Grew = grew(first, list)
	}
	say("hold the rows against their constraints")
	if err := verify(ctx, c.db, true); err != nil {
		return err
	}
	return c.measureSizes(ctx, r)
}
