// Package report owns the figures and tables of the reports of `bench`: samples with their quantiles, the head that describes the host,
// aims, and a printer for tables.
package report

import (
	"math"
	"slices"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// Samples are measurements of one thing.
type Samples []float64

// Add adds measurements.
func (s *Samples) Add(v ...float64) { *s = append(*s, v...) }

// quantile returns the nearest-rank quantile; 0 if there are no samples.
func (s Samples) quantile(q float64) float64 {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s))
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
}

// Median returns the middle sample, or the mean of the two in the middle.
func (s Samples) Median() float64 {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// Figure is one line of the table.
type Figure struct {
	Name string  `json:"name"`
	Unit string  `json:"unit"`
	N    int     `json:"n"`
	P50  float64 `json:"p50"`
	P95  float64 `json:"p95"`
	Min  float64 `json:"min"`
	Max  float64 `json:"max"`
	Note string  `json:"note,omitempty"`
}

// Group is a part of the table.
type Group struct {
	Title   string   `json:"title"`
	Figures []Figure `json:"figures"`
}

// Figure makes a line of the table.
func (s Samples) Figure(name, unit, note string) Figure {
	f := Figure{Name: name, Unit: unit, N: len(s), Note: note}
	if len(s) > 0 {
		f.P50, f.P95, f.Min, f.Max = s.Median(), s.quantile(0.95), slices.Min(s), slices.Max(s)
	}
	return f
}

// MS makes a line in milliseconds.
func (s Samples) MS(name, note string) Figure { return s.Figure(name, "ms", note) }

// Stage says where time is spent, with the median of all measurements.
type Stage struct {
	Stage  string  `json:"stage"`
	N      int     `json:"n"`
	Median float64 `json:"median_ms"`
}

// Stages collects the stages of many operations, in the order in which they were first seen.
type Stages struct {
	order []string
	by    map[string]*Samples
}

// Add adds the time of a stage.
func (s *Stages) Add(name string, ms float64) {
	if s.by == nil {
		s.by = make(map[string]*Samples)
	}
	if s.by[name] == nil {
		s.by[name] = new(Samples)
		s.order = append(s.order, name)
	}
	s.by[name].Add(ms)
}

// Public adds the timings of an answer of the API.
func (s *Stages) Public(t coppice.Timings) {
	for _, x := range t {
		s.Add(x.Stage, x.DurationMS)
	}
}

// Medians returns each stage with its median.
func (s *Stages) Medians() []Stage {
	out := make([]Stage, 0, len(s.order))
	for _, name := range s.order {
		out = append(out, Stage{name, len(*s.by[name]), s.by[name].Median()})
	}
	return out
}

// Total returns the sum of an answer's timings that count: those of a shell are part of the stage "shell".
func Total(t coppice.Timings) float64 {
	var sum float64
	for _, x := range t {
		if len(x.Stage) < 6 || x.Stage[:6] != "shell." {
			sum += x.DurationMS
		}
	}
	return sum
}

// Quantiles are in milliseconds.
type Quantiles struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
	N   int     `json:"n"`
}

// Quantiles returns the median and the 99th percentile.
func (s Samples) Quantiles() Quantiles {
	return Quantiles{P50: s.Median(), P99: s.quantile(0.99), N: len(s)}
}
