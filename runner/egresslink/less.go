package egresslink

import (
	"context"
	"errors"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/egress"
)

// lessPatience bounds each of two attempts after the process has not accepted rules: to give it less, and to take the sandbox from it.
const lessPatience = 2 * time.Second

// reduce makes a process enforce less for the sandbox, whose rules it did not accept: the rules without grants, or no rules. If the process accepts
// neither, it stops serving the sandbox. So removed entries are no longer in force, whatever is wrong with the others. This takes at most callTime
// of the egress client and twice lessPatience; if the process does not answer at all, its end does it (egress.Pulse). reduce returns nil if the
// process has ended or does not serve the sandbox, and otherwise an error. The caller holds mu.
func (s *Sandbox) reduce(ctx context.Context, c *egress.Client, why error) error {
	if passesNothing(ctx, c, why) {
		return nil
	}
	rules := s.rules
	s.acked = acked{}
	ctx = context.WithoutCancel(ctx) // the caller may have stopped waiting
	giving, cancel := context.WithTimeout(ctx, lessPatience)
	defer cancel()
	for _, less := range rules.Lesser() {
		err := c.SetRules(giving, s.id, less)
		if err == nil {
			s.acked = acked{by: c, rules: rules, less: true, tried: time.Now()}
			s.link.cfg.Log.ErrorContext(ctx, "the egress process refused the rules of a sandbox and got less", "sandbox_id", s.id, "rules_version", rules.Version,
				"entries", len(less.Allow), "err", why)
			return reduced(s.id, rules, why)
		}
		if passesNothing(ctx, c, err) {
			return nil
		}
	}
	cutting, stop := context.WithTimeout(ctx, lessPatience)
	defer stop()
	err := c.Remove(cutting, s.id)
	s.acked = acked{by: c, cut: true} // even after an error: the sandbox is given to the process again, which replaces what it has
	s.link.cfg.Log.ErrorContext(ctx, "the egress process refused the rules of a sandbox, and less; the sandbox was cut off", "sandbox_id", s.id,
		"rules_version", rules.Version, "err", errors.Join(why, err))
	return reduced(s.id, rules, errors.Join(why, err))
}

// lessPause is the wait before rules that a process has not accepted are given to it again. A controller may give them earlier.
const lessPause = time.Minute

// restore gives a process the rules that it has not accepted again, if it is time for that.
func (l *Link) restore(ctx context.Context, c *egress.Client) {
	for _, s := range l.sandboxes() {
		if ctx.Err() != nil {
			return
		}
		s.mu.Lock()
		s.again(ctx, c)
		s.mu.Unlock()
	}
}

// again gives a process the full rules of the sandbox again if it enforces less and it is time for that. Until the process accepts them, nothing
// changes: it enforces less, or, if only its answer was lost, the full rules. The caller holds mu.
func (s *Sandbox) again(ctx context.Context, c *egress.Client) {
	if !s.served || s.acked.by != c || !s.acked.less || time.Since(s.acked.tried) < lessPause || !sameRules(s.acked.rules, s.rules) {
		return
	}
	s.acked.tried = time.Now()
	if err := s.send(ctx, c); err != nil {
		s.link.cfg.Log.WarnContext(ctx, "the egress process still does not accept the rules of a sandbox, and enforces less", "sandbox_id", s.id,
			"rules_version", s.acked.rules.Version, "again_ms", core.Milliseconds(lessPause), "err", err)
		return
	}
	s.link.cfg.Log.InfoContext(ctx, "the egress process has accepted the rules of a sandbox for which it enforced less", "sandbox_id", s.id, "rules_version", s.acked.rules.Version)
}

// putOrLess is put. If the process does not accept the sandbox with its rules, putOrLess offers it with less. After an error the process may serve
// the sandbox with less, or not at all. The caller holds mu.
func (s *Sandbox) putOrLess(ctx context.Context, c *egress.Client) error {
	why := s.put(ctx, c, s.rules)
	if why == nil || errors.Is(ctx.Err(), context.Canceled) || passesNothing(ctx, c, why) {
		return why
	}
	rules := s.rules
	for _, less := range rules.Lesser() {
		if s.put(ctx, c, less) != nil {
			continue
		}
		s.acked = acked{by: c, rules: rules, less: true, tried: time.Now()}
		s.link.cfg.Log.ErrorContext(ctx, "the egress process refused a sandbox with its rules and serves it with less", "sandbox_id", s.id, "rules_version", rules.Version,
			"entries", len(less.Allow), "err", why)
		return reduced(s.id, rules, why)
	}
	s.acked = acked{by: c, cut: true}
	return why
}

// passesNothing reports whether an error of a process means that no traffic of a sandbox passes: the process does not have the sandbox yet, or
// has ended.
func passesNothing(ctx context.Context, c *egress.Client, err error) bool {
	return core.CategoryOf(err) == core.NotFound || errors.Is(err, egress.ErrGone) && c.Ended(context.WithoutCancel(ctx))
}

func reduced(id core.SandboxID, rules runnerapi.EgressRules, why error) error {
	return core.Wrapf(why, core.Unavailable, core.CodeEgressReduced,
		"the egress process refuses the rules of sandbox %s at version %d; until it accepts them, the sandbox may reach less, or nothing", id, rules.Version)
}

// denyRules replace rules that cannot be read: the sandbox may reach nothing.
func denyRules(rules runnerapi.EgressRules) runnerapi.EgressRules {
	return runnerapi.EgressRules{Version: rules.Version}
}
