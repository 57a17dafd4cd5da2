package proxy_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// TestEarlyData: what a client sends together with its CONNECT goes through the tunnel.
func TestEarlyData(t *testing.T) {
	w := newWorld(t, "tcp://allowed.example:22")
	w.names.set("allowed.example", allowedAddr)
	l, err := net.Listen("tcp", allowedAddr+":22")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	got := make(chan string, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(90 * time.Second))
		b := make([]byte, len("early data"))
		_, _ = io.ReadFull(c, b)
		got <- string(b)
	}()
	w.spoken("CONNECT allowed.example:22 HTTP/1.1\r\nHost: allowed.example:22\r\n\r\nearly data")
	select {
	case s := <-got:
		if s != "early data" {
			t.Errorf("the host got %q", s)
		}
	case <-time.After(promptly):
		t.Error("no tunnel was made")
	}
	wantFlows(t, w, "allowed tcp allowed.example:22")
}

// TestAnswersThatBreakOff: a client notices that it has only a part of an answer, also if the answer has no length.
func TestAnswersThatBreakOff(t *testing.T) {
	w := newWorld(t, "allowed.example")
	w.names.set("allowed.example", allowedAddr)
	w.serve(allowedAddr+":80", func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/length" {
			rw.Header().Set("Content-Length", "100")
		}
		fmt.Fprint(rw, "a part")
		_ = http.NewResponseController(rw).Flush()
		panic(http.ErrAbortHandler)
	})
	for _, path := range []string{"/chunks", "/length"} {
		for name, c := range map[string]*http.Client{"aware": w.client(), "unaware": w.unaware()} {
			resp, err := c.Get("http://allowed.example" + path)
			if err != nil {
				t.Fatal(err)
			}
			all, err := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			if err == nil || string(all) != "a part" {
				t.Errorf("%s, %s: %q, %v", path, name, all, err)
			}
		}
	}
	flows := w.flows()
	if len(flows) == 0 {
		t.Error("no flow was recorded")
	}
	for _, f := range flows {
		if !strings.HasPrefix(f, "failed http GET allowed.example:80") {
			t.Errorf("the flow is %q", f)
		}
	}
}
