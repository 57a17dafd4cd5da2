package runnertest

import (
	"context"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
)

// EgressURL is where guests of the fake find their proxy.
const EgressURL = "http://10.83.0.1:3128"

// RestartEgress has the runner have another egress process, by another key, as it says with its next heartbeat.
func (r *Runner) RestartEgress() {
	keys, err := grant.NewKeys()
	if err != nil {
		panic(err) // there is no randomness
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.keys = keys
}

// RefuseRules has the runner take no rules of a sandbox for which refuse reports true; nil: it takes all.
func (r *Runner) RefuseRules(id core.SandboxID, refuse func(runnerapi.EgressRules) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.refuse == nil {
		r.refuse = map[core.SandboxID]func(runnerapi.EgressRules) bool{}
	}
	r.refuse[id] = refuse
}

// setRules replaces the rules of a sandbox, unless they are newer. Those of the same version may be encrypted again.
func (r *Runner) setRules(ctx context.Context, id core.SandboxID, rules runnerapi.EgressRules) error {
	if err := r.pass(ctx, PointRules, string(id)); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s, ok := r.sandboxes[id]
	if !ok {
		return core.Errorf(core.NotFound, core.CodeSandboxNotFound, "this runner has no sandbox %s", id)
	}
	if refuse := r.refuse[id]; refuse != nil && refuse(rules) {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "this runner does not take these rules")
	}
	if rules.Version >= s.rules.Version {
		s.rules = rules
	}
	return nil
}

// Rules returns what a sandbox may reach.
func (r *Runner) Rules(id core.SandboxID) runnerapi.EgressRules {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s, ok := r.sandboxes[id]; ok {
		return s.rules
	}
	return runnerapi.EgressRules{}
}

// Bundle opens the grants of a sandbox, as its egress process does.
func (r *Runner) Bundle(id core.SandboxID) (grant.Bundle, error) {
	rules := r.Rules(id)
	if rules.Grants == nil {
		return grant.Bundle{}, nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.keys.Decrypt(rules.Grants, id, rules.Version)
}

// CA is the authority that the guest of a sandbox trusts.
func (r *Runner) CA(id core.SandboxID) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s, ok := r.sandboxes[id]; ok {
		return s.ca
	}
	return ""
}
