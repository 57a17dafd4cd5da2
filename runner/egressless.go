package runner

import (
	"context"
	"errors"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/egress"
)

// lessPatience is how long each of two attempts may take when the process does not take rules: to give it less, and to take the sandbox from it.
const lessPatience = 2 * time.Second

// reduce has a process that did not take the rules of a sandbox enforce less: the rules without grants, or none; and where it takes neither, it
// serves the sandbox no more. So what was taken away is out of force, whatever is wrong with what is left: within callTime of the egress client
// and twice lessPatience, or, where the process does not answer at all, by its end (egress.Pulse). It returns nil when the process has ended or does
// not serve the sandbox, and otherwise an error. The caller holds egressMu.
func (e *egressLink) reduce(ctx context.Context, c *egress.Client, s *sandbox, why error) error {
	if e.passesNothing(ctx, c, why) {
		return nil
	}
	rules := s.rules()
	s.told = told{}
	ctx = context.WithoutCancel(ctx) // who asked may have given up waiting
	giving, cancel := context.WithTimeout(ctx, lessPatience)
	defer cancel()
	for _, less := range rules.Lesser() {
		err := c.SetRules(giving, s.info.ID, less)
		if err == nil {
			s.told = told{by: c, rules: rules, less: true, tried: time.Now()}
			e.r.cfg.Log.ErrorContext(ctx, "the egress process refused the rules of a sandbox and got less", "sandbox_id", s.info.ID, "rules_version", rules.Version,
				"entries", len(less.Allow), "err", why)
			return reduced(s.info.ID, rules, why)
		}
		if e.passesNothing(ctx, c, err) {
			return nil
		}
	}
	cutting, stop := context.WithTimeout(ctx, lessPatience)
	defer stop()
	err := c.Remove(cutting, s.info.ID)
	s.told = told{by: c, cut: true} // after an error, too: it is handed over anew, which replaces what is there
	e.r.cfg.Log.ErrorContext(ctx, "the egress process refused the rules of a sandbox, and less; the sandbox was cut off", "sandbox_id", s.info.ID,
		"rules_version", rules.Version, "err", errors.Join(why, err))
	return reduced(s.info.ID, rules, errors.Join(why, err))
}

// lessPause is how long a process that has not taken the rules of a sandbox is not given them again, unless a controller does.
const lessPause = time.Minute

// restore gives a process again the rules that it has not taken, where it is time for that.
func (e *egressLink) restore(ctx context.Context, c *egress.Client) {
	for _, s := range e.r.all() {
		if ctx.Err() != nil {
			return
		}
		s.egressMu.Lock()
		e.again(ctx, c, s)
		s.egressMu.Unlock()
	}
}

// again gives a process the rules of a sandbox again for which it enforces less, if it is time for that. Until it takes them it has what it has:
// less, or, when only its answer was lost, the rules. The caller holds egressMu.
func (e *egressLink) again(ctx context.Context, c *egress.Client, s *sandbox) {
	if !s.served || s.told.by != c || !s.told.less || time.Since(s.told.tried) < lessPause || !sameRules(s.told.rules, s.rules()) {
		return
	}
	s.told.tried = time.Now()
	if err := e.tell(ctx, c, s); err != nil {
		e.r.cfg.Log.WarnContext(ctx, "the egress process still does not take the rules of a sandbox, and enforces less", "sandbox_id", s.info.ID,
			"rules_version", s.told.rules.Version, "again_ms", core.Milliseconds(lessPause), "err", err)
		return
	}
	e.r.cfg.Log.InfoContext(ctx, "the egress process has taken the rules of a sandbox that it enforced less for", "sandbox_id", s.info.ID, "rules_version", s.told.rules.Version)
}

// putOrLess is put, and hands the sandbox over with less where the process does not take it with its rules. After an error it may be served with
// less, or not at all. The caller holds egressMu.
func (e *egressLink) putOrLess(ctx context.Context, c *egress.Client, s *sandbox) error {
	why := e.put(ctx, c, s)
	if why == nil || errors.Is(ctx.Err(), context.Canceled) || e.passesNothing(ctx, c, why) {
		return why
	}
	rules := s.rules()
	for _, less := range rules.Lesser() {
		if e.putWith(ctx, c, s, less) != nil {
			continue
		}
		s.told = told{by: c, rules: rules, less: true, tried: time.Now()}
		e.r.cfg.Log.ErrorContext(ctx, "the egress process refused a sandbox with its rules and serves it with less", "sandbox_id", s.info.ID, "rules_version", rules.Version,
			"entries", len(less.Allow), "err", why)
		return reduced(s.info.ID, rules, why)
	}
	s.told = told{by: c, cut: true}
	return why
}

// passesNothing reports whether an error of a process means that nothing of a sandbox passes: it is about to get the sandbox, or has ended.
func (e *egressLink) passesNothing(ctx context.Context, c *egress.Client, err error) bool {
	return core.CategoryOf(err) == core.NotFound || errors.Is(err, egress.ErrGone) && c.Ended(context.WithoutCancel(ctx))
}

func reduced(id core.SandboxID, rules runnerapi.EgressRules, why error) error {
	return core.Wrapf(why, core.Unavailable, core.CodeEgressReduced,
		"the egress process refuses the rules of sandbox %s at version %d; until it accepts them, the sandbox may reach less, or nothing", id, rules.Version)
}

// denyRules are in the place of rules that cannot be read: nothing may be reached.
func denyRules(rules runnerapi.EgressRules) runnerapi.EgressRules {
	return runnerapi.EgressRules{Version: rules.Version}
}
