package proxy_test

import (
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/internal/test/eventually"
)

// keeper is a host of the Internet that answers when all it waits for have come, and counts its connections.
type keeper struct {
	open, all, waiting atomic.Int64
	release            atomic.Pointer[chan struct{}]
}

func (w *world) keeper(addr string) *keeper {
	w.t.Helper()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		w.t.Fatal(err)
	}
	k := &keeper{}
	s := &http.Server{
		ReadHeaderTimeout: time.Minute,
		Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			release := *k.release.Load()
			k.waiting.Add(1)
			select {
			case <-release:
			case <-r.Context().Done():
			}
		}),
		ConnState: func(_ net.Conn, st http.ConnState) {
			switch st {
			case http.StateNew:
				k.open.Add(1)
				k.all.Add(1)
			case http.StateClosed, http.StateHijacked:
				k.open.Add(-1)
			case http.StateActive, http.StateIdle:
			}
		},
	}
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.Serve(l) })
	w.t.Cleanup(func() {
		_ = s.Close()
		wg.Wait()
	})
	return k
}

// together has hosts asked at once, each so many times, so that each request has a connection of its own.
func (w *world) together(hosts []string, k *keeper, each int) {
	w.t.Helper()
	release := make(chan struct{})
	k.release.Store(&release)
	k.waiting.Store(0)
	c := w.client() // one that closed its connections would have the proxy close those to the hosts
	var wg sync.WaitGroup
	for _, h := range hosts {
		for range each {
			wg.Go(func() {
				if status, body := get(w.t, c, "http://"+h+"/"); status != http.StatusOK {
					w.t.Errorf("%s: %d %s", h, status, body)
				}
			})
		}
	}
	eventually.True(w.t, "all requests are there", func() bool { return k.waiting.Load() == int64(len(hosts)*each) })
	close(release)
	wg.Wait()
}

// TestIdleConnectionsAreBounded: of a sandbox's connections that have nothing to do, eight to one host are kept and 64 to all; the others are closed.
// What is kept is used again.
func TestIdleConnectionsAreBounded(t *testing.T) {
	const ofHost, ofAll, hosts = 8, 64, 9
	w := newWorld(t, "*.keep.example")
	k := w.keeper(allowedAddr + ":80")
	var all []string
	for i := range hosts {
		all = append(all, fmt.Sprintf("h%d.keep.example", i))
		w.names.set(all[i], allowedAddr)
	}
	kept := func(what string, open int) {
		t.Helper()
		eventually.True(t, fmt.Sprintf("%s: %d connections are open", what, open), func() bool { return k.open.Load() == int64(open) })
	}
	w.together(all[:1], k, ofHost)
	kept("as many as are kept of a host", ofHost)
	w.together(all[:1], k, ofHost+3)
	kept("three more", ofHost)
	if n := k.all.Load(); n != ofHost+3 {
		t.Errorf("%d connections were made for eight and then eleven requests, want %d", n, ofHost+3)
	}
	w.together(all, k, ofHost)
	kept("as many of nine hosts", ofAll)
	before := k.all.Load()
	w.together(all[hosts-1:], k, 1)
	kept("one request more", ofAll)
	if n := k.all.Load() - before; n > 1 {
		t.Errorf("%d connections were made for one request", n)
	}
	w.flows()
}

// TestBudgetsGoWithTheirGrants: there is one for each grant that was used, however often and whatever became of its fields. It goes with the grant.
func TestBudgetsGoWithTheirGrants(t *testing.T) {
	const many = 5
	b := newBank(t)
	b.open(func(http.ResponseWriter, *http.Request) {})
	var grants []grant.Grant
	for i := range many {
		g := b.g
		g.ID, g.Placeholder, g.Secret = fmt.Sprint("g", i), grant.NewPlaceholder(), grant.NewSecret(fmt.Sprint(canary, i))
		grants = append(grants, g)
	}
	use := func(want int, given []grant.Grant) {
		t.Helper()
		b.give(given...)
		c := b.guest(true, false)
		for range 3 {
			for _, g := range given {
				if status, all := b.ask(c, "GET", "https://"+bankHost+"/", "", "Authorization", "Bearer "+g.Placeholder); status != http.StatusOK {
					t.Errorf("%s: %d %s", g.ID, status, all)
				}
			}
		}
		b.flows()
		if n := b.server.Budgets(b.id); n != want {
			t.Errorf("%d grants have %d budgets, want %d", len(given), n, want)
		}
	}
	use(many, grants)
	for i := range grants {
		grants[i].PerMinute = 1000 + i
	}
	use(many, grants)
	b.give(grants[:2]...)
	if n := b.server.Budgets(b.id); n != 2 {
		t.Errorf("two grants are left, and %d budgets", n)
	}
	use(2, grants[:2])
	b.give()
	if n := b.server.Budgets(b.id); n != 0 {
		t.Errorf("no grants are left, and %d budgets", n)
	}
	use(1, grants[4:])
}

// TestAddressesOfANameAreBounded: sixteen addresses of a name are tried, one after the other. Those behind are not dialled, and not looked at.
func TestAddressesOfANameAreBounded(t *testing.T) {
	const most = 16
	w := newWorld(t, "allowed.example")
	good := w.serve(allowedAddr+":80", nil)
	inner := w.serve(secretAddr+":80", nil)
	var dead []string
	for i := range most {
		dead = append(dead, fmt.Sprintf("203.0.113.%d", 100+i)) // where nobody listens
	}
	for name, tc := range map[string]struct {
		addrs []string
		want  int
	}{
		"the last one":            {append(slices.Clone(dead[:most-1]), allowedAddr), http.StatusOK},
		"one further":             {append(slices.Clone(dead), allowedAddr), http.StatusBadGateway},
		"one that may not be":     {append(slices.Clone(dead[:most-1]), secretAddr), http.StatusForbidden},
		"a further one of those":  {append(append([]string{allowedAddr}, dead[:most-1]...), secretAddr), http.StatusOK},
		"a thousand, the last ok": {append(slices.Concat(slices.Repeat(dead, 63)), allowedAddr), http.StatusBadGateway},
	} {
		w.names.set("allowed.example", tc.addrs...)
		before := good.requests.Load()
		c := w.client()
		c.Transport.(*http.Transport).DisableKeepAlives = true
		status, body := get(t, c, "http://allowed.example/")
		if arrived := good.requests.Load() > before; status != tc.want || arrived != (tc.want == http.StatusOK) {
			t.Errorf("%s: %d %s, want %d", name, status, body, tc.want)
		}
		w.allow("allowed.example") // no connection is kept for the next one
	}
	if n := inner.conns.Load(); n != 0 {
		t.Errorf("%d connections were made to what must not be reached", n)
	}
	w.flows()
}
