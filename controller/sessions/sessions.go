// Package sessions owns the sessions of workspaces: programs that run in guests, their rows, and the
// ways to attach to them and to files, through the controller or directly at a runner. It also asks
// guests to work on files and to list processes. The state of a session lives in its guest; the row
// maps the public id to the guest's.
package sessions

import (
	"context"
	"log/slog"
	"time"

	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/controller/guestclient"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/controller/sweep"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pass"
)

// Store runs transactions. Package controller/postgres has the methods of Tx.
type Store interface {
	// InProject runs fn in a transaction of a project and commits when it returns nil.
	InProject(ctx context.Context, project core.ProjectID, fn func(Tx) error) error
	// InSystem runs fn in a transaction that sees all projects.
	InSystem(ctx context.Context, fn func(Tx) error) error
}

// Tx keeps sessions and attach tokens.
type Tx interface {
	request.Tx

	Workspace(ctx context.Context, id core.WorkspaceID) (model.Workspace, error)
	Runner(ctx context.Context, id core.RunnerID) (model.Runner, error)
	Key(ctx context.Context, id core.KeyID) (model.Key, error)
	Session(ctx context.Context, id core.SessionID) (model.Session, error)
	// MapSessions returns the rows for these ids of a guest. It makes the missing ones as long as there are fewer than most in
	// the sandbox, and fewer than the quota in the workspace.
	MapSessions(ctx context.Context, sandbox model.Sandbox, guestIDs []core.SessionID, most int, quota Quota) ([]model.Session, error)
	// InsertSession inserts a row, or fails with QUOTA_EXCEEDED.
	InsertSession(ctx context.Context, s model.Session, quota Quota) error
	// ForgetSessions removes the settled rows of a workspace whose sessions are no longer in its sandbox.
	ForgetSessions(ctx context.Context, sandbox model.Sandbox, there []core.SessionID, settled time.Duration) (int, error)
	// SweepSessions looks at the next rows with ids above after, at most limit rows. It removes the
	// rows of machines that ended more than kept ago. It returns the last row that it has looked
	// at, or an empty id if there are no more rows.
	SweepSessions(ctx context.Context, after core.SessionID, kept time.Duration, limit int) (last core.SessionID, removed int, err error)
	// CountSessions counts the rows of at most limit projects after the given one, for their quotas. It returns the last of them.
	CountSessions(ctx context.Context, after core.ProjectID, limit int) (last core.ProjectID, err error)
	InsertAttachToken(ctx context.Context, t model.AttachToken, ttl time.Duration) (model.AttachToken, error)
	// UseAttachToken spends a token. It fails with UNAUTHENTICATED if the token is unknown, spent, too old or for another session.
	UseAttachToken(ctx context.Context, hash [32]byte, session core.SessionID) (model.AttachToken, error)
	// SweepTokens removes at most limit attach tokens that have expired some time ago.
	SweepTokens(ctx context.Context, limit int) (int, error)
}

// Config says what a keeper works with.
type Config struct {
	Guests    *guestclient.Client
	Quota     Quota
	Kept      time.Duration // how long the rows of an ended machine's sessions are kept
	ExecGrace time.Duration // how long the keeper waits for a program after its timeout
	Log       *slog.Logger

	Passes    *pass.Signer // of passes for runners' data planes; nil: everything goes through the controller
	Authority []byte       // the certificate of the cluster's authority, with Passes

	// Reach returns a workspace whose guest can get requests; Awaken resumes one with auto-resume. Used hears that one is in use.
	Reach  func(ctx context.Context, project core.ProjectID, id core.WorkspaceID) (model.Workspace, error)
	Awaken func(ctx context.Context, w model.Workspace) (model.Workspace, error)
	Used   func(w model.Workspace)
	// Env returns the environment variables of the present grants of a workspace.
	Env func(ctx context.Context, w grants.Workspace) (map[string]string, error)
	// NotShown hears how many sessions of a list of a guest are not shown.
	NotShown func(sessions int)
}

// Keeper starts, finds and ends sessions. It is safe for concurrent use.
type Keeper struct {
	cfg   Config
	store Store
	marks sweep.Marks
}

// New makes a keeper. It starts nothing.
func New(cfg Config, store Store) *Keeper { return &Keeper{cfg: cfg, store: store} }

func inProject[T any](ctx context.Context, store Store, project core.ProjectID, query func(Tx) (T, error)) (out T, err error) {
	err = store.InProject(ctx, project, func(tx Tx) (err error) {
		out, err = query(tx)
		return err
	})
	return out, err
}

func inSystem[T any](ctx context.Context, store Store, query func(Tx) (T, error)) (out T, err error) {
	err = store.InSystem(ctx, func(tx Tx) (err error) {
		out, err = query(tx)
		return err
	})
	return out, err
}
