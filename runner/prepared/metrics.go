package prepared

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics count what became of prepared machines. No label has ids.
type metrics struct {
	outcomes, cpu                *prometheus.CounterVec
	hits, misses, wasted, failed prometheus.Counter
}

func newMetrics() metrics {
	m := metrics{outcomes: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "coppice_runner_prepared_total",
		Help: "Machines prepared for forks, by what became of them: taken by a fork, wasted, or failed; and forks that were missed, because no machine was prepared for them.",
	}, []string{"outcome"}), cpu: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "coppice_runner_prepared_cpu_seconds_total", Help: "Processor time that prepared machines had used when a fork took them, or when they were taken down.",
	}, []string{"outcome"})}
	for _, outcome := range []string{"taken", "wasted"} { // a reader sees 0, not nothing
		m.cpu.WithLabelValues(outcome)
	}
	m.hits, m.misses, m.wasted, m.failed = m.outcomes.WithLabelValues("taken"), m.outcomes.WithLabelValues("missed"), m.outcomes.WithLabelValues("wasted"), m.outcomes.WithLabelValues("failed")
	return m
}

// Collectors are the metrics of the pool.
func (p *Pool[Machine]) Collectors() []prometheus.Collector {
	return []prometheus.Collector{p.metrics.outcomes, p.metrics.cpu, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "coppice_runner_machines_prepared", Help: "Machines into which a checkpoint was restored before a fork of it was asked for.",
	}, func() float64 {
		p.mu.Lock()
		defer p.mu.Unlock()
		return float64(len(p.ready))
	}), prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "coppice_runner_prepared_memory_bytes", Help: "Memory of prepared machines that they do not share with others.",
	}, func() (sum float64) {
		p.mu.Lock()
		list := slices.Clone(p.ready)
		p.mu.Unlock()
		for _, e := range list { // reading is slow; no fork waits for it
			sum += float64(p.cfg.Memory(e.machine))
		}
		return sum
	})}
}
