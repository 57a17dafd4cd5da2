// Package sandboxnet says what a runner needs of the network of its sandboxes, and gives it network
// namespaces (package netns) in that form.
package sandboxnet

import (
	"bufio"
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/netns"
)

// Namespace is the network of one sandbox, as netns.Namespace implements it.
type Namespace interface {
	Name() string
	// NetNS opens the namespace itself. The VMM is started in it. It is nil if there is none.
	NetNS() (*os.File, error)
	// TapFile opens a queue of the tap; it is nil if there is no network. With up the tap is already up in quarantine.
	TapFile(up bool) (*os.File, error)
	Assign(ctx context.Context, id core.Identity) error
	Open(ctx context.Context, policy core.EgressPolicy) error
	// EgressSockets opens the sockets that the egress process serves for a namespace under core.EgressProxied or core.EgressAllowAll.
	EgressSockets(ctx context.Context) (netns.EgressSockets, error)
	Dial(ctx context.Context, network, address string) (net.Conn, error)
	// Check compares the rules in the kernel with those that were applied. If they differ, it cuts the guest off until Open and returns
	// netns.ErrRulesDiffer.
	Check(ctx context.Context) error
	Release(ctx context.Context) error
}

// Network hands out quarantined namespaces.
type Network interface {
	Acquire(ctx context.Context) (Namespace, error)
	// Adopt takes over a namespace that an earlier runner left open for a machine with that identity and policy. Anything that
	// is not exactly so is an error, and the namespace is left to Reconcile.
	Adopt(ctx context.Context, name string, id core.Identity, policy core.EgressPolicy) (Namespace, error)
	// Reconcile removes every namespace of this cluster that is not kept.
	Reconcile(ctx context.Context, keep map[string]bool) error
	// Gateway is the address and MAC that every guest has as its gateway; zero where there is no network.
	Gateway() (netip.Addr, string)
	// Resolvers are the name servers of a guest with the policy.
	Resolvers(policy core.EgressPolicy) []netip.Addr
}

// Of makes a pool of namespaces a runner's network. egress says whether the runner has an egress process.
func Of(p *netns.Pool, egress bool) Network { return pooled{p, egress} }

type pooled struct {
	*netns.Pool
	egress bool
}

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

// Resolvers are the egress process for a sandbox that it serves, and, without such a process, the host's own resolvers for a sandbox that may
// reach everything. Other sandboxes have no resolver.
func (p pooled) Resolvers(policy core.EgressPolicy) []netip.Addr {
	switch policy {
	case core.EgressAllowAll:
		if !p.egress {
			return hostResolvers("/etc/resolv.conf")
		}
		return []netip.Addr{p.Config().Gateway}
	case core.EgressProxied:
		return []netip.Addr{p.Config().Gateway}
	case core.EgressDenyAll:
	}
	return nil
}

// hostResolvers reads the host's name servers that a guest can reach. A guest cannot reach those on a loopback or private address, but a list
// without any would leave it those of its parent.
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
