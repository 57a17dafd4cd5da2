package proxy

import (
	"slices"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/ca"
	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/egress/policy"
)

// Rules say what a sandbox may reach, and with which secrets. They are replaced only together: a host that the policy
// adds may be one that is held.
type Rules struct {
	Policy policy.Policy
	Grants grant.Bundle
	// Held are hosts that can be reached only with a grant. The hosts of grants in [grant.ModeHeader] are always held.
	Held []grant.Target
}

// rules are the Rules of a sandbox, ready for use. They never change. The decision about a flow loads them once, so its
// parts come from the same rules. The check of a CONNECT before it, and the certificate and the check of the answer after
// it, use the present rules.
type rules struct {
	policy policy.Policy
	set    grant.Set
	leaves *ca.Leaves // nil when the proxy terminates no TLS
	held   []grant.Target
}

func newRules(from Rules) (*rules, error) {
	r := &rules{policy: from.Policy, set: grant.NewSet(from.Grants.Grants...), held: from.Held}
	if len(r.set.Hosts()) == 0 {
		return r, nil
	}
	if from.Grants.Issuer == nil {
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "there are grants for hosts, and no authority for their certificates")
	}
	var err error
	r.leaves, err = ca.NewLeaves(*from.Grants.Issuer)
	return r, err
}

func (t target) granted() grant.Target { return grant.Target{Host: t.host, Port: t.port} }

// holds reports whether TLS to a host is either read by the proxy or refused.
func (r *rules) holds(t target) bool {
	return r.set.Granted(t.granted(), grant.ModeHeader) || slices.Contains(r.held, t.granted())
}

// reads reports whether the proxy terminates TLS to a host.
func (r *rules) reads(t target) bool {
	return r.leaves != nil && r.set.Granted(t.granted(), grant.ModeHeader)
}

// ends returns the reason why a flow that began under other rules may not go on under these; nil: it may.
func (r *rules) ends(f *openFlow) error {
	if _, ok := r.policy.Allows(f.host, f.Port, f.Spoken); !ok {
		return errRevoked
	}
	switch {
	case f.use != nil && !r.set.Keeps(f.use.grant):
		return errEnded
	case f.Spoken != core.SpokenHTTP && r.holds(target{f.host, f.Port}):
		return errHeld
	}
	return nil
}

// setRules replaces the rules, and ends everything that the new ones do not allow.
func (b *sandbox) setRules(r *rules) {
	b.rules.Store(r)
	b.mu.Lock()
	out := map[*openFlow]error{}
	for f := range b.open {
		if why := r.ends(f); why != nil {
			out[f] = why
		}
	}
	var conns []*conn
	for c := range b.conns {
		if c.read && !r.set.Granted(c.target.granted(), grant.ModeHeader) {
			conns = append(conns, c)
		}
	}
	for id := range b.budgets {
		if !r.set.Has(id) {
			delete(b.budgets, id)
		}
	}
	b.mu.Unlock()
	for f, why := range out {
		f.cancel(why)
	}
	for _, c := range conns {
		reset(c.Conn)
	}
	b.closeIdle()
}
