package proxy_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
)

// TestTunnelsEndWithGrants: a tunnel that was opened while its host had no grant ends when the host gets one.
func TestTunnelsEndWithGrants(t *testing.T) {
	for name, come := range map[string]func(*bank){
		"granted": func(b *bank) { b.give(b.g) },
		"held":    func(b *bank) { b.hold() },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBank(t)
			b.give()
			long := func(w http.ResponseWriter, r *http.Request) {
				fmt.Fprint(w, "first")
				w.(http.Flusher).Flush()
				if r.URL.Path == "/long" {
					<-r.Context().Done()
				}
			}
			b.open(long)
			b.serve(evilAddr+":443", long, "other.example")
			begin := func(host string) io.ReadCloser {
				resp, err := b.client().Get("https://" + host + "/long")
				if err != nil {
					t.Fatal(err)
				}
				if _, err := io.ReadFull(resp.Body, make([]byte, 5)); err != nil {
					t.Fatal(err)
				}
				return resp.Body
			}
			ends, stays := begin(bankHost), begin("other.example")
			defer ends.Close()
			defer stays.Close()
			come(b)
			if all, err := io.ReadAll(ends); err == nil {
				t.Errorf("the tunnel ended with %q as if nothing had happened", all)
			}
			_ = stays.Close()
			flows := b.flows()
			slices.Sort(flows)
			if want := []string{"allowed tls other.example:443", "cut tls api.example:443"}; !slices.Equal(flows, want) {
				t.Errorf("%q, want %q", flows, want)
			}
		})
	}
}

// TestHeld: a host whose grants are missing cannot be reached with any protocol. Other hosts can.
func TestHeld(t *testing.T) {
	b := newBank(t)
	b.allow(bankHost, "tcp://"+bankHost+":443", "other.example")
	site := b.open(func(http.ResponseWriter, *http.Request) {})
	b.serve(evilAddr+":443", nil, "other.example")
	raw := func(c net.Conn) error { return request(c, "\x00\x01 not TLS\r\n\r\n") }
	plain := func(c net.Conn) error { return request(c, "GET / HTTP/1.1\r\nHost: "+bankHost+":443\r\n\r\n") }
	for name, state := range map[string]func(){
		"granted": func() { b.give(b.g) },
		"held":    b.hold,
	} {
		state()
		for _, c := range []*http.Client{b.client(), b.unaware()} {
			if status, all := b.ask(c, "GET", "https://"+bankHost+"/", "", b.bearer()...); status != 0 {
				t.Errorf("%s: %d %s", name, status, all)
			}
			if status, all := b.ask(c, "GET", "https://other.example/", ""); status != http.StatusOK {
				t.Errorf("%s: another host: %d %s", name, status, all)
			}
			c.CloseIdleConnections()
		}
		for _, do := range []func(net.Conn) error{raw, plain} {
			if err := tunnelled(t, b.world, bankHost+":443", do); err == nil {
				t.Errorf("%s: what is not TLS was served", name)
			}
		}
		if n := site.conns.Load(); n != 0 {
			t.Fatalf("%s: %d connections", name, n)
		}
	}
	for _, f := range b.flows() {
		if strings.HasPrefix(f, "allowed") && strings.Contains(f, bankHost) {
			t.Error(f)
		}
	}
	b.give() // the grants have been revoked: now only the rules count
	if status, all := b.ask(b.client(), "GET", "https://"+bankHost+"/", ""); status != http.StatusOK {
		t.Errorf("%d %s", status, all)
	}
}
