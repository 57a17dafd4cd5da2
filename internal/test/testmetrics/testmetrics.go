// Package testmetrics lets tests read metrics.
package testmetrics

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// Of returns the values of counters and gauges, and how many samples histograms have. A key is the name of a metric and the values
// of its labels, with a space before each: "coppice_egress_flows_total denied".
func Of(tb testing.TB, from prometheus.Gatherer) map[string]float64 {
	tb.Helper()
	families, err := from.Gather()
	if err != nil {
		tb.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			words := []string{f.GetName()}
			for _, l := range m.GetLabel() {
				words = append(words, l.GetValue())
			}
			out[strings.Join(words, " ")] = m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return out
}

// One returns the value of a metric that must exist.
func One(tb testing.TB, from prometheus.Gatherer, key string) float64 {
	tb.Helper()
	v, ok := Of(tb, from)[key]
	if !ok {
		tb.Fatalf("there is no metric %q", key)
	}
	return v
}
