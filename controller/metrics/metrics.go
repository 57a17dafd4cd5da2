// Package metrics has the metrics of a controller. It owns no state but their values.
package metrics

import (
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/controller/operations"
	"github.com/coppice-dev/coppice/core"
)

// durations are the buckets of every histogram of seconds: 1 ms to about 2 minutes.
var durations = prometheus.ExponentialBuckets(0.001, 2, 18)

// maxPhases bounds the label phase, whose values come from runners.
const maxPhases = 128

// Metrics are the metrics of a controller. They are safe for concurrent use. No label has ids, and each label has few values.
type Metrics struct {
	requests  *prometheus.HistogramVec // route, method, status
	ended     *prometheus.CounterVec   // kind, outcome
	operation *prometheus.HistogramVec // kind
	phase     *prometheus.HistogramVec // kind, phase
	reseal    *prometheus.HistogramVec // step
	children  *prometheus.CounterVec   // outcome
	Seals     *prometheus.CounterVec   // outcome
	Stored    prometheus.Counter
	collected *prometheus.CounterVec // unit

	JobsFailed *prometheus.CounterVec // the label "chore" names the job

	Attestations *prometheus.CounterVec // outcome

	InventedSessions prometheus.Counter

	// mu guards phases.
	mu     sync.Mutex
	phases map[string]bool
}

// Sources are read when metrics are.
type Sources struct {
	GuestBytes   func() int
	GuestRefused func() int64
	Running      func() int // operations
	Streams      func() int // of events
}

// New registers the metrics of a controller.
func New(from Sources, reg prometheus.Registerer) *Metrics {
	m := &Metrics{phases: map[string]bool{}}
	histogram := func(name, help string, labels ...string) *prometheus.HistogramVec {
		v := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "coppice_controller_" + name, Help: help, Buckets: durations}, labels)
		reg.MustRegister(v)
		return v
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "coppice_controller_" + name, Help: help}, labels)
		reg.MustRegister(v)
		return v
	}
	gauge := func(name, help string, value func() int) {
		reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "coppice_controller_" + name, Help: help}, func() float64 { return float64(value()) }))
	}
	m.requests = histogram("request_seconds", "Time to answer a request of the REST API.", "route", "method", "status")
	m.ended = counter("operations_total", "Operations that ended here.", "kind", "outcome")
	m.operation = histogram("operation_seconds", "Time from admission to the end of an operation.", "kind")
	m.phase = histogram("phase_seconds", "Time of a phase of an operation: those of the controller, of a fork's children and of a capture.", "kind", "phase")
	m.reseal = histogram("reseal_step_seconds", "Time of a step of a complete reseal, as the guest says.", "step")
	m.children = counter("children_total", "Children of forks.", "outcome")
	m.Seals = counter("seals_total", "Attempts to seal a checkpoint that ended.", "outcome")
	m.Stored = prometheus.NewCounter(prometheus.CounterOpts{Name: "coppice_controller_stored_bytes_total", Help: "Bytes of objects written for checkpoints that were sealed."})
	reg.MustRegister(m.Stored)
	m.collected = counter("collected_total", "Objects that were deleted from the store because nothing needs them, and their bytes.", "unit")
	m.JobsFailed = counter("chores_failed_total", "Periodic jobs, and parts of them, that failed here. They are due again after their interval.", "chore")
	m.Attestations = counter("attestations_total", "Attestations that runners sent with children of forks.", "outcome")
	m.InventedSessions = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "coppice_controller_sessions_not_shown_total", Help: "Sessions in lists of guests that have no row and get none: the guest invented them or has too many.",
	})
	reg.MustRegister(m.InventedSessions)
	gauge("guest_answer_bytes", "Bytes of guests' answers that are being read.", from.GuestBytes)
	reg.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "coppice_controller_guest_answers_refused_total", Help: "Answers of guests that were refused for want of memory for their bytes.",
	}, func() float64 { return float64(from.GuestRefused()) }))
	gauge("operations_running", "Operations that this controller works on.", from.Running)
	gauge("event_streams", "Open event streams.", from.Streams)
	return m
}

// Request counts a request of the REST API.
func (m *Metrics) Request(route, method string, status int, took time.Duration) {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete:
	default:
		method = "other"
	}
	m.requests.WithLabelValues(route, method, strconv.Itoa(status)).Observe(took.Seconds())
}

// Child is a child of a fork that has ended.
type Child struct {
	Failed  bool
	Timings []core.Timing
	Reseal  *core.ResealReport
}

// Operation counts an operation that has ended on this controller. reseal is that of its only workspace. capture has the stages of a capture.
func (m *Metrics) Operation(op operations.Operation, children []Child, reseal *core.ResealReport, capture []core.Timing) {
	kind, outcome := string(op.Kind), string(op.State)
	m.ended.WithLabelValues(kind, outcome).Inc()
	m.operation.WithLabelValues(kind).Observe(time.Since(op.CreatedAt).Seconds())
	m.timings(kind, op.Timings)
	for _, child := range children {
		outcome := "ready"
		if child.Failed {
			outcome = "failed"
		}
		m.children.WithLabelValues(outcome).Inc()
		m.timings("child", child.Timings)
		m.resealed(child.Reseal)
	}
	if len(children) == 0 {
		m.resealed(reseal)
	}
	m.timings("capture", capture)
}

func (m *Metrics) timings(kind string, list []core.Timing) {
	for _, t := range list {
		m.phase.WithLabelValues(kind, m.bounded(t.Stage)).Observe(t.DurationMS / 1000)
	}
}

// resealed counts the steps of a reseal that the host has verified: their names are those of the protocol.
func (m *Metrics) resealed(r *core.ResealReport) {
	if r == nil || !r.Complete {
		return
	}
	for _, s := range r.Steps {
		m.reseal.WithLabelValues(m.bounded(s.Name)).Observe(s.DurationMS / 1000)
	}
}

// bounded keeps the number of a label's values small, whatever the values are.
func (m *Metrics) bounded(name string) string {
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

// Removed counts what was deleted from the store.
func (m *Metrics) Removed(objects int, bytes int64) {
	m.collected.WithLabelValues("objects").Add(float64(objects))
	m.collected.WithLabelValues("bytes").Add(float64(bytes))
}

// Sealed counts a checkpoint that was sealed.
func (m *Metrics) Sealed(bytes int64, timings []core.Timing) {
	m.timings("seal", timings)
	m.Seals.WithLabelValues("sealed").Inc()
	m.Stored.Add(float64(bytes))
}
