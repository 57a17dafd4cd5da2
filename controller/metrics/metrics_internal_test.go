package metrics

import (
	"fmt"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/testmetrics"
)

// TestPhasesAreBounded: runners and guests name the phases of operations, and metrics have 128 of these names. The others are "other".
func TestPhasesAreBounded(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewRegistry()
	none := func() int { return 0 }
	m := New(Sources{GuestBytes: none, GuestRefused: func() int64 { return 0 }, Running: none, Streams: none}, registry)
	long := strings.Repeat("x", 41)
	var list []core.Timing
	r := &core.ResealReport{Complete: true}
	for i := range 3 * maxPhases {
		list = append(list, core.Timing{Stage: fmt.Sprint("stage-", i)}, core.Timing{Stage: long})
		r.Steps = append(r.Steps, core.ResealStep{Name: fmt.Sprint("step-", i)})
	}
	m.timings("capture", list)
	m.resealed(r)
	names := map[string]float64{}
	for key, n := range testmetrics.Of(t, registry) {
		if words := strings.Fields(key); strings.HasSuffix(words[0], "_phase_seconds") || strings.HasSuffix(words[0], "_step_seconds") {
			names[words[len(words)-1]] += n
		}
	}
	if want := float64(len(list) + len(r.Steps) - maxPhases); len(names) != maxPhases+1 || names["other"] != want || names[long] != 0 {
		t.Errorf("%d names, %v samples of other phases; want %d and %v", len(names), names["other"], maxPhases+1, want)
	}
}
