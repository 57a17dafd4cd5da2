package main

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/coppice-dev/coppice/internal/atomicfile"
)

// report is what is written beside the table.
type report struct {
	StartedAt time.Time          `json:"started_at"`
	Partial   bool               `json:"partial,omitempty"` // only some sections were run
	WallS     float64            `json:"wall_s"`
	Host      host               `json:"host"`
	Load      load               `json:"load"`
	Ratios    map[string]float64 `json:"ratios"`
	Aims      []aim              `json:"aims,omitempty"`
	Compared  []quotient         `json:"compared"` // the ratios with what was divided
	// NotMeasured are the sections that make no sense on this VMM.
	NotMeasured []string           `json:"not_measured,omitempty"`
	Groups      []group            `json:"groups"`
	Stages      map[string][]stage `json:"stages"` // where the time goes
	Memory      *treeMemory        `json:"memory,omitempty"`
}

// quotient is a ratio, whether or not an aim is set for it.
type quotient struct {
	Ratio string  `json:"ratio"`
	Value float64 `json:"value"`
	Of    string  `json:"of"`
}

// aim is a ratio with what it should be.
type aim struct {
	Ratio   string  `json:"ratio"`
	Value   float64 `json:"value"`
	Aim     float64 `json:"aim"`
	AtLeast bool    `json:"at_least"` // else at most
	Met     bool    `json:"met"`
	Of      string  `json:"of"` // what was divided by what, with the numbers of repeats
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

// ratio notes one of the aims.
func (r *report) ratio(name string, value float64, of string) {
	for _, a := range aims {
		if a.Ratio != name {
			continue
		}
		if math.IsNaN(value) || math.IsInf(value, 0) { // JSON has no such number; it is no ratio either
			value = 0
		}
		r.Ratios[name] = value
		r.Compared = append(r.Compared, quotient{name, value, of})
		if !r.Host.hasAims() {
			continue
		}
		a.Value, a.Of = value, of
		a.Met = value > 0 && (a.AtLeast && value >= a.Aim || !a.AtLeast && value <= a.Aim)
		r.Aims = append(r.Aims, a)
	}
}

// over notes the ratio of two medians.
func (r *report) over(name string, a, b samples, of string) {
	r.ratio(name, a.median()/b.median(), fmt.Sprintf("%s: %.1f (n=%d) over %.1f (n=%d)", of, a.median(), len(a), b.median(), len(b)))
}

func (r *report) write(path string) error { return atomicfile.WriteJSON(path, r, 0o644) }

func (r *report) show(w io.Writer) error {
	p := &printer{w: w}
	p.line("Coppice: make bench, %s, %.0f s", r.StartedAt.Format("2006-01-02 15:04 UTC"), r.WallS)
	p.line("host     %d x %s, %.0f GiB, Linux %s", r.Host.CPUs, r.Host.CPU, r.Host.MemoryGiB, r.Host.Kernel)
	p.line("VMM      %s %s, %s, guest CPU %s; private pages by %s", r.Host.VMM, r.Host.VMMVersion, r.Host.Accelerator, r.Host.CPUModel, r.Host.Scan)
	p.line("         %s", r.Host.Why)
	p.line("guest    image %s, Linux %s", r.Host.Image, r.Host.GuestKernel)
	p.line("volume   %s", r.Host.Volume)
	p.line("load     %.2f before, %.2f after: %s", r.Load.Before, r.Load.After, r.Load.Note)
	p.table(r.Groups)
	p.stages(r.Stages, "fork", "reseal", "exec", "checkpoint", "fork of 1 GiB")
	if r.Memory != nil {
		r.Memory.show(p)
	}
	for _, title := range r.NotMeasured {
		p.line("\n%s: not measured on %s", title, r.Host.VMM)
	}
	if r.Host.hasAims() {
		p.aims(r.Aims)
	} else {
		p.ratios(r.Compared, r.Host)
	}
	return p.err
}

// target is a figure of a report with what it should be.
type target struct {
	Figure  string  `json:"figure"`
	Value   float64 `json:"value"`
	Aim     float64 `json:"aim"`
	AtLeast bool    `json:"at_least"` // else at most
	Met     bool    `json:"met"`
}

// atMost and atLeast judge a figure. One that is 0 was not measured, and is not met.
func atMost(figure string, value, aim float64) target {
	return target{Figure: figure, Value: value, Aim: aim, Met: value > 0 && value <= aim}
}

func atLeast(figure string, value, aim float64) target {
	return target{Figure: figure, Value: value, Aim: aim, AtLeast: true, Met: value > 0 && value >= aim}
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

func (p *printer) aims(list []aim) {
	p.line("\nAims")
	rows := [][]string{{"", "ratio", "aim", "", "of medians"}}
	for _, a := range list {
		sign, met := "<=", "met"
		if a.AtLeast {
			sign = ">="
		}
		if !a.Met {
			met = fmt.Sprintf("MISSED by %.0f %%", 100*math.Abs(a.Value/a.Aim-1))
		}
		rows = append(rows, []string{a.Ratio, fmt.Sprintf("%.4g", a.Value), fmt.Sprintf("%s %.3g", sign, a.Aim), met, a.Of})
	}
	p.columns(rows)
}

// targets is the table of what figures should be.
func (p *printer) targets(title string, list []target) {
	p.line("\n%s", title)
	rows := [][]string{{"", "value", "aim", ""}}
	for _, t := range list {
		sign, met := "<=", "met"
		if t.AtLeast {
			sign = ">="
		}
		if !t.Met {
			met = "MISSED"
		}
		rows = append(rows, []string{t.Figure, number(t.Value), sign + " " + number(t.Aim), met})
	}
	p.columns(rows)
}

// quantiles is a row of a table of times.
func (q quantiles) row(name string) []string {
	return []string{name, fmt.Sprint(q.N), number(q.P50), number(q.P99)}
}

// heading is the start of a report on the control plane.
func (p *printer) heading(command, postgres string, startedAt time.Time, wallS float64, h host, l load) {
	p.line("Coppice: %s, %s, %.0f s", command, startedAt.Format("2006-01-02 15:04 UTC"), wallS)
	p.line("host     %d x %s, %.0f GiB, Linux %s", h.CPUs, h.CPU, h.MemoryGiB, h.Kernel)
	p.line("database PostgreSQL %s, durable, on a unix socket", postgres)
	p.line("load     %.2f before, %.2f after: %s\n", l.Before, l.After, l.Note)
}

func (p *printer) ratios(list []quotient, h host) {
	p.line("\nRatios on %s with %s, which no aims are set for", h.VMM, h.Accelerator)
	rows := [][]string{{"", "ratio", "of medians"}}
	for _, c := range list {
		rows = append(rows, []string{c.Ratio, fmt.Sprintf("%.4g", c.Value), c.Of})
	}
	p.columns(rows)
}

// number prints three digits that count.
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
