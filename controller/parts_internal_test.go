package controller

import (
	"log/slog"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// eager reads each metric as soon as it is registered, as a scrape in that moment does.
type eager struct{ prometheus.Registerer }

func (e eager) MustRegister(list ...prometheus.Collector) {
	e.Registerer.MustRegister(list...)
	for _, c := range list {
		got := make(chan prometheus.Metric, 100)
		c.Collect(got)
	}
}

// TestMetricsAreReadAtOnce: a scrape during the start finds all that the metrics read.
func TestMetricsAreReadAtOnce(t *testing.T) {
	t.Parallel()
	New(Config{Metrics: eager{prometheus.NewRegistry()}}, nil, nil, slog.New(slog.DiscardHandler))
}
