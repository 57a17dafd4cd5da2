package runner

import (
	"context"
	"errors"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
	"github.com/coppice-dev/coppice/runner/netns"
)

// recheck compares the network rules of sandboxes with what they should be, until ctx ends. It checks one sandbox after the other, each once in
// a round of Config.Recheck.
func (r *Runner) recheck(ctx context.Context) {
	for ctx.Err() == nil {
		list := r.all()
		share := r.cfg.Recheck / time.Duration(len(list)+1)
		for _, s := range list {
			_ = pace.Pause(ctx, share)
			r.recheckOne(ctx, s)
		}
		_ = pace.Pause(ctx, share)
	}
}

// recheckOne cuts off a sandbox whose rules are not as they should be. It reconnects a sandbox that was cut off in an earlier round. So no
// traffic passes for a round: the program that changed the rules may still be doing so.
func (r *Runner) recheckOne(ctx context.Context, s *sandbox) {
	state := s.snapshot().State
	if ctx.Err() != nil || state != runnerapi.SandboxReady && state != runnerapi.SandboxPaused {
		return
	}
	s.egressMu.Lock()
	cut := s.cut
	s.egressMu.Unlock()
	err := s.ns.Check(ctx) // also for a sandbox that is cut off: its rules may have been changed while it was being reconnected
	if !errors.Is(err, netns.ErrRulesDiffer) {
		if cut && err == nil { // else it was released meanwhile
			r.reconnect(ctx, s)
		}
		return
	}
	s.egressMu.Lock()
	s.cut = true
	s.egressMu.Unlock()
	r.metrics.cuts.Inc()
	r.cfg.Log.ErrorContext(ctx, "another program changed the network rules of a sandbox; it is cut off", "sandbox_id", s.info.ID, "workspace_id", s.info.WorkspaceID, "again_ms", core.Milliseconds(r.cfg.Recheck), "err", err)
	r.egress.end(ctx, s)
}

// reconnect gives a sandbox that was cut off its rules again, in the same way as a fork: they are read back before any traffic passes. If
// another operation works on the sandbox, it waits for the next round.
func (r *Runner) reconnect(ctx context.Context, s *sandbox) {
	select {
	case s.work <- struct{}{}:
	default:
		return
	}
	defer s.unlock()
	select {
	case <-s.gone:
		return
	case <-s.left:
		return
	default:
	}
	s.journalMu.Lock()
	opened := s.Sandbox.Egress
	s.journalMu.Unlock()
	err := s.ns.Assign(ctx, s.info.Identity)
	if err == nil && opened == core.EgressProxied {
		err = r.egress.begin(ctx, s)
	}
	if err == nil {
		err = s.ns.Open(ctx, opened)
	}
	if err != nil {
		r.egress.end(ctx, s)
		r.cfg.Log.ErrorContext(ctx, "a sandbox stays cut off", "sandbox_id", s.info.ID, "workspace_id", s.info.WorkspaceID, "again_ms", core.Milliseconds(r.cfg.Recheck), "err", err)
		return
	}
	s.egressMu.Lock()
	s.cut = false
	s.egressMu.Unlock()
	r.cfg.Log.WarnContext(ctx, "a sandbox that was cut off has its network again", "sandbox_id", s.info.ID, "workspace_id", s.info.WorkspaceID)
}
