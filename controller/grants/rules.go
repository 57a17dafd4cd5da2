package grants

import (
	"context"
	"slices"
	"strings"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/policy"
)

// Rules are what a workspace may reach through the egress proxy, under deny-all. The rules of a fork never allow more than those of its parent
// workspace, when it is forked or later (docs/adr/0035-rules-of-a-tree.md).
type Rules struct {
	Allow        []string // entries in their canonical form, sorted
	Version      int64    // one more with each change
	Applied      int64    // the version that the runner of the present sandbox is known to have
	Granted      bool     // the workspace also has grants
	EncryptedFor []byte   // the key that the grants were encrypted for last
}

func (r Rules) wire() runnerapi.EgressRules {
	return runnerapi.EgressRules{Version: r.Version, Allow: r.Allow}
}

// WorkspaceRules is a living or ended workspace with its rules.
type WorkspaceRules struct {
	ID     core.WorkspaceID
	Parent core.WorkspaceID // the workspace that it was forked from
	Egress core.EgressPolicy
	Allow  []string
}

// Applied says which rules the runner of a workspace's sandbox has.
type Applied struct {
	Workspace core.WorkspaceID
	Sandbox   core.SandboxID
	Given     Given
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

// beyond are the texts of the entries that r has and limit does not.
func (r reach) beyond(limit reach) []string {
	switch {
	case limit.all:
		return nil
	case r.all:
		return []string{string(core.EgressAllowAll)}
	}
	return r.policy.Beyond(limit.policy)
}

// within are the entries that both have: those of r that are in limit, and those of limit that are in r. If two entries overlap in another
// way, as *.example.com:443 and a.example.com do, neither is kept. Each list is within the bounds of rules, but the two together may exceed
// them. Then entries of r come first, and the rest is not kept.
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

// CheckWithin refuses rules that allow more than a workspace may reach.
func CheckWithin(mode core.EgressPolicy, allow []string, parent WorkspaceRules) error {
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
			"network: %s: workspace %s may not reach this, and its forks never reach more than it does; allow it there first, or leave it out", strings.Join(more, ", "), parent.ID)
	}
	return nil
}

// CheckMode refuses rules under allow-all, which has no rules.
func CheckMode(mode core.EgressPolicy, allow []string) error {
	if mode == core.EgressAllowAll && len(allow) > 0 {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "network.allow: it is for deny-all; under allow-all a workspace may reach everything")
	}
	return nil
}

// ChangeRules gives a workspace other rules. It removes from all forks below, at any depth, what is no longer within these rules: a removed
// host is removed from the whole tree below.
func ChangeRules(ctx context.Context, tx RulesTx, w Workspace, allow []string) error {
	if w.Egress == core.EgressAllowAll {
		return core.Errorf(core.FailedPrecondition, core.CodeInvalidField,
			"network.allow: workspace %s has egress policy allow-all, which has no rules; fork it with deny-all", w.ID)
	}
	parent, err := tx.ForkedFrom(ctx, w.ID)
	if err != nil {
		return err
	}
	if parent != nil {
		if err := CheckWithin(w.Egress, allow, *parent); err != nil {
			return err
		}
	}
	changed := []WorkspaceRules{{ID: w.ID, Egress: w.Egress, Allow: allow}}
	for level := changed; len(level) > 0; {
		above := map[core.WorkspaceID]WorkspaceRules{}
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
