package e2e

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// answer is what a malicious upstream says to a request. secret is what it was shown.
type answer struct {
	name string
	say  func(c net.Conn, secret string)
}

// upstream answers requests that carry Mallory's secret as badly as it can: cut at every byte, without end, with the secret in every
// place of the answer. The guest must not get the secret, and the proxy must live.
func (x *assault) upstream() {
	list := answers()
	x.world.Raw(echoHost, func(c net.Conn, r *http.Request) {
		n, err := strconv.Atoi(strings.TrimPrefix(r.URL.Path, "/attack/"))
		if err != nil || n < 0 || n >= len(list) {
			_, _ = io.WriteString(c, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
			return
		}
		list[n].say(c, strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer "))
	})
	if _, err := x.mallory.PutGrant(x.t.Context(), x.ws, "echo", coppice.PutGrantRequest{
		AllowedHosts: []string{echoHost}, Mode: "base_url", Secret: x.secret, Env: "TWO", BaseURLEnv: "TWO_BASE_URL",
	}); err != nil {
		x.t.Fatal(err)
	}
	shown := len(x.world.Shown())
	const asks = `i=%d; while [ $i -lt %d ]; do echo "== $i"; curl -sS -i -m 25 --max-filesize 100000000 -o - -H "Authorization: Bearer $TWO" "$TWO_BASE_URL/attack/$i" 2>&1 | head -c 4096 | tr -d '\000'; echo; i=$((i+1)); done`
	const some = 24 // in one program
	for from := 0; from < len(list); from += some {
		to := min(from+some, len(list))
		got := x.sh(fmt.Sprintf(asks, from, to))
		pieces := strings.Split(got, "== ")
		for i := from; i < to; i++ {
			var err error
			if len(pieces) != to-from+1 {
				err = fmt.Errorf("the guest's program ended early: %.300q", got)
			} else if strings.Contains(pieces[i-from+1], x.secret) {
				err = fmt.Errorf("the guest has the secret: %.300q", pieces[i-from+1])
			}
			x.held("upstream", list[i].name, err)
		}
	}
	if n := len(x.world.Shown()) - shown; n < len(list)/2 {
		x.t.Errorf("the upstream was shown the secret %d times: the attacks did not reach it", n)
	}
	if err := x.mallory.RevokeGrant(x.t.Context(), x.ws, "echo"); err != nil {
		x.t.Error(err)
	}
}

// answers are those of the malicious upstream.
func answers() []answer {
	var list []answer
	add := func(name string, say func(c net.Conn, secret string)) { list = append(list, answer{name, say}) }
	text := func(name, format string) {
		add(name, func(c net.Conn, secret string) {
			_, _ = io.WriteString(c, strings.ReplaceAll(format, "SECRET", secret))
		})
	}
	const whole = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nX-Echo: SECRET\r\nContent-Length: 40\r\n\r\nSECRET"
	for n := range len(whole) + 40 {
		add(fmt.Sprintf("an answer that is cut at byte %d", n), func(c net.Conn, secret string) {
			b := strings.ReplaceAll(whole, "SECRET", secret)
			_, _ = io.WriteString(c, b[:min(n, len(b))])
		})
	}
	for _, place := range []struct{ name, format string }{
		{"the status line", "HTTP/1.1 200 SECRET\r\nContent-Length: 0\r\n\r\n"},
		{"a malformed status", "HTTP/1.1 SECRET OK\r\n\r\n"},
		{"a malformed version", "HTTP/SECRET 200 OK\r\n\r\n"},
		{"a line that is no header", "HTTP/1.1 200 OK\r\nSECRET\r\n\r\n"},
		{"a header's name", "HTTP/1.1 200 OK\r\nSECRET: x\r\n\r\n"},
		{"a header of NULs", "HTTP/1.1 200 OK\r\nX: \x00SECRET\r\n\r\n"},
		{"the length", "HTTP/1.1 200 OK\r\nContent-Length: SECRET\r\n\r\n"},
		{"two lengths", "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: SECRET\r\n\r\nx"},
		{"the transfer encoding", "HTTP/1.1 200 OK\r\nTransfer-Encoding: SECRET\r\n\r\n"},
		{"a chunk's size", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nSECRET\r\nx\r\n0\r\n\r\n"},
		{"a chunk's extension", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;SECRET\r\nx\r\n0\r\n\r\n"},
		{"a trailer", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-T\r\n\r\n1\r\nx\r\n0\r\nX-T: SECRET\r\n\r\n"},
		{"a malformed trailer", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nSECRET\r\n\r\n"},
		{"an early hint", "HTTP/1.1 103 Early Hints\r\nLink: <SECRET>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"},
		{"a redirect", "HTTP/1.1 302 Found\r\nLocation: https://mallory.example.com/SECRET\r\nContent-Length: 0\r\n\r\n"},
		{"a cookie", "HTTP/1.1 200 OK\r\nSet-Cookie: a=SECRET\r\nContent-Length: 0\r\n\r\n"},
		{"a folded header", "HTTP/1.1 200 OK\r\nX-A: b\r\n SECRET\r\nContent-Length: 0\r\n\r\n"},
		{"an encoding that is none", "HTTP/1.1 200 OK\r\nContent-Encoding: SECRET\r\nContent-Length: 1\r\n\r\nx"},
		{"a body that says gzip and is not", "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 60\r\n\r\nSECRET" + strings.Repeat(" ", 60)},
		{"an upgrade", "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nSECRET"},
		{"what follows the answer", "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nxHTTP/1.1 200 OK\r\nX: SECRET\r\n\r\n"},
		{"no head at all", "SECRET"},
		{"an answer of HTTP/0.9", "<html>SECRET</html>"},
		{"a preface of HTTP/2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nSECRET"},
	} {
		text("the secret in "+place.name, place.format)
	}
	add("hints without end", func(c net.Conn, secret string) {
		for range 100_000 {
			if _, err := io.WriteString(c, "HTTP/1.1 103 Early Hints\r\nX: "+secret+"\r\n\r\n"); err != nil {
				return
			}
		}
	})
	add("a header without end", func(c net.Conn, _ string) {
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nX: ")
		_, _ = io.Copy(c, io.LimitReader(forever("x"), 64<<20))
	})
	add("headers without end", func(c net.Conn, _ string) {
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n")
		_, _ = io.Copy(c, io.LimitReader(forever("X: y\r\n"), 64<<20))
	})
	add("a bomb of gzip", func(c net.Conn, _ string) { bombOf(c, 256<<20) })
	add("an answer that never comes", func(c net.Conn, _ string) { _, _ = io.Copy(io.Discard, c) })
	add("a head at a byte a second", func(c net.Conn, secret string) { drop(c, "HTTP/1.1 200 OK\r\nX-A: "+secret) })
	add("a body at a byte a second", func(c net.Conn, secret string) {
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
		drop(c, secret)
	})
	return list
}

type repeated struct {
	text string
	at   int
}

// forever repeats a text.
func forever(text string) io.Reader { return &repeated{text: text} }

func (r *repeated) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = r.text[r.at%len(r.text)]
		r.at++
	}
	return len(p), nil
}

func bombOf(c net.Conn, n int64) {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = io.Copy(z, io.LimitReader(forever("\x00"), n))
	_ = z.Close()
	_, _ = fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n", b.Len())
	_, _ = b.WriteTo(c)
}

// drop sends a text at a byte a second, for 20 s at most.
func drop(c net.Conn, text string) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for i := range len(text) {
		if _, err := c.Write([]byte{text[i]}); err != nil {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}
