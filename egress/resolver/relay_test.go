package resolver_test

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/coppice-dev/coppice/egress/resolver"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testaddr"
)

// nameServer is a real name server, which answers as its function says and remembers what it was asked.
type nameServer struct {
	addr string

	mu    sync.Mutex
	asked []*dns.Msg
}

func newNameServer(t *testing.T, answer func(w dns.ResponseWriter, q, m *dns.Msg)) *nameServer {
	t.Helper()
	s := &nameServer{}
	udp, err := net.ListenPacket("udp", testaddr.New())
	if err != nil {
		t.Fatal(err)
	}
	s.addr = udp.LocalAddr().String()
	tcp, err := net.Listen("tcp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		s.mu.Lock()
		s.asked = append(s.asked, q.Copy())
		s.mu.Unlock()
		m := new(dns.Msg)
		m.SetReply(q)
		m.RecursionAvailable = true
		answer(w, q, m)
		_ = w.WriteMsg(m)
	})
	var serving sync.WaitGroup
	t.Cleanup(serving.Wait)
	for _, d := range []*dns.Server{{PacketConn: udp, Handler: handler}, {Listener: tcp, Handler: handler}} {
		up := make(chan struct{})
		d.NotifyStartedFunc = func() { close(up) }
		serving.Go(func() { _ = d.ActivateAndServe() })
		<-up
		t.Cleanup(func() { _ = d.Shutdown() })
	}
	return s
}

func (s *nameServer) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.asked)
}

// relayTo serves a resolver that asks servers.
func relayTo(t *testing.T, servers ...string) *world {
	t.Helper()
	w := &world{}
	w.serve(t, resolver.Config{Servers: func() []string { return servers }})
	return w
}

func (w *world) counted(a resolver.Answer) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.counts[a]
}

func exchange(t *testing.T, network, addr string, q *dns.Msg) *dns.Msg {
	t.Helper()
	r, _, err := (&dns.Client{Net: network, Timeout: time.Minute}).Exchange(q, addr)
	if err != nil {
		t.Fatalf("%s %s: %v", network, q.Question[0].Name, err)
	}
	if r.Id != q.Id {
		t.Errorf("the answer has id %d, the question %d", r.Id, q.Id)
	}
	return r
}

func question(name string, kind uint16) *dns.Msg { return new(dns.Msg).SetQuestion(name, kind) }

// TestRelay: what the name servers say is answered, of any type and any length, and of a guest's message only the question arrives there.
func TestRelay(t *testing.T) {
	t.Parallel()
	ns := newNameServer(t, func(w dns.ResponseWriter, q, m *dns.Msg) {
		hdr := dns.RR_Header{Name: q.Question[0].Name, Rrtype: q.Question[0].Qtype, Class: dns.ClassINET, Ttl: 7}
		switch {
		case strings.HasPrefix(hdr.Name, "absent."):
			m.Rcode = dns.RcodeNameError
		case hdr.Rrtype == dns.TypeA:
			m.Answer = []dns.RR{&dns.A{Hdr: hdr, A: net.IPv4(203, 0, 113, 5)}}
		case hdr.Rrtype == dns.TypeTXT:
			for range 40 {
				m.Answer = append(m.Answer, &dns.TXT{Hdr: hdr, Txt: []string{strings.Repeat("x", 100)}})
			}
		case hdr.Rrtype == dns.TypeMX:
			m.Answer = []dns.RR{&dns.MX{Hdr: hdr, Preference: 5, Mx: "mail.example."}}
		}
		if w.RemoteAddr().Network() == "udp" {
			m.Truncate(dns.MinMsgSize)
		}
	})
	w := relayTo(t, ns.addr)
	for _, network := range []string{"udp", "tcp"} {
		r := exchange(t, network, w.addr, question("Some.Example.", dns.TypeA))
		if len(r.Answer) != 1 || r.Answer[0].(*dns.A).A.String() != "203.0.113.5" || r.Question[0].Name != "Some.Example." {
			t.Errorf("over %s: %v", network, r)
		}
		if r = exchange(t, network, w.addr, question("example.", dns.TypeMX)); len(r.Answer) != 1 {
			t.Errorf("a record of another type over %s: %v", network, r)
		}
		if r = exchange(t, network, w.addr, question("absent.example.", dns.TypeA)); r.Rcode != dns.RcodeNameError {
			t.Errorf("an absent name over %s: %v", network, r)
		}
	}
	if r := exchange(t, "udp", w.addr, question("long.example.", dns.TypeTXT)); !r.Truncated { // the client has room for 512 bytes
		t.Errorf("a long answer over UDP: %v", r)
	}
	if r := exchange(t, "tcp", w.addr, question("long.example.", dns.TypeTXT)); r.Truncated || len(r.Answer) != 40 {
		t.Errorf("a long answer over TCP: truncated %v, %d records", r.Truncated, len(r.Answer))
	}

	q := question("tell.example.", dns.TypeA)
	q.SetEdns0(4096, true)
	q.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_LOCAL{Code: 65001, Data: []byte("of the guest")}}
	q.Extra = append(q.Extra, &dns.TXT{Hdr: dns.RR_Header{Name: "more.example.", Rrtype: dns.TypeTXT, Class: dns.ClassINET}, Txt: []string{"of the guest"}})
	exchange(t, "udp", w.addr, q)
	ns.mu.Lock()
	last := ns.asked[len(ns.asked)-1]
	ns.mu.Unlock()
	if opt := last.IsEdns0(); len(last.Extra) != 1 || opt == nil || !opt.Do() || len(opt.Option) != 0 {
		t.Errorf("the name server got %v", last)
	}

	before := ns.count()
	for _, q := range []*dns.Msg{question("example.", dns.TypeAXFR), question("example.", dns.TypeIXFR), {MsgHdr: dns.MsgHdr{Id: 5, Opcode: dns.OpcodeUpdate}, Question: question("example.", dns.TypeSOA).Question}} {
		if r := exchange(t, "udp", w.addr, q); r.Rcode != dns.RcodeRefused && r.Rcode != dns.RcodeNotImplemented {
			t.Errorf("%v: %v", q, r)
		}
	}
	if n := ns.count() - before; n != 0 {
		t.Errorf("%d messages arrived that are not questions for names", n)
	}
	// The library refuses the update by itself.
	if w.counted(resolver.Refused) != 2 || w.counted(resolver.Relayed) != 9 {
		t.Errorf("counted %v", w.counts)
	}
}

// TestRelayServers: a server that cannot answer is followed by the next; without any, the guest is told.
func TestRelayServers(t *testing.T) {
	t.Parallel()
	gone, err := net.Listen("tcp", testaddr.New())
	if err != nil {
		t.Fatal(err)
	}
	nobody := gone.Addr().String()
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	unwilling := newNameServer(t, func(_ dns.ResponseWriter, _, m *dns.Msg) { m.Rcode = dns.RcodeRefused })
	ns := newNameServer(t, func(_ dns.ResponseWriter, q, m *dns.Msg) {
		m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET}, A: net.IPv4(203, 0, 113, 5)}}
	})
	for _, network := range []string{"udp", "tcp"} {
		w := relayTo(t, nobody, unwilling.addr, ns.addr)
		if r := exchange(t, network, w.addr, question("example.", dns.TypeA)); len(r.Answer) != 1 {
			t.Errorf("over %s: %v", network, r)
		}
		for _, w := range []*world{relayTo(t, nobody), relayTo(t), relayTo(t, nobody, nobody, nobody, ns.addr)} { // the last is one too many
			if r := exchange(t, network, w.addr, question("example.", dns.TypeA)); r.Rcode != dns.RcodeServerFailure || w.counted(resolver.Failed) != 1 {
				t.Errorf("without a server over %s: %v", network, r)
			}
		}
	}
}

// TestRelayRoom: questions that wait for a slow server take a bounded room, and the end of the resolver does not wait for them.
func TestRelayRoom(t *testing.T) {
	t.Parallel()
	waiting := make(chan struct{})
	ns := newNameServer(t, func(dns.ResponseWriter, *dns.Msg, *dns.Msg) { <-waiting })
	t.Cleanup(func() { close(waiting) }) // after the resolver has ended, and before the name server does
	w := relayTo(t, ns.addr)
	c, err := net.Dial("udp", w.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	eventually.True(t, "a question finds no room", func() bool {
		m, err := question("slow.example.", dns.TypeA).Pack()
		if err == nil {
			_, err = c.Write(m)
		}
		if err != nil {
			t.Fatal(err)
		}
		return w.counted(resolver.Limited) > 0
	})
	if n := ns.count(); n == 0 {
		t.Error("no question arrived")
	}
}

func TestHostServers(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "resolv.conf")
	list := resolver.HostServers(path)
	want := func(why string, servers ...string) {
		t.Helper()
		eventually.True(t, why, func() bool { return slices.Equal(list(), servers) })
	}
	want("without a file it is this host's", "127.0.0.1:53")
	write := func(text string, at time.Time) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, at, at); err != nil {
			t.Fatal(err)
		}
	}
	write("search example\nnameserver 127.0.0.53\nnameserver 10.1.2.3\nnameserver 2001:db8::1\nnameserver 10.9.9.9\n", time.Unix(1000, 0))
	want("those of the file", "127.0.0.53:53", "10.1.2.3:53", "[2001:db8::1]:53")
	write("# nothing\n", time.Unix(2000, 0))
	want("a file that names none", "127.0.0.1:53")
}
