package proxy_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/internal/test/eventually"
)

// last waits until the only flow of the journal has ended or was denied, returns it and removes it from the journal.
func (w *world) last() core.Flow {
	w.t.Helper()
	var list []core.Flow
	eventually.True(w.t, "the flow has ended", func() bool {
		w.journal.mu.Lock()
		defer w.journal.mu.Unlock()
		list = nil
		for _, f := range w.journal.begun {
			if f.Outcome == core.FlowDenied {
				list = append(list, f)
			}
		}
		list = append(list, w.journal.ended...)
		return len(list) > 0 && len(list) == len(w.journal.begun)
	})
	if len(list) != 1 {
		w.t.Fatalf("%d flows: %+v", len(list), list)
	}
	w.flows()
	return list[0]
}

// TestWhatWasCutIsAnEffect: when a host has executed a request, the flow counts as an effect even if the proxy
// withholds the answer. A request that never left is not an effect.
func TestWhatWasCutIsAnEffect(t *testing.T) {
	const path = "https://" + bankHost + "/change"
	begin := func(w http.ResponseWriter, _ *http.Request) { // an endless answer
		_ = http.NewResponseController(w).Flush()
	}
	never := func(w http.ResponseWriter, r *http.Request) {
		begin(w, r)
		<-r.Context().Done()
	}
	silent := func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // otherwise the server does not notice that the proxy has disconnected
		<-r.Context().Done()
	}
	for name, c := range map[string]struct {
		grant  func(*grant.Grant)
		body   string
		answer http.HandlerFunc
		end    func(*bank)
		sent   bool
		lost   bool // the connection ends at once: at the site, its end may overtake the data sent before
	}{
		"echo in the head": {answer: func(w http.ResponseWriter, r *http.Request) { w.Header().Set("X-Said", r.Header.Get("Authorization")) }, sent: true},
		"echo in the body": {answer: func(w http.ResponseWriter, r *http.Request) {
			begin(w, r)
			fmt.Fprint(w, r.Header.Get("Authorization"))
		}, sent: true},
		"encoding": {answer: func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Content-Encoding", "br") }, sent: true},
		"budget": {
			grant: func(g *grant.Grant) { g.MaxBytes = 1000 }, sent: true,
			answer: func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(make([]byte, 2000)) },
		},
		"revoked while it answers":     {answer: never, end: func(b *bank) { b.give() }, sent: true},
		"revoked before it answers":    {answer: silent, end: func(b *bank) { b.give() }, sent: true},
		"expired":                      {grant: func(g *grant.Grant) { g.Expires = time.Now().Add(6 * time.Second) }, answer: silent, end: func(*bank) {}, sent: true},
		"policy while it answers":      {answer: never, end: func(b *bank) { b.allow("other.example") }, sent: true},
		"policy before it answers":     {answer: silent, end: func(b *bank) { b.allow("other.example") }, sent: true},
		"a placeholder after a part":   {body: strings.Repeat("x", 100<<10) + grant.NewPlaceholder(), answer: silent, sent: true, lost: true},
		"a request that is not sent":   {grant: func(g *grant.Grant) { g.Methods = []string{"GET"} }},
		"an address that is forbidden": {grant: func(*grant.Grant) {}, end: func(b *bank) { b.names.set(bankHost, secretAddr) }},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBank(t, func(g *grant.Grant) {
				if c.grant != nil {
					c.grant(g)
				}
			})
			site := b.open(func(w http.ResponseWriter, r *http.Request) { c.answer(w, r) })
			if !c.sent && c.end != nil {
				c.end(b)
			}
			answered := make(chan string, 1)
			go func() {
				status, all := b.ask(b.guest(true, false), "POST", path, c.body, b.bearer()...)
				answered <- fmt.Sprint(status, " ", all)
			}()
			if c.sent && c.end != nil {
				eventually.True(t, "the request has arrived", func() bool { return site.requests.Load() == 1 })
				c.end(b)
			}
			if all := <-answered; strings.Contains(all, canary) || strings.HasPrefix(all, "200") && strings.HasSuffix(all, " <nil>") {
				t.Errorf("the guest got %s", all)
			}
			f := b.last()
			want := core.FlowDenied
			if c.sent {
				want = core.FlowCut
			}
			if f.Outcome != want || f.Changes() != c.sent || f.Reason == "" || !c.lost && (site.requests.Load() == 1) != c.sent {
				t.Errorf("%d requests arrived, and the flow is %+v", site.requests.Load(), f)
			}
		})
	}
}

// TestTunnelsThatAreCut: data that went through a tunnel before the policy ended it counts as sent.
func TestTunnelsThatAreCut(t *testing.T) {
	w := newWorld(t, "tcp://allowed.example:22")
	w.names.set("allowed.example", allowedAddr)
	l, err := net.Listen("tcp", allowedAddr+":22")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(c, c)
				_ = c.Close()
			}()
		}
	}()
	err = tunnelled(t, w, "allowed.example:22", func(c net.Conn) error {
		if _, err := io.WriteString(c, "change"); err != nil {
			return err
		}
		if _, err := io.ReadFull(c, make([]byte, 6)); err != nil {
			return err
		}
		w.allow()
		if n, err := c.Read(make([]byte, 1)); err == nil {
			return fmt.Errorf("the tunnel lives on: %d", n)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if f := w.last(); f.Outcome != core.FlowCut || !f.Changes() || f.Sent != 6 || f.Reason == "" {
		t.Errorf("the tunnel is %+v", f)
	}
	if err := tunnelled(t, w, "allowed.example:22", func(c net.Conn) error {
		_, err := c.Read(make([]byte, 1))
		return err
	}); err == nil {
		t.Error("a tunnel that is not allowed")
	}
	if f := w.last(); f.Outcome != core.FlowDenied || f.Changes() {
		t.Errorf("the refused tunnel is %+v", f)
	}
}
