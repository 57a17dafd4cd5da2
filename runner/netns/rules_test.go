package netns

import (
	"flag"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/core"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// testPlan is a plan in the given state, as the golden files show it.
func testPlan(s state, policy core.EgressPolicy, services ...uint16) plan {
	cfg := Config{}.withDefaults()
	p := plan{state: s, gateway: cfg.Gateway, own: cfg.own()}
	if s != quarantined {
		p.mac = net.HardwareAddr{0x02, 0xfc, 0, 0, 0x1, 0x7}
		p.ip = netip.MustParseAddr("10.83.1.7")
		p.policy = policy
		p.services = services
	}
	return p
}

// goldenRulesets are the rulesets whose text is kept in testdata and compared with what nft prints.
func goldenRulesets() map[string]ruleset {
	limited := testPlan(quarantined, "")
	limited.rate = Rate{Bytes: 8_000_001, Packets: 8000} // numbers that nft prints without a unit
	return map[string]ruleset{
		"quarantined":      rulesFor(testPlan(quarantined, "")),
		"assigned":         rulesFor(testPlan(assigned, "")),
		"deny-all":         rulesFor(testPlan(opened, core.EgressDenyAll)),
		"deny-all-service": rulesFor(testPlan(opened, core.EgressDenyAll, 53, 3128)),
		"allow-all":        rulesFor(testPlan(opened, core.EgressAllowAll)), // of an older runner
		"allow-all-names":  rulesFor(withNames(testPlan(opened, core.EgressAllowAll))),
		"rate":             rulesFor(limited),
		"proxied":          rulesFor(testPlan(opened, core.EgressProxied)),
		"host":             hostRules("coppice_0123abcd_xy2z3", "cp0123abcdxy2z3", netip.MustParseAddr("198.18.0.2"), Config{}.withDefaults().own()),
	}
}

func withNames(p plan) plan {
	p.names = true
	return p
}

func TestRulesGolden(t *testing.T) {
	t.Parallel()
	for name, rs := range goldenRulesets() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join("testdata", name+".nft")
			got := rs.String()
			if *update {
				if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("rules changed (-golden +got); if that is intended run: go test -update\n%s", diff)
			}
		})
	}
}

func TestPlanSurvivesItsComment(t *testing.T) {
	t.Parallel()
	for _, want := range []plan{
		testPlan(quarantined, ""),
		testPlan(assigned, ""),
		testPlan(assigned, "", 3128),
		testPlan(opened, core.EgressDenyAll),
		testPlan(opened, core.EgressProxied),
		testPlan(opened, core.EgressAllowAll, 1, 2, 3, 4, 5, 6, 7, 65535),
		withNames(testPlan(opened, core.EgressAllowAll)),
		withNames(testPlan(opened, core.EgressAllowAll, 1, 2, 3, 4, 5, 6, 7, 65535)),
	} {
		got, err := parsePlan(want.String(), testPlan(quarantined, ""))
		if err != nil {
			t.Fatal(err)
		}
		if got.String() != want.String() || rulesFor(got).String() != rulesFor(want).String() {
			t.Errorf("%q came back as %q", want, got)
		}
		if n := len(want.String()); n > 128 { // nft shows no longer comment
			t.Errorf("%q has %d bytes", want, n)
		}
	}
}

func FuzzParsePlan(f *testing.F) {
	f.Add("coppice-1 quarantined")
	f.Add(testPlan(opened, core.EgressAllowAll, 3128).String())
	f.Add(withNames(testPlan(opened, core.EgressAllowAll, 3128)).String())
	f.Add("coppice-1 open 02:fc:00:00:01:07 10.83.1.7 deny-all 65536")
	f.Add("coppice-2 quarantined")
	f.Fuzz(func(t *testing.T, comment string) {
		p, err := parsePlan(comment, testPlan(quarantined, ""))
		if err == nil && p.String() != comment {
			t.Errorf("%q was accepted as %q", comment, p)
		}
	})
}

// TestDropsComeFirst checks that in every chain of every plan the forbidden destinations stand before anything that
// accepts new packets towards them.
func TestDropsComeFirst(t *testing.T) {
	t.Parallel()
	for _, policy := range []core.EgressPolicy{core.EgressDenyAll, core.EgressAllowAll, core.EgressProxied} {
		rules := ipRules(testPlan(opened, policy, 3128))
		last := -1
		firstAccept := len(rules)
		for i, r := range rules {
			if r.counter == counterDropSpecial {
				last = i
			}
			if r.verdict == accept && i < firstAccept {
				firstAccept = i
			}
		}
		if last < len(specialNets) || firstAccept < last {
			t.Errorf("%s: last special drop is rule %d, first accept rule %d", policy, last, firstAccept)
		}
	}
}

func TestOwnNetworksAreDenied(t *testing.T) {
	t.Parallel()
	p := testPlan(opened, core.EgressAllowAll)
	p.own = []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("10.83.0.0/16")}
	want := append(slices.Clone(privateNets), p.own[0]) // the second is private already
	if diff := cmp.Diff(want, privateAnd(p.own), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Error(diff)
	}
}
