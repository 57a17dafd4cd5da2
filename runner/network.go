package runner

import (
	"bufio"
	"context"
	"errors"
	"net/netip"
	"os"
	"strings"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/netns"
)

// NetworkOf makes a pool of namespaces the runner's network.
func NetworkOf(p *netns.Pool) Network { return pooled{p} }

type pooled struct{ *netns.Pool }

func (p pooled) Acquire(ctx context.Context) (Namespace, error) {
	ns, err := p.Pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	return pooledNamespace{ns}, nil
}

func (p pooled) Adopt(ctx context.Context, name string, id core.Identity, policy core.EgressPolicy) (Namespace, error) {
	ns, err := p.Pool.Adopt(ctx, name)
	if err != nil {
		return nil, err
	}
	mac, ip, _ := ns.Identity()
	if now, open := ns.IsOpen(); !open || now != policy || mac != id.MAC || ip != id.IP {
		err := core.Errorf(core.FailedPrecondition, core.CodeStateConflict,
			"network namespace %s is open for %s %s under %q (%v), not for %s %s under %q", name, mac, ip, now, open, id.MAC, id.IP, policy)
		return nil, errors.Join(err, ns.Release(ctx))
	}
	return pooledNamespace{ns}, nil
}

func (p pooled) Gateway() (netip.Addr, string) { return p.Config().Gateway, netns.GatewayMAC }

// Resolvers are the host's own resolvers for a sandbox that may reach everything, and the egress process for a sandbox that it serves. Other
// sandboxes have no resolver.
func (p pooled) Resolvers(policy core.EgressPolicy) []netip.Addr {
	switch policy {
	case core.EgressAllowAll:
		return hostResolvers("/etc/resolv.conf")
	case core.EgressProxied:
		return []netip.Addr{p.Config().Gateway}
	case core.EgressDenyAll:
	}
	return nil
}

// hostResolvers reads the host's name servers that a guest can reach. A guest cannot reach those on a loopback address.
func hostResolvers(path string) []netip.Addr {
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	var out []netip.Addr
	for lines := bufio.NewScanner(f); lines.Scan(); {
		rest, ok := strings.CutPrefix(strings.TrimSpace(lines.Text()), "nameserver")
		if a, err := netip.ParseAddr(strings.TrimSpace(rest)); ok && err == nil && a.Is4() && !a.IsLoopback() {
			out = append(out, a)
		}
	}
	return out
}

type pooledNamespace struct{ *netns.Namespace }

func (n pooledNamespace) NetNS() (*os.File, error) { return os.Open(n.Path()) }
