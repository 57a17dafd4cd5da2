package policy_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/policy"
)

func parse(t *testing.T, allow ...string) policy.Policy {
	t.Helper()
	p, err := policy.Parse("network.allow", allow)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func host(t *testing.T, s string) policy.Host {
	t.Helper()
	h, err := policy.ParseHost(s)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func TestHostsHaveOneForm(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"allowed.example": "allowed.example", "ALLOWED.EXAMPLE": "allowed.example", "allowed.example.": "allowed.example",
		"bücher.example": "xn--bcher-kva.example", "XN--bcher-KVA.example": "xn--bcher-kva.example", "a。example": "a.example",
		"1.2.3.4": "1.2.3.4", "[2001:DB8::1]": "2001:db8::1", "2001:db8:0::1": "2001:db8::1", "localhost": "localhost", "1password.example": "1password.example",
	} {
		if got := host(t, in).String(); got != want {
			t.Errorf("%q is %q, not %q", in, got, want)
		}
	}
}

func TestWhatIsNoHost(t *testing.T) {
	t.Parallel()
	for _, in := range []string{
		"", ".", "..", "a..b", ".a", "a.example..", "-a.example", "a-.example", "a_b.example", "*.example", "a b", "a\tb", "a\x00b", "a\r\nb", "a/b", "a@b", "a%2eb", "a%b", "a:80",
		"[allowed.example]", "[1.2.3.4]", "[::1", "::1]", "[fe80::1%eth0]", "fe80::1%eth0", "127.1", "0", "2130706433", "0x7f000001", "0177.0.0.1", "1.2.3", "1.2.3.4.5", "1.2.3.256", "a.0x10", "a.7",
		"0x", "a.0x", "xn--a", "xn--\xff", strings.Repeat("a", 64) + ".example", strings.Repeat("a.", 126) + "ab", "unix:/run/x", "http://a", "a,b", "a;b", "a\\b", "a\u200bb.example\u0000",
	} {
		if h, err := policy.ParseHost(in); err == nil {
			t.Errorf("%q was taken for %q", in, h)
		} else if core.CategoryOf(err) != core.Invalid {
			t.Errorf("%q: %v", in, err)
		}
	}
}

func TestAllows(t *testing.T) {
	t.Parallel()
	p := parse(t, "allowed.example", "*.wide.example", "other.example:8443", "203.0.113.7:443", "[2001:db8::1]", "tcp://db.example:5432", "bundle:python")
	for _, c := range []struct {
		host   string
		port   uint16
		spoken core.Spoken
		by     string // empty: denied
	}{
		{"allowed.example", 443, core.SpokenTLS, "allowed.example"},
		{"allowed.example", 80, core.SpokenHTTP, "allowed.example"},
		{"ALLOWED.example.", 443, core.SpokenTLS, "allowed.example"},
		{"allowed.example", 443, core.SpokenTCP, ""},
		{"allowed.example", 22, core.SpokenTLS, ""},
		{"evilallowed.example", 443, core.SpokenTLS, ""},
		{"allowed.example.evil.com", 443, core.SpokenTLS, ""},
		{"www.allowed.example", 443, core.SpokenTLS, ""},
		{"a.wide.example", 443, core.SpokenTLS, "*.wide.example"},
		{"a.b.wide.example", 80, core.SpokenHTTP, "*.wide.example"},
		{"wide.example", 443, core.SpokenTLS, ""},
		{"evilwide.example", 443, core.SpokenTLS, ""},
		{"wide.example.evil.com", 443, core.SpokenTLS, ""},
		{"other.example", 8443, core.SpokenTLS, "other.example:8443"},
		{"other.example", 443, core.SpokenTLS, ""},
		{"203.0.113.7", 443, core.SpokenTLS, "203.0.113.7:443"},
		{"203.0.113.7", 80, core.SpokenHTTP, ""},
		{"203.0.113.8", 443, core.SpokenTLS, ""},
		{"::ffff:203.0.113.7", 443, core.SpokenTLS, ""},
		{"2001:db8::1", 443, core.SpokenTLS, "[2001:db8::1]"},
		{"db.example", 5432, core.SpokenTCP, "tcp://db.example:5432"},
		{"db.example", 5432, core.SpokenTLS, "tcp://db.example:5432"},
		{"db.example", 443, core.SpokenTLS, ""},
		{"pypi.org", 443, core.SpokenTLS, "bundle:python"},
		{"pypi.org", 80, core.SpokenHTTP, ""},
	} {
		by, ok := p.Allows(host(t, c.host), c.port, c.spoken)
		if by != c.by || ok != (c.by != "") {
			t.Errorf("%s to %s:%d: %q, %v; want %q", c.spoken, c.host, c.port, by, ok, c.by)
		}
	}
	if got := p.Names(5432); len(got) != 1 || got[0] != host(t, "db.example") {
		t.Errorf("names at 5432: %v", got)
	}
	for name, want := range map[string]bool{"db.example": true, "a.wide.example": true, "wide.example": false, "203.0.113.7": false, "example": false} {
		if p.Resolves(host(t, name)) != want {
			t.Errorf("%s resolves: %v", name, !want)
		}
	}
	if _, ok := (policy.Policy{}).Allows(host(t, "allowed.example"), 443, core.SpokenTLS); ok {
		t.Error("an empty policy allows something")
	}
}

func TestEntriesHaveOneForm(t *testing.T) {
	t.Parallel()
	p := parse(t, "B.example.", "a.example:443", "b.example", "tcp://X.example:22", "*.Wide.example", "bundle:go", "2001:db8::0")
	want := []string{"*.wide.example", "[2001:db8::]", "a.example:443", "b.example", "bundle:go", "tcp://x.example:22"}
	if got := p.Entries(); !slices.Equal(got, want) {
		t.Errorf("%q, not %q", got, want)
	}
	if again := parse(t, p.Entries()...); !slices.Equal(again.Entries(), want) {
		t.Errorf("read again: %q", again.Entries())
	}
}

func TestWhatCannotBeAllowed(t *testing.T) {
	t.Parallel()
	for _, in := range []string{
		"", "*", "*.", "*.com", "**.example.com", "a.*.example", "*.1.2.3.4", "https://a.example", "a.example/path", "a.example:0", "a.example:65536", "a.example:443 ", "a.example: 443", "a.example:+443", "a.example:0443",
		"a.example:443:443", "tcp://a.example", "tcp://*.example.com:22", "tcp://tcp://a.example:22", "bundle:", "bundle:nothing", "bundle:Python", "10.0.0.0/8", "[2001:db8::1]:", "user@a.example", "\x1b[31m",
	} {
		_, err := policy.Parse("network.allow", []string{"ok.example", in})
		if core.CategoryOf(err) != core.Invalid || !strings.Contains(err.Error(), "network.allow[1]") || strings.Contains(err.Error(), "allow[0]") {
			t.Errorf("%q: %v", in, err)
		}
	}
	if _, err := policy.Parse("f", make([]string, policy.MaxRules+1)); core.CodeOf(err) != core.CodeInvalidField {
		t.Errorf("too many: %v", err)
	}
}

func TestBeyond(t *testing.T) {
	t.Parallel()
	parent := parse(t, "a.example", "*.wide.example", "b.example:80", "b.example:443", "tcp://db.example:5432", "bundle:python")
	for _, c := range []struct{ child, beyond string }{
		{"", ""},
		{"a.example", ""},
		{"a.example:443", ""},
		{"a.example:8443", "a.example:8443"},
		{"*.deep.wide.example", ""},
		{"x.wide.example:80", ""},
		{"*.wide.example", ""},
		{"wide.example", "wide.example"},
		{"*.a.example", "*.a.example"},
		{"b.example", ""},
		{"db.example:5432", ""},
		{"tcp://a.example:443", "tcp://a.example:443"},
		{"pypi.org:443", ""},
		{"pypi.org", "pypi.org"},
		{"bundle:python", ""},
		{"bundle:npm a.example", "bundle:npm"},
		{"z.example a.example y.example", "y.example z.example"},
		{"1.1.1.1", "1.1.1.1"},
	} {
		got := strings.Join(parse(t, strings.Fields(c.child)...).Beyond(parent), " ")
		if got != c.beyond {
			t.Errorf("%q goes beyond by %q, not %q", c.child, got, c.beyond)
		}
	}
}

func TestBundlesParse(t *testing.T) {
	t.Parallel()
	for _, b := range policy.Bundles() {
		if p := parse(t, "bundle:"+b); p.Empty() || len(policy.BundleRules(b)) == 0 {
			t.Errorf("bundle %s is empty", b)
		}
	}
}

func TestReach(t *testing.T) {
	t.Parallel()
	never := strings.Fields(`127.0.0.1 0.0.0.0 127.255.255.255 :: ::1 169.254.169.254 169.254.170.2 100.100.100.200 168.63.129.16 fd00:ec2::254 192.0.0.1 224.0.0.1 239.255.255.255 240.0.0.1
		255.255.255.255 fe80::1 fec0::1 ff02::1 ::ffff:169.254.169.254 ::ffff:a9fe:a9fe ::ffff:8.8.8.8 ::a9fe:a9fe 64:ff9b::a9fe:a9fe 64:ff9b::808:808 64:ff9b:1::1 2002:a9fe:a9fe:: 2001::1 2001:0:a9fe:a9fe::1
		100::1 5f00::1 fe80::1%eth0 192.88.99.1`)
	private := strings.Fields("10.0.0.1 10.255.255.255 172.16.0.1 172.31.255.255 192.168.0.1 100.64.0.1 198.18.0.1 198.19.255.255 192.0.2.1 198.51.100.1 203.0.113.1 fc00::1 fdff::1 2001:db8::1")
	public := strings.Fields("1.1.1.1 9.255.255.255 11.0.0.0 172.15.255.255 172.32.0.0 100.63.255.255 100.128.0.0 198.17.255.255 223.255.255.255 2606:4700::1111 2a00::1 2001:4860::8888")
	all := policy.Reach{Private: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}}
	own := policy.Reach{Private: all.Private, Own: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/32"), netip.MustParsePrefix("1.1.1.1/32")}}
	for _, c := range []struct {
		addrs []string
		reach policy.Reach
		ok    bool
	}{
		{never, policy.Reach{}, false},
		{never, all, false},
		{private, policy.Reach{}, false},
		{private, all, true},
		{public, policy.Reach{}, true},
		{public, all, true},
		{[]string{"10.0.0.1", "1.1.1.1"}, own, false},
		{[]string{"10.0.0.2", "1.1.1.2"}, own, true},
	} {
		for _, s := range c.addrs {
			if err := c.reach.Check(netip.MustParseAddr(s)); (err == nil) != c.ok {
				t.Errorf("%s, private %v, own %v: %v", s, c.reach.Private, c.reach.Own, err)
			}
		}
	}
	if policy.Reach.Check(all, netip.Addr{}) == nil {
		t.Error("no address may be dialled")
	}
}
