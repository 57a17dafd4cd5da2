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
		{"misses_total", "Reads that it did not answer.", &m.misses},
		{"hit_bytes_total", "Bytes that it answered with.", &m.fromCache},
		{"miss_bytes_total", "Bytes that were read from what is behind it.", &m.fromBehind},
		{"evictions_total", "Objects that were given up for want of room.", &m.evictions},
		{"rot_total", "Reads that found other bytes than the store's in the cache; those were replaced.", &m.rot},
		{"failures_total", "Reads and writes of the cache's files that failed.", &m.failures},
		{"refused_total", "Reads whose bytes were not kept, for want of room.", &m.refused},
	} {
		value := func() float64 { return float64(c.count.Load()) }
		if err := to.Register(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "coppice_cache_" + c.name, Help: c.help}, value)); err != nil {
			return err
		}
	}
	return to.Register(prometheus.NewGaugeFunc(
		prometheus.GaugeOpts{Name: "coppice_cache_bytes", Help: "Bytes of the disk that the cache takes, at most."}, func() float64 { return float64(used()) },
	))
}
