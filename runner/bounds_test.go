package runner

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testmetrics"
	"github.com/coppice-dev/coppice/snapshotstore/blob/peers"
)

// TestPhasesAreBounded: guests name the steps of a reseal, and metrics have 128 of these names. The others are "other".
func TestPhasesAreBounded(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewRegistry()
	r := newFakeRig(t, func(c *Config) { c.Metrics = registry })
	long := strings.Repeat("x", 41)
	var list []core.Timing
	for i := range 3 * maxPhases {
		list = append(list, core.Timing{Stage: fmt.Sprint("stage-", i)}, core.Timing{Stage: long})
	}
	r.metrics.timings("test", list)
	names := map[string]float64{}
	for key, n := range testmetrics.Of(t, registry) {
		if words := strings.Fields(key); strings.HasSuffix(words[0], "_phase_seconds") || strings.HasSuffix(words[0], "_step_seconds") {
			names[words[len(words)-1]] += n
		}
	}
	if want := float64(len(list) - maxPhases); len(names) > maxPhases+1 || names["other"] < want || names[long] != 0 {
		t.Errorf("%d names, %v samples of other phases; want %d and %v", len(names), names["other"], maxPhases+1, want)
	}
}

// TestReadsOfPeersAreBounded: 16 reads of other runners are answered at once, and more find that nothing is here.
func TestReadsOfPeersAreBounded(t *testing.T) {
	t.Parallel()
	reading, goOn := make(chan struct{}), make(chan struct{})
	var now atomic.Int64
	r := newFakeRig(t, func(c *Config) {
		c.Store.Cached = func(_ string, _, n int64) ([]byte, bool) {
			if now.Add(1) <= maxObjects { // others end at once, and the test says that they were there
				reading <- struct{}{}
				<-goOn
			}
			now.Add(-1)
			return make([]byte, n), true
		}
	})
	var wg sync.WaitGroup
	ask := func() {
		wg.Go(func() {
			if b, ok := r.Object("k", 0, 10); !ok || len(b) != 10 {
				t.Errorf("a read within the bound: %d bytes, %v", len(b), ok)
			}
		})
		<-reading
	}
	for range maxObjects {
		ask()
	}
	for range 10 {
		if _, ok := r.Object("k", 0, 10); ok {
			t.Error("a read beyond the bound was answered")
		}
	}
	goOn <- struct{}{}
	eventually.True(t, "a place is free", func() bool { return len(r.objects) < maxObjects })
	ask()
	close(goOn)
	wg.Wait()
	if _, ok := r.Object("k", 0, peers.MaxRange+1); ok {
		t.Error("a read of more than there may be in one was answered")
	}
}
