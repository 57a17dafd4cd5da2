package tenancy

import (
	"context"
	"errors"

	"github.com/coppice-dev/coppice/controller/datakeys"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
)

// QuotasPatch changes limits; nil does not change a limit. Version 0 does not compare.
type QuotasPatch struct {
	Version int64

	Workspaces, ForksInFlight, Checkpoints, CheckpointBytes, Depth, Children, Keys, Ports *int64

	AllowAll *model.AllowAll
}

// QuotaUsage is how much of its quotas a project uses.
type QuotaUsage struct {
	Workspaces, ForksInFlight, Checkpoints, CheckpointBytes, Keys, Ports int64
}

// Demand is what an admission adds to a project.
type Demand struct {
	Workspaces    int               // new ones
	ForksInFlight int               // workspaces that are made or restored
	Checkpoint    core.CheckpointID // to be captured

	CheckpointBytes int64 // of that one, where it is known before
}

// ProjectTx keeps projects and their quotas.
type ProjectTx interface {
	// EnsureProject returns the project of that name. It makes the project if it is missing.
	EnsureProject(ctx context.Context, id core.ProjectID, name string) (model.Project, error)
	InsertProject(ctx context.Context, id core.ProjectID, name string) (model.Project, error)
	// Project finds neither the system's project nor a deleted one.
	Project(ctx context.Context, id core.ProjectID) (model.Project, error)
	Projects(ctx context.Context, p model.Page) ([]model.Project, error)
	// DeleteProject marks a project deleted and revokes its keys. It fails with PROJECT_NOT_EMPTY if something of the project lives.
	DeleteProject(ctx context.Context, id core.ProjectID) error
	PatchQuotas(ctx context.Context, id core.ProjectID, p QuotasPatch) (model.Project, error)
	QuotaUsage(ctx context.Context, id core.ProjectID) (QuotaUsage, error)
}

// AdmitTx is what a transaction needs that inserts objects of a project.
type AdmitTx interface {
	// Project finds neither the system's project nor a deleted one.
	Project(ctx context.Context, id core.ProjectID) (model.Project, error)
	// Admit counts what the transaction has inserted against the quotas. It fails with QUOTA_EXCEEDED if there is no room. It blocks the
	// project's other admissions until the transaction ends, so it comes last.
	Admit(ctx context.Context, id core.ProjectID, d Demand) error
}

// reachOf is the scope in which a key manages projects and keys.
func reachOf(k model.Key) model.Scope {
	if core.MissingScope(k.Scopes, core.ScopeAdmin) == "" {
		return model.System()
	}
	return model.InProject(k.ProjectID)
}

// CreateProject makes a project with the usual quotas, changed by p.
func (m *Manager) CreateProject(ctx context.Context, actor model.Key, name string, p QuotasPatch, e datakeys.Patch) (model.Project, error) {
	id := core.NewID[core.ProjectID]()
	fresh, err := m.cfg.FreshKey(ctx, model.Project{ID: id, Encryption: model.EncryptionNone}, e)
	if err != nil {
		return model.Project{}, err
	}
	made, err := query(ctx, m, reachOf(actor), func(tx Tx) (model.Project, error) {
		if err := request.Bind(ctx, tx, actor.ProjectID, string(id)); err != nil {
			return model.Project{}, err
		}
		if _, err := tx.InsertProject(ctx, id, name); err != nil {
			return model.Project{}, err
		}
		if err := datakeys.Change(ctx, tx, id, e, fresh); err != nil {
			return model.Project{}, err
		}
		p.Version = 0
		return tx.PatchQuotas(ctx, id, p)
	})
	if again, ok := errors.AsType[*request.RepeatError](err); ok {
		if made, _, err = m.Project(ctx, actor, core.ProjectID(again.Use.Object)); err == nil {
			request.ClaimOf(ctx).SetReplayed(true)
		}
	}
	return made, err
}

// Project returns one, with what it has.
func (m *Manager) Project(ctx context.Context, actor model.Key, id core.ProjectID) (model.Project, QuotaUsage, error) {
	var usage QuotaUsage
	p, err := query(ctx, m, reachOf(actor), func(tx Tx) (model.Project, error) {
		p, err := tx.Project(ctx, id)
		if err == nil {
			usage, err = tx.QuotaUsage(ctx, id)
		}
		return p, err
	})
	return p, usage, err
}

// Projects lists those that the key may see, newest first.
func (m *Manager) Projects(ctx context.Context, actor model.Key, p model.Page) ([]model.Project, error) {
	return query(ctx, m, reachOf(actor), func(tx Tx) ([]model.Project, error) { return tx.Projects(ctx, p) })
}

// PatchProject changes the limits of a project and its encryption. Objects above a lowered limit stay, but none can be added.
func (m *Manager) PatchProject(ctx context.Context, actor model.Key, id core.ProjectID, p QuotasPatch, e datakeys.Patch) (model.Project, error) {
	var fresh *datakeys.ProjectKey
	if e != (datakeys.Patch{}) { // a key is not wrapped in a transaction, because this may take a while
		now, err := query(ctx, m, reachOf(actor), func(tx Tx) (model.Project, error) { return tx.Project(ctx, id) })
		if err != nil {
			return now, err
		}
		if fresh, err = m.cfg.FreshKey(ctx, now, e); err != nil {
			return now, err
		}
	}
	return query(ctx, m, reachOf(actor), func(tx Tx) (model.Project, error) {
		if err := datakeys.Change(ctx, tx, id, e, fresh); err != nil {
			return model.Project{}, err
		}
		return tx.PatchQuotas(ctx, id, p)
	})
}

// DeleteProject removes an empty project for good and ends its keys.
func (m *Manager) DeleteProject(ctx context.Context, actor model.Key, id core.ProjectID) error {
	if id == actor.ProjectID {
		return core.Errorf(core.PermissionDenied, core.CodePermissionDenied, "project %s is the one of the key that asks; delete it with a key of another", id)
	}
	_, err := query(ctx, m, reachOf(actor), func(tx Tx) (any, error) { return nil, tx.DeleteProject(ctx, id) })
	return err
}
