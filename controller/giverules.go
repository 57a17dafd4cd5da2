package controller

import (
	"context"
	"encoding/json"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// lessTime is how long the attempt to give a runner less than it has refused may take.
const lessTime = 5 * time.Second

// shrink bounds the rules of each workspace by the bytes that can be sent to a host. Admitted rules are within the bound (grant.MaxBundle,
// policy.MaxBytes); older rows may exceed it. With lenient set they are reduced, down to no rules at all: removed entries must not stay in
// force because of others.
func shrink(list []Workspace, out []equipment, lenient bool) error {
	for i, w := range list {
		for _, less := range append([]runnerapi.EgressRules{out[i].rules}, out[i].rules.Lesser()...) {
			text, err := json.Marshal(less)
			if err != nil {
				return err
			}
			if len(text) <= runnerapi.MaxEgressRules {
				out[i].rules = less
				break
			}
			err = core.Errorf(core.FailedPrecondition, core.CodeGrantsTooLarge,
				"the rules of workspace %s take %d bytes with its grants, and at most %d can be sent to its host; revoke a grant, or allow less", w.ID, len(text), runnerapi.MaxEgressRules)
			if !lenient {
				return err
			}
			out[i].less = err
		}
	}
	return nil
}

// giveRulesOf gives a workspace's rules, with its grants, to the runner of its sandbox. After an error they are not in force as they are;
// the runner may have less then: rules without grants, or none.
func (c *Controller) giveRulesOf(ctx context.Context, w Workspace, limit time.Duration) (Given, error) {
	within, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	equipped, err := c.equip(within, []Workspace{w}, true)
	if err == nil {
		err = c.runners.SetEgress(within, w.Sandbox.Endpoint, w.Sandbox.ID, equipped[0].rules)
		if refuses(err) {
			c.giveLess(ctx, w, equipped[0].rules)
		}
	}
	if err == nil {
		err = equipped[0].less
	}
	if err != nil {
		c.log.InfoContext(ctx, "egress rules not in force yet", "workspace_id", w.ID, "runner_id", w.Sandbox.RunnerID, "rules_version", w.Rules.Version, "err", err)
		return Given{}, err
	}
	return equipped[0].given, nil
}

// refuses reports whether a runner has answered that it does not take rules as they are. Any other error says nothing about
// the rules: the runner was not reached, has a fault of its own such as a full disk, or has no such sandbox. They are given
// again then.
func refuses(err error) bool { return core.CategoryOf(err) == core.Invalid }

// giveLess gives a runner lesser rules than those that it refused, so that removed entries are out of force.
func (c *Controller) giveLess(ctx context.Context, w Workspace, rules runnerapi.EgressRules) {
	ctx, cancel := context.WithTimeout(ctx, lessTime)
	defer cancel()
	for _, less := range rules.Lesser() {
		err := c.runners.SetEgress(ctx, w.Sandbox.Endpoint, w.Sandbox.ID, less)
		c.log.ErrorContext(ctx, "runner refused the rules of a workspace and got less", "workspace_id", w.ID, "runner_id", w.Sandbox.RunnerID,
			"rules_version", w.Rules.Version, "entries", len(less.Allow), "err", err)
		if !refuses(err) {
			return
		}
	}
}
