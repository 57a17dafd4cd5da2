package controller

import (
	"log/slog"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// TestPeriodicJobsAreListed: the tests of what a periodic job does call it themselves, and do not wait until its time comes. So this test holds that
// a controller has these periodic jobs at all, and how often they run.
func TestPeriodicJobsAreListed(t *testing.T) {
	t.Parallel()
	every := map[string]time.Duration{}
	for _, c := range New(Config{Metrics: prometheus.NewRegistry()}, nil, nil, slog.New(slog.DiscardHandler)).periodicJobs() {
		if _, twice := every[c.Name]; twice || c.Every <= 0 || c.Do == nil {
			t.Errorf("the periodic job %s is listed twice, or is not whole: %+v", c.Name, c)
		}
		every[c.Name] = c.Every
	}
	for name, want := range map[string]time.Duration{
		"expire": time.Second, "sessions": time.Minute, "count_sessions": time.Minute, "prune": 10 * time.Minute, "sweep_tokens": 10 * time.Minute,
	} {
		if every[name] != want {
			t.Errorf("the periodic job %s runs every %s, want %s", name, every[name], want)
		}
	}
}
