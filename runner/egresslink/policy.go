package egresslink

import (
	"maps"
	"net/netip"
	"strings"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/policy"
	"github.com/coppice-dev/coppice/runner/netns"
)

// OpenedWith returns the policy with which the namespace of a sandbox is opened.
func (l *Link) OpenedWith(p core.EgressPolicy) core.EgressPolicy {
	if p == core.EgressDenyAll && l.cfg.Process != nil {
		return core.EgressProxied
	}
	return p
}

// serves reports whether the process serves sandboxes whose namespaces are opened with a policy: those that are proxied, and the names of those
// that may reach everything.
func (l *Link) serves(opened core.EgressPolicy) bool {
	return opened == core.EgressProxied || opened == core.EgressAllowAll && l.cfg.Process != nil
}

// CheckRules refuses rules that this runner could not enforce for a sandbox whose namespace is opened with a policy.
func CheckRules(opened core.EgressPolicy, rules runnerapi.EgressRules) error {
	if opened != core.EgressProxied && len(rules.Allow)+len(rules.Grants) > 0 && opened != core.EgressAllowAll {
		return core.Errorf(core.Invalid, core.CodeUnsupported,
			"this runner has no egress process, or had none when the sandbox was made, so nothing leaves it and network.allow must be empty; start the runner without --egress off")
	}
	_, err := policy.Parse("egress_rules.allow", rules.Allow)
	return err
}

func proxyURL(gateway netip.Addr) string {
	return "http://" + netip.AddrPortFrom(gateway, netns.PortProxy).String()
}

// trustBundle has the certificates that the guest trusts, including its project's authority.
const trustBundle = "/etc/ssl/certs/ca-certificates.crt"

// SessionEnv is the environment of a sandbox's sessions: the sandbox's own variables. If the sandbox is proxied, it also has the address of the
// proxy and the list of certificates for programs that have a list of their own, unless the sandbox's own variables name them.
func SessionEnv(own map[string]string, opened core.EgressPolicy, gateway netip.Addr, trusts bool) map[string]string {
	out := maps.Clone(own)
	if out == nil {
		out = map[string]string{} // empty: it replaces the captured environment
	}
	if opened != core.EgressProxied {
		return out
	}
	proxy := proxyURL(gateway)
	for name, value := range map[string]string{"http_proxy": proxy, "https_proxy": proxy, "no_proxy": "localhost,127.0.0.1,::1," + gateway.String()} {
		upper := strings.ToUpper(name)
		_, low := own[name]
		_, up := own[upper]
		if !low && !up {
			out[name], out[upper] = value, value
		}
	}
	for _, name := range []string{"NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE"} {
		if _, said := own[name]; trusts && !said {
			out[name] = trustBundle
		}
	}
	return out
}
