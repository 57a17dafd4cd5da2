package controller

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"

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
	digests   [][sha256.Size]byte // of what each sandbox is given
}

// maxUnsealings bounds the sandboxes whose last record a controller remembers.
const maxUnsealings = 16384

// unsealings remember what was last recorded of sandboxes: who refuses rules is offered the same again and again, and one record of that is enough.
type unsealings struct {
	mu   sync.Mutex
	last map[core.SandboxID][sha256.Size]byte
}

func (u *unsealings) has(id core.SandboxID, digest [sha256.Size]byte) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	was, there := u.last[id]
	return there && was == digest
}

func (u *unsealings) note(ids []core.SandboxID, digests [][sha256.Size]byte) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.last == nil {
		u.last = map[core.SandboxID][sha256.Size]byte{}
	}
	for i, id := range ids {
		if _, there := u.last[id]; !there && len(u.last) >= maxUnsealings {
			for some := range u.last { // what is forgotten is recorded once more at most
				delete(u.last, some)
				break
			}
		}
		u.last[id] = digests[i]
	}
}

type unsealedGrant struct {
	Grant    string           `json:"grant"`
	Owner    core.WorkspaceID `json:"owner"`
	SecretID string           `json:"secret_id,omitempty"`
	VaultRef string           `json:"vault_ref,omitempty"`
}

// add notes the grants of a workspace that are in its bundle. What is only given anew, to a process that is known to have the same version of
// them, is not noted, nor is what was recorded already.
func (u *unsealed) add(place int, w Workspace, held []HeldGrant, chest *chest, recorded *unsealings) {
	if w.Rules.Applied >= w.Rules.Version && bytes.Equal(w.Rules.Sealed, w.Sandbox.EgressKey) {
		return
	}
	var own []unsealedGrant
	for _, g := range held {
		if _, there := chest.values[g.ID]; !there {
			continue
		}
		own = append(own, unsealedGrant{g.Name, g.Owner, g.SecretID, g.VaultRef})
	}
	digest := sha256.Sum256(fmt.Appendf(nil, "%d %x %q", w.Rules.Version, w.Sandbox.EgressKey, own))
	if len(own) == 0 || recorded.has(w.Sandbox.ID, digest) {
		return
	}
	for _, one := range own {
		if !slices.Contains(u.grants, one) {
			u.grants = append(u.grants, one)
		}
	}
	u.places, u.sandboxes, u.digests = append(u.places, place), append(u.sandboxes, w.Sandbox.ID), append(u.digests, digest)
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
	err = c.Audit(WithOrigin(ctx, o), AuditRecord{ProjectID: first.ProjectID, Object: object, Outcome: AuditSucceeded, Detail: detail})
	if err == nil {
		c.unsealings.note(u.sandboxes, u.digests)
	}
	return err
}
