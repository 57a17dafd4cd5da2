// Package tracing carries OpenTelemetry traces from the API to the host's side of the agent. Without a variable that asks for
// them there is no exporter, and spans cost next to nothing. Ids of objects are attributes here, unlike in metrics.
package tracing

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/coppice-dev/coppice/core"
)

const scope = "github.com/coppice-dev/coppice"

// Open returns a provider that exports by OTLP over HTTP to OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
// and obeys the other standard variables. It returns a provider that does nothing if neither is set, if OTEL_SDK_DISABLED is
// true, or if OTEL_TRACES_EXPORTER is none. end sends the remaining spans.
func Open(ctx context.Context, getenv func(string) string, service string) (_ trace.TracerProvider, end func(context.Context) error, _ error) {
	if getenv("OTEL_EXPORTER_OTLP_ENDPOINT")+getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") == "" ||
		strings.EqualFold(getenv("OTEL_SDK_DISABLED"), "true") || getenv("OTEL_TRACES_EXPORTER") == "none" {
		return noop.NewTracerProvider(), func(context.Context) error { return nil }, nil
	}
	exporter, err := otlptracehttp.New(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("open the exporter of traces: %w", err)
	}
	about, err := resource.New(ctx, resource.WithAttributes(attribute.String("service.name", service)), resource.WithFromEnv(), resource.WithTelemetrySDK())
	if err != nil {
		return nil, nil, fmt.Errorf("describe this process for traces: %w", err)
	}
	p := sdk.NewTracerProvider(sdk.WithBatcher(exporter), sdk.WithResource(about))
	return p, p.Shutdown, nil
}

// Serve begins the span of a request that came by HTTP, below the caller's if it says so.
func Serve(p trace.TracerProvider, q *http.Request, name string) (context.Context, trace.Span) {
	if p == nil {
		p = noop.NewTracerProvider()
	}
	ctx := propagation.TraceContext{}.Extract(q.Context(), propagation.HeaderCarrier(q.Header))
	return p.Tracer(scope).Start(ctx, name, trace.WithSpanKind(trace.SpanKindServer))
}

// Inject says in a request to whom its trace belongs.
func Inject(ctx context.Context, h http.Header) {
	propagation.TraceContext{}.Inject(ctx, propagation.HeaderCarrier(h))
}

// Start begins a span below that of ctx, of the same provider.
func Start(ctx context.Context, name string, options ...trace.SpanStartOption) (context.Context, trace.Span) {
	return trace.SpanFromContext(ctx).TracerProvider().Tracer(scope).Start(ctx, name, options...)
}

// Fail records an error in the span; nil is no error.
func Fail(span trace.Span, err error) {
	if err != nil {
		span.SetStatus(codes.Error, string(core.CodeOf(err)))
	}
}

// Stages makes a span of each timing, which followed one another from begin on. Those with a dot are parts of what came before.
func Stages(ctx context.Context, begin time.Time, list []core.Timing) {
	if !trace.SpanFromContext(ctx).IsRecording() {
		return
	}
	for _, t := range list {
		if strings.Contains(t.Stage, ".") {
			continue
		}
		end := begin.Add(time.Duration(t.DurationMS * float64(time.Millisecond)))
		_, span := Start(ctx, t.Stage, trace.WithTimestamp(begin))
		span.End(trace.WithTimestamp(end))
		begin = end
	}
}
