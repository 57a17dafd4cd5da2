package policy_test

import (
	"net/netip"
	"net/url"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/policy"
)

// allowedByLabels is a second implementation of the matcher: it compares label by label, from the right.
func allowedByLabels(rule, host string) bool {
	want, got := strings.Split(rule, "."), strings.Split(host, ".")
	if want[0] != "*" && len(want) != len(got) || len(got) < len(want) {
		return false
	}
	for i := range want {
		w, g := want[len(want)-1-i], got[len(got)-1-i]
		if w != "*" && w != g {
			return false
		}
	}
	return true
}

// FuzzHost: a host has one form, which net/url and netip read as the same host; and the rules decide in the same way as
// the second matcher.
func FuzzHost(f *testing.F) {
	for _, s := range []string{"allowed.example", "A.Allowed.Example.", "[::1]", "1.2.3.4", "0x7f.1", "bücher.example", "evilallowed.example", "a%2eallowed.example", "allowed.example:443", "ａllowed.example"} {
		f.Add(s)
	}
	rules := []string{"allowed.example", "*.allowed.example"}
	exact, _ := policy.Parse("f", rules[:1])
	suffix, _ := policy.Parse("f", rules[1:])
	f.Fuzz(func(t *testing.T, s string) {
		h, err := policy.ParseHost(s)
		if err != nil {
			if !h.IsZero() {
				t.Fatalf("%q: %v, and yet %q", s, err, h)
			}
			return
		}
		form := h.String()
		again, err := policy.ParseHost(form)
		if err != nil || again != h {
			t.Fatalf("%q became %q, which became %q (%v)", s, form, again, err)
		}
		if addr, ok := h.Addr(); ok {
			if other, err := netip.ParseAddr(strings.Trim(s, "[]")); err != nil || other != addr {
				t.Fatalf("%q became the address %s, netip says %s (%v)", s, addr, other, err)
			}
		} else if u, err := url.Parse("https://" + form + "/"); err != nil || u.Hostname() != form || u.Port() != "" || u.User != nil {
			t.Fatalf("%q became %q, which is %v in a URL (%v)", s, form, u, err)
		} else if _, err := netip.ParseAddr(form); err == nil {
			t.Fatalf("%q became the name %q, which is an address", s, form)
		}
		for i, p := range []policy.Policy{exact, suffix} {
			_, got := p.Allows(h, 443, core.SpokenTLS)
			if want := allowedByLabels(rules[i], form); got != want {
				t.Fatalf("%q (%q) by %s: %v, and label by label %v", s, form, rules[i], got, want)
			}
		}
	})
}

// FuzzPolicy: every accepted entry has one form and is within itself.
func FuzzPolicy(f *testing.F) {
	for _, s := range []string{"a.example", "*.a.example:1", "tcp://a.example:22", "bundle:go", "[2001:db8::1]:443", "1.2.3.4"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := policy.Parse("f", []string{s})
		if err != nil {
			return
		}
		again, err := policy.Parse("f", p.Entries())
		if err != nil || len(again.Entries()) != 1 || again.Entries()[0] != p.Entries()[0] {
			t.Fatalf("%q became %q, which became %q (%v)", s, p.Entries(), again.Entries(), err)
		}
		if b := p.Beyond(again); b != nil {
			t.Fatalf("%q goes beyond itself by %q", s, b)
		}
	})
}
