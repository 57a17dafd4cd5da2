package controller

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"strings"

	"github.com/coppice-dev/coppice/core"
)

// ActionUnseal is the action in the audit log when secrets of grants are decrypted, or read from Vault, for an egress process that did not have
// them.
const ActionUnseal = "unsealGrants"

// unsealed collects whose secrets are given to egress processes.
type unsealed struct {
	places    []int // of the workspaces in the list that they are of
	sandboxes []core.SandboxID
	grants    []unsealedGrant
}

type unsealedGrant struct {
	Grant    string           `json:"grant"`
	Owner    core.WorkspaceID `json:"owner"`
	SecretID string           `json:"secret_id,omitempty"`
	VaultRef string           `json:"vault_ref,omitempty"`
}

// add notes the grants of a workspace that are in its bundle. What is only given anew, to a process that is known to have the same version of
// them, is not noted.
func (u *unsealed) add(place int, w Workspace, held []HeldGrant, chest *chest) {
	if w.Rules.Applied >= w.Rules.Version && bytes.Equal(w.Rules.Sealed, w.Sandbox.EgressKey) {
		return
	}
	any := false
	for _, g := range held {
		if _, there := chest.values[g.ID]; !there {
			continue
		}
		any = true
		one := unsealedGrant{g.Name, g.Owner, g.SecretID, g.VaultRef}
		if !slices.Contains(u.grants, one) {
			u.grants = append(u.grants, one)
		}
	}
	if any {
		u.places, u.sandboxes = append(u.places, place), append(u.sandboxes, w.Sandbox.ID)
	}
}

// record writes into the audit log which secrets are given to whom, before they are. Of a fork it is one record, which has the grants once: its
// children have those of one workspace.
func (u *unsealed) record(ctx context.Context, c *Controller, list []Workspace) error {
	if len(u.places) == 0 {
		return nil
	}
	first := list[u.places[0]]
	object := string(first.ID)
	if len(u.places) > 1 {
		object = string(first.Parent)
	}
	slices.SortFunc(u.grants, func(a, b unsealedGrant) int { return strings.Compare(a.Grant+string(a.Owner), b.Grant+string(b.Owner)) })
	detail, err := json.Marshal(struct {
		Sandboxes []core.SandboxID `json:"sandboxes"`
		Grants    []unsealedGrant  `json:"grants"`
	}{u.sandboxes, u.grants})
	if err != nil {
		return err
	}
	o, _ := OriginOf(ctx)
	o.Action = ActionUnseal
	return c.Audit(WithOrigin(ctx, o), AuditRecord{ProjectID: first.ProjectID, Object: object, Outcome: AuditSucceeded, Detail: detail})
}
