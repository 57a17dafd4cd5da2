package controller

import (
	"time"

	"github.com/coppice-dev/coppice/controller/metrics"
)

func newMetrics(c *Controller) *metrics.Metrics {
	return metrics.New(metrics.Sources{
		GuestBytes: c.GuestBytes, Running: c.operations.Running, Streams: c.Events.Streams,
		GuestRefused: func() int64 {
			_, refused := c.guests.Used()
			return refused
		},
	}, c.cfg.Metrics)
}

// ObserveRequest counts a request of the REST API. route is the path in the contract; it is empty for other paths.
func (c *Controller) ObserveRequest(route, method string, status int, took time.Duration) {
	c.metrics.Request(route, method, status, took)
}

func (c *Controller) countEnded(op Operation, result Result) {
	children := make([]metrics.Child, len(result.Children))
	for i, child := range result.Children {
		children[i] = metrics.Child{Failed: child.Problem != nil, Timings: child.Timings, Reseal: child.Reseal}
	}
	made := &Checkpoint{}
	if cp := result.Checkpoint; cp != nil && (op.Kind == OpCreateCheckpoint || op.Kind == OpForkWorkspace || op.Kind == OpCreateTemplate) {
		made = cp
	}
	c.metrics.Operation(op, children, result.Reseal, made.Timings)
}
