package proxy_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/internal/test/eventually"
)

// socket is the part of a WebSocket that a proxy sees. Its upgrade has been answered.
type socket struct {
	net.Conn
	r    *bufio.Reader
	resp *http.Response
}

func openSocket(t *testing.T, c net.Conn, target string, header ...string) socket {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	lines := append([]string{"GET " + target + " HTTP/1.1", "Connection: Upgrade", "Upgrade: websocket"}, header...)
	if _, err := io.WriteString(c, strings.Join(lines, "\r\n")+"\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	s := socket{Conn: c, r: bufio.NewReader(c)}
	var err error
	if s.resp, err = http.ReadResponse(s.r, nil); err != nil { //nolint:bodyclose // the data after the upgrade is read from s
		t.Fatal(err)
	}
	return s
}

// echo answers an upgrade, and then sends back what it receives until that is "end" or the connection ends.
func echo(seen *atomic.Int64) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		c, buf, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		b := make([]byte, 32<<10)
		for {
			n, err := buf.Read(b)
			seen.Add(int64(n))
			if err != nil {
				return
			}
			if _, err := c.Write(b[:n]); err != nil || string(b[:n]) == "end" {
				return
			}
		}
	}
}

// overTLS returns a connection of a guest to the host with the grant, through CONNECT.
func (b *bank) overTLS() net.Conn {
	b.t.Helper()
	c, err := net.Dial("tcp", b.explicit.String())
	if err != nil {
		b.t.Fatal(err)
	}
	fmt.Fprintf(c, "CONNECT %s:443 HTTP/1.1\r\nHost: %s:443\r\n\r\n", bankHost, bankHost)
	resp, err := http.ReadResponse(bufio.NewReaderSize(c, 16), nil)
	if err != nil || resp.StatusCode != http.StatusOK {
		b.t.Fatal(resp, err)
	}
	_ = resp.Body.Close() // the answer has no body
	out := tls.Client(c, &tls.Config{RootCAs: b.trust, ServerName: bankHost})
	if err := out.HandshakeContext(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
	return out
}

func descriptors(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// TestUpgradesEnd: when either side of an upgraded connection ends, the other side ends too, and nothing of the
// connection is left over.
func TestUpgradesEnd(t *testing.T) {
	b := newBank(t)
	var seen atomic.Int64
	b.open(echo(&seen))
	b.serve(evilAddr+":80", echo(&seen))
	transparent := b.redirected("80")
	dial := func(addr string) func() net.Conn {
		return func() net.Conn {
			c, err := (&net.Dialer{}).DialContext(context.WithoutCancel(t.Context()), "tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			return c
		}
	}
	kinds := map[string]struct {
		dial   func() net.Conn
		target string
		header []string
	}{
		"explicit":    {dial(b.explicit.String()), "http://other.example/", []string{"Host: other.example"}},
		"transparent": {dial(transparent), "/", []string{"Host: other.example"}},
		"read":        {b.overTLS, "/", []string{"Host: " + bankHost, "Authorization: Bearer " + b.g.Placeholder}},
	}
	for name, k := range kinds {
		for side, end := range map[string]func(s socket){
			"the host": func(s socket) {
				if _, err := io.WriteString(s, "end"); err != nil {
					t.Error(err)
				}
				if all, err := io.ReadAll(s.r); string(all) != "end" || err != nil {
					t.Fatalf("%s: the guest read %q, %v", name, all, err)
				}
			},
			"the guest": func(s socket) {
				if err := s.Conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
					t.Error(err)
				}
				if all, err := io.ReadAll(s.r); len(all) != 0 || err != nil {
					t.Fatalf("%s: the guest read %q, %v", name, all, err)
				}
			},
			"the guest, at once": func(socket) {},
		} {
			before := descriptors(t)
			for range 40 {
				s := openSocket(t, k.dial(), k.target, k.header...)
				if _, err := io.WriteString(s, "ping"); err != nil {
					t.Fatal(err)
				}
				if _, err := io.ReadFull(s.r, make([]byte, 4)); err != nil {
					t.Fatal(err)
				}
				end(s)
				_ = s.Close()
			}
			var conns, flows int
			eventually.True(t, name+": nothing is left when "+side+" has ended it", func() bool {
				conns, flows = b.server.Held(b.id)
				return conns == 0 && flows == 0 && descriptors(t) <= before+2
			})
		}
	}
	for _, f := range b.flows() {
		if !strings.HasPrefix(f, "allowed http GET") || !strings.HasSuffix(f, " 101") {
			t.Error(f)
		}
	}
}

// TestUpgradeBudget: a grant's bytes also bound the data over an upgraded connection.
func TestUpgradeBudget(t *testing.T) {
	const most = 1 << 20
	b := newBank(t, func(g *grant.Grant) { g.MaxBytes = most })
	var seen atomic.Int64
	b.open(func(w http.ResponseWriter, _ *http.Request) {
		c, buf, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		p := make([]byte, 32<<10)
		for {
			n, err := buf.Read(p)
			if seen.Add(int64(n)); err != nil {
				return
			}
		}
	})
	s := openSocket(t, b.overTLS(), "/", "Host: "+bankHost, "Authorization: Bearer "+b.g.Placeholder)
	defer s.Close()
	var err error
	for sent := 0; err == nil && sent < 8*most; sent += 32 << 10 {
		_, err = s.Write(make([]byte, 32<<10))
	}
	if _, err := s.r.ReadByte(); err == nil {
		t.Error("the connection lives on")
	}
	if flows := b.flows(); len(flows) != 1 || !strings.HasPrefix(flows[0], "cut http GET api.example:443/ with api 101") {
		t.Errorf("%q", flows)
	}
	if n := seen.Load(); n == 0 || n > most {
		t.Errorf("the host has got %d bytes of %d", n, most)
	}
}
