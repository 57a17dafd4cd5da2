package proxy_test

import (
	"net/http"
	"slices"
	"strings"
	"testing"
)

func wantFlows(t *testing.T, w *world, want ...string) {
	t.Helper()
	if got := w.flows(); !slices.Equal(got, want) {
		t.Errorf("flows:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// TestAllowedAndDenied: programs that know of the proxy, and programs that do not, reach only allowed hosts.
func TestAllowedAndDenied(t *testing.T) {
	for name, client := range map[string]func(*world) *http.Client{"explicit": (*world).client, "transparent": (*world).unaware} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, "allowed.example", "*.wide.example:443")
			w.names.set("allowed.example", allowedAddr)
			w.names.set("a.wide.example", allowedAddr)
			w.names.set("evil.example", evilAddr)
			good := w.serve(allowedAddr+":443", nil, "allowed.example", "a.wide.example")
			w.serve(allowedAddr+":80", nil)
			evil := w.serve(evilAddr+":443", nil, "evil.example")
			plain := w.serve(evilAddr+":80", nil)
			c := client(w)
			for url, want := range map[string]string{
				"https://allowed.example/x?secret=1": "GET /x ", "https://a.wide.example/y": "GET /y ", "http://allowed.example/z?secret=1": "GET /z ",
			} {
				if status, body := get(t, c, url); status != 200 || body != want {
					t.Errorf("%s: %d %s", url, status, body)
				}
			}
			c.CloseIdleConnections()
			got := w.flows()
			slices.Sort(got)
			if want := []string{"allowed http GET allowed.example:80/z 200", "allowed tls a.wide.example:443", "allowed tls allowed.example:443"}; !slices.Equal(got, want) {
				t.Errorf("flows: %q, want %q", got, want)
			}
			if status, body := get(t, c, "https://evil.example/"); status == 200 {
				t.Errorf("evil.example over TLS: %d %s", status, body)
			}
			wantFlows(t, w, "denied tls evil.example:443")
			if status, body := get(t, c, "http://evil.example/p"); status != http.StatusForbidden || !strings.Contains(body, "does not allow http to evil.example:80") {
				t.Errorf("evil.example: %d %s", status, body)
			}
			wantFlows(t, w, "denied http GET evil.example:80/p")
			if good.requests.Load() != 2 || evil.conns.Load() != 0 || plain.conns.Load() != 0 {
				t.Errorf("the Internet saw %d requests and %d + %d connections", good.requests.Load(), evil.conns.Load(), plain.conns.Load())
			}
			for _, n := range w.names.asked {
				if strings.Contains(n, "evil") {
					t.Errorf("the name server was asked for %s", n)
				}
			}
		})
	}
}
