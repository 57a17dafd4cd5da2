package tracing_test

import (
	"testing"

	"go.opentelemetry.io/otel/trace/noop"

	"github.com/coppice-dev/coppice/internal/tracing"
)

func TestOffByDefault(t *testing.T) {
	t.Parallel()
	for name, env := range map[string]map[string]string{
		"nothing":     {},
		"disabled":    {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
		"no exporter": {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
	} {
		p, end, err := tracing.Open(t.Context(), func(k string) string { return env[k] }, "x")
		if _, off := p.(noop.TracerProvider); err != nil || !off || end(t.Context()) != nil {
			t.Errorf("%s: %T, %v", name, p, err)
		}
	}
	env := map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
	p, end, err := tracing.Open(t.Context(), func(k string) string { return env[k] }, "x")
	if _, off := p.(noop.TracerProvider); err != nil || off || end(t.Context()) != nil {
		t.Errorf("asked for: %T, %v", p, err)
	}
}
