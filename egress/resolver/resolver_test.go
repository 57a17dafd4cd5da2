package resolver_test

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/coppice-dev/coppice/egress/policy"
	"github.com/coppice-dev/coppice/egress/resolver"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testaddr"
	"github.com/coppice-dev/coppice/internal/test/testleak"
)

func TestMain(m *testing.M) { testleak.Main(m) }

func parse(t testing.TB, allow ...string) policy.Policy {
	t.Helper()
	p, err := policy.Parse("allow", allow)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

type world struct {
	policy atomic.Pointer[policy.Policy]
	mu     sync.Mutex
	counts map[resolver.Answer]int
	addr   string
}

// serve serves a resolver that allows names.
func serve(t *testing.T, limit int, allow ...string) *world {
	t.Helper()
	w := &world{}
	p := parse(t, allow...)
	w.policy.Store(&p)
	w.serve(t, resolver.Config{Policy: func() policy.Policy { return *w.policy.Load() }, Rate: limit})
	return w
}

// serve serves a resolver that counts its answers.
func (w *world) serve(t *testing.T, cfg resolver.Config) {
	t.Helper()
	w.counts = map[resolver.Answer]int{}
	udp, err := net.ListenPacket("udp", testaddr.New())
	if err != nil {
		t.Fatal(err)
	}
	w.addr = udp.LocalAddr().String()
	tcp, err := net.Listen("tcp", w.addr)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	cfg.Count = func(a resolver.Answer) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.counts[a]++
	}
	s := resolver.Serve(cfg, udp, tcp)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
}

// ask returns the answer to a question: the addresses, or the reason why there are none.
func (w *world) ask(t *testing.T, network, name string, kind uint16) string {
	t.Helper()
	q := new(dns.Msg)
	q.SetQuestion(name, kind)
	r, _, err := (&dns.Client{Net: network, Timeout: time.Minute}).Exchange(q, w.addr)
	if err != nil {
		return err.Error()
	}
	if r.Rcode != dns.RcodeSuccess {
		return dns.RcodeToString[r.Rcode]
	}
	var out []string
	for _, rr := range r.Answer {
		if rr.Header().Name != name || rr.Header().Ttl != uint32(resolver.TTL/time.Second) {
			t.Errorf("record %s", rr)
		}
		out = append(out, rr.(*dns.A).A.String())
	}
	return strings.Join(out, " ")
}

func host(t testing.TB, name string) policy.Host {
	t.Helper()
	h, err := policy.ParseHost(name)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func TestAnswers(t *testing.T) {
	t.Parallel()
	w := serve(t, 0, "allowed.example", "*.wide.example", "203.0.113.9", "tcp://db.example:5432")
	of := func(name string) string { return resolver.Address(host(t, name)).String() }
	for _, network := range []string{"udp", "tcp"} {
		for _, c := range []struct {
			name string
			kind uint16
			want string
		}{
			{"allowed.example.", dns.TypeA, of("allowed.example")},
			{"ALLOWED.example.", dns.TypeA, of("allowed.example")},
			{"a.wide.example.", dns.TypeA, of("a.wide.example")},
			{"db.example.", dns.TypeA, of("db.example")},
			{"allowed.example.", dns.TypeAAAA, ""},
			{"allowed.example.", dns.TypeHTTPS, ""},
			{"allowed.example.", dns.TypeSVCB, ""},
			{"allowed.example.", dns.TypeTXT, "REFUSED"},
			{"allowed.example.", dns.TypeNULL, "REFUSED"},
			{"allowed.example.", dns.TypeANY, "REFUSED"},
			{"allowed.example.", dns.TypeCNAME, "REFUSED"},
			{"allowed.example.", dns.TypeMX, "REFUSED"},
			{"allowed.example.", dns.TypeNS, "REFUSED"},
			{"x.allowed.example.", dns.TypeA, "NXDOMAIN"},
			{"wide.example.", dns.TypeA, "NXDOMAIN"},
			{"evil.example.", dns.TypeA, "NXDOMAIN"},
			{"evil.example.", dns.TypeAAAA, "NXDOMAIN"},
			{"9.113.0.203.in-addr.arpa.", dns.TypePTR, "REFUSED"},
			{"localhost.", dns.TypeA, "NXDOMAIN"},
			{"metadata.google.internal.", dns.TypeA, "NXDOMAIN"},
			{"a_b.wide.example.", dns.TypeA, "NXDOMAIN"},
			{".", dns.TypeA, "NXDOMAIN"},
		} {
			if got := w.ask(t, network, c.name, c.kind); got != c.want {
				t.Errorf("%s %s over %s: %q, want %q", dns.TypeToString[c.kind], c.name, network, got, c.want)
			}
		}
	}
	if w.counts[resolver.Given] != 14 || w.counts[resolver.NotFound] != 16 || w.counts[resolver.Refused] != 14 {
		t.Errorf("counted %v", w.counts)
	}
	p := parse(t)
	w.policy.Store(&p)
	if got := w.ask(t, "udp", "allowed.example.", dns.TypeA); got != "NXDOMAIN" {
		t.Errorf("after the policy changed: %s", got)
	}
}

// TestOddMessages: a message that is not a valid question gets no address, and the resolver goes on.
func TestOddMessages(t *testing.T) {
	t.Parallel()
	w := serve(t, 0, "allowed.example")
	ask := func(patience time.Duration, change func(*dns.Msg)) string {
		q := new(dns.Msg)
		q.SetQuestion("allowed.example.", dns.TypeA)
		change(q)
		r, _, err := (&dns.Client{Timeout: patience}).Exchange(q, w.addr)
		if err != nil {
			return "nothing"
		}
		return fmt.Sprintf("%s %d", dns.RcodeToString[r.Rcode], len(r.Answer))
	}
	for name, c := range map[string]struct {
		change func(*dns.Msg)
		want   string
	}{
		"plain":         {func(*dns.Msg) {}, "NOERROR 1"},
		"two questions": {func(q *dns.Msg) { q.Question = append(q.Question, q.Question[0]) }, "FORMERR 0"},
		"no question":   {func(q *dns.Msg) { q.Question = nil }, "FORMERR 0"},
		"update":        {func(q *dns.Msg) { q.Opcode = dns.OpcodeUpdate }, "NOTIMP 0"},
		"chaos":         {func(q *dns.Msg) { q.Question[0].Qclass = dns.ClassCHAOS }, "NXDOMAIN 0"},
		"an answer":     {func(q *dns.Msg) { q.Response = true }, "nothing"},
	} {
		patience := time.Minute
		if c.want == "nothing" {
			patience = 300 * time.Millisecond
		}
		if got := ask(patience, c.change); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
	conn, err := net.Dial("udp", w.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for _, b := range []string{"", "x", strings.Repeat("\xff", 512), strings.Repeat("\xc0\x0c", 600)} {
		if _, err := conn.Write([]byte(b)); err != nil {
			t.Fatal(err)
		}
	}
	if got := ask(time.Minute, func(*dns.Msg) {}); got != "NOERROR 1" {
		t.Errorf("afterwards: %s", got)
	}
}

// TestLimits: a guest that sends questions without end gets only its share, and slow connections do not block others
// for ever.
func TestLimits(t *testing.T) {
	t.Parallel()
	w := serve(t, 50, "allowed.example")
	conn, err := net.Dial("udp", w.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	q := new(dns.Msg)
	q.SetQuestion("allowed.example.", dns.TypeA)
	b, err := q.Pack()
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	var given, limited int
	for sent := 50; sent <= 300; sent += 50 { // at most as many at once as a socket buffer holds
		for range 50 {
			_, _ = conn.Write(b)
		}
		eventually.True(t, "all questions were looked at", func() bool {
			w.mu.Lock()
			defer w.mu.Unlock()
			given, limited = w.counts[resolver.Given], w.counts[resolver.Limited]
			return given+limited == sent
		})
	}
	most := 50 + int(50*time.Since(began).Seconds()) + 1
	if limited == 0 || given == 0 || given > most {
		t.Errorf("%d answered (at most %d), %d not", given, most, limited)
	}
	var held []net.Conn
	for range 40 {
		if c, err := net.Dial("tcp", w.addr); err == nil {
			held = append(held, c)
		}
	}
	defer func() {
		for _, c := range held {
			_ = c.Close()
		}
	}()
	eventually.True(t, "silent connections make room for others", func() bool {
		return strings.HasPrefix(w.ask(t, "tcp", "allowed.example.", dns.TypeA), "198.1")
	})
}

func TestAddressesStandForNames(t *testing.T) {
	t.Parallel()
	seen := map[netip.Addr]bool{}
	for i := range 2000 {
		a := resolver.Address(host(t, fmt.Sprintf("h%d.example", i)))
		if !resolver.Network.Contains(a) || a == resolver.Network.Addr() || a != resolver.Address(host(t, fmt.Sprintf("H%d.example.", i))) {
			t.Fatalf("%s", a)
		}
		seen[a] = true
	}
	if len(seen) < 1950 {
		t.Errorf("2,000 names have %d addresses", len(seen))
	}
	p := parse(t, "tcp://db.example:5432", "tcp://git.example:22", "web.example", "*.wide.example")
	for _, c := range []struct {
		name string
		port uint16
		want string
	}{{"db.example", 5432, "db.example"}, {"git.example", 22, "git.example"}, {"db.example", 22, ""}, {"web.example", 443, ""}, {"a.wide.example", 443, ""}, {"evil.example", 22, ""}} {
		h, ok := resolver.Host(p, netip.AddrPortFrom(resolver.Address(host(t, c.name)), c.port))
		if h.String() != c.want || ok != (c.want != "") {
			t.Errorf("%s:%d is %q, %v", c.name, c.port, h, ok)
		}
	}
	if h, ok := resolver.Host(p, netip.MustParseAddrPort("203.0.113.9:22")); ok {
		t.Errorf("an address of elsewhere is %s", h)
	}
}

// TestNamesThatShareAnAddress: an address that two names share stands for neither.
func TestNamesThatShareAnAddress(t *testing.T) {
	t.Parallel()
	first := map[netip.Addr]string{}
	for i := range 20000 {
		name := fmt.Sprintf("n%d.example", i)
		a := resolver.Address(host(t, name))
		if other, ok := first[a]; ok {
			p := parse(t, "tcp://"+name+":22", "tcp://"+other+":22")
			if h, ok := resolver.Host(p, netip.AddrPortFrom(a, 22)); ok {
				t.Errorf("%s is for %s and %s, and it was taken for %s", a, name, other, h)
			}
			return
		}
		first[a] = name
	}
	t.Fatal("no two of 20,000 names have an address in common")
}
