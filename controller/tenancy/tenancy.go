// Package tenancy owns the projects of a cluster: their quotas, their API keys, the audit log, and the
// totals of what their workspaces have used.
package tenancy

import (
	"context"
	"crypto/sha256"
	"log/slog"
	"time"

	"github.com/coppice-dev/coppice/controller/datakeys"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/bootclock"
)

// Store runs transactions. Package controller/postgres has the methods of Tx.
type Store interface {
	// InTx runs fn in a transaction of the scope and commits when it returns nil.
	InTx(ctx context.Context, scope model.Scope, fn func(Tx) error) error
}

// Tx keeps projects, keys, the audit log and usage.
type Tx interface {
	ProjectTx
	KeyTx
	AuditTx
	UsageTx
	request.Tx
	datakeys.ChangeTx
}

// Config says how a manager works.
type Config struct {
	KeyCache time.Duration   // how long a valid key is cached
	Interval time.Duration   // of the loop that looks for ended keys
	Clock    bootclock.Clock // of the cache
	// FreshKey makes the key with which a project's data is encrypted, if a change needs one; nil if it needs none.
	FreshKey func(ctx context.Context, p model.Project, e datakeys.Patch) (*datakeys.ProjectKey, error)
	Log      *slog.Logger
}

// Manager manages projects and their keys. It is safe for concurrent use.
type Manager struct {
	cfg   Config
	store Store
	keys  keyring
}

// New makes a manager. It starts nothing.
func New(cfg Config, store Store) *Manager { return &Manager{cfg: cfg, store: store} }

// query runs a query in a scope.
func query[T any](ctx context.Context, m *Manager, scope model.Scope, fn func(Tx) (T, error)) (out T, err error) {
	err = m.store.InTx(ctx, scope, func(tx Tx) (err error) {
		out, err = fn(tx)
		return err
	})
	return out, err
}

// Bootstrap is what must exist before the first request.
type Bootstrap struct {
	Project string // name; default "default"
	Key     string // the secret of an API key for it; empty makes none
	JoinKey string // likewise, of a key that makes join tokens and nothing else
}

// Bootstrap makes the first project and its keys, unless they exist.
func (m *Manager) Bootstrap(ctx context.Context, b Bootstrap) (model.Project, error) {
	return query(ctx, m, model.System(), func(tx Tx) (model.Project, error) {
		project, err := tx.EnsureProject(ctx, core.NewID[core.ProjectID](), b.Project)
		if err != nil {
			return project, err
		}
		for _, k := range []struct {
			name, secret string
			scope        core.KeyScope
		}{{"bootstrap", b.Key, core.ScopeAdmin}, {"join", b.JoinKey, core.ScopeRunnerJoin}} {
			if k.secret == "" {
				continue
			}
			if err := tx.EnsureKey(ctx, model.Key{
				ID: core.NewID[core.KeyID](), ProjectID: project.ID, Name: k.name, Prefix: k.secret[:min(8, len(k.secret)/4)],
				Hash: sha256.Sum256([]byte(k.secret)), Scopes: []core.KeyScope{k.scope},
			}); err != nil {
				return project, err
			}
		}
		return project, nil
	})
}
