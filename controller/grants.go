package controller

import (
	"context"
	"encoding/json"

	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/core"
)

// Grants are the egress rules and grants of workspaces.
func (c *Controller) Grants() *grants.Manager { return c.grants }

// newGrants makes the manager of a controller.
func newGrants(c *Controller) *grants.Manager {
	return grants.New(grants.Config{
		Interval: c.cfg.LoopInterval, Runners: c.runners, Secrets: c.secrets, Source: c.cfg.Secrets, Log: c.log,
		Audit: func(ctx context.Context, project core.ProjectID, object string, detail json.RawMessage) error {
			o, _ := OriginOf(ctx)
			o.Action = grants.ActionUnseal
			return c.Tenancy.Audit(WithOrigin(ctx, o), AuditRecord{ProjectID: project, Object: object, Outcome: AuditSucceeded, Detail: detail})
		},
	}, partStore[grants.Tx]{c.store.Store, func(tx AllTx) grants.Tx { return tx }})
}

// deliverRules delivers the just changed rules of a workspace, and returns the workspace after that.
func (c *Controller) deliverRules(ctx context.Context, w Workspace) Workspace {
	if _, applied := c.grants.ApplyNow(ctx, w.ForGrants()); applied {
		if now, err := c.Workspace(ctx, w.ProjectID, w.ID); err == nil {
			return now
		}
	}
	return w
}

// RulesTx orders forks and changes of rules.
type RulesTx interface {
	// HoldRules makes LockRules of the project wait until this transaction ends. Call it before reading the rules of a workspace.
	HoldRules(project core.ProjectID)
}

// inherit gives children the present grants of their parent workspace.
func inherit(ctx context.Context, tx Tx, source Checkpoint, choice grants.Choice, children []Workspace) error {
	if choice.None || source.WorkspaceID == "" || !source.Granted && len(choice.Names) == 0 {
		return nil
	}
	var ids []core.WorkspaceID
	for _, child := range children {
		if child.Egress == core.EgressDenyAll {
			ids = append(ids, child.ID)
		}
	}
	granted, err := grants.Inherit(ctx, tx, source.WorkspaceID, choice, ids)
	for i := range children {
		children[i].Rules.Granted = granted && children[i].Egress == core.EgressDenyAll
	}
	return err
}
