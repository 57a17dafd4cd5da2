package main

import (
	"math"
	"slices"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// samples are measurements of one thing.
type samples []float64

func (s *samples) add(v ...float64) { *s = append(*s, v...) }

// quantile returns the nearest-rank quantile; 0 if there are no samples.
func (s samples) quantile(q float64) float64 {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s))
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
}

// median returns the middle sample, or the mean of the two in the middle.
func (s samples) median() float64 {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// figure is one line of the table.
type figure struct {
	Name string  `json:"name"`
	Unit string  `json:"unit"`
	N    int     `json:"n"`
	P50  float64 `json:"p50"`
	P95  float64 `json:"p95"`
	Min  float64 `json:"min"`
	Max  float64 `json:"max"`
	Note string  `json:"note,omitempty"`
}

// group is a part of the table.
type group struct {
	Title   string   `json:"title"`
	Figures []figure `json:"figures"`
}

// figure makes a line of the table.
func (s samples) figure(name, unit, note string) figure {
	f := figure{Name: name, Unit: unit, N: len(s), Note: note}
	if len(s) > 0 {
		f.P50, f.P95, f.Min, f.Max = s.median(), s.quantile(0.95), slices.Min(s), slices.Max(s)
	}
	return f
}

// ms makes a line in milliseconds.
func (s samples) ms(name, note string) figure { return s.figure(name, "ms", note) }

// stage says where time is spent, with the median of all measurements.
type stage struct {
	Stage  string  `json:"stage"`
	N      int     `json:"n"`
	Median float64 `json:"median_ms"`
}

// stages collects the stages of many operations, in the order in which they were first seen.
type stages struct {
	order []string
	by    map[string]*samples
}

func (s *stages) add(name string, ms float64) {
	if s.by == nil {
		s.by = make(map[string]*samples)
	}
	if s.by[name] == nil {
		s.by[name] = new(samples)
		s.order = append(s.order, name)
	}
	s.by[name].add(ms)
}

// public adds the timings of an answer of the API.
func (s *stages) public(t coppice.Timings) {
	for _, x := range t {
		s.add(x.Stage, x.DurationMS)
	}
}

func (s *stages) medians() []stage {
	out := make([]stage, 0, len(s.order))
	for _, name := range s.order {
		out = append(out, stage{name, len(*s.by[name]), s.by[name].median()})
	}
	return out
}

// total returns the sum of an answer's timings that count: those of a shell are part of the stage "shell".
func total(t coppice.Timings) float64 {
	var sum float64
	for _, x := range t {
		if len(x.Stage) < 6 || x.Stage[:6] != "shell." {
			sum += x.DurationMS
		}
	}
	return sum
}
