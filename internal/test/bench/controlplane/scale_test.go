package controlplane

import (
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/pgcluster"
	"github.com/coppice-dev/coppice/internal/test/require"
)

// TestScale measures a little of everything that `bench scale` measures: two runners instead of a thousand.
func TestScale(t *testing.T) {
	t.Parallel()
	_, err := pgcluster.Find(t.Context(), "")
	require.That(t, "postgres", err == nil, "apt-get install --no-install-recommends postgresql")
	cfg := scaleConfig{
		out: publicDir(t), warmups: 1, singles: 4, clients: 2, sustain: 100 * time.Millisecond, beats: time.Second, beatEvery: 250 * time.Millisecond, churnRate: 5, churnTime: time.Minute, fenceTime: 2 * time.Minute,
	}.withScale(0.001)
	r, err := measureScale(t.Context(), cfg, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	if err := r.show(t.Output()); err != nil {
		t.Error(err)
	}
	for n := range map[string]bool{"1": true, "2": true} {
		if q := r.ForkOpMS[n]; q.N != 4 || q.P50 <= 0 || q.P99 < q.P50 {
			t.Errorf("forks with %s runners: %+v", n, q)
		}
	}
	if r.Projects < 20 || r.Workspaces != 101 || r.Checkpoints < 2000 || r.BytesPerCheckpoint < 500 {
		t.Errorf("the cell has %d projects, %d workspaces, %d checkpoints of %.0f bytes", r.Projects, r.Workspaces, r.Checkpoints, r.BytesPerCheckpoint)
	}
	if r.ForkOpsPerS <= 0 || r.HeartbeatDBCPUShare <= 0 || r.Heartbeats.Beats == 0 {
		t.Errorf("forks a second %v, heartbeats %+v", r.ForkOpsPerS, r.Heartbeats)
	}
	if c := r.Churn; c.Cycles != 18 || c.Checkpoints != 4 || c.BytesPerCycle <= 0 {
		t.Errorf("churn: %+v", c)
	}
	if p := r.Retention; p.Nodes != 1000 || p.Problem != "" || p.Deleted < 900 || p.Truncated || r.Retention1M <= 0 {
		t.Errorf("retention: %+v", p)
	}
	if f := r.Fence; f.Runners != 2 || f.Workspaces != 101 || f.Left != 0 || r.FenceAllS <= 0 {
		t.Errorf("fence: %+v in %v s", f, r.FenceAllS)
	}
	if len(r.Limits) != 3 {
		t.Errorf("%+v", r.Limits)
	}
}

// TestCPUOfProcesses: the processor time of a server includes all its processes, also those that have ended. If they
// cannot be seen, there is no figure.
func TestCPUOfProcesses(t *testing.T) {
	t.Parallel()
	proc := t.TempDir()
	write := func(pid, parent, times string) {
		t.Helper()
		dir := filepath.Join(proc, pid)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		line := pid + " (post gres) (x) S " + parent + " 0 0 0 0 0 0 0 0 0 " + times + " 20 0 1 0 7 0 0\n"
		if err := os.WriteFile(filepath.Join(dir, "stat"), []byte(line), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, sees := range []func(){
		func() {},
		func() { write("10", "1", "1 2 3 4") },
	} {
		sees()
		if sum, err := treeCPU(proc, 10); err == nil || !strings.Contains(err.Error(), "cannot be seen") {
			t.Errorf("got %v, %v", sum, err)
		}
	}
	write("11", "10", "5 6 100 100")
	write("12", "11", "100 100 100 100") // another's child
	write("13", "1", "100 100 100 100")
	if err := os.WriteFile(filepath.Join(proc, "11", "cmdline"), []byte("postgres: autovacuum worker bench1"), 0o600); err != nil {
		t.Fatal(err)
	}
	want := map[string]float64{"postmaster": 10 * (1 + 2), ended: 10 * (3 + 4), "autovacuum worker": 10 * (5 + 6)}
	if by, err := treeCPU(proc, 10); err != nil || !maps.Equal(by, want) {
		t.Errorf("got %v, %v, want %v", by, err, want)
	}
}

// TestGrew: only the number of pages that a call reads counts, and a few more pages do not.
func TestGrew(t *testing.T) {
	t.Parallel()
	small := []statement{{ID: 1, Query: "a", Calls: 9, Pages: 10, Rows: 1}, {ID: 2, Query: "b", Calls: 9, Pages: 10, Rows: 1}, {ID: 3, Query: "c", Calls: 9, Pages: 3, Rows: 1}}
	large := []statement{
		{ID: 1, Query: "a", Calls: 9, Pages: 25, Rows: 1}, {ID: 2, Query: "b", Calls: 9, Pages: 11, Rows: 1000}, {ID: 3, Query: "c", Calls: 9, Pages: 300, Rows: 1, MS: 1}, {ID: 4, Query: "d", Calls: 9, Pages: 300},
	}
	var got []string
	for _, g := range grew(small, large) {
		got = append(got, g.Query)
	}
	if strings.Join(got, " ") != "c b" {
		t.Errorf("got %v", got)
	}
}

// TestScaleRefuses: an unknown stage is an error that names it, before anything begins.
func TestScaleRefuses(t *testing.T) {
	t.Parallel()
	for _, arguments := range [][]string{{"-only", "forks,none"}, {"-scale", "2"}, {"-scale", "0"}} {
		if err := ScaleMain(t.Context(), arguments, io.Discard, io.Discard); err == nil {
			t.Errorf("%v were taken", arguments)
		}
	}
}
