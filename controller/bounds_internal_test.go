package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/testmetrics"
)

// TestDelayedAnswersAreBounded: 256 answers to wrong keys are held back for a second at most, and the next one is refused at once.
func TestDelayedAnswersAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := &Controller{limits: newLimiter(Limits{FailureDelay: time.Second})}
		const from = "192.0.2.1:1000"
		for range 100 { // beyond those that are answered at once
			c.limits.open.Failed(time.Now(), origin(from))
		}
		began := time.Now()
		var wg sync.WaitGroup
		for range maxDelayed {
			wg.Go(func() {
				if err := c.SlowFailure(t.Context(), from); err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		for range 10 {
			if err := c.SlowFailure(t.Context(), from); core.CodeOf(err) != core.CodeRateLimited {
				t.Errorf("beyond %d: %v", maxDelayed, err)
			}
		}
		if now := time.Now(); now != began {
			t.Errorf("a refusal took %s", now.Sub(began))
		}
		wg.Wait()
		if took := time.Since(began); took != maxFailureDelay {
			t.Errorf("the answers were held back for %s", took)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := c.SlowFailure(ctx, from); !errors.Is(err, context.Canceled) || c.limits.delayed != 0 {
			t.Errorf("afterwards: %v, and %d are held back", err, c.limits.delayed)
		}
	})
}

// TestPhasesAreBounded: runners and guests name the phases of operations, and metrics have 128 of these names. The others are "other".
func TestPhasesAreBounded(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewRegistry()
	m := New(Config{ClusterID: "test", Metrics: registry}, nil, nil, slog.New(slog.DiscardHandler)).metrics
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
