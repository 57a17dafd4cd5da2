package egress_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/ca"
	"github.com/coppice-dev/coppice/egress/egressapi"
	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/egress/policy"
	"github.com/coppice-dev/coppice/internal/sidecar"
)

// longName is a name of a host, of n bytes, that no other number has.
func longName(i, n int) string {
	name := fmt.Sprintf("h%d", i)
	for len(name) < n-1 {
		name += "." + strings.Repeat("a", min(63, n-len(name)-1))
	}
	return name
}

// fullRules are rules that take all the bytes that rules may take, or all the entries.
func fullRules(t *testing.T, each int) []string {
	t.Helper()
	var texts []string
	for i := range policy.MaxRules {
		texts = append(texts, "tcp://"+longName(i, each)+":65535")
	}
	for policy.SizeOf(texts) > policy.MaxBytes {
		texts = texts[1:]
	}
	if left := policy.MaxBytes - policy.SizeOf(texts); len(texts) < policy.MaxRules && left > 16 {
		texts = append(texts, "tcp://"+longName(999, max(left-15, 5))+":65535")
	}
	p, err := policy.Parse("allow", texts)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.CheckSize("allow"); err != nil {
		t.Fatal(err)
	}
	return p.Entries()
}

// full adds grants as long as they fit, and then the longest secret that fits.
func full(t *testing.T, secret string, one func(i int, secret string) grant.Grant) []grant.Grant {
	t.Helper()
	var out []grant.Grant
	sum := 0
	for i := range 32 {
		g := one(i, secret)
		if n := grant.Size(g, g.Secret.Size()); sum+n <= grant.MaxBundle {
			out, sum = append(out, g), sum+n
			continue
		}
		if left := grant.MaxBundle - sum - grant.Size(g, 0); left >= grant.MinSecret {
			g.Secret = grant.NewSecret(strings.Repeat("x", left))
			out, sum = append(out, g), sum+grant.Size(g, left)
		}
		break
	}
	if sum < grant.MaxBundle*9/10 && len(out) < 32 {
		t.Errorf("%d bytes of %d are used: this is not the largest bundle", sum, grant.MaxBundle)
	}
	return out
}

// TestLargestRules: whatever is admitted is delivered: the largest rules with the largest grants of every shape, to a real process, with the
// sandbox and as a change.
func TestLargestRules(t *testing.T) {
	x := newRig(t, func(*settings) {})
	hello, err := x.client.Hello(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	root, err := ca.NewRoot(core.NewID[core.ProjectID](), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	expires := time.Now().Add(time.Hour).In(time.FixedZone("", 3600))
	shape := func(mode grant.Mode, hosts, name, paths int) func(i int, secret string) grant.Grant {
		return func(i int, secret string) grant.Grant {
			g := grant.Grant{
				ID: fmt.Sprintf("g%062d", i), Mode: mode, Placeholder: grant.NewPlaceholder(), Secret: grant.NewSecret(secret), Header: "X-" + strings.Repeat("a", 62),
				Expires: expires, MaxBytes: 1<<63 - 1, PerMinute: 1_000_000,
			}
			for h := range hosts {
				host, err := policy.ParseHost(longName(i*hosts+h, name))
				if err != nil {
					t.Fatal(err)
				}
				g.Targets = append(g.Targets, grant.Target{Host: host, Port: 65535})
			}
			for p := range paths {
				g.Paths = append(g.Paths, fmt.Sprintf("/%d/%s", p, strings.Repeat("&", 500)))
			}
			return g
		}
	}
	for name, c := range map[string]struct {
		secret string
		one    func(i int, secret string) grant.Grant
	}{
		"one host each":    {"a good secret", shape(grant.ModeHeader, 1, 12, 0)},
		"long names":       {"a good secret", shape(grant.ModeHeader, 16, 253, 0)},
		"short names":      {"a good secret", shape(grant.ModeHeader, 16, 4, 0)},
		"paths":            {"a good secret", shape(grant.ModeHeader, 2, 100, 32)},
		"base URLs":        {"a good secret", shape(grant.ModeBaseURL, 16, 253, 32)},
		"plain secrets":    {strings.Repeat("x", grant.MaxSecret), shape(grant.ModeHeader, 1, 20, 0)},
		"ampersands":       {strings.Repeat("&", grant.MaxSecret), shape(grant.ModeHeader, 1, 20, 0)},
		"quotes":           {strings.Repeat(`"`, grant.MaxSecret), shape(grant.ModeHeader, 1, 20, 0)},
		"backslashes":      {strings.Repeat(`\`, grant.MaxSecret), shape(grant.ModeBaseURL, 1, 20, 0)},
		"line separators":  {strings.Repeat("\u2028", grant.MaxSecret/3), shape(grant.ModeHeader, 1, 20, 0)},
		"long characters":  {strings.Repeat("😀", grant.MaxSecret/4), shape(grant.ModeHeader, 1, 20, 0)},
		"reserved secrets": {strings.Repeat("x", grant.ReservedSecret), shape(grant.ModeHeader, 1, 30, 1)},
	} {
		for _, each := range []int{100, 250, 20} {
			bundle := grant.Bundle{Grants: full(t, c.secret, c.one)}
			if hosts := grant.NewSet(bundle.Grants...).Hosts(); len(hosts) > 0 {
				issuer, err := root.Issuer(hosts, time.Now(), expires)
				if err != nil {
					t.Fatal(err)
				}
				bundle.Issuer = &issuer
			}
			g := x.guest()
			rules := runnerapi.EgressRules{Version: 1<<63 - 2, Allow: fullRules(t, each), Key: hello.Key}
			for _, one := range bundle.Grants {
				for _, target := range one.Targets {
					if one.Mode == grant.ModeHeader {
						rules.Held = append(rules.Held, policy.JoinHostPort(target.Host, target.Port))
					}
				}
			}
			for _, step := range []func() error{
				func() error {
					return x.client.Put(t.Context(), egressapi.Sandbox{ID: g.id, Epoch: 1<<63 - 1, Rules: rules}, g.files)
				},
				func() error { rules.Version++; return nil },
				func() error { return x.client.SetRules(t.Context(), g.id, rules) },
			} {
				if rules.Grants, err = grant.Encrypt(hello.Key, g.id, rules.Version, bundle); err != nil {
					t.Fatal(err)
				}
				if err := step(); err != nil {
					t.Errorf("%s, rules of %d bytes each: %v", name, each, err)
				}
			}
			sidecar.CloseAll(g.files)
			text, err := json.Marshal(rules)
			if err != nil || len(text) > runnerapi.MaxEgressRules {
				t.Errorf("%s: the rules take %d bytes, at most %d are for them: %v", name, len(text), runnerapi.MaxEgressRules, err)
			}
			list, err := x.client.List(t.Context())
			if err != nil || len(list) != 1 || list[0].Version != rules.Version || list[0].Lacks {
				t.Errorf("%s: %+v is served, %v", name, list, err)
			}
			if err := x.client.Remove(t.Context(), g.id); err != nil {
				t.Fatal(err)
			}
		}
	}
}
