package proxy_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// TestNoSlices: a request with a secret asks for the whole answer, and partial answers are refused. A request without a
// secret may ask for parts.
func TestNoSlices(t *testing.T) {
	b := newBank(t)
	var always atomic.Bool
	b.open(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Ranges", fmt.Sprint(len(r.Header["Range"])+len(r.Header["If-Range"])+len(r.Header["Request-Range"])))
		if always.Load() {
			w.Header().Set("Content-Range", "bytes 0-6/100")
			w.WriteHeader(http.StatusPartialContent)
			fmt.Fprint(w, strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")[:7])
			return
		}
		http.ServeContent(w, r, "x", time.Time{}, strings.NewReader("you said "+r.Header.Get("Authorization")))
	})
	part := []string{"Range", "bytes=16-22", "Request-Range", "bytes=16-22"}
	for _, two := range []bool{false, true} {
		c := b.guest(true, two)
		always.Store(false)
		status, all := b.ask(c, "GET", "https://"+bankHost+"/", "", append(b.bearer(), part...)...)
		if status == http.StatusPartialContent || strings.Contains(all, canary[:7]) {
			t.Errorf("a part: %d %s", status, all)
		}
		if status, all := b.ask(c, "GET", "https://"+bankHost+"/", "", part[:2]...); status != http.StatusRequestedRangeNotSatisfiable && status != http.StatusPartialContent || !strings.Contains(all, "X-Ranges: 1") {
			t.Errorf("a part without a secret: %d %s", status, all)
		}
		always.Store(true)
		if status, all := b.ask(c, "GET", "https://"+bankHost+"/", "", b.bearer()...); status != http.StatusForbidden || strings.Contains(all, canary[:7]) {
			t.Errorf("a part that nobody asked for: %d %s", status, all)
		}
	}
}

// TestNoExtensions: the data after an upgrade is not compressed.
func TestNoExtensions(t *testing.T) {
	b := newBank(t)
	var offered atomic.Value
	var insists atomic.Bool
	b.open(func(w http.ResponseWriter, r *http.Request) {
		offered.Store(r.Header.Get("Sec-Websocket-Extensions"))
		c, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		more := ""
		if insists.Load() {
			more = "Sec-WebSocket-Extensions: permessage-deflate\r\n"
		}
		fmt.Fprintf(rw, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n%s\r\n", more)
		_ = rw.Flush()
	})
	for _, insist := range []bool{false, true} {
		insists.Store(insist)
		s := openSocket(t, b.overTLS(), "/", "Host: "+bankHost, "Authorization: Bearer "+b.g.Placeholder, "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits")
		want := http.StatusSwitchingProtocols
		if insist {
			want = http.StatusForbidden
		}
		if s.resp.StatusCode != want || s.resp.Header.Get("Sec-Websocket-Extensions") != "" || offered.Load() != "" {
			t.Errorf("insists %v: %s %v, and the host was offered %q", insist, s.resp.Status, s.resp.Header, offered.Load())
		}
		_ = s.Close()
	}
}
