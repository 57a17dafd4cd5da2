package egress

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/internal/test/bench/report"
)

// get sends a request to the server and checks the answer.
func (x *egressPath) get(ctx context.Context) (float64, error) {
	start := time.Now()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, x.url, nil)
	if err != nil {
		return 0, err
	}
	r.Header.Set("Authorization", x.auth)
	resp, err := x.client.Do(r)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", x.name, err)
	}
	n, err := io.Copy(io.Discard, resp.Body)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		return 0, fmt.Errorf("%s: %w", x.name, err)
	}
	if resp.StatusCode != http.StatusOK || n != 512 {
		return 0, fmt.Errorf("%s: the server answered %s with %d bytes", x.name, resp.Status, n)
	}
	return report.Since(start), nil
}

// measureWays uses each way in turns: first with one client, then with several.
func (w *egressWorld) measureWays(ctx context.Context, cfg egressConfig, r *egressReport) error {
	const warm = 20
	for round := range cfg.rounds + 1 {
		for _, x := range w.ways {
			for range cfg.requests {
				took, err := x.get(ctx)
				if err != nil {
					return err
				}
				if round > 0 { // the first makes connections
					x.seen.latency.Add(took)
				}
			}
		}
	}
	for range cfg.rounds {
		for _, x := range w.ways {
			if err := x.sustain(ctx, cfg.clients, cfg.sustain/time.Duration(cfg.rounds), warm); err != nil {
				return err
			}
		}
	}
	for _, x := range w.ways {
		out := egressWay{Way: x.name, LatencyMS: x.seen.latency.Quantiles(), PerSecond: float64(x.seen.requests) / x.seen.seconds}
		if x.proxy != nil {
			out.ProxyCPU = x.seen.cpu / float64(x.seen.requests)
		}
		r.Ways = append(r.Ways, out)
		x.client.CloseIdleConnections()
	}
	return nil
}

// sustain lets several clients send requests as fast as they can.
func (x *egressPath) sustain(ctx context.Context, clients int, long time.Duration, warm int) error {
	if _, err := report.Together(clients, func(int) (report.Samples, error) { // connections for all of them
		for range warm {
			if _, err := x.get(ctx); err != nil {
				return nil, err
			}
		}
		return nil, nil
	}); err != nil {
		return err
	}
	var before float64
	if x.proxy != nil {
		before = x.proxy.cpu()
	}
	start := time.Now()
	got, err := report.Sustained(clients, long, func() (float64, error) { return x.get(ctx) })
	x.seen.requests += len(got)
	x.seen.seconds += time.Since(start).Seconds()
	if x.proxy != nil {
		x.seen.cpu += x.proxy.cpu() - before
	}
	return err
}

// heldTunnel is a connection to the server through a proxy.
type heldTunnel struct{ *tls.Conn }

// hold opens a tunnel.
func (w *egressWorld) hold(ctx context.Context, proxy string) (_ heldTunnel, err error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp4", proxy)
	if err != nil {
		return heldTunnel{}, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Close())
		}
	}()
	if _, err := fmt.Fprintf(c, "CONNECT %[1]s:443 HTTP/1.1\r\nHost: %[1]s:443\r\n\r\n", egressName); err != nil {
		return heldTunnel{}, err
	}
	resp, err := http.ReadResponse(bufio.NewReaderSize(io.LimitReader(c, 1<<10), 16), &http.Request{Method: http.MethodConnect}) // nothing follows before we speak
	if err != nil {
		return heldTunnel{}, err
	}
	_ = resp.Body.Close() // what follows is the tunnel's
	if resp.StatusCode != http.StatusOK {
		return heldTunnel{}, fmt.Errorf("a tunnel was answered with %s", resp.Status)
	}
	t := tls.Client(c, &tls.Config{ServerName: egressName, RootCAs: w.trust, MinVersion: tls.VersionTLS12})
	return heldTunnel{t}, t.HandshakeContext(ctx)
}

// use sends a request through a held tunnel.
func (t heldTunnel) use() error {
	if _, err := fmt.Fprintf(t, "GET / HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\n\r\n", egressName, egressSecret); err != nil {
		return err
	}
	resp, err := http.ReadResponse(bufio.NewReader(t), nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("a held tunnel answered %s", resp.Status)
	}
	return nil
}

// perSandbox is the number of tunnels that are held for one sandbox. It is below the limit of a sandbox.
const perSandbox = 500

// measureHeld holds tunnels through goproxy, then through the egress process, and uses each once more at the end.
func (w *egressWorld) measureHeld(ctx context.Context, cfg egressConfig, r *egressReport) error {
	for i := 0; i*perSandbox < cfg.tunnels; i++ {
		if err := w.put(ctx, holder(i), ""); err != nil {
			return err
		}
	}
	for _, x := range []struct {
		name    string
		process *proxyProcess
		at      func(n int) string
	}{
		{wayPlainTunnel, w.plain, func(int) string { return w.plain.at.Tunnel }},
		{wayTunnel, w.ours, func(n int) string { return w.explicit[holder(n/perSandbox)] }},
	} {
		h, err := w.holdMany(ctx, cfg.tunnels, x.process, x.at)
		if err != nil {
			return fmt.Errorf("%s: %w", x.name, err)
		}
		h.Way = x.name
		r.Held = append(r.Held, h)
	}
	return nil
}

func holder(i int) core.SandboxID { return core.SandboxID(fmt.Sprintf("sbx_hold_%d", i)) }

func (w *egressWorld) holdMany(ctx context.Context, n int, p *proxyProcess, at func(int) string) (egressHeld, error) {
	out := egressHeld{Tunnels: n}
	before, err := p.residentKiB()
	if err != nil {
		return out, err
	}
	held := make([]heldTunnel, n)
	defer func() {
		for _, t := range held {
			if t.Conn != nil {
				_ = t.Close()
			}
		}
	}()
	const hands = 8
	each := func(f func(i int) error) error {
		_, err := report.Together(hands, func(hand int) (report.Samples, error) {
			for i := hand; i < n; i += hands {
				if err := f(i); err != nil {
					return nil, err
				}
			}
			return nil, nil
		})
		return err
	}
	if err := each(func(i int) (err error) {
		held[i], err = w.hold(ctx, at(i))
		return err
	}); err != nil {
		return out, err
	}
	after, err := p.residentKiB()
	if err != nil {
		return out, err
	}
	out.KiBEach, out.AllMiB = (after-before)/float64(n), after/1024
	return out, each(func(i int) error { return held[i].use() })
}

// measureRules changes the rules of one sandbox among many, again and again.
func (w *egressWorld) measureRules(ctx context.Context, cfg egressConfig, r *egressReport) error {
	served, err := w.client.List(ctx)
	if err != nil {
		return err
	}
	name := func(i int) core.SandboxID { return core.SandboxID(fmt.Sprintf("sbx_rules_%d", i)) }
	for i := len(served); i < cfg.sandboxes; i++ {
		if err := w.put(ctx, name(i), ""); err != nil {
			return err
		}
	}
	if served, err = w.client.List(ctx); err != nil || len(served) != cfg.sandboxes {
		return errors.Join(err, fmt.Errorf("%d sandboxes are served, want %d", len(served), cfg.sandboxes))
	}
	var mu sync.Mutex // guards version
	version := int64(1)
	change := func(mode grant.Mode) (float64, error) {
		mu.Lock()
		defer mu.Unlock()
		version++
		id := served[rand.IntN(len(served))].ID //nolint:gosec // G404: any will do
		var rules runnerapi.EgressRules
		if rules, err = w.rules(id, version, mode); err != nil { // sealed by the controller: not counted
			return 0, err
		}
		start := time.Now()
		err := w.client.SetRules(ctx, id, rules)
		return report.Since(start), err
	}
	for mode, to := range map[grant.Mode]*report.Quantiles{"": &r.RulesMS, grant.ModeHeader: &r.GrantsMS} {
		var times report.Samples
		for range cfg.changes {
			took, err := change(mode)
			if err != nil {
				return err
			}
			times.Add(took)
		}
		*to = times.Quantiles()
	}
	return nil
}
