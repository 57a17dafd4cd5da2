//go:build linux

package guestagent

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// TestConnectToLoopback reaches a server that listens on loopback only, sends it something and ends its own direction first.
func TestConnectToLoopback(t *testing.T) {
	t.Parallel()
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		l, err := net.Listen("tcp", address)
		if err != nil {
			t.Logf("no loopback address %s: %v", address, err)
			continue
		}
		t.Cleanup(func() { _ = l.Close() })
		go func() {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			b, _ := io.ReadAll(conn)
			_, _ = io.WriteString(conn, strings.ToUpper(string(b)))
			_ = conn.Close()
		}()
		a := newTestAgent(t)
		conn, err := net.Dial("tcp", strings.TrimPrefix(a.URL, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		_, port, _ := net.SplitHostPort(l.Addr().String())
		// The first bytes come with the request.
		if _, err := io.WriteString(conn, "GET /v1/ports/"+port+"/connect HTTP/1.1\r\nHost: guest\r\nConnection: Upgrade\r\nUpgrade: "+guestapi.UpgradeTCP+"\r\n\r\nhel"); err != nil {
			t.Fatal(err)
		}
		from := bufio.NewReader(conn)
		res, err := http.ReadResponse(from, nil) //nolint:bodyclose // it has none
		if err != nil || res.StatusCode != http.StatusSwitchingProtocols {
			t.Fatalf("%s: %+v, %v", address, res, err)
		}
		if _, err := io.WriteString(conn, "lo"); err != nil {
			t.Fatal(err)
		}
		if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(from); err != nil || string(b) != "HELLO" {
			t.Errorf("%s: %q, %v", address, b, err)
		}
	}
}

func TestConnectRefusals(t *testing.T) {
	t.Parallel()
	a := newTestAgent(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, free, _ := net.SplitHostPort(l.Addr().String())
	_ = l.Close()
	for _, c := range []struct {
		port, upgrade string
		code          core.Code
	}{
		{free, guestapi.UpgradeTCP, core.CodePortClosed},
		{free, "", core.CodeInvalidField},
		{"0", guestapi.UpgradeTCP, core.CodeInvalidField},
		{"65536", guestapi.UpgradeTCP, core.CodeInvalidField},
		{"x", guestapi.UpgradeTCP, core.CodeInvalidField},
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, a.URL+"/v1/ports/"+c.port+"/connect", nil)
		if err != nil {
			t.Fatal(err)
		}
		if c.upgrade != "" {
			req.Header.Set("Connection", "Upgrade")
			req.Header.Set("Upgrade", c.upgrade)
		}
		res, err := http.DefaultTransport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(res.Body)
		_ = res.Body.Close()
		if !strings.Contains(string(b), string(c.code)) {
			t.Errorf("port %s, upgrade %q: %d %s, want %s", c.port, c.upgrade, res.StatusCode, b, c.code)
		}
	}
}
