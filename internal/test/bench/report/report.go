package report

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
)

// Head is the beginning of every report.
type Head struct {
	StartedAt time.Time `json:"started_at"`
	WallS     float64   `json:"wall_s"`
	Host      Host      `json:"host"`
	Load      load      `json:"load"`
}

// Begin makes the head of a report.
func Begin(now time.Time) Head {
	return Head{StartedAt: now.UTC().Truncate(time.Second), Host: describeHost(), Load: load{Before: loadAverage()}}
}

// Finish records how long the run took, and the load at its end.
func (h *Head) Finish(began time.Time) {
	h.WallS = float64(time.Since(began).Milliseconds()) / 1000
	h.Load.After = loadAverage()
	h.Load.Note = "the host was quiet when the run began"
	if h.Load.Before > 1 {
		h.Load.Note = fmt.Sprintf("the host was busy before the run began (load %.1f on %d CPUs): times are too long, ratios less so", h.Load.Before, h.Host.CPUs)
	}
}

// Progress returns what prints a line about the progress of a run.
func Progress(w io.Writer, began time.Time) func(format string, a ...any) {
	return func(format string, a ...any) {
		fmt.Fprintf(w, "%6.1f s  %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, a...))
	}
}

// Selection has the parts of a run that somebody asked for. It is empty for all.
type Selection []string

// Choose reads a list of parts, separated by commas.
func Choose(what, only string, all []string) (Selection, error) {
	if only == "" {
		return nil, nil
	}
	s := Selection(strings.Split(only, ","))
	for _, name := range s {
		if !slices.Contains(all, name) {
			return nil, fmt.Errorf("there is no %s %q; there are %s", what, name, strings.Join(all, ", "))
		}
	}
	return s, nil
}

// Wants reports whether a part was asked for.
func (s Selection) Wants(part string) bool { return len(s) == 0 || slices.Contains(s, part) }

// Body is what the reports on machines have in common.
type Body struct {
	Ratios map[string]float64 `json:"ratios"`
	Aims   []Aim              `json:"aims,omitempty"`
	// NotMeasured are the sections that make no sense on this VMM.
	NotMeasured []string           `json:"not_measured,omitempty"`
	Groups      []Group            `json:"groups"`
	Stages      map[string][]Stage `json:"stages"` // where the time goes
}

// NewBody makes an empty body.
func NewBody() Body { return Body{Ratios: map[string]float64{}, Stages: map[string][]Stage{}} }

// Group adds a group of figures.
func (b *Body) Group(title string, figures ...Figure) {
	b.Groups = append(b.Groups, Group{title, figures})
}

// Aim is a ratio, or another figure of a report, with what it should be.
type Aim struct {
	Ratio   string  `json:"ratio,omitempty"`
	Figure  string  `json:"figure,omitempty"`
	Value   float64 `json:"value"`
	Aim     float64 `json:"aim"`
	AtLeast bool    `json:"at_least"` // else at most
	Met     bool    `json:"met"`
	Of      string  `json:"of,omitempty"` // what was divided by what, with the numbers of repeats
}

// Judged returns the aim with a value. A value of 0 was not measured, and does not meet the aim.
func (a Aim) Judged(value float64) Aim {
	a.Value = value
	a.Met = value > 0 && (a.AtLeast && value >= a.Aim || !a.AtLeast && value <= a.Aim)
	return a
}

// Finite is 0 for a ratio that is none: JSON has no number for it.
func Finite(v float64) float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return 0
	}
	return v
}

// Printer prints a report. It keeps the first error of writing.
type Printer struct {
	w   io.Writer
	Err error // the first
}

// NewPrinter makes a printer.
func NewPrinter(w io.Writer) *Printer { return &Printer{w: w} }

// Line prints a line.
func (p *Printer) Line(format string, a ...any) {
	_, err := fmt.Fprintf(p.w, format+"\n", a...)
	p.Err = cmp.Or(p.Err, err)
}

// Columns prints rows as a table.
func (p *Printer) Columns(rows [][]string) {
	t := tabwriter.NewWriter(p.w, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		_, err := fmt.Fprintln(t, strings.Join(row, "\t"))
		p.Err = cmp.Or(p.Err, err)
	}
	p.Err = cmp.Or(p.Err, t.Flush())
}

// Table prints groups of figures.
func (p *Printer) Table(groups []Group) {
	for _, g := range groups {
		p.Line("\n%s", g.Title)
		rows := [][]string{{"", "unit", "n", "p50", "p95", "min", "max", ""}}
		for _, f := range g.Figures {
			rows = append(rows, []string{f.Name, f.Unit, fmt.Sprint(f.N), Number(f.P50), Number(f.P95), Number(f.Min), Number(f.Max), f.Note})
		}
		p.Columns(rows)
	}
}

// Stages prints where the time of the named operations goes.
func (p *Printer) Stages(all map[string][]Stage, names ...string) {
	for _, name := range names {
		if len(all[name]) == 0 {
			continue
		}
		p.Line("\nWhere the time of one %s goes (medians, ms)", name)
		var line []string
		for _, s := range all[name] {
			if s.Median >= 0.1 {
				line = append(line, fmt.Sprintf("%s %s", s.Stage, Number(s.Median)))
			}
		}
		p.Line("  %s", strings.Join(line, " · "))
	}
}

// Aims prints a table of aims.
func (p *Printer) Aims(title string, list []Aim) {
	p.Line("\n%s", title)
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
	p.Columns(rows)
}

// Row is a row of a table of times.
func (q Quantiles) Row(name string) []string {
	return []string{name, fmt.Sprint(q.N), Number(q.P50), Number(q.P99)}
}

// Head prints the head of a report, and lines about what was measured.
func (p *Printer) Head(command string, h Head, lines ...string) {
	p.Line("Coppice: %s, %s, %.0f s", command, h.StartedAt.Format("2006-01-02 15:04 UTC"), h.WallS)
	p.Line("host     %d x %s, %.0f GiB, Linux %s", h.Host.CPUs, h.Host.CPU, h.Host.MemoryGiB, h.Host.Kernel)
	for _, l := range lines {
		p.Line("%s", l)
	}
	p.Line("load     %.2f before, %.2f after: %s", h.Load.Before, h.Load.After, h.Load.Note)
}

// Sorted prints ratios by their names.
func (p *Printer) Sorted(ratios map[string]float64) {
	p.Line("\nRatios")
	var rows [][]string
	for _, name := range slices.Sorted(maps.Keys(ratios)) {
		rows = append(rows, []string{name, fmt.Sprintf("%.4g", ratios[name])})
	}
	p.Columns(rows)
}

// Number prints three significant digits.
func Number(v float64) string {
	switch {
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	default:
		return fmt.Sprintf("%.2f", v)
	}
}
