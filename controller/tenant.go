package controller

import (
	"context"
	"errors"
	"time"

	"github.com/coppice-dev/coppice/controller/datakeys"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
)

// QuotasPatch changes limits; nil does not change a limit. Version 0 does not compare.
type QuotasPatch struct {
	Version int64

	Workspaces, ForksInFlight, Checkpoints, CheckpointBytes, Depth, Children, Keys, Ports *int64

	AllowAll *AllowAll
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

// TenantTx keeps projects and their quotas.
type TenantTx interface {
	// EnsureProject returns the project of that name. It makes the project if it is missing.
	EnsureProject(ctx context.Context, id core.ProjectID, name string) (Project, error)
	InsertProject(ctx context.Context, id core.ProjectID, name string) (Project, error)
	// Project finds neither the system's project nor a deleted one.
	Project(ctx context.Context, id core.ProjectID) (Project, error)
	Projects(ctx context.Context, p Page) ([]Project, error)
	// DeleteProject marks a project deleted and revokes its keys. It fails with PROJECT_NOT_EMPTY if something of the project lives.
	DeleteProject(ctx context.Context, id core.ProjectID) error
	PatchQuotas(ctx context.Context, id core.ProjectID, p QuotasPatch) (Project, error)
	QuotaUsage(ctx context.Context, id core.ProjectID) (QuotaUsage, error)
	// Admit counts what the transaction has inserted against the quotas. It fails with QUOTA_EXCEEDED if there is no room. It blocks the
	// project's other admissions until the transaction ends, so it comes last.
	Admit(ctx context.Context, id core.ProjectID, d Demand) error
}

// reachOf is the scope in which a key manages projects and keys.
func reachOf(k Key) Scope {
	if core.MissingScope(k.Scopes, core.ScopeAdmin) == "" {
		return System()
	}
	return InProject(k.ProjectID)
}

// CreateProject makes a project with the usual quotas, changed by p.
func (c *Controller) CreateProject(ctx context.Context, actor Key, name string, p QuotasPatch, e EncryptionPatch) (Project, error) {
	id := core.NewID[core.ProjectID]()
	fresh, err := c.dataKeys.Fresh(ctx, Project{ID: id, Encryption: EncryptionNone}, e)
	if err != nil {
		return Project{}, err
	}
	made, err := read(ctx, c, reachOf(actor), func(tx Tx) (Project, error) {
		if err := request.Bind(ctx, tx, actor.ProjectID, string(id)); err != nil {
			return Project{}, err
		}
		if _, err := tx.InsertProject(ctx, id, name); err != nil {
			return Project{}, err
		}
		if err := datakeys.Change(ctx, tx, id, e, fresh); err != nil {
			return Project{}, err
		}
		p.Version = 0
		return tx.PatchQuotas(ctx, id, p)
	})
	if again, ok := errors.AsType[*request.RepeatError](err); ok {
		if made, _, err = c.Project(ctx, actor, core.ProjectID(again.Use.Object)); err == nil {
			request.ClaimOf(ctx).SetReplayed(true)
		}
	}
	return made, err
}

// Project returns one, with what it has.
func (c *Controller) Project(ctx context.Context, actor Key, id core.ProjectID) (Project, QuotaUsage, error) {
	var usage QuotaUsage
	p, err := read(ctx, c, reachOf(actor), func(tx Tx) (Project, error) {
		p, err := tx.Project(ctx, id)
		if err == nil {
			usage, err = tx.QuotaUsage(ctx, id)
		}
		return p, err
	})
	return p, usage, err
}

// Projects lists those that the key may see, newest first.
func (c *Controller) Projects(ctx context.Context, actor Key, p Page) ([]Project, error) {
	return read(ctx, c, reachOf(actor), func(tx Tx) ([]Project, error) { return tx.Projects(ctx, p) })
}

// PatchProject changes the limits of a project and its encryption. Objects above a lowered limit stay, but none can be added.
func (c *Controller) PatchProject(ctx context.Context, actor Key, id core.ProjectID, p QuotasPatch, e EncryptionPatch) (Project, error) {
	var fresh *ProjectKey
	if e != (EncryptionPatch{}) { // a key is not wrapped in a transaction, because this may take a while
		now, err := read(ctx, c, reachOf(actor), func(tx Tx) (Project, error) { return tx.Project(ctx, id) })
		if err != nil {
			return now, err
		}
		if fresh, err = c.dataKeys.Fresh(ctx, now, e); err != nil {
			return now, err
		}
	}
	return read(ctx, c, reachOf(actor), func(tx Tx) (Project, error) {
		if err := datakeys.Change(ctx, tx, id, e, fresh); err != nil {
			return Project{}, err
		}
		return tx.PatchQuotas(ctx, id, p)
	})
}

// DeleteProject removes an empty project for good and ends its keys.
func (c *Controller) DeleteProject(ctx context.Context, actor Key, id core.ProjectID) error {
	if id == actor.ProjectID {
		return core.Errorf(core.PermissionDenied, core.CodePermissionDenied, "project %s is the one of the key that asks; delete it with a key of another", id)
	}
	_, err := read(ctx, c, reachOf(actor), func(tx Tx) (any, error) { return nil, tx.DeleteProject(ctx, id) })
	return err
}

// KeyTx keeps API keys.
type KeyTx interface {
	// EnsureKey stores a key unless there is one with the same secret.
	EnsureKey(ctx context.Context, key Key) error
	// KeyByHash finds a key that is neither revoked nor expired; UNAUTHENTICATED otherwise.
	KeyByHash(ctx context.Context, hash [32]byte) (Key, error)
	// InsertKey stores a key that lives for ttl and no longer than its parent; UNAUTHENTICATED when that one has ended.
	InsertKey(ctx context.Context, key Key, ttl time.Duration) (Key, error)
	Key(ctx context.Context, id core.KeyID) (Key, error)
	Keys(ctx context.Context, project core.ProjectID, p Page) ([]Key, error)
	// RevokeKey ends a key and those that were made of it, and tells all controllers when the transaction commits. To
	// revoke one that is revoked is no error.
	RevokeKey(ctx context.Context, id core.KeyID) error
	// EndedKeys returns those of the given keys that are revoked or have expired.
	EndedKeys(ctx context.Context, ids []core.KeyID) ([]core.KeyID, error)
	// UseKeys records when keys were last used.
	UseKeys(ctx context.Context, at map[core.KeyID]time.Time) error
}
