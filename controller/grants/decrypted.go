package grants

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

// ActionUnseal is the action in the audit log for secrets of grants that were decrypted, or read from Vault, for an egress process that did
// not have them.
const ActionUnseal = "unsealGrants"

// decrypted collects the grants whose secrets are given to egress processes.
type decrypted struct {
	places    []int // positions of their workspaces in the list
	sandboxes []core.SandboxID
	grants    []decryptedGrant
	digests   [][sha256.Size]byte // of the grants that each sandbox is given
}

// maxDecryptions bounds the number of sandboxes whose last record a controller remembers.
const maxDecryptions = 16384

// decryptions remember the last record of each sandbox. A runner that refuses rules is offered the same rules again and again; one record of
// this is enough.
type decryptions struct {
	mu   sync.Mutex
	last map[core.SandboxID][sha256.Size]byte
}

func (u *decryptions) has(id core.SandboxID, digest [sha256.Size]byte) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	was, there := u.last[id]
	return there && was == digest
}

func (u *decryptions) note(ids []core.SandboxID, digests [][sha256.Size]byte) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.last == nil {
		u.last = map[core.SandboxID][sha256.Size]byte{}
	}
	for i, id := range ids {
		if _, there := u.last[id]; !there && len(u.last) >= maxDecryptions {
			for some := range u.last { // a forgotten sandbox is recorded at most once more
				delete(u.last, some)
				break
			}
		}
		u.last[id] = digests[i]
	}
}

type decryptedGrant struct {
	Grant    string           `json:"grant"`
	Owner    core.WorkspaceID `json:"owner"`
	SecretID string           `json:"secret_id,omitempty"`
	VaultRef string           `json:"vault_ref,omitempty"`
}

// add notes the grants in the bundle of a workspace. It leaves out grants that the egress process is known to have in the same version, and
// grants that were recorded already.
func (u *decrypted) add(place int, w Workspace, held []Held, secrets *openedSecrets, recorded *decryptions) {
	if w.Rules.Applied >= w.Rules.Version && bytes.Equal(w.Rules.EncryptedFor, w.Sandbox.EgressKey) {
		return
	}
	var own []decryptedGrant
	for _, g := range held {
		if _, there := secrets.values[g.ID]; !there {
			continue
		}
		own = append(own, decryptedGrant{g.Name, g.Owner, g.SecretID, g.VaultRef})
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

// record writes into the audit log which secrets are about to be given to whom. A fork operation has one record with each grant once, because
// all its children have the grants of one workspace.
func (u *decrypted) record(ctx context.Context, m *Manager, list []Workspace) error {
	if len(u.places) == 0 {
		return nil
	}
	first := list[u.places[0]]
	object := string(first.ID)
	if len(u.places) > 1 {
		object = string(first.Parent)
	}
	slices.SortFunc(u.grants, func(a, b decryptedGrant) int {
		return strings.Compare(a.Grant+string(a.Owner), b.Grant+string(b.Owner))
	})
	detail, err := json.Marshal(struct {
		Sandboxes []core.SandboxID `json:"sandboxes"`
		Grants    []decryptedGrant `json:"grants"`
	}{u.sandboxes, u.grants})
	if err != nil {
		return err
	}
	err = m.cfg.Audit(ctx, first.ProjectID, object, detail)
	if err == nil {
		m.decryptions.note(u.sandboxes, u.digests)
	}
	return err
}
