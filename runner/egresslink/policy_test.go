package egresslink

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/core"
)

func TestSessionEnv(t *testing.T) {
	t.Parallel()
	gateway := netip.MustParseAddr("10.83.0.1")
	const proxy = "http://10.83.0.1:3128"
	all := map[string]string{
		"http_proxy": proxy, "HTTP_PROXY": proxy, "https_proxy": proxy, "HTTPS_PROXY": proxy,
		"no_proxy": "localhost,127.0.0.1,::1,10.83.0.1", "NO_PROXY": "localhost,127.0.0.1,::1,10.83.0.1",
	}
	const bundle = "/etc/ssl/certs/ca-certificates.crt"
	for _, c := range []struct {
		opened    core.EgressPolicy
		trusts    bool
		own, want map[string]string
	}{
		{core.EgressProxied, false, nil, all},
		{core.EgressDenyAll, true, nil, map[string]string{}},
		{core.EgressAllowAll, true, map[string]string{"A": "1"}, map[string]string{"A": "1"}},
		{
			core.EgressProxied, true,
			map[string]string{"http_proxy": "", "https_proxy": "", "no_proxy": "", "REQUESTS_CA_BUNDLE": "mine"},
			map[string]string{"http_proxy": "", "https_proxy": "", "no_proxy": "", "REQUESTS_CA_BUNDLE": "mine", "NODE_EXTRA_CA_CERTS": bundle},
		},
		{
			core.EgressProxied, false,
			map[string]string{"A": "1", "https_proxy": "", "NO_PROXY": "x"},
			map[string]string{"A": "1", "https_proxy": "", "NO_PROXY": "x", "http_proxy": proxy, "HTTP_PROXY": proxy},
		},
	} {
		if diff := cmp.Diff(c.want, SessionEnv(c.own, c.opened, gateway, c.trusts)); diff != "" {
			t.Errorf("%s with %v: %s", c.opened, c.own, diff)
		}
	}
}
