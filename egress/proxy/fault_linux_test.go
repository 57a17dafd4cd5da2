package proxy_test

import (
	"bufio"
	"crypto/tls"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/coppice-dev/coppice/core"
)

// answers runs a server at an address. It reads the head of each request and answers with the bytes that say returns.
// It speaks TLS for tlsNames, if there are any.
func (w *world) answers(addr string, say func(head string) string, tlsNames ...string) {
	w.t.Helper()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		w.t.Fatal(err)
	}
	if tlsNames != nil {
		l = tls.NewListener(l, w.ca.config(tlsNames...))
	}
	var wg sync.WaitGroup
	w.t.Cleanup(func() {
		_ = l.Close()
		wg.Wait()
	})
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				r := bufio.NewReader(c)
				var head strings.Builder
				for {
					line, err := r.ReadString('\n')
					if head.WriteString(line); err != nil || line == "\r\n" {
						break
					}
				}
				_, _ = io.WriteString(c, say(head.String()))
			})
		}
	})
}

// echoed returns the secret that a head contains.
func echoed(head string) string {
	_, rest, _ := strings.Cut(head, "Bearer ")
	secret, _, _ := strings.Cut(rest, "\r\n")
	return secret
}

// TestFaultsQuoteNothing: whatever a host answers instead of HTTP, including the secret that it received, the guest and
// the journal get only the class of the fault and no word of the answer.
func TestFaultsQuoteNothing(t *testing.T) {
	b := newBank(t)
	var say func(secret string) string
	var given string
	b.answers(allowedAddr+":443", func(head string) string {
		given = echoed(head)
		return say(given)
	}, bankHost)
	for what, answer := range map[string]func(string) string{
		"no HTTP at all":           func(s string) string { return s + "\r\n\r\n" },
		"a status that is none":    func(s string) string { return "HTTP/1.1 " + s + " OK\r\n\r\n" },
		"a version that is none":   func(s string) string { return "HTTP/" + s + " 200 OK\r\n\r\n" },
		"a header without a colon": func(s string) string { return "HTTP/1.1 200 OK\r\n" + s + "\r\n\r\n" },
		"a header with a bad name": func(s string) string { return "HTTP/1.1 200 OK\r\nX " + s + ": a\r\n\r\n" },
		"a length that is none":    func(s string) string { return "HTTP/1.1 200 OK\r\nContent-Length: " + s + "\r\n\r\n" },
		"two lengths": func(s string) string {
			return "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: " + s + "\r\n\r\n"
		},
		"an encoding that is none": func(s string) string { return "HTTP/1.1 200 OK\r\nTransfer-Encoding: " + s + "\r\n\r\n" },
		"an upgrade to nothing":    func(s string) string { return "HTTP/1.1 101 " + s + "\r\n\r\n" },
		"its end in the middle":    func(s string) string { return "HTTP/1.1 200 OK\r\nX-Echo: " + s },
		"a head beyond the bound": func(s string) string {
			return "HTTP/1.1 200 OK\r\nX: " + strings.Repeat(s+",", 1<<20/len(s)+2) + "\r\n\r\n"
		},
		"many heads before it":       func(s string) string { return strings.Repeat("HTTP/1.1 103 "+s+"\r\n\r\n", 200) },
		"chunks of an unknown size":  func(s string) string { return "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + s + "\r\n" },
		"an end before it has begun": func(string) string { return "" },
	} {
		t.Run(strings.ReplaceAll(what, " ", "_"), func(t *testing.T) {
			say = answer
			status, all := b.ask(b.guest(true, false), "GET", "https://"+bankHost+"/", "", b.bearer()...)
			if given != canary {
				t.Fatalf("the host was not given the secret: %q", given)
			}
			b.flowsWithout(t, all, canary[:9], "Bearer", "malformed HTTP", "bad ")
			if status != http.StatusBadGateway && status != http.StatusForbidden && !strings.Contains(what, "chunks") {
				t.Errorf("%d %s", status, all)
			}
			b.flows()
		})
	}
}

// flowsWithout fails if the guest or the journal got one of the words.
func (w *world) flowsWithout(t *testing.T, answer string, words ...string) {
	t.Helper()
	w.journal.mu.Lock()
	defer w.journal.mu.Unlock()
	list := w.journal.ended
	for _, f := range w.journal.begun {
		list = append(list, f)
	}
	encoded, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	for _, word := range words {
		if strings.Contains(answer, word) {
			t.Errorf("the guest was told %q: %s", word, answer)
		}
		if strings.Contains(string(encoded), word) {
			t.Errorf("the journal has %q: %s", word, encoded)
		}
	}
}

// TestFaultsHaveClasses: the answers to the guest and the journal tell the faults apart.
func TestFaultsHaveClasses(t *testing.T) {
	w := newWorld(t, "nobody.example", "garbage.example:81", "closes.example:81", "empty.example", "refused.example")
	for _, name := range []string{"refused.example", "garbage.example", "closes.example"} {
		w.names.set(name, allowedAddr)
	}
	w.names.set("empty.example")
	w.answers(allowedAddr+":81", func(head string) string {
		if strings.Contains(head, "closes") {
			return ""
		}
		return "garbage garbage\r\n\r\n"
	})
	for target, class := range map[string]string{
		"http://nobody.example/": "no_such_name", "http://refused.example/": "refused", "http://garbage.example:81/": "malformed_answer", "http://closes.example:81/": "closed",
		"http://empty.example/": "no_such_name",
	} {
		status, body := get(t, w.client(), target)
		if status != http.StatusBadGateway || !strings.Contains(body, `"`+class+": ") {
			t.Errorf("%s: %d %s, want %s", target, status, body, class)
		}
		w.journal.mu.Lock()
		for _, f := range w.journal.ended {
			if f.Outcome != core.FlowFailed || !strings.HasPrefix(f.Reason, class+": ") {
				t.Errorf("%s: the journal has %s %q", target, f.Outcome, f.Reason)
			}
		}
		w.journal.mu.Unlock()
		w.flows()
	}
}

// TestLongHeads: whatever a guest sends in any part of a head, its record and its answer are within their bounds.
func TestLongHeads(t *testing.T) {
	w := newWorld(t)
	w.names.set("x.example", allowedAddr)
	for what, head := range map[string]string{
		"a placeholder's header": "GET http://x.example/ HTTP/1.1\r\nHost: x.example\r\ncoppice-brokered-" + strings.Repeat("&", 60_000) + ": 1\r\n\r\n",
		"a method":               strings.Repeat("M", 60_000) + " http://x.example/ HTTP/1.1\r\nHost: x.example\r\n\r\n",
		"a path":                 "GET http://x.example/" + strings.Repeat("<", 60_000) + " HTTP/1.1\r\nHost: x.example\r\n\r\n",
		"a host":                 "GET http://" + strings.Repeat("x", 60_000) + "/ HTTP/1.1\r\nHost: " + strings.Repeat("x", 60_000) + "\r\n\r\n",
		"a base URL's grant":     "GET /.coppice/" + strings.Repeat("&", 60_000) + "/ HTTP/1.1\r\nHost: x\r\n\r\n",
		"CONNECT":                "CONNECT " + strings.Repeat("&", 60_000) + ":443 HTTP/1.1\r\nHost: x.example\r\n\r\n",
	} {
		answer := say(t, w.explicit.String(), head)
		w.journal.mu.Lock()
		for _, f := range w.journal.begun {
			encoded, err := json.Marshal(f)
			if err != nil || len(encoded) > core.MaxFlowEncoded {
				t.Errorf("%s: the record has %d bytes, %v", what, len(encoded), err)
			}
		}
		if len(w.journal.begun) == 0 {
			t.Errorf("%s: nothing was recorded", what)
		}
		w.journal.mu.Unlock()
		if answer == "" || len(answer) > 2<<10 {
			t.Errorf("%s: the answer has %d bytes", what, len(answer))
		}
		w.flows()
	}
}
