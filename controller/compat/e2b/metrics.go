package e2b

import (
	"context"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// sample is what a guest says about its processors, memory and disk.
type sample struct {
	at                          time.Time
	cpus                        int
	cpuPercent                  float64
	memTotal, memUsed, memCache int64 // bytes
	diskTotal, diskUsed         int64 // bytes
}

// sampleProgram writes what parseSample reads: the processors' counters twice, so that their difference is the load now.
const sampleProgram = `cat /proc/stat; cat /proc/meminfo; df -P -k / | tail -n 1 | sed 's/^/disk: /'; sleep 0.2; head -n 1 /proc/stat`

const sampleTime = 10_000 // milliseconds

// takeSample asks a guest.
func takeSample(ctx context.Context, c *coppice.Client, ws coppice.WorkspaceID) (sample, error) {
	res, err := c.Exec(ctx, ws, coppice.ExecRequest{Command: []string{"/bin/sh", "-c", sampleProgram}, Cwd: "/", TimeoutMS: sampleTime})
	if err != nil {
		return sample{}, err
	}
	s, ok := parseSample(res.Stdout)
	if !ok {
		return s, shared.Failf(http.StatusNotImplemented, "metrics: the image of this sandbox does not have sh, cat, df, tail, sed, sleep and head, or no /proc")
	}
	s.at = time.Now()
	return s, nil
}

// parseSample reads the output of sampleProgram, which a guest controls.
func parseSample(text string) (s sample, ok bool) {
	var busy, all, available int64
	counters := 0
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		switch {
		case len(f) > 7 && f[0] == "cpu":
			b, a := ticks(f[1:])
			if counters++; counters > 1 && a > all {
				s.cpuPercent = min(max(100*float64(b-busy)/float64(a-all), 0), 100)
			}
			busy, all = b, a
		case len(f) > 1 && strings.HasPrefix(f[0], "cpu"):
			s.cpus++
		case len(f) == 3 && f[0] == "MemTotal:":
			s.memTotal = kib(f[1])
		case len(f) == 3 && f[0] == "MemAvailable:":
			available = kib(f[1])
		case len(f) == 3 && f[0] == "Cached:":
			s.memCache = kib(f[1])
		case len(f) == 7 && f[0] == "disk:":
			s.diskTotal, s.diskUsed = kib(f[2]), kib(f[3])
		}
	}
	s.memUsed = max(s.memTotal-available, 0)
	return s, s.cpus > 0 && s.memTotal > 0 && s.diskTotal > 0
}

// ticks adds the counters of a processor line: idle and iowait are those in which nothing was done.
func ticks(f []string) (busy, all int64) {
	const idle, iowait, guest = 3, 4, 8 // guest and what follows are in others, too
	for i, text := range f[:min(len(f), guest)] {
		n := bounded(text)
		all += n
		if i != idle && i != iowait {
			busy += n
		}
	}
	return busy, all
}

// bounded reads a counter. Its bound keeps sums and products of a few from overflowing.
func bounded(text string) int64 {
	const most = 1 << 50
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0
	}
	return min(max(n, 0), most)
}

func kib(text string) int64 { return bounded(text) << 10 }

// metricView is E2B's SandboxMetric.
type metricView struct {
	Timestamp     time.Time `json:"timestamp"`
	TimestampUnix int64     `json:"timestampUnix"`
	CPUCount      int       `json:"cpuCount"`
	CPUUsedPct    float64   `json:"cpuUsedPct"`
	MemUsed       int64     `json:"memUsed"`
	MemTotal      int64     `json:"memTotal"`
	MemCache      int64     `json:"memCache"`
	DiskUsed      int64     `json:"diskUsed"`
	DiskTotal     int64     `json:"diskTotal"`
}

// metricsSlack is how old the end of an interval may be that still asks for the present.
const metricsSlack = 30 * time.Second

// metrics answers with one sample of the present: Coppice keeps no history. For an interval without the present, and for a
// sandbox that does not run, there is none.
func metrics(w http.ResponseWriter, r *http.Request, c call) error {
	now := time.Now()
	start, err1 := unixTime(rawQuery(r, "start"), time.Time{})
	end, err2 := unixTime(rawQuery(r, "end"), now)
	if err1 != nil || err2 != nil {
		return shared.Failf(http.StatusBadRequest, "start and end are seconds since 1970")
	}
	ws, err := c.workspace(r)
	if err != nil {
		return err
	}
	out := []metricView{}
	if start.After(now) || end.Before(now.Add(-metricsSlack)) || ws.State != coppice.WorkspaceReady {
		writeJSON(w, http.StatusOK, out)
		return nil
	}
	s, err := takeSample(r.Context(), c.Client, ws.ID)
	if err != nil {
		return err
	}
	out = append(out, metricView{
		Timestamp: s.at.UTC(), TimestampUnix: s.at.Unix(), CPUCount: s.cpus, CPUUsedPct: s.cpuPercent,
		MemUsed: s.memUsed, MemTotal: s.memTotal, MemCache: s.memCache, DiskUsed: s.diskUsed, DiskTotal: s.diskTotal,
	})
	writeJSON(w, http.StatusOK, out)
	return nil
}

func unixTime(text string, otherwise time.Time) (time.Time, error) {
	if text == "" {
		return otherwise, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	return time.Unix(n, 0), err
}

// envdMetrics is the same, as the daemon of a sandbox says it.
func envdMetrics(w http.ResponseWriter, r *http.Request) error {
	v := visitOf(r.Context())
	s, err := takeSample(r.Context(), v.Client, v.ws)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, map[string]any{
		"ts": s.at.Unix(), "cpu_count": s.cpus, "cpu_used_pct": s.cpuPercent, "mem_total": s.memTotal, "mem_used": s.memUsed, "mem_cache": s.memCache,
		"mem_total_mib": s.memTotal >> 20, "mem_used_mib": s.memUsed >> 20, "disk_used": s.diskUsed, "disk_total": s.diskTotal,
	})
	return nil
}
