// Package settings changes what a user may change of a workspace: its name, its labels, its time to live, its idle policy and what it may
// reach.
package settings

import (
	"context"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/policy"
)

// Patch says what to change. Version 0 does not compare.
type Patch struct {
	Version int64
	Name    string             // empty: as it was
	Labels  map[string]*string // nil removes
	TTL     *time.Duration     // 0 removes the expiry

	IdleAfter  *time.Duration   // 0 removes it
	OnIdle     model.IdleAction // empty: as it was; IdleSuspend when it had none
	AutoResume *bool
	OnTTL      model.IdleAction // empty: as it was

	// Rules, in the only form of their entries. Allow replaces all of them; Add and Remove change single ones.
	Allow       *[]string
	Add, Remove []string
}

// changesRules reports whether the patch changes what the workspace may reach.
func (p Patch) changesRules() bool { return p.Allow != nil || len(p.Add)+len(p.Remove) > 0 }

// rules are the rules that a workspace with these rules gets.
func (p Patch) rules(id core.WorkspaceID, now []string) ([]string, error) {
	if p.Allow != nil {
		return *p.Allow, nil
	}
	next := slices.Clone(now)
	for _, entry := range p.Remove {
		i := slices.Index(next, entry)
		if i < 0 {
			return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "network.remove: workspace %s has no entry %s", id, entry)
		}
		next = slices.Delete(next, i, i+1)
	}
	for _, entry := range p.Add {
		if !slices.Contains(next, entry) {
			next = append(next, entry)
		}
	}
	rules, err := policy.Parse("network.add", next)
	if err != nil {
		return nil, err
	}
	return rules.Entries(), rules.CheckSize("network.add")
}

// Store runs transactions. Package controller/postgres has the methods of Tx.
type Store interface {
	// InProject runs fn in a transaction of a project and commits when it returns nil.
	InProject(ctx context.Context, project core.ProjectID, fn func(Tx) error) error
}

// Tx changes workspaces.
type Tx interface {
	grants.RulesTx
	Workspace(ctx context.Context, id core.WorkspaceID) (model.Workspace, error)
	// PatchWorkspace fails with NAME_TAKEN if another living workspace has the name.
	PatchWorkspace(ctx context.Context, id core.WorkspaceID, p Patch) (model.Workspace, error)
}

// Changer changes workspaces. It is safe for concurrent use.
type Changer struct {
	store   Store
	deliver func(context.Context, model.Workspace) model.Workspace
}

// New makes a Changer. deliver sends the new rules of a workspace to its runner and returns the workspace as it is afterwards.
func New(store Store, deliver func(context.Context, model.Workspace) model.Workspace) *Changer {
	return &Changer{store, deliver}
}

// PatchWorkspace changes name, labels, expiry, idle policy and rules, all of it or nothing.
func (c *Changer) PatchWorkspace(ctx context.Context, project core.ProjectID, id core.WorkspaceID, p Patch) (model.Workspace, error) {
	if p.Name != "" {
		if err := core.ValidateName("name", p.Name); err != nil {
			return model.Workspace{}, err
		}
	}
	var w model.Workspace
	err := c.store.InProject(ctx, project, func(tx Tx) (err error) {
		w, err = change(ctx, tx, project, id, p)
		return err
	})
	if err == nil && p.changesRules() {
		w = c.deliver(ctx, w)
	}
	return w, err
}

func change(ctx context.Context, tx Tx, project core.ProjectID, id core.WorkspaceID, p Patch) (model.Workspace, error) {
	if p.changesRules() {
		if err := tx.LockRules(ctx, project); err != nil {
			return model.Workspace{}, err
		}
	}
	w, err := tx.PatchWorkspace(ctx, id, p)
	if err == nil && p.changesRules() {
		w, err = changeRules(ctx, tx, w, p)
	}
	switch {
	case err != nil:
		return w, err
	case w.IdlePolicy.OnTTL == model.IdleSuspend && (p.TTL != nil || p.OnTTL != ""):
		if err := MaySuspendAtTTL(ctx); err != nil {
			return w, err
		}
	}
	switch {
	case p.Name != "" && w.State.Final():
		return w, core.Errorf(core.FailedPrecondition, core.CodeWorkspaceNotReady, "workspace %s is %s and keeps its name", id, w.State)
	case p.OnIdle != "" && w.IdlePolicy.IdleAfter == 0:
		return w, core.Errorf(core.Invalid, core.CodeInvalidField, "on_idle: it needs idle_seconds, and workspace %s has none", id)
	case len(w.Labels) > model.MaxLabels:
		return w, core.Errorf(core.Invalid, core.CodeInvalidField, "labels: there would be %d; at most %d are kept", len(w.Labels), model.MaxLabels)
	}
	return w, nil
}

func changeRules(ctx context.Context, tx Tx, w model.Workspace, p Patch) (model.Workspace, error) {
	allow, err := p.rules(w.ID, w.Rules.Allow)
	if err != nil {
		return w, err
	}
	if err := grants.ChangeRules(ctx, tx, w.ForGrants(), allow); err != nil {
		return w, err
	}
	return tx.Workspace(ctx, w.ID)
}

// MaySuspendAtTTL refuses a key without the right to suspend: to have a workspace suspended at the end of its time is to suspend it.
func MaySuspendAtTTL(ctx context.Context) error {
	key := request.KeyOf(ctx)
	if key.ID == "" {
		return nil // the controller itself
	}
	if missing := core.MissingScope(key.Scopes, core.ScopeWorkspaceCreate, core.ScopeCheckpointCreate); missing != "" {
		return core.Errorf(core.PermissionDenied, core.CodePermissionDenied, "on_ttl: a workspace that is suspended at the end of its time needs a key with the scope %s", missing)
	}
	return nil
}
