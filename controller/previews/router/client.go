package router

import (
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// The rate of requests of one address that are not let in: those for names without a preview, and those with wrong tokens or keys. They have
// buckets of their own, so that they use up nothing of the API.
const (
	strangersPerSecond = 100
	strangersBurst     = 500
)

// maxHops is how many proxies a request may have passed.
const maxHops = 8

// client is the address that a request comes from. Only a proxy that the operator has named may say that it is another's. The
// zero value stands for all whose address is not known.
func (r *Router) client(q *http.Request) netip.Addr {
	var from netip.Addr
	if peer, err := netip.ParseAddrPort(q.RemoteAddr); err == nil {
		from = peer.Addr().Unmap().WithZone("")
	}
	if !r.proxy(from) {
		return from
	}
	hops := strings.Split(strings.Join(q.Header.Values("X-Forwarded-For"), ","), ",")
	slices.Reverse(hops)
	for _, hop := range hops[:min(len(hops), maxHops)] {
		before, err := netip.ParseAddr(strings.TrimSpace(hop))
		if err != nil {
			break
		}
		if from = before.Unmap().WithZone(""); !r.proxy(from) {
			break
		}
	}
	return from
}

// proxy reports whether an address is that of a proxy of the operator.
func (r *Router) proxy(from netip.Addr) bool {
	return slices.ContainsFunc(r.cfg.Proxies, func(p netip.Prefix) bool { return p.Contains(from) })
}

// visitor is what counts as one client: an address of IPv4, or what a site gets of IPv6.
func visitor(from netip.Addr) netip.Prefix {
	bits := 32
	if from.Is6() {
		bits = 48
	}
	p, _ := from.Prefix(bits) // of the zero address: the zero prefix
	return p
}

// charge counts a request before it costs the database something. wait is above zero if its address has sent too many.
func (r *Router) charge(from netip.Addr) (wait time.Duration) {
	_, wait = r.strangers.Take(time.Now(), from)
	return wait
}
