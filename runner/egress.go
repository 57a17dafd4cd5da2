package runner

import (
	"context"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/egresslink"
	"github.com/coppice-dev/coppice/runner/journal"
)

// newEgressLink returns the connection to the egress process of this host.
func newEgressLink(r *Runner) *egresslink.Link {
	gateway, _ := r.cfg.Network.Gateway()
	return egresslink.New(egresslink.Config{
		Process: r.cfg.Egress, Gateway: gateway, Log: r.cfg.Log, Life: r.runCtx, Changed: r.wake, Cut: func() { r.metrics.cuts.Inc() },
		Exists: func(id core.SandboxID) bool {
			_, err := r.find(id)
			return err == nil
		},
	})
}

// egressOf is the part of a new sandbox that the link works with.
func egressOf(r *Runner, s *sandbox) *egresslink.Sandbox {
	return r.egress.Sandbox(egresslink.SandboxConfig{
		ID: s.info.ID, WorkspaceID: s.info.WorkspaceID, Epoch: s.info.Epoch, Identity: s.info.Identity, Namespace: s.ns, Open: s.released, Try: s.tryLock,
		Record: func(rules runnerapi.EgressRules) error {
			return s.notes.Change(func(j *journal.Sandbox) { j.Rules = rules })
		},
	})
}

// egresses are the parts of all sandboxes that the link works with.
func (r *Runner) egresses() []*egresslink.Sandbox {
	all := r.all()
	out := make([]*egresslink.Sandbox, 0, len(all))
	for _, s := range all {
		out = append(out, s.egress)
	}
	return out
}

// released reports whether the workload of the sandbox was released.
func (s *sandbox) released() bool {
	state := s.snapshot().State
	return state == runnerapi.SandboxReady || state == runnerapi.SandboxPaused
}

// SetEgressRules replaces the rules of a sandbox; see egresslink.Sandbox.
func (r *Runner) SetEgressRules(ctx context.Context, id core.SandboxID, rules runnerapi.EgressRules) error {
	s, err := r.find(id)
	if err != nil {
		return err
	}
	return s.egress.SetRules(ctx, rules)
}

// Flows acknowledges records of flows up to a number and waits for more. Records that were not acknowledged are returned again.
func (r *Runner) Flows(ctx context.Context, after int64) (flows []core.Flow, last int64, err error) {
	return r.egress.Flows(ctx, after)
}
