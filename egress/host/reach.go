package host

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/egress/policy"
	"github.com/coppice-dev/coppice/egress/proxy"
)

// reach says which addresses may be dialled, given the current addresses of this host.
type reach struct {
	private, own []netip.Prefix
	names        []string // names of the installation's servers
	resolver     proxy.Resolver
	log          *slog.Logger

	mu      sync.Mutex // guards the fields below
	servers map[string][]netip.Prefix
	at      time.Time // when the field now was computed
	now     policy.Reach
}

const (
	addressesFresh = time.Second // how long the last reading of this host's addresses is used
	namesFresh     = time.Minute
	lookupTime     = 5 * time.Second
)

func newReach(ctx context.Context, cfg Config) (*reach, error) {
	r := &reach{private: cfg.Private, own: cfg.Own, names: cfg.Servers, resolver: cfg.Resolver, log: cfg.Log, servers: map[string][]netip.Prefix{}}
	r.lookup(ctx)
	addrs, err := hostAddresses()
	if err != nil {
		return nil, err
	}
	r.set(addrs)
	return r, nil
}

// current returns what may be dialled at this moment.
func (r *reach) current() policy.Reach {
	r.mu.Lock()
	defer r.mu.Unlock()
	if time.Since(r.at) > addressesFresh {
		addrs, err := hostAddresses()
		if err != nil { // the addresses of the last reading are still denied
			r.log.Error("the addresses of this host were not read", "err", err)
			addrs = r.now.Own
		}
		r.set(addrs)
	}
	return r.now
}

func (r *reach) set(addrs []netip.Prefix) {
	own := slices.Concat(r.own, addrs)
	for _, list := range r.servers {
		own = append(own, list...)
	}
	r.now, r.at = policy.Reach{Private: r.private, Own: own}, time.Now()
}

// run resolves the names of the servers regularly.
func (r *reach) run(ctx context.Context) {
	tick := time.NewTicker(namesFresh)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			r.lookup(ctx)
		case <-ctx.Done():
			return
		}
	}
}

func (r *reach) lookup(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, lookupTime)
	defer cancel()
	for _, name := range r.names {
		addrs, err := r.resolver.LookupNetIP(ctx, "ip", name)
		if err != nil {
			if ctx.Err() == nil {
				r.log.WarnContext(ctx, "the name of a server of this installation was not resolved; only its addresses from an earlier look-up, if there are any, are denied to sandboxes", "name", name, "err", err)
			}
			continue
		}
		list := make([]netip.Prefix, len(addrs))
		for i, a := range addrs {
			a = a.Unmap().WithZone("")
			list[i] = netip.PrefixFrom(a, a.BitLen())
		}
		r.mu.Lock()
		r.servers[name], r.at = list, time.Time{}
		r.mu.Unlock()
	}
}

func hostAddresses() ([]netip.Prefix, error) {
	list, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	out := make([]netip.Prefix, 0, len(list))
	for _, a := range list {
		if n, ok := a.(*net.IPNet); ok {
			if addr, ok := netip.AddrFromSlice(n.IP); ok {
				addr = addr.Unmap()
				out = append(out, netip.PrefixFrom(addr, addr.BitLen()))
			}
		}
	}
	return out, nil
}
