package egresslink

import (
	"context"
	"errors"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
	"github.com/coppice-dev/coppice/runner/netns"
)

// Recheck compares the network rules of sandboxes with what they should be, until ctx ends. It checks one sandbox after the other, each once in
// every interval. list returns all sandboxes of the runner, also those that the process does not serve.
func (l *Link) Recheck(ctx context.Context, every time.Duration, list func() []*Sandbox) {
	for ctx.Err() == nil {
		all := list()
		share := every / time.Duration(len(all)+1)
		for _, s := range all {
			_ = pace.Pause(ctx, share)
			s.recheck(ctx, every)
		}
		_ = pace.Pause(ctx, share)
	}
}

// recheck cuts off a sandbox whose rules are not as they should be. It reconnects a sandbox that was cut off in an earlier round. So no
// traffic passes for a round: the program that changed the rules may still be doing so.
func (s *Sandbox) recheck(ctx context.Context, every time.Duration) {
	if ctx.Err() != nil || !s.cfg.Open() {
		return
	}
	s.mu.Lock()
	cut := s.cut
	s.mu.Unlock()
	log := s.link.cfg.Log.With("sandbox_id", s.id, "workspace_id", s.cfg.WorkspaceID)
	err := s.cfg.Namespace.Check(ctx) // also for a sandbox that is cut off: its rules may have been changed while it was being reconnected
	if errors.Is(err, netns.ErrRulesDiffer) {
		s.setCut(true)
		s.link.cfg.Cut()
		log.ErrorContext(ctx, "another program changed the network rules of a sandbox; it is cut off", "again_ms", core.Milliseconds(every), "err", err)
		s.End(ctx)
		return
	}
	if !cut || err != nil { // an error: it was released meanwhile
		return
	}
	release, ok := s.cfg.Try()
	if !ok {
		return // the next round tries again
	}
	defer release()
	if err := s.reconnect(ctx); err != nil {
		s.End(ctx)
		log.ErrorContext(ctx, "a sandbox stays cut off", "again_ms", core.Milliseconds(every), "err", err)
		return
	}
	s.setCut(false)
	log.WarnContext(ctx, "a sandbox that was cut off has its network again")
}

// reconnect gives a sandbox that was cut off its rules again, in the same way as a fork: they are read back before any traffic passes.
func (s *Sandbox) reconnect(ctx context.Context) error {
	s.mu.Lock()
	opened := s.opened
	s.mu.Unlock()
	if err := s.cfg.Namespace.Assign(ctx, s.cfg.Identity); err != nil {
		return err
	}
	if err := s.Serve(ctx); err != nil {
		return err
	}
	return s.cfg.Namespace.Open(ctx, opened)
}

func (s *Sandbox) setCut(cut bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cut = cut
}
