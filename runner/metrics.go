package runner

import (
	"context"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/tracing"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/portforward"
)

// durations are the buckets of every histogram of seconds: 1 ms to about 2 minutes.
var durations = prometheus.ExponentialBuckets(0.001, 2, 18)

// maxPhases bounds the label phase.
const maxPhases = 128

// metrics are the metrics of a runner. No label has ids, and each label has few values.
type metrics struct {
	children *prometheus.CounterVec // outcome
	captures *prometheus.CounterVec // outcome
	stalls   prometheus.Counter
	cuts     prometheus.Counter
	phase    *prometheus.HistogramVec // kind, phase
	reseal   *prometheus.HistogramVec // step
	pause    prometheus.Histogram

	// mu guards phases.
	mu     sync.Mutex
	phases map[string]bool
}

func newMetrics(r *Runner, reg prometheus.Registerer) *metrics {
	m := &metrics{phases: map[string]bool{}}
	m.children = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "coppice_runner_children_total", Help: "Children of forks."}, []string{"outcome"})
	m.captures = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "coppice_runner_captures_total", Help: "Captures of sandboxes and templates."}, []string{"outcome"})
	m.phase = prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "coppice_runner_phase_seconds", Help: "Time of a phase of a child's restore or of a capture.", Buckets: durations}, []string{"kind", "phase"})
	m.reseal = prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "coppice_runner_reseal_step_seconds", Help: "Time of a step of a complete reseal, as the guest reports it.", Buckets: durations}, []string{"step"})
	m.pause = prometheus.NewHistogram(prometheus.HistogramOpts{Name: "coppice_runner_capture_pause_seconds", Help: "How long the workload stood still for a capture.", Buckets: durations})
	m.stalls = prometheus.NewCounter(prometheus.CounterOpts{Name: "coppice_runner_stalls_total", Help: "Times that a virtual machine was held because it waited for the store."})
	m.cuts = prometheus.NewCounter(prometheus.CounterOpts{Name: "coppice_runner_network_cuts_total", Help: "Times that a sandbox was cut off because its network rules in the kernel were not those that were applied."})
	reg.MustRegister(m.children, m.captures, m.stalls, m.cuts, m.phase, m.reseal, m.pause, newState(r), r.lazy.Collector())
	reg.MustRegister(r.fetches.Collectors()...)
	reg.MustRegister(r.prepared.Collectors()...)
	if r.cfg.Egress != nil {
		reg.MustRegister(r.egress.Collector())
	}
	return m
}

// forked counts a child.
func (m *metrics) forked(out runnerapi.ChildResult) {
	outcome := "ready"
	if out.Problem != nil {
		outcome = "failed"
	}
	m.children.WithLabelValues(outcome).Inc()
	m.timings("child", out.Timings)
	if out.Reseal != nil && out.Reseal.Complete { // the host has verified the steps, so their names are names of the protocol
		for _, s := range out.Reseal.Steps {
			m.reseal.WithLabelValues(m.bounded(s.Name)).Observe(s.DurationMS / 1000)
		}
	}
}

// captured counts a capture.
func (m *metrics) captured(out *checkpoints.Record, err error) {
	if err != nil {
		m.captures.WithLabelValues("failed").Inc()
		return
	}
	m.captures.WithLabelValues("captured").Inc()
	m.pause.Observe(out.PauseMS / 1000)
	m.timings("capture", out.Timings)
}

func (m *metrics) timings(kind string, list []core.Timing) {
	for _, t := range list {
		m.phase.WithLabelValues(kind, m.bounded(t.Stage)).Observe(t.DurationMS / 1000)
	}
}

// bounded keeps the number of a label's values small, whatever the values are.
func (m *metrics) bounded(name string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.phases[name] {
		if len(m.phases) >= maxPhases || len(name) > 40 {
			return "other"
		}
		m.phases[name] = true
	}
	return name
}

// state collects what the runner has and what is free on the host.
type state struct {
	r *Runner

	sandboxes, stalled, ports, sandboxesMax, starting, warm, checkpoints, checkpointBytes, allocated, diskFree, diskSize, memory, memoryFree, trash, trashBytes *prometheus.Desc
}

func newState(r *Runner) *state {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("coppice_runner_"+name, help, labels, nil)
	}
	return &state{
		r:               r,
		sandboxes:       desc("sandboxes", "Sandboxes.", "state"),
		stalled:         desc("sandboxes_stalled", "Sandboxes that are held because they wait for the store."),
		ports:           desc("ports", "Forwarded ports: listening; waiting for an address that another process has taken; or refused, because the operator no longer allows the address.", "state"),
		sandboxesMax:    desc("sandboxes_max", "Largest number of virtual machines at the same time, including warm ones."),
		starting:        desc("children_starting", "Children that are being started at this moment."),
		warm:            desc("shells_warm", "Virtual machine monitors that wait on a base."),
		checkpoints:     desc("checkpoints", "Checkpoints on this host."),
		checkpointBytes: desc("checkpoint_bytes", "Bytes of the checkpoints without their bases: delta, device state and disk, with shared extents counted in full."),
		trash:           desc("trash_checkpoints", "Checkpoints in the trash. The database does not know them."),
		trashBytes:      desc("trash_bytes", "Bytes of the checkpoints in the trash without their bases, with shared extents counted in full."),
		allocated:       desc("memory_allocated_bytes", "RAM that the guests see, in sum."),
		diskFree:        desc("disk_free_bytes", "Free bytes of the file system of the data directory."),
		diskSize:        desc("disk_size_bytes", "Size of the file system of the data directory. If this is a volume of its own, it is the budget."),
		memory:          desc("memory_bytes", "RAM of the host."),
		memoryFree:      desc("memory_free_bytes", "RAM of the host that nothing uses, not even caches."),
	}
}

// Describe implements prometheus.Collector.
func (s *state) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		s.sandboxes, s.stalled, s.ports, s.sandboxesMax, s.starting, s.warm, s.checkpoints, s.checkpointBytes, s.allocated, s.diskFree, s.diskSize, s.memory, s.memoryFree, s.trash, s.trashBytes,
	} {
		out <- d
	}
}

// Collect sends the present values.
func (s *state) Collect(out chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	states, allocated, stalled := map[runnerapi.SandboxState]int{}, 0, 0
	for _, sb := range s.r.Sandboxes() {
		states[sb.State]++
		if sb.State != runnerapi.SandboxDead {
			allocated += sb.Resources.MemoryMiB
		}
		if sb.Stalled != nil {
			stalled++
		}
	}
	for name, n := range states {
		send(s.sandboxes, float64(n), string(name))
	}
	send(s.stalled, float64(stalled))
	for name, n := range portStates(s.r.all()) {
		send(s.ports, float64(n), string(name))
	}
	send(s.allocated, float64(allocated)*(1<<20))
	send(s.sandboxesMax, float64(s.r.cfg.MaxSandboxes))
	send(s.starting, float64(len(s.r.starting)))
	send(s.warm, float64(s.r.warm.Ready(func(shape) bool { return true })))
	list := s.r.Checkpoints()
	send(s.checkpoints, float64(len(list)))
	var bytes int64
	for _, c := range list {
		bytes += c.DeltaBytes + c.DeviceStateBytes + c.DiskBytes
	}
	send(s.checkpointBytes, float64(bytes))
	rest := s.r.checkpoints.ListTrash()
	send(s.trash, float64(len(rest)))
	bytes = 0
	for _, t := range rest {
		bytes += t.Record.DeltaBytes + t.Record.DeviceStateBytes + t.Record.DiskBytes
	}
	send(s.trashBytes, float64(bytes))
	var fs unix.Statfs_t
	if unix.Statfs(s.r.cfg.DataDir, &fs) == nil {
		send(s.diskFree, float64(fs.Bavail)*float64(fs.Bsize))
		send(s.diskSize, float64(fs.Blocks)*float64(fs.Bsize))
	}
	var mem unix.Sysinfo_t
	if unix.Sysinfo(&mem) == nil {
		send(s.memory, float64(mem.Totalram)*float64(mem.Unit))
		send(s.memoryFree, float64(mem.Freeram)*float64(mem.Unit))
	}
}

// portStates counts the forwarded ports of sandboxes by their state.
func portStates(sandboxes []*sandbox) map[portforward.State]int {
	n := map[portforward.State]int{portforward.Listening: 0, portforward.Waiting: 0, portforward.Refused: 0}
	for _, s := range sandboxes {
		s.ports.Count(n)
	}
	return n
}

// Traces is where the spans of requests go.
func (r *Runner) Traces() trace.TracerProvider { return r.cfg.Traces }

// traceChild begins the span of a child. end also makes a span of each stage, such as restore, the agent's connection, reseal and release.
func traceChild(ctx context.Context, id core.SandboxID) (_ context.Context, end func(out runnerapi.ChildResult)) {
	began := time.Now()
	ctx, span := tracing.Start(ctx, "child", trace.WithTimestamp(began), trace.WithAttributes(attribute.String("sandbox_id", string(id))))
	return ctx, func(out runnerapi.ChildResult) {
		if out.Problem != nil {
			tracing.Fail(span, out.Problem.Err())
		}
		tracing.Stages(ctx, began, out.Timings)
		span.End()
	}
}
