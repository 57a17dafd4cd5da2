package fetch

import "github.com/prometheus/client_golang/prometheus"

// metrics count what the operator should know.
type metrics struct {
	evicted prometheus.Counter
	// ancestors counts ancestors of checkpoints that a fetch did not use.
	ancestors prometheus.Counter
	refused   prometheus.Counter
}

func newMetrics() metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "coppice_runner_" + name, Help: help})
	}
	return metrics{
		evicted:   counter("copies_evicted_total", "Fetched checkpoints that were given up to free disk space."),
		ancestors: counter("ancestors_refused_total", "Ancestors of a checkpoint that a fetch did not use, because they are not what the controller's rows say."),
		refused:   counter("fetches_refused_total", "Fetches of checkpoints that were refused, because they would use the floor of free disk space."),
	}
}

// Collectors are the metrics of a Fetcher.
func (f *Fetcher) Collectors() []prometheus.Collector {
	return []prometheus.Collector{f.metrics.evicted, f.metrics.ancestors, f.metrics.refused}
}
