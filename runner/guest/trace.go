package guest

import (
	"context"
	"slices"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/tracing"
)

// traceCall begins the span of a control request. end is to be called with its outcome.
func traceCall(ctx context.Context, method, path string) (_ context.Context, end func(err error)) {
	ctx, span := tracing.Start(ctx, "agent "+method+" "+path, trace.WithSpanKind(trace.SpanKindClient))
	return ctx, func(err error) {
		tracing.Fail(span, err)
		span.End()
	}
}

// traceSteps makes spans of the steps of a reseal, which followed one another from begin on: the agent cannot report any itself, for
// it has no way out of its sandbox. Of what it says only steps that there are get a span, a bounded number of them, and only as long as the answer took.
func traceSteps(ctx context.Context, begin time.Time, steps []core.ResealStep) {
	if !trace.SpanFromContext(ctx).IsRecording() {
		return
	}
	left := time.Since(begin)
	var list []core.Timing
	for _, s := range steps[:min(len(steps), maxSteps)] {
		known := slices.ContainsFunc(rules, func(r rule) bool { return r.step == s.Name })
		took := s.DurationMS * float64(time.Millisecond)
		if inTime := took >= 0 && took <= float64(left); !known || !inTime { // NaN is neither
			continue
		}
		left -= time.Duration(took)
		list = append(list, core.Timing{Stage: s.Name, DurationMS: s.DurationMS})
	}
	tracing.Stages(ctx, begin, list)
}
