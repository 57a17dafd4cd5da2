package cache

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics counts.
type metrics struct {
	hits, misses, evictions, rot, failures, refused atomic.Int64
	fromCache, fromBehind                           atomic.Int64 // bytes
}

func (m *metrics) register(to prometheus.Registerer, used func() int64) error {
	for _, c := range []struct {
		name, help string
		count      *atomic.Int64
	}{
		{"hits_total", "Reads of the store that the host's cache answered.", &m.hits},
		{"misses_total", "Reads of the store that the host's cache did not answer.", &m.misses},
		{"hit_bytes_total", "Bytes that reads got from the host's cache.", &m.fromCache},
		{"miss_bytes_total", "Bytes that reads got from the store behind the cache.", &m.fromBehind},
		{"evictions_total", "Objects that the cache removed to make room.", &m.evictions},
		{"rot_total", "Reads that found wrong bytes in the cache; they were replaced.", &m.rot},
		{"failures_total", "Reads and writes of the cache's files that failed.", &m.failures},
		{"refused_total", "Reads whose bytes were not cached, because there was no room.", &m.refused},
	} {
		value := func() float64 { return float64(c.count.Load()) }
		if err := to.Register(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "coppice_cache_" + c.name, Help: c.help}, value)); err != nil {
			return err
		}
	}
	return to.Register(prometheus.NewGaugeFunc(
		prometheus.GaugeOpts{Name: "coppice_cache_bytes", Help: "Upper bound of the bytes of disk that the cache takes."}, func() float64 { return float64(used()) },
	))
}
