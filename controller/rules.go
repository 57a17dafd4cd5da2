package controller

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/policy"
)

// Rules are what a workspace may reach through the egress proxy, under deny-all. A fork's never allow more than those of the workspace that
// it was forked from, then or later (docs/adr/0035-rules-of-a-tree.md).
type Rules struct {
	Allow   []string // entries in their only form, sorted
	Version int64    // one more with each change
	Applied int64    // the version that the runner of the present sandbox is known to have
	Granted bool     // there are grants, too
	Sealed  []byte   // the key that they were sealed for last
}

func (r Rules) wire() runnerapi.EgressRules {
	return runnerapi.EgressRules{Version: r.Version, Allow: r.Allow}
}

// RulesPending reports whether a workspace runs on a host that is not known to have its present rules.
func (w Workspace) RulesPending() bool {
	running := w.State == core.WorkspaceReady || w.State == core.WorkspaceCheckpointing
	return running && (w.Rules.Applied < w.Rules.Version || w.Rules.Granted && !bytes.Equal(w.Rules.Sealed, w.Sandbox.EgressKey))
}

// Ruled is a workspace, whether it lives or not, with what it may reach.
type Ruled struct {
	ID     core.WorkspaceID
	Parent core.WorkspaceID // that it was forked from
	Egress core.EgressPolicy
	Allow  []string
}

// AppliedRules says which rules the runner of a workspace's sandbox has.
type AppliedRules struct {
	Workspace core.WorkspaceID
	Sandbox   core.SandboxID
	Given     Given
}

// RulesTx keeps the rules of workspaces.
type RulesTx interface {
	// HoldRules, and then a look at the rules of a workspace, keeps LockRules of the project waiting until this transaction ends.
	HoldRules(project core.ProjectID)
	// LockRules waits for all who hold the rules of the project: what they have forked is there then.
	LockRules(ctx context.Context, project core.ProjectID) error
	// ForkedFrom returns the workspace that a workspace was forked from, also of a checkpoint that is deleted by now; nil when it was made
	// from an image or a file.
	ForkedFrom(ctx context.Context, id core.WorkspaceID) (*Ruled, error)
	// Forks returns what was forked from workspaces, ended ones too.
	Forks(ctx context.Context, of []core.WorkspaceID) ([]Ruled, error)
	// SetRules gives workspaces rules that they do not have yet.
	SetRules(ctx context.Context, list []Ruled) error
	// PendingRules returns workspaces that run on a runner with a lease that is not known to have their present rules, or whose grants have to
	// be sealed anew.
	PendingRules(ctx context.Context, limit int) ([]Workspace, error)
	// RulesFloor is below every version that rules get in the present history of the database, and above those of the histories before it: a
	// promoted standby may lack changes that runners have, and would give their versions to others. 0 in the first history. A workspace begins
	// one above it.
	RulesFloor(ctx context.Context) (int64, error)
	// RaiseRules lifts versions of living workspaces above a floor, so that runners are given their rules again, and returns how many: less
	// than limit when all are above it.
	RaiseRules(ctx context.Context, floor int64, limit int) (int, error)
	// ApplyRules records what runners have; of sandboxes that are not the present ones it records nothing.
	ApplyRules(ctx context.Context, list []AppliedRules) error
}

// reach is what may be reached: everything, or what a policy allows.
type reach struct {
	all    bool
	policy policy.Policy
}

func reachOf(mode core.EgressPolicy, allow []string) (reach, error) {
	p, err := policy.Parse("network.allow", allow)
	return reach{all: mode == core.EgressAllowAll, policy: p}, err
}

// beyond are the words for what r has and limit does not.
func (r reach) beyond(limit reach) []string {
	switch {
	case limit.all:
		return nil
	case r.all:
		return []string{string(core.EgressAllowAll)}
	}
	return r.policy.Beyond(limit.policy)
}

// within are the entries of what both have: those of r that are in limit, and those of limit that are in r. Where two overlap otherwise,
// as *.example.com:443 and a.example.com do, neither is kept. Both lists are within the bounds of rules, and together they may not be: then
// entries of r come first, and what is too much is not kept either.
func (r reach) within(limit reach) []string {
	if limit.all {
		return r.policy.Entries()
	}
	out := r.policy.Entries()
	more := r.policy.Beyond(limit.policy)
	out = slices.DeleteFunc(out, func(e string) bool { return slices.Contains(more, e) })
	more = limit.policy.Beyond(r.policy)
	for _, e := range limit.policy.Entries() {
		if !slices.Contains(more, e) && !slices.Contains(out, e) {
			out = append(out, e)
		}
	}
	for len(out) > 0 && (len(out) > policy.MaxRules || policy.SizeOf(out) > policy.MaxBytes) {
		out = out[:len(out)-1]
	}
	slices.Sort(out)
	return out
}

// limitedTo refuses what goes beyond what a workspace may reach.
func limitedTo(mode core.EgressPolicy, allow []string, parent Ruled) error {
	wanted, err := reachOf(mode, allow)
	if err != nil {
		return err
	}
	limit, err := reachOf(parent.Egress, parent.Allow)
	if err != nil {
		return err
	}
	if more := wanted.beyond(limit); more != nil {
		return core.Errorf(core.PermissionDenied, core.CodeEgressBeyondParent,
			"network: %s is beyond what workspace %s may reach, and what comes from it never reaches more; allow it there first, or leave it out", strings.Join(more, ", "), parent.ID)
	}
	return nil
}

// ruled refuses rules where there are none.
func ruled(mode core.EgressPolicy, allow []string) error {
	if mode == core.EgressAllowAll && len(allow) > 0 {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "network.allow: it is for deny-all; under allow-all everything may be reached")
	}
	return nil
}

// origin is the workspace that bounds what is grown from a checkpoint; nil for one that comes from an image or a file.
func (cp Checkpoint) origin() *Ruled {
	if cp.WorkspaceID == "" {
		return nil
	}
	return &Ruled{ID: cp.WorkspaceID, Egress: cp.Egress, Allow: cp.Allow}
}

// changeRules gives a workspace other rules, and takes from everything that was forked from it, and from that, what is no longer within:
// a host that is taken out is out of the whole tree below.
func changeRules(ctx context.Context, tx Tx, w Workspace, allow []string) error {
	if w.Egress == core.EgressAllowAll {
		return core.Errorf(core.FailedPrecondition, core.CodeInvalidField, "network.allow: workspace %s has egress policy allow-all, under which there are no rules; fork it with deny-all", w.ID)
	}
	parent, err := tx.ForkedFrom(ctx, w.ID)
	if err != nil {
		return err
	}
	if parent != nil {
		if err := limitedTo(w.Egress, allow, *parent); err != nil {
			return err
		}
	}
	changed := []Ruled{{ID: w.ID, Egress: w.Egress, Allow: allow}}
	for level := changed; len(level) > 0; {
		above := map[core.WorkspaceID]Ruled{}
		ids := make([]core.WorkspaceID, len(level))
		for i, r := range level {
			ids[i], above[r.ID] = r.ID, r
		}
		forks, err := tx.Forks(ctx, ids)
		if err != nil {
			return err
		}
		level = nil
		for _, fork := range forks {
			limit, err := reachOf(core.EgressDenyAll, above[fork.Parent].Allow)
			if err != nil {
				return err
			}
			has, err := reachOf(fork.Egress, fork.Allow)
			if err != nil {
				return err
			}
			if has.beyond(limit) != nil {
				fork.Allow = has.within(limit)
				level = append(level, fork)
			}
		}
		changed = append(changed, level...)
	}
	return tx.SetRules(ctx, changed)
}

const (
	rulesBatch    = 1024
	rulesAtOnce   = 8               // to one runner
	rulesCallTime = 5 * time.Second // for one runner to take rules
	rulesWaitTime = time.Second     // of which a request that changes them waits for
)

// rulesLoop runs on every controller. It gives runners the rules that they are not known to have: that were changed while they could not be
// reached or a sandbox was being made, and those of forks of what was changed.
func (c *Controller) rulesLoop(ctx context.Context) {
	var group sync.WaitGroup
	defer group.Wait()
	every(ctx, c.cfg.LoopInterval, c.rulesChanged, func() {
		if err := c.giveRules(ctx, &group); err != nil && ctx.Err() == nil {
			c.log.WarnContext(ctx, "egress rules were not given to runners", "err", err)
		}
	})
}

// wakeRules makes the loop look at once.
func (c *Controller) wakeRules() {
	select {
	case c.rulesChanged <- struct{}{}:
	default:
	}
}

// raiseRules has all rules given to runners again when the database has begun another history: what runners have is maybe newer than what it
// knows, and they would take nothing older. Every controller does it, and only the first finds something to do.
func (c *Controller) raiseRules(ctx context.Context) error {
	floor, err := read(ctx, c, System(), func(tx Tx) (int64, error) { return tx.RulesFloor(ctx) })
	if err != nil || floor == c.rulesFloor {
		return err
	}
	total := 0
	for n := rulesBatch; n == rulesBatch; total += n {
		if n, err = read(ctx, c, System(), func(tx Tx) (int, error) { return tx.RaiseRules(ctx, floor, rulesBatch) }); err != nil {
			return err
		}
	}
	c.rulesFloor = floor
	if total > 0 {
		c.log.WarnContext(ctx, "the database has begun another history: egress rules are given to runners again", "count", total)
	}
	return nil
}

// giveRules begins with every runner that something is pending for, and waits for none: one that hangs holds up nobody but itself.
func (c *Controller) giveRules(ctx context.Context, group *sync.WaitGroup) error {
	if err := c.raiseRules(ctx); err != nil {
		return err
	}
	list, err := read(ctx, c, System(), func(tx Tx) ([]Workspace, error) { return tx.PendingRules(ctx, rulesBatch) })
	if err != nil || len(list) == 0 {
		return err
	}
	byRunner := map[core.RunnerID][]Workspace{}
	for _, w := range list {
		byRunner[w.Sandbox.RunnerID] = append(byRunner[w.Sandbox.RunnerID], w)
	}
	for runner, list := range byRunner {
		if !c.rulesUnder.begin(runner) {
			continue
		}
		group.Go(func() {
			defer func() {
				if c.rulesUnder.end(runner) {
					c.wakeRules()
				}
			}()
			if err := c.giveRulesTo(ctx, list); err != nil && ctx.Err() == nil {
				c.log.WarnContext(ctx, "egress rules that runners have were not recorded", "runner_id", runner, "err", err)
			}
		})
	}
	return nil
}

// giveRulesTo gives rules to one runner, which is not asked for each of its sandboxes when it cannot be reached.
func (c *Controller) giveRulesTo(ctx context.Context, list []Workspace) error {
	// mu guards applied and away.
	var mu sync.Mutex
	var applied []AppliedRules
	away := false
	slots := make(chan struct{}, rulesAtOnce)
	var group sync.WaitGroup
	for _, w := range list {
		slots <- struct{}{}
		mu.Lock()
		skip := away
		mu.Unlock()
		if skip {
			break
		}
		group.Go(func() {
			defer func() { <-slots }()
			given, err := c.giveRulesOf(ctx, w, rulesCallTime)
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				applied = append(applied, AppliedRules{w.ID, w.Sandbox.ID, given})
			} else if core.CodeOf(err) == core.CodeRunnerUnreachable {
				away = true
			}
		})
	}
	group.Wait()
	if len(applied) == 0 {
		return nil
	}
	slices.SortFunc(applied, func(a, b AppliedRules) int { return strings.Compare(string(a.Workspace), string(b.Workspace)) }) // rows are locked in one order
	return c.store.InTx(ctx, System(), func(tx Tx) error { return tx.ApplyRules(ctx, applied) })
}

// underWay are runners that are being given rules.
type underWay struct {
	// mu guards again.
	mu    sync.Mutex
	again map[core.RunnerID]bool // whether there was something for it meanwhile
}

// begin reports whether a runner is given nothing at this moment; from then on it is.
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

// end reports whether there was something meanwhile.
func (u *underWay) end(id core.RunnerID) (again bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	again = u.again[id]
	delete(u.again, id)
	return again
}

// applyRules gives the rules of a workspace that were just changed to its runner, and returns the workspace as it is then. What does not
// succeed is left to the loop.
func (c *Controller) applyRules(ctx context.Context, w Workspace) Workspace {
	defer c.wakeRules() // for what was forked from it
	if !w.RulesPending() {
		return w
	}
	given, err := c.giveRulesOf(ctx, w, rulesWaitTime)
	if err != nil {
		return w
	}
	err = c.store.InTx(ctx, InProject(w.ProjectID), func(tx Tx) error {
		if err := tx.ApplyRules(ctx, []AppliedRules{{w.ID, w.Sandbox.ID, given}}); err != nil {
			return err
		}
		now, err := tx.Workspace(ctx, w.ID)
		if err == nil {
			w = now
		}
		return err
	})
	if err != nil {
		c.log.InfoContext(ctx, "egress rules not recorded as in force yet", "workspace_id", w.ID, "err", err)
	}
	return w
}
