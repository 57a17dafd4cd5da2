package grants

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/secretstore"
	"github.com/coppice-dev/coppice/core"
)

// Config says what a Manager works with.
type Config struct {
	Interval time.Duration // between two searches for rules that runners do not have
	Runners  Runners
	Secrets  Secrets
	Source   SecretSource // of secrets that are not kept in the database; nil: there is none
	Log      *slog.Logger

	// Audit records, with ActionUnseal, that secrets of grants are disclosed to an egress process.
	Audit func(ctx context.Context, project core.ProjectID, object string, detail json.RawMessage) error
}

// Runners reaches runners.
type Runners interface {
	// SetEgress gives a runner the rules of one of its sandboxes.
	SetEgress(ctx context.Context, endpoint string, sandbox core.SandboxID, rules runnerapi.EgressRules) error
}

// Secrets are those that the database keeps. secretstore.Keeper has the methods.
type Secrets interface {
	Encrypt(ctx context.Context, project core.ProjectID, value []byte) (*secretstore.Secret, error)
	Decrypt(ctx context.Context, ids []string) (opened map[string][]byte, failed map[string]error)
	Authority(ctx context.Context, project core.ProjectID) (secretstore.Authority, error)
}

// Store runs transactions on rules and grants. Package controller/postgres has the methods of Tx.
type Store interface {
	// InProject runs fn in a transaction that sees one project, InSystem in one that sees all of them. Each commits when fn returns nil.
	InProject(ctx context.Context, project core.ProjectID, fn func(Tx) error) error
	InSystem(ctx context.Context, fn func(Tx) error) error
}

// RulesTx is the part of Tx that ChangeRules needs.
type RulesTx interface {
	// LockRules waits for all transactions that fork in the project. After it, this transaction sees their forks.
	LockRules(ctx context.Context, project core.ProjectID) error
	// ForkedFrom returns the workspace that a workspace was forked from, even if the checkpoint between them is deleted. It returns nil if
	// the workspace was made from an image or a file.
	ForkedFrom(ctx context.Context, id core.WorkspaceID) (*WorkspaceRules, error)
	// Forks returns the forks of workspaces, including ended ones.
	Forks(ctx context.Context, of []core.WorkspaceID) ([]WorkspaceRules, error)
	// SetRules gives workspaces rules that they do not have yet.
	SetRules(ctx context.Context, list []WorkspaceRules) error
}

// HoldersTx is the part of Tx that Inherit needs.
type HoldersTx interface {
	// HeldGrants returns the grants of workspaces, by their names.
	HeldGrants(ctx context.Context, of []core.WorkspaceID) ([]Held, error)
	// InsertHolders gives grants to workspaces that were just inserted.
	InsertHolders(ctx context.Context, list []Holder) error
}

// Tx keeps rules and grants of workspaces. A transaction that changes any of them calls LockRules first.
type Tx interface {
	RulesTx
	HoldersTx

	// RuledWorkspace returns a workspace with its rules.
	RuledWorkspace(ctx context.Context, id core.WorkspaceID) (Workspace, error)

	// PendingRules returns workspaces whose runner has a lease and is not known to have their present rules, and workspaces whose grants must
	// be encrypted again.
	PendingRules(ctx context.Context, limit int) ([]Workspace, error)
	// RulesFloor is below every version that rules get in the present history of the database, and above the versions of earlier histories.
	// Without it, a promoted standby that lacks some changes would give the versions of these changes, which runners have, to other rules. It
	// is 0 in the first history. The rules of a new workspace have the version one above it.
	RulesFloor(ctx context.Context) (int64, error)
	// RaiseRules raises versions of living workspaces above a floor, so that runners get their rules again. It returns how many it has raised:
	// less than limit if all are above the floor now.
	RaiseRules(ctx context.Context, floor int64, limit int) (int, error)
	// ApplyRules records which rules runners have. It ignores sandboxes that are no longer the present ones of their workspaces.
	ApplyRules(ctx context.Context, list []Applied) error

	// PutGrant gives a grant to its owner and returns it. It replaces a grant of the same name; if the owner owned that one, its placeholder stays.
	PutGrant(ctx context.Context, g Grant, ttl time.Duration, placeholder string) (Held, error)
	// DropGrant takes a grant from all workspaces.
	DropGrant(ctx context.Context, id core.GrantID) error
	// DropHolders takes a grant from workspaces.
	DropHolders(ctx context.Context, id core.GrantID, from []core.WorkspaceID) error
	// CountGrants counts the grants that living workspaces of a project have.
	CountGrants(ctx context.Context, project core.ProjectID) (int, error)
	// LargestHolder looks at the workspaces that have a grant. It returns the one with the largest grants together, and their size in bytes.
	LargestHolder(ctx context.Context, id core.GrantID) (core.WorkspaceID, int, error)
	// GrantHolders returns the workspaces that have a grant.
	GrantHolders(ctx context.Context, id core.GrantID) ([]core.WorkspaceID, error)
	// ChangedGrants raises the version of the rules of workspaces, so that their runners get them.
	ChangedGrants(ctx context.Context, ids []core.WorkspaceID) error

	InsertSecret(ctx context.Context, s secretstore.Secret) error
	DeleteSecret(ctx context.Context, id string) error
}

// Workspace has the fields of a workspace that this package needs.
type Workspace struct {
	ID        core.WorkspaceID
	ProjectID core.ProjectID
	Parent    core.CheckpointID // the checkpoint that it was made from
	State     core.WorkspaceState
	Ended     error // why it cannot get grants any more; nil while it lives
	Egress    core.EgressPolicy
	Rules     Rules
	Sandbox   Sandbox
}

// Sandbox is the present VM of a workspace.
type Sandbox struct {
	ID        core.SandboxID
	RunnerID  core.RunnerID
	Endpoint  string // of the runner
	EgressKey []byte // of the egress process of its host
	EgressURL string // of the egress process, as the guest reaches it
}

// Pending reports whether a workspace runs on a host that is not known to have its present rules.
func (w Workspace) Pending() bool {
	running := w.State == core.WorkspaceReady || w.State == core.WorkspaceCheckpointing
	return running && (w.Rules.Applied < w.Rules.Version || w.Rules.Granted && !bytes.Equal(w.Rules.EncryptedFor, w.Sandbox.EgressKey))
}

// Manager changes rules and grants, and delivers them to runners. It is safe for concurrent use, except that Run is called only once.
type Manager struct {
	cfg         Config
	store       Store
	changed     chan struct{} // size 1: look for rules that runners do not have
	floor       int64         // used by Run: the history of the database in which all versions were raised
	delivering  underWay
	decryptions decryptions
}

// New makes a manager. It starts nothing.
func New(cfg Config, store Store) *Manager {
	return &Manager{cfg: cfg, store: store, changed: make(chan struct{}, 1)}
}

// inProject runs a query in a transaction of a project.
func inProject[T any](ctx context.Context, m *Manager, project core.ProjectID, query func(Tx) (T, error)) (out T, err error) {
	err = m.store.InProject(ctx, project, func(tx Tx) (err error) {
		out, err = query(tx)
		return err
	})
	return out, err
}

// inSystem runs a query in a transaction that sees all projects.
func inSystem[T any](ctx context.Context, m *Manager, query func(Tx) (T, error)) (out T, err error) {
	err = m.store.InSystem(ctx, func(tx Tx) (err error) {
		out, err = query(tx)
		return err
	})
	return out, err
}
