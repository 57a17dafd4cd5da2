package guest

import (
	"encoding/json"
	"net/http"
	"testing"

	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/internal/tracing"
)

// TestTracesOfLies has an agent that names steps that there are not, without end, and that took longer than there was time.
func TestTracesOfLies(t *testing.T) {
	t.Parallel()
	steps := []core.ResealStep{{Name: "no such step", DurationMS: 0.001}, {Name: guestapi.StepClock, DurationMS: 1e9}, {Name: guestapi.StepHostname, DurationMS: -1}}
	for range 1000 {
		steps = append(steps, core.ResealStep{Name: guestapi.StepEntropy})
	}
	c := serveHTTP(t, func(w http.ResponseWriter, _ *http.Request) {
		if err := json.NewEncoder(w).Encode(core.ResealReport{Steps: steps}); err != nil {
			t.Error(err)
		}
	})
	exporter := tracetest.NewInMemoryExporter()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://runner", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	ctx, span := tracing.Serve(sdk.NewTracerProvider(sdk.WithSyncer(exporter)), request, "fork")
	if _, err := c.Reseal(ctx, guestapi.ResealRequest{Entropy: append(make([]byte, guestapi.EntropySize-1), 1)}); err != nil {
		t.Fatal(err)
	}
	span.End()
	names := map[string]int{}
	for _, s := range exporter.GetSpans() {
		names[s.Name]++
	}
	if entropy := names[guestapi.StepEntropy]; entropy == 0 || entropy > maxSteps || names["fork"] != 1 || names["agent POST "+guestapi.PathReseal] != 1 || len(names) != 3 {
		t.Errorf("the spans are %v", names)
	}
}
