package controller

import (
	"context"

	"github.com/coppice-dev/coppice/core"
)

// mayReachAll refuses a new sandbox under allow-all if the operator has not allowed it. It is called for every new sandbox, wherever the
// policy comes from: a request, a checkpoint from a time when allow-all was allowed, or the workspace itself.
func (c *Controller) mayReachAll(ctx context.Context, tx Tx, project core.ProjectID, mode core.EgressPolicy) error {
	if mode != core.EgressAllowAll {
		return nil
	}
	p, err := tx.Project(ctx, project)
	if err != nil {
		return err
	}
	if p.Quotas.AllowAll == AllowAllAllowed || p.Quotas.AllowAll != AllowAllDenied && c.cfg.AllowAllEgress {
		return nil
	}
	return core.Errorf(core.PermissionDenied, core.CodeEgressForbidden,
		"network: the egress policy allow-all is not allowed for project %s; use deny-all with entries in allow, or ask an administrator", p.Name)
}
