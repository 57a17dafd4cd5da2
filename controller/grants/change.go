package grants

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/controller/secretstore"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
)

func noGrant(id core.WorkspaceID, name string) error {
	return core.Errorf(core.NotFound, core.CodeGrantNotFound, "workspace %s has no grant %s", id, core.Clip(name))
}

func heldGrant(ctx context.Context, tx Tx, id core.WorkspaceID, name string) (Held, []Held, error) {
	list, err := tx.HeldGrants(ctx, []core.WorkspaceID{id})
	if err != nil {
		return Held{}, nil, err
	}
	for _, g := range list {
		if g.Name == name {
			return g, list, nil
		}
	}
	return Held{}, list, noGrant(id, name)
}

// Put gives a workspace a grant, or changes one, also for the forks that have it. If a fork inherited a grant and gets another one with the
// same name, the new grant is its own from then on.
func (m *Manager) Put(ctx context.Context, project core.ProjectID, id core.WorkspaceID, name string, r Request) (Held, Workspace, error) {
	g, err := m.check(project, id, name, r)
	if err != nil {
		return Held{}, Workspace{}, err
	}
	if _, err := m.cfg.Secrets.Authority(ctx, project); err != nil {
		return Held{}, Workspace{}, err
	}
	var encrypted *secretstore.Secret
	if r.Secret.Reveal() != "" {
		if encrypted, err = m.cfg.Secrets.Encrypt(ctx, project, []byte(r.Secret.Reveal())); err != nil {
			return Held{}, Workspace{}, err
		}
	}
	value := r.Secret
	if g.VaultRef != "" { // not in a transaction. A secret that is not available is not granted
		if value, err = m.readSource(ctx, project, g.VaultRef); err != nil {
			return Held{}, Workspace{}, err
		}
	}
	g.reserve(value)
	var held Held
	w, err := inProject(ctx, m, project, func(tx Tx) (Workspace, error) {
		if err := tx.LockRules(ctx, project); err != nil {
			return Workspace{}, err
		}
		w, err := tx.RuledWorkspace(ctx, id)
		if err == nil {
			err = w.Ended
		}
		if err == nil {
			err = allowedHosts(w, g)
		}
		if err != nil {
			return w, err
		}
		held, err = putGrant(ctx, tx, g, r.TTL, encrypted)
		if err != nil {
			return w, err
		}
		return tx.RuledWorkspace(ctx, id)
	})
	if err != nil {
		return held, w, err
	}
	m.cfg.Log.InfoContext(ctx, "grant given",
		"workspace_id", id, "grant_id", name, "provider", held.Provider, "mode", held.Mode, "hosts", held.Hosts)
	w, _ = m.ApplyNow(ctx, w)
	return held, w, nil
}

// List returns the grants of a workspace.
func (m *Manager) List(ctx context.Context, project core.ProjectID, id core.WorkspaceID) ([]Held, Workspace, error) {
	var w Workspace
	list, err := inProject(ctx, m, project, func(tx Tx) (list []Held, err error) {
		if w, err = tx.RuledWorkspace(ctx, id); err != nil {
			return nil, err
		}
		return tx.HeldGrants(ctx, []core.WorkspaceID{id})
	})
	return list, w, err
}

// Get returns one grant of a workspace.
func (m *Manager) Get(ctx context.Context, project core.ProjectID, id core.WorkspaceID, name string) (Held, Workspace, error) {
	list, w, err := m.List(ctx, project, id)
	if err != nil {
		return Held{}, w, err
	}
	for _, g := range list {
		if g.Name == name {
			return g, w, nil
		}
	}
	return Held{}, w, noGrant(id, name)
}

// Revoke revokes a grant from a workspace and its forks. It ends requests that use the grant.
func (m *Manager) Revoke(ctx context.Context, project core.ProjectID, id core.WorkspaceID, name string) error {
	w, err := inProject(ctx, m, project, func(tx Tx) (Workspace, error) {
		if err := tx.LockRules(ctx, project); err != nil {
			return Workspace{}, err
		}
		if _, err := tx.RuledWorkspace(ctx, id); err != nil {
			return Workspace{}, err
		}
		g, _, err := heldGrant(ctx, tx, id, name)
		if err != nil {
			return Workspace{}, err
		}
		if err := revoke(ctx, tx, g); err != nil {
			return Workspace{}, err
		}
		return tx.RuledWorkspace(ctx, id)
	})
	if err != nil {
		return err
	}
	m.cfg.Log.InfoContext(ctx, "grant revoked", "workspace_id", id, "grant_id", name)
	m.ApplyNow(ctx, w)
	return nil
}

// revoke takes a grant from its holder and from the forks below that inherited it. It searches the whole tree below, by the grant's name. A
// fork in between may have got another grant with this name; the forks that were made from it before still lose the old one. Grants that the
// forks below own themselves stay.
func revoke(ctx context.Context, tx Tx, g Held) error {
	below, err := forksBelow(ctx, tx, g.Workspace)
	if err != nil {
		return err
	}
	held, err := tx.HeldGrants(ctx, slices.Collect(maps.Keys(below)))
	if err != nil {
		return err
	}
	lost := map[core.GrantID][]core.WorkspaceID{g.ID: {g.Workspace}}
	for _, h := range held {
		if h.Name == g.Name && !below[h.Owner] {
			lost[h.ID] = append(lost[h.ID], h.Workspace)
		}
	}
	if g.Owner == g.Workspace {
		if lost[g.ID], err = tx.GrantHolders(ctx, g.ID); err != nil {
			return err
		}
		if err := tx.DropGrant(ctx, g.ID); err != nil {
			return err
		}
		if g.SecretID != "" {
			if err := tx.DeleteSecret(ctx, g.SecretID); err != nil {
				return err
			}
		}
	}
	var changed []core.WorkspaceID // no duplicates: a workspace has one grant of a name
	for id, from := range lost {
		if err := tx.DropHolders(ctx, id, from); err != nil {
			return err
		}
		changed = append(changed, from...)
	}
	return tx.ChangedGrants(ctx, changed)
}

// forksBelow are the forks of a workspace, their forks, and so on, without the workspace itself.
func forksBelow(ctx context.Context, tx Tx, id core.WorkspaceID) (map[core.WorkspaceID]bool, error) {
	below := map[core.WorkspaceID]bool{}
	for level := []core.WorkspaceID{id}; len(level) > 0; {
		forks, err := tx.Forks(ctx, level)
		if err != nil {
			return nil, err
		}
		level = nil
		for _, f := range forks {
			if f.ID != id && !below[f.ID] {
				below[f.ID] = true
				level = append(level, f.ID)
			}
		}
	}
	return below, nil
}

// Inherit gives children the present grants of their parent workspace, with placeholders of their own. It reports whether there are any.
func Inherit(ctx context.Context, tx HoldersTx, from core.WorkspaceID, choice Choice, children []core.WorkspaceID) (bool, error) {
	list, err := tx.HeldGrants(ctx, []core.WorkspaceID{from})
	if err != nil {
		return false, err
	}
	if choice.Names != nil {
		for _, name := range choice.Names {
			if !slices.ContainsFunc(list, func(g Held) bool { return g.Name == name }) {
				return false, noGrant(from, name)
			}
		}
		list = slices.DeleteFunc(list, func(g Held) bool { return !slices.Contains(choice.Names, g.Name) })
	}
	if len(list) == 0 {
		return false, nil
	}
	var holders []Holder
	for _, child := range children {
		for _, g := range list {
			holders = append(holders, Holder{child, g.ID, grant.NewPlaceholder()})
		}
	}
	return true, tx.InsertHolders(ctx, holders)
}

// Env is EnvOf for all present grants of a workspace.
func (m *Manager) Env(ctx context.Context, w Workspace) (map[string]string, error) {
	list, err := inProject(ctx, m, w.ProjectID, func(tx Tx) ([]Held, error) { return tx.HeldGrants(ctx, []core.WorkspaceID{w.ID}) })
	if err != nil {
		return nil, err
	}
	return EnvOf(list, w.Sandbox.EgressURL, time.Now()), nil
}

// EnvOf returns the environment variables of grants: placeholders and base URLs.
func EnvOf(list []Held, egressURL string, now time.Time) map[string]string {
	env := map[string]string{}
	for _, g := range list {
		if g.Expired(now) {
			continue
		}
		if g.Env != "" {
			env[g.Env] = g.Placeholder
		}
		if g.BaseEnv != "" && egressURL != "" {
			env[g.BaseEnv] = BaseURL(g, egressURL)
		}
	}
	return env
}

// BaseURL is the URL that a program uses instead of a grant's host. egressURL is the URL of the proxy on the sandbox's host.
func BaseURL(g Held, egressURL string) string {
	return egressURL + grant.BasePath + g.Name + g.BasePath
}
