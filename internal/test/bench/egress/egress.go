// Package egress measures the cost of the egress process for `bench egress`, beside goproxy and a direct connection.
package egress

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/test/bench/report"
)

// `bench egress` measures the cost of the egress process. It sends requests to one TLS server on its own network, in
// turns: directly, through plain goproxy, and through the egress process. It also holds tunnels and changes rules.

// egressWay is one way to the server.
type egressWay struct {
	Way       string           `json:"way"`
	LatencyMS report.Quantiles `json:"latency_ms"` // one client, a request at a time on a kept connection
	AddedP50  float64          `json:"added_p50_ms"`
	AddedP99  float64          `json:"added_p99_ms"`
	PerSecond float64          `json:"per_second"`   // several clients
	ProxyCPU  float64          `json:"proxy_cpu_ms"` // CPU time of the proxy's process for each request meanwhile
}

// egressHeld is the cost of idle tunnels.
type egressHeld struct {
	Way     string  `json:"way"`
	Tunnels int     `json:"tunnels"`
	KiBEach float64 `json:"kib_each"` // resident memory of the proxy for each tunnel
	AllMiB  float64 `json:"process_mib"`
}

// egressReport is egress.json.
type egressReport struct {
	report.Head
	Clients   int                `json:"clients"`
	Ways      []egressWay        `json:"ways"`
	Held      []egressHeld       `json:"held"`
	Sandboxes int                `json:"sandboxes"`
	RulesMS   report.Quantiles   `json:"rules_ms"`        // a change of one sandbox's rules, asked for over the process's socket, to its answer
	GrantsMS  report.Quantiles   `json:"rules_grants_ms"` // the same with a grant, which is sealed
	Ratios    map[string]float64 `json:"ratios"`
}

// The ways to the server.
const (
	wayDirect      = "direct"
	wayPlainTunnel = "goproxy, tunnel"
	wayPlainRead   = "goproxy, TLS read"
	wayTunnel      = "egress, tunnel"
	wayHeader      = "egress, header"
	wayBase        = "egress, base URL"
)

func (r *egressReport) way(name string) egressWay {
	i := slices.IndexFunc(r.Ways, func(w egressWay) bool { return w.Way == name })
	if i < 0 {
		return egressWay{}
	}
	return r.Ways[i]
}

// judge records the ratios: each of our ways against the same way with goproxy, and against the direct way.
func (r *egressReport) judge() {
	for i := range r.Ways {
		w := &r.Ways[i]
		w.AddedP50, w.AddedP99 = w.LatencyMS.P50-r.way(wayDirect).LatencyMS.P50, w.LatencyMS.P99-r.way(wayDirect).LatencyMS.P99
	}
	note := func(name string, a, b float64) {
		if v := a / b; !math.IsNaN(v) && !math.IsInf(v, 0) {
			r.Ratios[name] = v
		}
	}
	for name, pair := range map[string][2]string{
		"tunnel_over_goproxy": {wayTunnel, wayPlainTunnel}, "header_over_goproxy": {wayHeader, wayPlainRead}, "base_url_over_goproxy": {wayBase, wayPlainRead},
		"tunnel_over_direct": {wayTunnel, wayDirect}, "header_over_direct": {wayHeader, wayDirect}, "base_url_over_direct": {wayBase, wayDirect},
	} {
		a, b := r.way(pair[0]), r.way(pair[1])
		note(name+"_p50", a.LatencyMS.P50, b.LatencyMS.P50)
		note(name+"_p99", a.LatencyMS.P99, b.LatencyMS.P99)
		note(name+"_per_second", a.PerSecond, b.PerSecond)
		note(name+"_cpu", a.ProxyCPU, b.ProxyCPU)
	}
	if len(r.Held) == 2 {
		note("held_over_goproxy_memory", r.Held[1].KiBEach, r.Held[0].KiBEach)
	}
}

func (r *egressReport) show(w io.Writer) error {
	p := report.NewPrinter(w)
	p.Head("make bench-egress", r.Head)
	p.Line("")
	rows := [][]string{{"kept connections", "n", "p50 ms", "p99 ms", "added p50", "added p99", fmt.Sprintf("requests/s, %d clients", r.Clients), "CPU of the proxy, ms"}}
	for _, x := range r.Ways {
		rows = append(rows, []string{
			x.Way, fmt.Sprint(x.LatencyMS.N), report.Number(x.LatencyMS.P50), report.Number(x.LatencyMS.P99), report.Number(x.AddedP50), report.Number(x.AddedP99), report.Number(x.PerSecond), fmt.Sprintf("%.3f", x.ProxyCPU),
		})
	}
	p.Columns(rows)
	p.Line("")
	for _, h := range r.Held {
		p.Line("%s: %d held, %s KiB each, %s MiB in all", h.Way, h.Tunnels, report.Number(h.KiBEach), report.Number(h.AllMiB))
	}
	p.Line("rules of one of %d sandboxes: %s / %s ms (p50 / p99, n=%d); with a grant %s / %s ms (n=%d)", r.Sandboxes,
		report.Number(r.RulesMS.P50), report.Number(r.RulesMS.P99), r.RulesMS.N, report.Number(r.GrantsMS.P50), report.Number(r.GrantsMS.P99), r.GrantsMS.N)
	p.Sorted(r.Ratios)
	return p.Err
}

// egressConfig says how much to measure. Tests measure little.
type egressConfig struct {
	out       string
	self      []string // what this program is started again with
	rounds    int
	requests  int // of each way in a round
	clients   int
	sustain   time.Duration // of each way in all
	tunnels   int
	sandboxes int
	changes   int
}

// Main is `bench egress`.
func Main(ctx context.Context, arguments []string, out, progress io.Writer) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cfg := egressConfig{self: []string{self, ChildCommand}, rounds: 20, requests: 150, clients: 8, tunnels: 2000, sandboxes: 1000, changes: 2000}
	f := flag.NewFlagSet("bench egress", flag.ContinueOnError)
	f.SetOutput(progress)
	f.StringVar(&cfg.out, "out", "var/bench", "`directory` for egress.json")
	f.DurationVar(&cfg.sustain, "sustain", 5*time.Second, "how long the rate of each way is measured")
	f.IntVar(&cfg.rounds, "rounds", cfg.rounds, "how often the ways take turns")
	if err := f.Parse(arguments); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("measuring egress needs root, for the server's network namespace: sudo -E make bench-egress")
	}
	if err := os.MkdirAll(cfg.out, 0o711); err != nil { //nolint:gosec // G301: as for the other reports
		return err
	}
	r, err := measureEgress(ctx, cfg, progress)
	if err != nil {
		return err
	}
	if err := atomicfile.WriteJSON(filepath.Join(cfg.out, "egress.json"), r, 0o644); err != nil {
		return err
	}
	return r.show(out)
}

func measureEgress(ctx context.Context, cfg egressConfig, progress io.Writer) (_ *egressReport, err error) {
	began := time.Now()
	say := report.Progress(progress, began)
	r := &egressReport{Head: report.Begin(began), Clients: cfg.clients, Sandboxes: cfg.sandboxes, Ratios: map[string]float64{}}
	dir, err := os.MkdirTemp("", "bench-egress-") // the path of a socket must be short
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	say("start a server, goproxy and an egress process")
	w, err := openEgressWorld(ctx, cfg, dir, progress)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	say("requests, in turns")
	if err := w.measureWays(ctx, cfg, r); err != nil {
		return nil, err
	}
	say("%d tunnels", cfg.tunnels)
	if err := w.measureHeld(ctx, cfg, r); err != nil {
		return nil, err
	}
	say("rules of %d sandboxes", cfg.sandboxes)
	if err := w.measureRules(ctx, cfg, r); err != nil {
		return nil, err
	}
	r.Finish(began)
	r.judge()
	return r, nil
}
