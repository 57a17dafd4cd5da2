package daemon

import (
	"context"
	"log/slog"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/coppice-dev/coppice/core"
)

// Metrics is a registry that is served in Prometheus's form. It asks for no key, so it must listen on loopback.
type Metrics struct {
	*prometheus.Registry

	on *listener // nil: nowhere
}

// OpenMetrics makes a registry and binds the address; an empty one serves it nowhere.
func OpenMetrics(ctx context.Context, address string, log *slog.Logger) (*Metrics, error) {
	m := &Metrics{Registry: prometheus.NewRegistry()}
	m.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if address == "" {
		return m, nil
	}
	if !loopback(address) {
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "--metrics-listen: %s is not on loopback, and metrics are shown without a key; listen on 127.0.0.1 and let a proxy that authenticates pass them on", address)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.Registry, promhttp.HandlerOpts{}))
	var err error
	m.on, err = listen(ctx, address, "metrics-listen", mux, log)
	return m, err
}

// Address is where the metrics are; empty when nowhere.
func (m *Metrics) Address() string {
	if m.on == nil {
		return ""
	}
	return m.on.Addr().String()
}

// Run serves until ctx ends.
func (m *Metrics) Run(ctx context.Context) error {
	if m.on == nil {
		<-ctx.Done()
		return nil
	}
	return served(m.on)(ctx)
}

// Close gives the address back.
func (m *Metrics) Close() error {
	if m.on == nil {
		return nil
	}
	return m.on.close()
}
