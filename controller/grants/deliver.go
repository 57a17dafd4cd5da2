package grants

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
)

// lessTime bounds the attempt to give a runner less than the rules that it refused.
const lessTime = 5 * time.Second

const (
	rulesBatch    = 1024
	rulesAtOnce   = 8               // to one runner
	rulesCallTime = 5 * time.Second // for one runner to take rules
	rulesWaitTime = time.Second     // how long a request that changes rules waits for their delivery
)

// Run delivers rules to runners that are not known to have them, until ctx ends. These are rules that changed while a runner could not be
// reached or while a sandbox was being made, and the rules of forks of a changed workspace. Run runs on every controller.
func (m *Manager) Run(ctx context.Context) {
	var group sync.WaitGroup
	defer group.Wait()
	pace.Every(ctx, m.cfg.Interval, m.changed, func() {
		if err := m.deliver(ctx, &group); err != nil && ctx.Err() == nil {
			m.cfg.Log.WarnContext(ctx, "egress rules were not given to runners", "err", err)
		}
	})
}

// Wake makes Run look at once.
func (m *Manager) Wake() {
	select {
	case m.changed <- struct{}{}:
	default:
	}
}

// raiseRules makes the versions of all rules newer when the database has begun another history. Runners may have newer rules than the database
// knows, and they accept no older ones. Every controller does this, but only the first one finds something to do.
func (m *Manager) raiseRules(ctx context.Context) error {
	floor, err := inSystem(ctx, m, func(tx Tx) (int64, error) { return tx.RulesFloor(ctx) })
	if err != nil || floor == m.floor {
		return err
	}
	total := 0
	for n := rulesBatch; n == rulesBatch; total += n {
		if n, err = inSystem(ctx, m, func(tx Tx) (int, error) { return tx.RaiseRules(ctx, floor, rulesBatch) }); err != nil {
			return err
		}
	}
	m.floor = floor
	if total > 0 {
		m.cfg.Log.WarnContext(ctx, "the database has begun another history: egress rules are delivered to runners again", "count", total)
	}
	return nil
}

// deliver starts a delivery to every runner with pending rules, and waits for none of them: a runner that hangs delays only itself.
func (m *Manager) deliver(ctx context.Context, group *sync.WaitGroup) error {
	if err := m.raiseRules(ctx); err != nil {
		return err
	}
	list, err := inSystem(ctx, m, func(tx Tx) ([]Workspace, error) { return tx.PendingRules(ctx, rulesBatch) })
	if err != nil || len(list) == 0 {
		return err
	}
	byRunner := map[core.RunnerID][]Workspace{}
	for _, w := range list {
		byRunner[w.Sandbox.RunnerID] = append(byRunner[w.Sandbox.RunnerID], w)
	}
	for runner, list := range byRunner {
		if !m.delivering.begin(runner) {
			continue
		}
		group.Go(func() {
			defer func() {
				if m.delivering.end(runner) {
					m.Wake()
				}
			}()
			if err := m.deliverTo(ctx, list); err != nil && ctx.Err() == nil {
				m.cfg.Log.WarnContext(ctx, "egress rules were delivered to a runner, but this was not recorded", "runner_id", runner, "err", err)
			}
		})
	}
	return nil
}

// deliverTo delivers rules to one runner. If the runner cannot be reached, it does not try the other sandboxes.
func (m *Manager) deliverTo(ctx context.Context, list []Workspace) error {
	// mu guards applied and unreachable.
	var mu sync.Mutex
	var applied []Applied
	unreachable := false
	slots := make(chan struct{}, rulesAtOnce)
	var group sync.WaitGroup
	for _, w := range list {
		slots <- struct{}{}
		mu.Lock()
		skip := unreachable
		mu.Unlock()
		if skip {
			break
		}
		group.Go(func() {
			defer func() { <-slots }()
			given, err := m.deliverOne(ctx, w, rulesCallTime)
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				applied = append(applied, Applied{w.ID, w.Sandbox.ID, given})
			} else if core.CodeOf(err) == core.CodeRunnerUnreachable {
				unreachable = true
			}
		})
	}
	group.Wait()
	if len(applied) == 0 {
		return nil
	}
	slices.SortFunc(applied, func(a, b Applied) int { return strings.Compare(string(a.Workspace), string(b.Workspace)) }) // rows are locked in one order
	return m.store.InSystem(ctx, func(tx Tx) error { return tx.ApplyRules(ctx, applied) })
}

// underWay are the runners with a delivery under way.
type underWay struct {
	// mu guards again.
	mu    sync.Mutex
	again map[core.RunnerID]bool // whether further rules became pending for the runner meanwhile
}

// begin reports whether no delivery to a runner is under way. If it returns true, one is under way from then on.
func (u *underWay) begin(id core.RunnerID) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.again == nil {
		u.again = map[core.RunnerID]bool{}
	}
	_, busy := u.again[id]
	u.again[id] = busy
	return !busy
}

// end reports whether further rules became pending meanwhile.
func (u *underWay) end(id core.RunnerID) (again bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	again = u.again[id]
	delete(u.again, id)
	return again
}

// ApplyNow delivers the just changed rules of a workspace to its runner. It returns the workspace after that, and whether the runner has the
// rules. If the runner does not have them, Run delivers them later.
func (m *Manager) ApplyNow(ctx context.Context, w Workspace) (Workspace, bool) {
	defer m.Wake() // for its forks
	if !w.Pending() {
		return w, false
	}
	given, err := m.deliverOne(ctx, w, rulesWaitTime)
	if err != nil {
		return w, false
	}
	now, err := inProject(ctx, m, w.ProjectID, func(tx Tx) (Workspace, error) {
		if err := tx.ApplyRules(ctx, []Applied{{w.ID, w.Sandbox.ID, given}}); err != nil {
			return w, err
		}
		return tx.RuledWorkspace(ctx, w.ID)
	})
	if err != nil {
		m.cfg.Log.InfoContext(ctx, "egress rules not recorded as in force yet", "workspace_id", w.ID, "err", err)
		return w, false
	}
	return now, true
}

// deliverOne delivers the rules of a workspace, with its grants, to the runner of its sandbox. After an error these rules are not in force,
// and the runner may have less: rules without grants, or no rules.
func (m *Manager) deliverOne(ctx context.Context, w Workspace, limit time.Duration) (Given, error) {
	within, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	bundled, err := m.Bundles(within, []Workspace{w}, true)
	if err == nil {
		err = m.cfg.Runners.SetEgress(within, w.Sandbox.Endpoint, w.Sandbox.ID, bundled[0].Rules)
		if refuses(err) {
			m.deliverLess(ctx, w, bundled[0].Rules)
		}
	}
	if err == nil {
		err = bundled[0].less
	}
	if err != nil {
		m.cfg.Log.InfoContext(ctx, "egress rules not in force yet",
			"workspace_id", w.ID, "runner_id", w.Sandbox.RunnerID, "rules_version", w.Rules.Version, "err", err)
		return Given{}, err
	}
	return bundled[0].Given, nil
}

// refuses reports whether a runner has answered that it does not accept the rules. Any other error says nothing about the rules: the runner
// was not reached, has a problem such as a full disk, or has no such sandbox. Then the rules are delivered again.
func refuses(err error) bool { return core.CategoryOf(err) == core.Invalid }

// deliverLess delivers less than the rules that the runner refused, so that removed entries are no longer in force.
func (m *Manager) deliverLess(ctx context.Context, w Workspace, rules runnerapi.EgressRules) {
	ctx, cancel := context.WithTimeout(ctx, lessTime)
	defer cancel()
	for _, less := range rules.Lesser() {
		err := m.cfg.Runners.SetEgress(ctx, w.Sandbox.Endpoint, w.Sandbox.ID, less)
		m.cfg.Log.ErrorContext(ctx, "runner refused the rules of a workspace and got less", "workspace_id", w.ID, "runner_id", w.Sandbox.RunnerID,
			"rules_version", w.Rules.Version, "entries", len(less.Allow), "err", err)
		if !refuses(err) {
			return
		}
	}
}
