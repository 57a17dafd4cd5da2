package proxy

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// bytesConn is a connection that delivers some bytes and then ends.
type bytesConn struct {
	net.Conn // nil: no other method is called
	r        *bytes.Reader
}

func (c bytesConn) Read(p []byte) (int, error)    { return c.r.Read(p) }
func (bytesConn) SetReadDeadline(time.Time) error { return nil }

// FuzzHead: net/http also accepts every head that is accepted here, with the same method, target, host and length.
func FuzzHead(f *testing.F) {
	for _, s := range []string{
		"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n", "CONNECT a.example:443 HTTP/1.1\r\nHost: a.example:443\r\n\r\nmore", "GET / HTTP/1.0\r\n\r\n", "GET / HTTP/1.1\r\nHost:\r\n\r\n",
		"POST / HTTP/1.1\r\nhost: a\r\nTransfer-Encoding: chunked\r\n\r\n", "GET / HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\n", "GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding : chunked\r\n\r\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		c := &peeked{Conn: bytesConn{r: bytes.NewReader(b)}}
		h, err := readHead(c, time.Second)
		if !bytes.Equal(b[:min(len(b), maxHead)], c.ahead[:min(len(c.ahead), len(b), maxHead)]) {
			t.Fatalf("%q is not what will be read again: %q", b, c.ahead)
		}
		if err != nil {
			return
		}
		r := bufio.NewReaderSize(bytes.NewReader(b), maxHead+4096)
		req, err := http.ReadRequest(r)
		if err != nil {
			return // net/http is stricter, and refuses a head that was accepted here
		}
		if req.Method != h.method || req.RequestURI != h.target {
			t.Fatalf("%q: %s %s here and %s %s there", b, h.method, h.target, req.Method, req.RequestURI)
		}
		if !req.URL.IsAbs() && h.method != http.MethodConnect && req.URL.Host == "" && req.Host != h.host {
			t.Fatalf("%q: the host is %q here and %q there", b, h.host, req.Host)
		}
		rest, err := io.ReadAll(r)
		if err != nil || len(req.TransferEncoding) == 0 && string(rest) != string(b[h.size:]) {
			t.Fatalf("%q: the head ends after %d bytes here, and there %q is left", b, h.size, rest)
		}
	})
}

// helloName is a second parser: it returns the name that a ClientHello asks for, if the first record has exactly one
// extension with exactly one name.
func helloName(b []byte) (name string, extensions int, ok bool) {
	take := func(n int) []byte {
		if n > len(b) {
			b = nil
			ok = false
			return nil
		}
		out := b[:n]
		b = b[n:]
		return out
	}
	length := func(size int) int {
		n := 0
		for _, c := range take(size) {
			n = n<<8 | int(c)
		}
		return n
	}
	ok = true
	if head := take(5); !ok || head[0] != 0x16 {
		return "", 0, false
	}
	if kind := take(1); !ok || kind[0] != 1 {
		return "", 0, false
	}
	body := take(length(3))
	b = body
	take(2 + 32)
	take(length(1))
	take(length(2))
	take(length(1))
	b = take(length(2))
	for ok && len(b) > 0 {
		kind := length(2)
		ext := take(length(2))
		if kind == 0 && ok && len(ext) >= 5 && ext[2] == 0 {
			extensions++
			n := int(binary.BigEndian.Uint16(ext[3:]))
			if len(ext) != 5+n {
				return "", extensions, false
			}
			name = string(ext[5:])
		}
	}
	return name, extensions, ok
}

// FuzzHello: the proxy decides on the same name that the second parser finds, and the bytes that it read can be read
// again.
func FuzzHello(f *testing.F) {
	f.Add([]byte("\x16\x03\x01\x00\x05hello"))
	f.Add(helloOf(f, "allowed.example"))
	f.Add(helloOf(f, ""))
	f.Fuzz(func(t *testing.T, b []byte) {
		c := &peeked{Conn: bytesConn{r: bytes.NewReader(b)}}
		h, err := readHello(t.Context(), c)
		again, rerr := io.ReadAll(c)
		if rerr != nil || !bytes.Equal(again, b) {
			t.Fatalf("%x is read again as %x (%v)", b, again, rerr)
		}
		if err != nil || len(b) < 5 || int(binary.BigEndian.Uint16(b[3:])) < 4+int(b[6])<<16+int(b[7])<<8+int(b[8]) {
			return // refused, or in several records
		}
		name, n, ok := helloName(b)
		if !ok || n > 1 || !strings.EqualFold(name, h.String()) && !strings.HasPrefix(h.String(), "xn--") && !strings.Contains(h.String(), ".xn--") {
			t.Fatalf("%x: %q here; %q, %d times, %v there", b, h, name, n, ok)
		}
	})
}

func helloOf(f *testing.F, name string) []byte {
	f.Helper()
	b, err := clientHello(name)
	if err != nil {
		f.Fatal(err)
	}
	return b
}
