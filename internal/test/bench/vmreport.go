package main

import (
	"fmt"
	"io"

	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/test/bench/report"
)

// vmReport is what is written beside the table.
type vmReport struct {
	report.Head
	report.Body
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

// aims are those of issues 2 and 20, for QEMU under TCG.
var aims = []report.Aim{
	{Ratio: "fork_over_boot", Aim: 1.0 / 30},
	{Ratio: "sealed_over_unsealed", Aim: 1.3},
	{Ratio: "pause_2g_over_256m", Aim: 1.3},
	{Ratio: "wall_8_over_1", Aim: 5},
	{Ratio: "depth_64_over_1", Aim: 1.15},
	{Ratio: "anon_share", Aim: 0.03},
	{Ratio: "loadvm_over_fork", Aim: 20, AtLeast: true},
	{Ratio: "prepared_ready_over_boot", Aim: 1.0 / 100},
	{Ratio: "prepared_exec_over_boot", Aim: 1.0 / 50},
	{Ratio: "prepared_wall_8_over_1", Aim: 2.5},
	{Ratio: "prepared_hit_rate", Aim: 0.9, AtLeast: true},
	{Ratio: "prepared_waste", Aim: 0.3},
	{Ratio: "prepared_idle_cpus", Aim: 0.02},
}

// ratio records one of the aims.
func (r *vmReport) ratio(name string, value float64, of string) {
	for _, a := range aims {
		if a.Ratio != name {
			continue
		}
		value = report.Finite(value)
		r.Ratios[name] = value
		r.Compared = append(r.Compared, quotient{name, value, of})
		if !r.Host.HasAims() {
			continue
		}
		a.Of = of
		r.Aims = append(r.Aims, a.Judged(value))
	}
}

// over records the ratio of two medians.
func (r *vmReport) over(name string, a, b report.Samples, of string) {
	r.ratio(name, a.Median()/b.Median(), fmt.Sprintf("%s: %.1f (n=%d) over %.1f (n=%d)", of, a.Median(), len(a), b.Median(), len(b)))
}

func (r *vmReport) write(path string) error { return atomicfile.WriteJSON(path, r, 0o644) }

func (r *vmReport) show(w io.Writer) error {
	p := report.NewPrinter(w)
	h := r.Host
	p.Head("make bench", r.Head,
		fmt.Sprintf("VMM      %s; private pages by %s", h.Machines(), h.Scan),
		"         "+h.Why,
		fmt.Sprintf("guest    image %s, Linux %s", h.Image, h.GuestKernel),
		"volume   "+h.Volume)
	p.Table(r.Groups)
	p.Stages(r.Stages, "fork", "reseal", "exec", "checkpoint", "fork of 1 GiB")
	if r.Memory != nil {
		r.Memory.show(p)
	}
	for _, title := range r.NotMeasured {
		p.Line("\n%s: not measured on %s", title, r.Host.VMM)
	}
	if r.Host.HasAims() {
		p.Aims("Aims", r.Aims)
	} else {
		showRatios(p, r.Compared, r.Host)
	}
	return p.Err
}

// showRatios prints ratios that no aims are set for.
func showRatios(p *report.Printer, list []quotient, h report.Host) {
	p.Line("\nRatios on %s with %s, which no aims are set for", h.VMM, h.Accelerator)
	rows := [][]string{{"", "ratio", "of medians"}}
	for _, c := range list {
		rows = append(rows, []string{c.Ratio, fmt.Sprintf("%.4g", c.Value), c.Of})
	}
	p.Columns(rows)
}
