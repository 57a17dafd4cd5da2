package egresslink

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/core"
)

// state exports the counters of the egress process, because that process has no port of its own.
type state struct {
	link *Link

	up, sandboxes, open, flows, answers, unrecorded, spool, spoolMax, restarts, aside, tooLong *prometheus.Desc
}

// scrapeTime is how long the process may take to answer a scrape.
const scrapeTime = 2 * time.Second

// Collector returns the metrics of the egress process.
func (l *Link) Collector() prometheus.Collector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("coppice_egress_"+name, help, labels, nil)
	}
	return &state{
		link:       l,
		up:         desc("up", "1 while the egress process of this host answers; otherwise no traffic leaves the sandboxes."),
		sandboxes:  desc("sandboxes", "Sandboxes that the egress process serves."),
		open:       desc("flows_open", "Flows that are under way."),
		flows:      desc("flows_total", "Flows that have ended or were denied, since the start of the egress process.", "outcome"),
		answers:    desc("dns_answers_total", "DNS queries of sandboxes, by outcome.", "answer"),
		unrecorded: desc("flows_unrecorded_total", "Flows that were refused because they could not be recorded, and ends of flows that were not recorded."),
		spool:      desc("spool_bytes", "Size of the spool of flows that the controller does not have yet."),
		spoolMax:   desc("spool_max_bytes", "Largest size of the spool. When it is full, flows are refused."),
		restarts:   desc("restarts_total", "Egress processes that have ended under this runner (ended), or were killed because they did not answer (hung); another follows.", "why"),
		aside: desc("records_set_aside_total", "Records of earlier egress processes that were not used as they are. They were too long or unreadable and were set aside, or "+
			"clipped and reported. Counted since the start of the egress process.", "why"),
		tooLong: desc("answers_too_long_total", "Answers of the egress process to this runner that were too long for a message; it sent an error instead."),
	}
}

// Describe implements prometheus.Collector.
func (s *state) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{s.up, s.sandboxes, s.open, s.flows, s.answers, s.unrecorded, s.spool, s.spoolMax, s.restarts, s.aside, s.tooLong} {
		out <- d
	}
}

// Collect asks the process.
func (s *state) Collect(out chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64) { out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v) }
	count := func(d *prometheus.Desc, v int64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	count(s.restarts, s.link.ended.Load(), "ended")
	count(s.restarts, s.link.hung.Load(), "hung")
	ctx, cancel := context.WithTimeout(s.link.cfg.Life, scrapeTime)
	defer cancel()
	c, _ := s.link.current()
	if c == nil {
		gauge(s.up, 0)
		return
	}
	st, err := c.Stats(ctx)
	if err != nil {
		gauge(s.up, 0)
		return
	}
	gauge(s.up, 1)
	gauge(s.sandboxes, float64(st.Sandboxes))
	gauge(s.open, float64(st.Open))
	for _, o := range []core.Outcome{core.FlowAllowed, core.FlowDenied, core.FlowCut, core.FlowFailed} {
		count(s.flows, st.Flows[o], string(o))
	}
	for a, n := range st.Answers {
		count(s.answers, n, a)
	}
	for _, why := range []string{"too_long", "unreadable", "clipped"} {
		count(s.aside, st.SetAside[why], why)
	}
	count(s.tooLong, st.TooLong)
	count(s.unrecorded, st.Unrecorded)
	gauge(s.spool, float64(st.SpoolBytes))
	gauge(s.spoolMax, float64(st.SpoolMax))
}
