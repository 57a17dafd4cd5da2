package proxy_test

import (
	"encoding/json"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/coppice-dev/coppice/core"
)

// strangeHead returns a head that is almost valid, with random bytes of random size in one or more places.
func strangeHead(r *rand.Rand) string {
	text := func() string {
		b := make([]byte, []int{0, 1, 20, 300, 5000, 70_000}[r.IntN(6)])
		alphabet := []string{"", "&", "<", "\"\\", "\x00\x01\x7f\x1b", "abc", "%&", "\xc3\xa9", " \t:"}[r.IntN(9)]
		for i := range b {
			if b[i] = byte(r.Uint32()); alphabet != "" {
				b[i] = alphabet[r.IntN(len(alphabet))]
			}
		}
		return string(b)
	}
	or := func(usual string) string {
		switch r.IntN(4) {
		case 0:
			return text()
		case 1:
			return usual + text()
		}
		return usual
	}
	host := or("x.example")
	lines := []string{or([]string{"GET", "POST", "CONNECT", "M-SEARCH"}[r.IntN(4)]) + " " + or([]string{"http://" + host + "/", host + ":443", "/", "/.coppice/grants/a/b", "*"}[r.IntN(5)]) + " " + or("HTTP/1.1")}
	lines = append(lines, "Host: "+host)
	for range r.IntN(4) {
		lines = append(lines, or([]string{"X", "coppice-brokered-", "Content-Length", "Transfer-Encoding", "Cookie"}[r.IntN(5)])+": "+or("1"))
	}
	return strings.Join(lines, "\r\n") + "\r\n\r\n"
}

// send sends bytes to an address, ends its side, and returns the answer.
func send(t *testing.T, addr, head string) string {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(90 * time.Second))
	if _, err := io.WriteString(c, head); err == nil { // it may be refused before it was read completely
		_ = c.(*net.TCPConn).CloseWrite()
	}
	b, _ := io.ReadAll(c)
	return string(b)
}

// TestAnyHead: for any head of a request, the record of the outcome is within its bound and is valid text.
func TestAnyHead(t *testing.T) {
	w := newWorld(t, "x.example")
	w.names.set("x.example", allowedAddr)
	w.serve(allowedAddr+":80", nil)
	r := rand.New(rand.NewPCG(15, 1))
	records := 0
	for range 400 {
		head := strangeHead(r)
		if answer := send(t, w.explicit.String(), head); strings.HasPrefix(answer, "HTTP/1.1 4") && len(answer) > 3<<10 {
			t.Errorf("%.80q: the answer has %d bytes", head, len(answer))
		}
		w.journal.mu.Lock()
		list := w.journal.ended
		for _, f := range w.journal.begun {
			list = append(list, f)
		}
		for _, f := range list {
			records++
			encoded, err := json.Marshal(f)
			if err != nil || len(encoded) > core.MaxFlowEncoded || strings.ContainsFunc(f.Host+f.Method+f.Path+f.Reason, unicode.IsControl) {
				t.Errorf("%.80q: a record of %d bytes, %v: %.200s", head, len(encoded), err, encoded)
			}
		}
		w.journal.mu.Unlock()
		w.flows()
	}
	if records < 200 {
		t.Errorf("%d records were made of 400 heads", records)
	}
}
