package proxy_test

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/egress/proxy"
)

// say sends bytes to an address, and returns the answer up to the moment when the other side closed.
func say(t *testing.T, addr string, parts ...string) string {
	t.Helper()
	c, err := net.DialTimeout("tcp", addr, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(90 * time.Second)) // less than the idle timeout of a connection
	for _, p := range parts {
		if _, err := io.WriteString(c, p); err != nil {
			break
		}
	}
	b, err := io.ReadAll(c)
	if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
		t.Errorf("the connection was left open after %q", b)
	}
	return string(b)
}

// hello returns the ClientHello of a client for a name; without SNI when the name is empty.
func hello(t *testing.T, name string, protos ...string) []byte {
	t.Helper()
	near, far := net.Pipe()
	go func() {
		_ = tls.Client(near, &tls.Config{ServerName: name, InsecureSkipVerify: true, NextProtos: protos}).HandshakeContext(t.Context())
	}()
	var all []byte
	_ = far.SetReadDeadline(time.Now().Add(time.Minute))
	for len(all) < 5 || len(all) < 5+int(binary.BigEndian.Uint16(all[3:])) {
		b := make([]byte, 32<<10)
		n, err := far.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, b[:n]...)
	}
	_ = far.Close()
	return all
}

// withExtension adds an extension to a ClientHello.
func withExtension(t *testing.T, hello []byte, kind uint16, body []byte) []byte {
	t.Helper()
	// record header 5, handshake header 4, version 2, random 32, session id, suites, compression, extensions
	at := 5 + 4 + 2 + 32
	at += 1 + int(hello[at])
	at += 2 + int(binary.BigEndian.Uint16(hello[at:]))
	at += 1 + int(hello[at])
	ext := binary.BigEndian.AppendUint16(nil, kind)
	ext = append(binary.BigEndian.AppendUint16(ext, uint16(len(body))), body...)
	out := slices.Insert(slices.Clone(hello), at+2, ext...)
	binary.BigEndian.PutUint16(out[at:], binary.BigEndian.Uint16(out[at:])+uint16(len(ext)))
	n := len(out) - 5
	binary.BigEndian.PutUint16(out[3:], uint16(n))
	out[6], out[7], out[8] = 0, byte((n-4)>>8), byte(n-4)
	return out
}

func sni(names ...string) []byte {
	var list []byte
	for _, n := range names {
		list = append(binary.BigEndian.AppendUint16(append(list, 0), uint16(len(n))), n...)
	}
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(list))), list...)
}

// TestNamesMustAgree: CONNECT, SNI and Host take every combination of an allowed name and a denied one. A connection
// gets through only when all three are the same allowed name.
func TestNamesMustAgree(t *testing.T) {
	w := newWorld(t, "allowed.example", "also.example")
	for _, n := range []string{"allowed.example", "also.example", "evil.example"} {
		w.names.set(n, allowedAddr)
	}
	over := w.serve(allowedAddr+":443", nil, "allowed.example", "also.example", "evil.example")
	plain := w.serve(allowedAddr+":80", nil)
	all := []string{"allowed.example", "also.example", "evil.example", ""}
	passed := 0
	for _, connect := range all[:3] {
		for _, name := range all {
			before := over.conns.Load()
			got := tunnelled(t, w, connect+":443", func(c net.Conn) error {
				return tls.Client(c, &tls.Config{ServerName: name, InsecureSkipVerify: true}).HandshakeContext(t.Context())
			})
			want := connect == name && name != "evil.example"
			if (got == nil) != want || over.conns.Load()-before != int64(len(map[bool][]int{true: {1}}[want])) {
				t.Errorf("CONNECT %s, SNI %q: %v, %d connections", connect, name, got, over.conns.Load()-before)
			}
			if want {
				passed++
			}
		}
		for _, host := range all {
			before := plain.requests.Load()
			got := tunnelled(t, w, connect+":80", func(c net.Conn) error {
				return request(c, "GET / HTTP/1.1\r\nHost: "+host+"\r\n\r\n")
			})
			want := connect == host && host != "evil.example"
			if (got == nil) != want || plain.requests.Load()-before != int64(len(map[bool][]int{true: {1}}[want])) {
				t.Errorf("CONNECT %s, Host %q: %v, %d requests", connect, host, got, plain.requests.Load()-before)
			}
		}
	}
	for _, target := range all[:3] {
		for _, host := range all {
			before := plain.requests.Load()
			c, err := net.Dial("tcp", w.explicit.String())
			if err != nil {
				t.Fatal(err)
			}
			got := request(c, "GET http://"+target+"/ HTTP/1.1\r\nHost: "+host+"\r\n\r\n")
			_ = c.Close()
			want := target == host && host != "evil.example"
			if (got == nil) != want || plain.requests.Load()-before != int64(len(map[bool][]int{true: {1}}[want])) {
				t.Errorf("target %s, Host %q: %v, %d requests", target, host, got, plain.requests.Load()-before)
			}
		}
	}
	if passed != 2 {
		t.Errorf("%d TLS combinations passed", passed)
	}
}

// tunnelled calls do with a tunnel to the target.
func tunnelled(t *testing.T, w *world, target string, do func(net.Conn) error) error {
	t.Helper()
	c, err := net.Dial("tcp", w.explicit.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(90 * time.Second))
	fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", target, target)
	b := make([]byte, 512)
	n, err := c.Read(b)
	if err != nil {
		return err
	}
	if !strings.HasPrefix(string(b[:n]), "HTTP/1.1 200") {
		return fmt.Errorf("CONNECT: %s", b[:n])
	}
	return do(c)
}

func request(c net.Conn, text string) error {
	_ = c.SetDeadline(time.Now().Add(90 * time.Second))
	if _, err := io.WriteString(c, text); err != nil {
		return err
	}
	b := make([]byte, 512)
	n, err := c.Read(b)
	if err == nil && !strings.HasPrefix(string(b[:n]), "HTTP/1.1 200") {
		err = fmt.Errorf("answer: %s", b[:n])
	}
	return err
}

// TestHellos: which ClientHellos the transparent listener accepts.
func TestHellos(t *testing.T) {
	w := newWorldWith(t, impatient, "allowed.example")
	w.names.set("allowed.example", allowedAddr)
	site := w.serve(allowedAddr+":443", nil, "allowed.example")
	plain := hello(t, "allowed.example")
	pieces := func(b []byte, n int) []string {
		var out []string
		for i := range n {
			out = append(out, string(b[i*len(b)/n:(i+1)*len(b)/n]))
		}
		return out
	}
	many := make([]string, 100)
	for i := range many {
		many[i] = strings.Repeat("x", 200)
	}
	noName := hello(t, "")
	for _, c := range []struct {
		name  string
		parts []string
		ok    bool
	}{
		{"plain", []string{string(plain)}, true},
		{"in 20 pieces", pieces(plain, 20), true},
		{"upper case", []string{string(hello(t, "ALLOWED.example"))}, true},
		{"other name", []string{string(hello(t, "evil.example"))}, false},
		{"no name", []string{string(noName)}, false},
		{"encrypted", []string{string(withExtension(t, plain, 0xfe0d, make([]byte, 200)))}, false},
		{"final dot", []string{string(withExtension(t, noName, 0, sni("allowed.example.")))}, false},
		{"two names", []string{string(withExtension(t, noName, 0, sni("allowed.example", "evil.example")))}, false},
		{"two extensions", []string{string(withExtension(t, plain, 0, sni("evil.example")))}, false},
		{"empty name", []string{string(withExtension(t, noName, 0, sni("")))}, false},
		{"address", []string{string(withExtension(t, noName, 0, sni("203.0.113.10")))}, false},
		{"NUL", []string{string(withExtension(t, noName, 0, sni("allowed.example\x00.evil.example")))}, false},
		{"an added one", []string{string(withExtension(t, noName, 0, sni("allowed.example")))}, true},
		{"too long", []string{string(hello(t, "allowed.example", many...))}, false},
		{"cut off", []string{string(plain[:len(plain)/2])}, false},
		{"nonsense", []string{"\x16\x03\x01\x00\x05hello"}, false},
	} {
		before := site.conns.Load()
		conn, err := net.Dial("tcp", w.redirected("443"))
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(90 * time.Second))
		for _, p := range c.parts {
			if _, err := io.WriteString(conn, p); err != nil {
				break
			}
		}
		b := make([]byte, 1)
		_, err = io.ReadFull(conn, b)
		_ = conn.Close()
		answered := err == nil && b[0] == 0x16
		if answered != c.ok || site.conns.Load()-before != int64(len(map[bool][]int{true: {1}}[c.ok])) {
			t.Errorf("%s: answered %v (%x, %v), %d connections", c.name, answered, b, err, site.conns.Load()-before)
		}
	}
	w.flows()
}

// TestRequestsThatAreRefused: every request that could be read in two ways is refused.
func TestRequestsThatAreRefused(t *testing.T) {
	w := newWorld(t, "allowed.example")
	w.names.set("allowed.example", allowedAddr)
	site := w.serve(allowedAddr+":80", nil)
	over := w.serve(allowedAddr+":443", nil, "allowed.example")
	big := strings.Repeat("a", 70<<10)
	for name, text := range map[string]string{
		"two hosts":              "GET http://allowed.example/ HTTP/1.1\r\nHost: allowed.example\r\nHost: allowed.example\r\n\r\n",
		"other host":             "GET http://allowed.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",
		"other host, HTTP":       "GET HTTP://allowed.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",
		"other host, evil HTTP":  "GET HtTp://evil.example/ HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
		"no host":                "GET http://allowed.example/ HTTP/1.1\r\n\r\n",
		"other port":             "GET http://allowed.example/ HTTP/1.1\r\nHost: allowed.example:8080\r\n\r\n",
		"user":                   "GET http://allowed.example@evil.example/ HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
		"user at allowed":        "GET http://a:b@allowed.example/ HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
		"length and chunks":      "POST http://allowed.example/ HTTP/1.1\r\nHost: allowed.example\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"two lengths":            "POST http://allowed.example/ HTTP/1.1\r\nHost: allowed.example\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
		"two encodings":          "POST http://allowed.example/ HTTP/1.1\r\nHost: allowed.example\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
		"odd encoding":           "POST http://allowed.example/ HTTP/1.1\r\nHost: allowed.example\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
		"space before colon":     "POST http://allowed.example/ HTTP/1.1\r\nHost: allowed.example\r\nContent-Length : 3\r\n\r\nabc",
		"folded":                 "GET http://allowed.example/ HTTP/1.1\r\nHost: allowed.example\r\nX: a\r\n b: c\r\n\r\n",
		"bare line ends":         "GET http://allowed.example/ HTTP/1.1\nHost: allowed.example\n\n\r\n\r\n",
		"NUL":                    "GET http://allowed.example/ HTTP/1.1\r\nHost: allowed.example\r\nX: \x00\r\n\r\n",
		"HTTP/0.9":               "GET http://allowed.example/\r\n\r\n",
		"HTTP/2.0":               "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
		"HTTP/1.2":               "GET http://allowed.example/ HTTP/1.2\r\nHost: allowed.example\r\n\r\n",
		"https":                  "GET https://allowed.example/ HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
		"file":                   "GET file:///etc/passwd HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
		"unix":                   "GET unix:/run/x HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
		"origin form":            "GET / HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
		"brackets":               "GET http://[allowed.example]/ HTTP/1.1\r\nHost: [allowed.example]\r\n\r\n",
		"percent":                "GET http://allowed%2eexample/ HTTP/1.1\r\nHost: allowed%2eexample\r\n\r\n",
		"backslash":              "GET http://evil.example\\@allowed.example/ HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
		"fragment":               "GET http://evil.example#allowed.example/ HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
		"too long":               "GET http://allowed.example/ HTTP/1.1\r\nHost: allowed.example\r\nX: " + big + "\r\n\r\n",
		"CONNECT without a port": "CONNECT allowed.example HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
		"CONNECT to port 0":      "CONNECT allowed.example:0 HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
		"CONNECT to 65536":       "CONNECT allowed.example:65536 HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
		"CONNECT to 443x":        "CONNECT allowed.example:443x HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
		"CONNECT with a path":    "CONNECT allowed.example:443/x HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
		"CONNECT with a user":    "CONNECT evil@allowed.example:443 HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
		"CONNECT, other Host":    "CONNECT allowed.example:443 HTTP/1.1\r\nHost: evil.example\r\n\r\n",
		"CONNECT to ssh":         "CONNECT allowed.example:22 HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
		"CONNECT to mysql":       "CONNECT allowed.example:3306 HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
		"nonsense":               "\x00\x01\x02\x03\r\n\r\n",
	} {
		got := say(t, w.explicit.String(), text)
		if status, _, _ := strings.Cut(strings.TrimPrefix(got, "HTTP/1.1 "), " "); status != "400" && status != "403" && status != "501" {
			t.Errorf("%s: %.200q", name, got)
		}
		if site.conns.Load()+over.conns.Load() != 0 {
			t.Fatalf("%s: the site was reached", name)
		}
	}
	w.flows()
	// The transparent listener refuses a request for a proxy, or for another port.
	for name, text := range map[string]string{
		"absolute":   "GET http://allowed.example/ HTTP/1.1\r\nHost: allowed.example\r\nConnection: close\r\n\r\n",
		"other port": "GET / HTTP/1.1\r\nHost: allowed.example:8080\r\nConnection: close\r\n\r\n",
		"CONNECT":    "CONNECT allowed.example:443 HTTP/1.1\r\nHost: allowed.example:443\r\nConnection: close\r\n\r\n",
		"other host": "GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
		"an address": "GET / HTTP/1.1\r\nHost: " + allowedAddr + "\r\nConnection: close\r\n\r\n",
		"two hosts":  "GET / HTTP/1.1\r\nHost: allowed.example\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
		"ssh":        "SSH-2.0-OpenSSH_9.2\r\n",
	} {
		got := say(t, w.redirected("80"), text)
		if status, _, _ := strings.Cut(strings.TrimPrefix(got, "HTTP/1.1 "), " "); got != "" && status != "400" && status != "403" {
			t.Errorf("transparent, %s: %.200q", name, got)
		}
		if site.conns.Load()+over.conns.Load() != 0 {
			t.Fatalf("transparent, %s: the site was reached", name)
		}
	}
}

// TestTheSecondRequest: the proxy decides on each of several requests on one connection.
func TestTheSecondRequest(t *testing.T) {
	w := newWorld(t, "allowed.example")
	w.names.set("allowed.example", allowedAddr)
	w.names.set("evil.example", allowedAddr)
	site := w.serve(allowedAddr+":80", nil)
	got := say(t, w.redirected("80"), "GET /1 HTTP/1.1\r\nHost: allowed.example\r\n\r\nGET /2 HTTP/1.1\r\nHost: evil.example\r\n\r\nGET /3 HTTP/1.1\r\nHost: allowed.example\r\nConnection: close\r\n\r\n")
	if strings.Count(got, "HTTP/1.1 200") != 2 || strings.Count(got, "HTTP/1.1 403") != 1 || site.requests.Load() != 2 {
		t.Errorf("%d requests reached the site; the guest got %s", site.requests.Load(), got)
	}
	wantFlows(t, w, "allowed http GET allowed.example:80/1 200", "denied http GET evil.example:80/2", "allowed http GET allowed.example:80/3 200")
}

// TestAddressesThatAreNeverReached: an allowed name that resolves to such an address is denied.
func TestAddressesThatAreNeverReached(t *testing.T) {
	w := newWorld(t, "allowed.example", "tcp://allowed.example:22")
	inner := w.serve(secretAddr+":80", nil)
	meta := w.serve(metadata+":80", nil)
	good := w.serve(allowedAddr+":80", nil)
	for _, a := range []string{secretAddr, metadata, "127.0.0.1", "0.0.0.0", "::1", "::", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::", "fe80::1", "100.100.100.200", "10.0.0.1"} {
		for _, list := range [][]string{{a}, {allowedAddr, a}, {a, allowedAddr}} {
			w.names.set("allowed.example", list...)
			if status, body := get(t, w.client(), "http://allowed.example/"); status != http.StatusForbidden {
				t.Errorf("%v: %d %s", list, status, body)
			}
		}
	}
	for _, f := range w.flows() {
		if f != "denied http GET allowed.example:80/" {
			t.Errorf("flow %s", f)
		}
	}
	if inner.conns.Load()+meta.conns.Load()+good.conns.Load() != 0 {
		t.Error("something was reached")
	}
	// The addresses themselves, without a rule that names them.
	for _, a := range []string{secretAddr, metadata, "127.0.0.1", "[::1]", "[::ffff:169.254.169.254]", "2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "127.1", "0"} {
		if status, body := get(t, w.client(), "http://"+a+"/"); status != http.StatusForbidden && status != http.StatusBadRequest {
			t.Errorf("%s: %d %s", a, status, body)
		}
	}
	if inner.conns.Load()+meta.conns.Load() != 0 {
		t.Error("something was reached by its address")
	}
}

// TestRebinding: for a name that resolves to another address each time, only permitted addresses are reached.
func TestRebinding(t *testing.T) {
	w := newWorld(t, "allowed.example")
	inner := w.serve(secretAddr+":80", nil)
	meta := w.serve(metadata+":80", nil)
	good := w.serve(allowedAddr+":80", nil)
	w.names.next = func(string) []string {
		return [][]string{{allowedAddr}, {metadata}, {secretAddr}, {allowedAddr, metadata}, {"127.0.0.1"}}[rand.IntN(5)]
	}
	c := w.client()
	c.Transport.(*http.Transport).DisableKeepAlives = true
	ok := 0
	for range 1000 {
		switch status, body := get(t, c, "http://allowed.example/"); status {
		case http.StatusOK:
			ok++
		case http.StatusForbidden:
		default:
			t.Fatalf("%d %s", status, body)
		}
	}
	if inner.conns.Load()+meta.conns.Load() != 0 || ok == 0 || good.requests.Load() != int64(ok) {
		t.Errorf("%d got through of 1,000, the site saw %d; %d connections to what is internal", ok, good.requests.Load(), inner.conns.Load()+meta.conns.Load())
	}
}

// TestSlowGuests: a connection that never says what it wants is closed, and others do not wait for it.
func TestSlowGuests(t *testing.T) {
	w := newWorldWith(t, func(c *proxy.Config) { c.FirstTime = time.Second }, "allowed.example")
	w.names.set("allowed.example", allowedAddr)
	w.serve(allowedAddr+":80", nil)
	for _, addr := range []string{w.explicit.String(), w.redirected("443")} {
		for _, first := range []string{"", "GET http://allow", "\x16\x03\x01", "CONNECT allowed.example:443 HTTP/1.1\r\n"} {
			say(t, addr, first) // fails if the connection stays open
		}
	}
}

// TestNothingUnrecorded: a flow that the journal cannot record does not happen.
func TestNothingUnrecorded(t *testing.T) {
	w := newWorld(t, "allowed.example")
	w.names.set("allowed.example", allowedAddr)
	site := w.serve(allowedAddr+":80", nil)
	over := w.serve(allowedAddr+":443", nil, "allowed.example")
	w.journal.fails = errors.New("disk full")
	if status, body := get(t, w.client(), "http://allowed.example/"); status != http.StatusServiceUnavailable || !strings.Contains(body, "cannot record") {
		t.Errorf("%d %s", status, body)
	}
	for _, c := range []*http.Client{w.client(), w.unaware()} {
		if status, body := get(t, c, "https://allowed.example/"); status != 0 {
			t.Errorf("%d %s", status, body)
		}
	}
	if site.conns.Load()+over.conns.Load() != 0 || len(w.names.asked) != 0 {
		t.Errorf("%d connections, %q asked for", site.conns.Load()+over.conns.Load(), w.names.asked)
	}
}

// TestRawTunnels: other protocols reach hosts for which there is a rule, by CONNECT or by the address that the resolver
// gave.
func TestRawTunnels(t *testing.T) {
	w := newWorld(t, "tcp://allowed.example:22", "also.example")
	w.names.set("allowed.example", allowedAddr)
	w.names.set("also.example", allowedAddr)
	for _, port := range []string{"22", "443"} {
		l, err := net.Listen("tcp", allowedAddr+":"+port)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = io.WriteString(c, "SSH-2.0-test\r\n") // the server speaks first
				_, _ = io.Copy(c, c)
				_ = c.Close()
			}
		}()
	}
	echo := func(c net.Conn) error {
		if _, err := io.WriteString(c, "ping"); err != nil {
			return err
		}
		_ = c.(*net.TCPConn).CloseWrite()
		b, err := io.ReadAll(c)
		if err == nil && !bytes.Equal(b, []byte("SSH-2.0-test\r\nping")) {
			err = fmt.Errorf("got %q", b)
		}
		return err
	}
	if err := tunnelled(t, w, "allowed.example:22", echo); err != nil {
		t.Error(err)
	}
	if err := tunnelled(t, w, "also.example:443", echo); err == nil {
		t.Error("a raw tunnel to a port of TLS")
	}
	if err := tunnelled(t, w, "also.example:22", echo); err == nil {
		t.Error("a raw tunnel to a host that may not have one")
	}
	got := w.flows()
	if len(got) != 3 || got[0] != "allowed tcp allowed.example:22" || !strings.HasPrefix(got[1], "denied tcp also.example:443") {
		t.Errorf("%q", got)
	}
}

// TestRevocation: a flow under way ends when the rule that allowed it is removed.
func TestRevocation(t *testing.T) {
	w := newWorld(t, "allowed.example", "other.example")
	for _, n := range []string{"allowed.example", "other.example"} {
		w.names.set(n, allowedAddr)
	}
	release := make(chan struct{})
	slow := func(rw http.ResponseWriter, _ *http.Request) {
		rw.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(rw).Flush()
		<-release
	}
	w.serve(allowedAddr+":443", slow, "allowed.example", "other.example")
	w.serve(allowedAddr+":80", slow)
	defer close(release)
	urls := []string{"https://allowed.example/", "http://allowed.example/", "https://other.example/", "http://other.example/"}
	bodies := map[string]io.Reader{}
	for _, u := range urls {
		resp, err := w.client().Get(u)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		bodies[u] = resp.Body
	}
	began := time.Now()
	w.allow("other.example")
	for _, u := range urls[:2] {
		if b, err := io.ReadAll(bodies[u]); err == nil || os.IsTimeout(err) {
			t.Errorf("%s ended with %q, %v, as if nothing had happened", u, b, err)
		}
	}
	if took := time.Since(began); took > promptly {
		t.Errorf("it took %s", took)
	}
	if status, body := get(t, w.client(), "http://allowed.example/"); status != http.StatusForbidden {
		t.Errorf("%d %s", status, body)
	}
	for _, u := range urls[2:] { // these are still allowed
		ended := make(chan struct{})
		go func() {
			_, _ = bodies[u].Read(make([]byte, 1))
			close(ended)
		}()
		select {
		case <-ended:
			t.Errorf("%s ended, too", u)
		case <-time.After(100 * time.Millisecond):
		}
	}
	w.server.Remove(w.id)
	if c, err := net.DialTimeout("tcp", w.explicit.String(), time.Minute); err == nil {
		_ = c.Close()
		t.Error("the listener of a sandbox that was removed is open")
	}
	got := w.flows()
	slices.Sort(got)
	want := []string{
		"allowed tls other.example:443", "cut http GET allowed.example:80/ 200", "cut tls allowed.example:443", "denied http GET allowed.example:80/", "failed http GET other.example:80/ 200",
	}
	if !slices.Equal(got, want) {
		t.Errorf("flows %q, want %q", got, want)
	}
	if ok, err := w.server.SetRules("sbx_none", w.rules); ok || err != nil {
		t.Error("a sandbox that is not there has got rules", err)
	}
}

// TestUpgrade: websockets work, and end when the rule that allowed them is removed.
func TestUpgrade(t *testing.T) {
	w := newWorld(t, "allowed.example")
	w.names.set("allowed.example", allowedAddr)
	w.serve(allowedAddr+":80", func(rw http.ResponseWriter, _ *http.Request) {
		c, buf, err := http.NewResponseController(rw).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		_, _ = io.Copy(c, buf)
	})
	for _, addr := range []string{w.explicit.String(), w.redirected("80")} {
		target := "/"
		if addr == w.explicit.String() {
			target = "http://allowed.example/"
		}
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(90 * time.Second))
		fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: allowed.example\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", target)
		b := make([]byte, 1024)
		n, err := c.Read(b)
		if err != nil || !strings.HasPrefix(string(b[:n]), "HTTP/1.1 101") {
			t.Fatalf("%q, %v", b[:n], err)
		}
		_, _ = io.WriteString(c, "ping")
		if n, err = c.Read(b); string(b[:n]) != "ping" {
			t.Errorf("%q, %v", b[:n], err)
		}
		w.allow()
		if n, err = c.Read(b); err == nil {
			t.Errorf("the connection lives on: %q", b[:n])
		}
		_ = c.Close()
		w.allow("allowed.example")
	}
	wantFlows(t, w, "cut http GET allowed.example:80/ 101", "cut http GET allowed.example:80/ 101")
}
