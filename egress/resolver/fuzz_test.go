package resolver

import (
	"testing"

	"github.com/miekg/dns"

	"github.com/coppice-dev/coppice/egress/policy"
)

// FuzzAnswer: for any question, an answer contains an address only if the question asks for the one allowed name and
// for nothing else.
func FuzzAnswer(f *testing.F) {
	for _, name := range []string{"allowed.example.", "evil.example.", "x.allowed.example."} {
		q := new(dns.Msg)
		q.SetQuestion(name, dns.TypeA)
		b, err := q.Pack()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	p, err := policy.Parse("allow", []string{"allowed.example"})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		q := new(dns.Msg)
		if q.Unpack(b) != nil {
			return
		}
		m, what := answer(p, q)
		if _, err := m.Pack(); err != nil && len(q.Question) == 1 {
			t.Fatalf("the answer to %s cannot be sent: %v", q, err)
		}
		if len(m.Answer) == 0 {
			return
		}
		if what != Given || len(q.Question) != 1 || q.Question[0].Qtype != dns.TypeA || dns.CanonicalName(q.Question[0].Name) != "allowed.example." || len(m.Answer) != 1 {
			t.Fatalf("%s was answered with %s", q, m)
		}
	})
}
