package proxy_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/egress/policy"
	"github.com/coppice-dev/coppice/egress/proxy"
)

// swapping gives the sandbox two rules in turn while requests are sent, several at a time. It lets some requests end
// before it continues, so that requests are under way, have been answered, and have just begun when rules change.
func swapping(w *world, requests int, first, second proxy.Rules, send func(i int)) {
	w.t.Helper()
	const senders = 4
	var sent, swaps atomic.Int64
	answered, done := make(chan struct{}, 1), make(chan struct{})
	var swapper, all sync.WaitGroup
	set := func(r proxy.Rules) {
		if ok, err := w.server.SetRules(w.id, r); !ok || err != nil {
			w.t.Error("rules were not set: ", ok, err)
		}
	}
	set(first) // before any request
	swapper.Go(func() {
		for {
			set(second)
			set(first)
			select {
			case <-done:
				return
			default:
			}
			if swaps.Add(1)%64 == 0 {
				select {
				case <-answered:
				case <-done:
				}
			}
		}
	})
	for range senders {
		all.Go(func() {
			for i := sent.Add(1); i <= int64(requests); i = sent.Add(1) {
				send(int(i))
				select {
				case answered <- struct{}{}:
				default:
				}
			}
		})
	}
	all.Wait()
	close(done)
	swapper.Wait()
	w.t.Logf("%d requests, %d swaps", requests, 2*swaps.Load())
}

// TestRulesComeWithTheirHeldHosts: one set of rules does not allow a host, and the other holds it. So nothing may reach
// it while they take turns: under the policy of one and the held hosts of the other, everything would.
func TestRulesComeWithTheirHeldHosts(t *testing.T) {
	b := newBank(t)
	b.give()
	tls, plain := b.open(func(http.ResponseWriter, *http.Request) {}), b.serve(allowedAddr+":80", nil)
	closed := proxy.Rules{Policy: b.policy("other.example")}
	held := proxy.Rules{
		Policy: b.policy(bankHost, "tcp://"+bankHost+":443", "other.example"), Held: []grant.Target{b.at(bankHost + ":80"), b.at(bankHost + ":443")},
	}
	greeting := hello(t, bankHost)
	connect := "CONNECT " + bankHost + ":443 HTTP/1.1\r\nHost: " + bankHost + ":443\r\n\r\n"
	ways := []string{
		"GET http://" + bankHost + "/ HTTP/1.1\r\nHost: " + bankHost + "\r\nConnection: close\r\n\r\n",
		connect + string(greeting),
		connect + "\x00\x01 not TLS\r\n\r\n",
	}
	swapping(b.world, 1000, closed, held, func(i int) {
		if answer := b.spoken(ways[i%len(ways)]); strings.HasPrefix(answer, "HTTP/1.1 200 OK") {
			t.Errorf("%q was answered %q", ways[i%len(ways)], answer)
		}
	})
	if n := tls.conns.Load() + plain.conns.Load(); n != 0 {
		t.Errorf("%d connections reached a host that is always closed or held", n)
	}
	for _, f := range b.flows() {
		if !strings.HasPrefix(f, "denied") {
			t.Errorf("%s", f)
			break
		}
	}
}

// TestRulesComeWithTheirGrants: two sets of rules each allow one host and have a grant for it, with the same base URL.
// While they take turns, a request goes to the host of one with the secret of the same one, or it is ended because the
// rules have changed. It is never refused by the policy of the other.
func TestRulesComeWithTheirGrants(t *testing.T) {
	b := newBank(t, func(g *grant.Grant) { g.Mode = grant.ModeBaseURL })
	secrets := map[string]string{bankHost: canary, "other.example": "another secret of the same length"}
	made := func(host string) proxy.Rules {
		g := b.g
		g.Targets, g.Secret = []grant.Target{b.at(host + ":443")}, grant.NewSecret(secrets[host])
		return proxy.Rules{Policy: b.policy(host), Grants: grant.Bundle{Grants: []grant.Grant{g}}}
	}
	var wrong atomic.Int64
	answer := func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+secrets[r.Host] {
			wrong.Add(1)
		}
	}
	one, two := b.open(answer), b.serve(evilAddr+":443", answer, "other.example")
	request := "GET " + grant.BasePath + "api/ HTTP/1.1\r\nHost: " + b.explicit.String() + "\r\nAuthorization: Bearer " + b.g.Placeholder + "\r\nConnection: close\r\n\r\n"
	swapping(b.world, 120, made("other.example"), made(bankHost), func(int) { b.spoken(request) })
	for _, host := range []string{bankHost, "other.example"} { // the host of each is reached when nothing changes
		b.rules = made(host)
		b.setRules()
		b.spoken(request)
	}
	if one.requests.Load() == 0 || two.requests.Load() == 0 || wrong.Load() > 0 {
		t.Errorf("the hosts got %d and %d requests, %d with the wrong secret", one.requests.Load(), two.requests.Load(), wrong.Load())
	}
	b.journal.mu.Lock()
	defer b.journal.mu.Unlock()
	mixed := map[string]int{}
	for _, f := range b.journal.begun {
		if f.Outcome == core.FlowDenied {
			mixed[fmt.Sprintf("%s:%d: %s", f.Host, f.Port, f.Reason)]++
		}
	}
	if len(mixed) > 0 {
		t.Errorf("refused: %v", mixed)
	}
}

// TestRulesThatChangeBeforeAFlowIsAdmitted: a flow that was allowed by rules which have been replaced since does not
// begin, although it was not yet among the flows under way when they were replaced.
func TestRulesThatChangeBeforeAFlowIsAdmitted(t *testing.T) {
	const host = "allowed.example"
	for name, c := range map[string]struct {
		next    func(b *bank) proxy.Rules
		arrives bool
	}{
		"still allowed": {func(b *bank) proxy.Rules { return proxy.Rules{Policy: b.policy("tcp://"+host+":22", "other.example")} }, true},
		"not allowed":   {func(b *bank) proxy.Rules { return proxy.Rules{Policy: b.policy("other.example")} }, false},
		"held": {func(b *bank) proxy.Rules {
			return proxy.Rules{Policy: b.policy("tcp://" + host + ":22"), Held: []grant.Target{b.at(host + ":22")}}
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBank(t)
			b.names.set(host, allowedAddr)
			site := b.serve(allowedAddr+":22", nil)
			next := c.next(b)
			var listeners [2]net.Listener
			for i := range listeners {
				l, err := net.Listen("tcp", "203.0.113.200:0")
				if err != nil {
					t.Fatal(err)
				}
				listeners[i] = l
			}
			named := b.at(host + ":22").Host
			err := b.server.Add(proxy.Sandbox{
				ID: b.id, Epoch: 7, Rules: proxy.Rules{Policy: b.policy("tcp://" + host + ":22")},
				Alias: func(policy.Policy, netip.AddrPort) (policy.Host, bool) { // is called once the rules have been looked at
					if ok, err := b.server.SetRules(b.id, next); !ok || err != nil {
						t.Error("rules were not set: ", ok, err)
					}
					return named, true
				},
			}, listeners[0], listeners[1])
			if err != nil {
				t.Fatal(err)
			}
			b.transparent = listeners[1].Addr().(*net.TCPAddr).AddrPort()
			conn, err := net.Dial("tcp", b.redirected("22"))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			got := request(conn, "\x00\x01 not TLS\r\n\r\n")
			if n := site.conns.Load(); (n == 1) != c.arrives {
				t.Errorf("%d connections arrived: %v", n, got)
			}
			_ = conn.Close()
			for _, f := range b.flows() {
				if strings.HasPrefix(f, "allowed") != c.arrives {
					t.Error(f)
				}
			}
		})
	}
}

// spoken sends bytes to the explicit proxy and returns the whole answer; "" if the connection was reset.
func (w *world) spoken(text string) string {
	c, err := net.Dial("tcp", w.explicit.String())
	if err != nil {
		w.t.Error(err)
		return ""
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(90 * time.Second))
	if _, err := io.WriteString(c, text); err != nil {
		return ""
	}
	all, _ := io.ReadAll(io.LimitReader(c, 1<<20)) // a flow that is ended resets the connection
	return string(all)
}
