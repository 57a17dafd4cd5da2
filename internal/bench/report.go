package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/coppice-dev/coppice/internal/atomicfile"
)

// head is the beginning of every report.
type head struct {
	StartedAt time.Time `json:"started_at"`
	WallS     float64   `json:"wall_s"`
	Host      host      `json:"host"`
	Load      load      `json:"load"`
}

// begin makes the head of a report.
func begin(now time.Time) head {
	return head{StartedAt: now.UTC().Truncate(time.Second), Host: describeHost(), Load: load{Before: loadAverage()}}
}

func (h *head) finish(began time.Time) {
	h.WallS = float64(time.Since(began).Milliseconds()) / 1000
	h.Load.After = loadAverage()
	h.Load.Note = "the host was quiet when the run began"
	if h.Load.Before > 1 {
		h.Load.Note = fmt.Sprintf("the host was busy before the run began (load %.1f on %d CPUs): times are too long, ratios less so", h.Load.Before, h.Host.CPUs)
	}
}

// progressOf returns what prints a line about the progress of a run.
func progressOf(w io.Writer, began time.Time) func(format string, a ...any) {
	return func(format string, a ...any) {
		fmt.Fprintf(w, "%6.1f s  %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, a...))
	}
}

// selection has the parts of a run that somebody asked for. It is empty for all.
type selection []string

// choose reads a list of parts, separated by commas.
func choose(what, only string, all []string) (selection, error) {
	if only == "" {
		return nil, nil
	}
	s := selection(strings.Split(only, ","))
	for _, name := range s {
		if !slices.Contains(all, name) {
			return nil, fmt.Errorf("there is no %s %q; there are %s", what, name, strings.Join(all, ", "))
		}
	}
	return s, nil
}

func (s selection) wants(part string) bool { return len(s) == 0 || slices.Contains(s, part) }

// body is what the reports on machines have in common.
type body struct {
	Ratios map[string]float64 `json:"ratios"`
	Aims   []aim              `json:"aims,omitempty"`
	// NotMeasured are the sections that make no sense on this VMM.
	NotMeasured []string           `json:"not_measured,omitempty"`
	Groups      []group            `json:"groups"`
	Stages      map[string][]stage `json:"stages"` // where the time goes
}

func newBody() body { return body{Ratios: map[string]float64{}, Stages: map[string][]stage{}} }

func (b *body) group(title string, figures ...figure) {
	b.Groups = append(b.Groups, group{title, figures})
}

// report is what is written beside the table.
type report struct {
	head
	body
	Partial  bool        `json:"partial,omitempty"` // only some sections were run
	Compared []quotient  `json:"compared"`          // the ratios with what was divided
	Memory   *treeMemory `json:"memory,omitempty"`
}

// quotient is a ratio, with or without an aim.
type quotient struct {
	Ratio string  `json:"ratio"`
	Value float64 `json:"value"`
	Of    string  `json:"of"`
}

// aim is a ratio, or another figure of a report, with what it should be.
type aim struct {
	Ratio   string  `json:"ratio,omitempty"`
	Figure  string  `json:"figure,omitempty"`
	Value   float64 `json:"value"`
	Aim     float64 `json:"aim"`
	AtLeast bool    `json:"at_least"` // else at most
	Met     bool    `json:"met"`
	Of      string  `json:"of,omitempty"` // what was divided by what, with the numbers of repeats
}

// judged is the aim with a value. A value of 0 was not measured, and does not meet the aim.
func (a aim) judged(value float64) aim {
	a.Value = value
	a.Met = value > 0 && (a.AtLeast && value >= a.Aim || !a.AtLeast && value <= a.Aim)
	return a
}

// finite is 0 for a ratio that is none: JSON has no number for it.
func finite(v float64) float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return 0
	}
	return v
}

// aims are those of issue 2, for QEMU under TCG.
var aims = []aim{
	{Ratio: "fork_over_boot", Aim: 1.0 / 30},
	{Ratio: "sealed_over_unsealed", Aim: 1.3},
	{Ratio: "pause_2g_over_256m", Aim: 1.3},
	{Ratio: "wall_8_over_1", Aim: 5},
	{Ratio: "depth_64_over_1", Aim: 1.15},
	{Ratio: "anon_share", Aim: 0.03},
	{Ratio: "loadvm_over_fork", Aim: 20, AtLeast: true},
}

// ratio records one of the aims.
func (r *report) ratio(name string, value float64, of string) {
	for _, a := range aims {
		if a.Ratio != name {
			continue
		}
		value = finite(value)
		r.Ratios[name] = value
		r.Compared = append(r.Compared, quotient{name, value, of})
		if !r.Host.hasAims() {
			continue
		}
		a.Of = of
		r.Aims = append(r.Aims, a.judged(value))
	}
}

// over records the ratio of two medians.
func (r *report) over(name string, a, b samples, of string) {
	r.ratio(name, a.median()/b.median(), fmt.Sprintf("%s: %.1f (n=%d) over %.1f (n=%d)", of, a.median(), len(a), b.median(), len(b)))
}

func (r *report) write(path string) error { return atomicfile.WriteJSON(path, r, 0o644) }

func (r *report) show(w io.Writer) error {
	p := &printer{w: w}
	h := r.Host
	p.head("make bench", r.head,
		fmt.Sprintf("VMM      %s; private pages by %s", h.machines(), h.Scan),
		"         "+h.Why,
		fmt.Sprintf("guest    image %s, Linux %s", h.Image, h.GuestKernel),
		"volume   "+h.Volume)
	p.table(r.Groups)
	p.stages(r.Stages, "fork", "reseal", "exec", "checkpoint", "fork of 1 GiB")
	if r.Memory != nil {
		r.Memory.show(p)
	}
	for _, title := range r.NotMeasured {
		p.line("\n%s: not measured on %s", title, r.Host.VMM)
	}
	if r.Host.hasAims() {
		p.aims("Aims", r.Aims)
	} else {
		p.ratios(r.Compared, r.Host)
	}
	return p.err
}

// printer keeps the first error of writing.
type printer struct {
	w   io.Writer
	err error
}

func (p *printer) line(format string, a ...any) {
	_, err := fmt.Fprintf(p.w, format+"\n", a...)
	p.err = cmp.Or(p.err, err)
}

func (p *printer) columns(rows [][]string) {
	t := tabwriter.NewWriter(p.w, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		_, err := fmt.Fprintln(t, strings.Join(row, "\t"))
		p.err = cmp.Or(p.err, err)
	}
	p.err = cmp.Or(p.err, t.Flush())
}

func (p *printer) table(groups []group) {
	for _, g := range groups {
		p.line("\n%s", g.Title)
		rows := [][]string{{"", "unit", "n", "p50", "p95", "min", "max", ""}}
		for _, f := range g.Figures {
			rows = append(rows, []string{f.Name, f.Unit, fmt.Sprint(f.N), number(f.P50), number(f.P95), number(f.Min), number(f.Max), f.Note})
		}
		p.columns(rows)
	}
}

func (p *printer) stages(all map[string][]stage, names ...string) {
	for _, name := range names {
		if len(all[name]) == 0 {
			continue
		}
		p.line("\nWhere the time of one %s goes (medians, ms)", name)
		var line []string
		for _, s := range all[name] {
			if s.Median >= 0.1 {
				line = append(line, fmt.Sprintf("%s %s", s.Stage, number(s.Median)))
			}
		}
		p.line("  %s", strings.Join(line, " · "))
	}
}

func (p *printer) aims(title string, list []aim) {
	p.line("\n%s", title)
	rows := [][]string{{"", "value", "aim", "", ""}}
	for _, a := range list {
		sign, met := "<=", "met"
		if a.AtLeast {
			sign = ">="
		}
		if !a.Met {
			met = fmt.Sprintf("MISSED by %.0f %%", 100*math.Abs(a.Value/a.Aim-1))
		}
		rows = append(rows, []string{cmp.Or(a.Ratio, a.Figure), fmt.Sprintf("%.4g", a.Value), fmt.Sprintf("%s %.3g", sign, a.Aim), met, a.Of})
	}
	p.columns(rows)
}

// quantiles is a row of a table of times.
func (q quantiles) row(name string) []string {
	return []string{name, fmt.Sprint(q.N), number(q.P50), number(q.P99)}
}

// head prints the head of a report, and lines about what was measured.
func (p *printer) head(command string, h head, lines ...string) {
	p.line("Coppice: %s, %s, %.0f s", command, h.StartedAt.Format("2006-01-02 15:04 UTC"), h.WallS)
	p.line("host     %d x %s, %.0f GiB, Linux %s", h.Host.CPUs, h.Host.CPU, h.Host.MemoryGiB, h.Host.Kernel)
	for _, l := range lines {
		p.line("%s", l)
	}
	p.line("load     %.2f before, %.2f after: %s", h.Load.Before, h.Load.After, h.Load.Note)
}

// sorted prints ratios by their names.
func (p *printer) sorted(ratios map[string]float64) {
	p.line("\nRatios")
	var rows [][]string
	for _, name := range slices.Sorted(maps.Keys(ratios)) {
		rows = append(rows, []string{name, fmt.Sprintf("%.4g", ratios[name])})
	}
	p.columns(rows)
}

func (p *printer) ratios(list []quotient, h host) {
	p.line("\nRatios on %s with %s, which no aims are set for", h.VMM, h.Accelerator)
	rows := [][]string{{"", "ratio", "of medians"}}
	for _, c := range list {
		rows = append(rows, []string{c.Ratio, fmt.Sprintf("%.4g", c.Value), c.Of})
	}
	p.columns(rows)
}

// number prints three significant digits.
func number(v float64) string {
	switch {
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	default:
		return fmt.Sprintf("%.2f", v)
	}
}
