package sessions

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/sweep"
	"github.com/coppice-dev/coppice/core"
)

// Quota bounds the rows of sessions.
type Quota struct {
	Workspace int // of one workspace; default 1024
	Project   int // of one project, by the last count (one a minute); default 200,000. The rows of all the workspaces that it may have are always allowed
}

// WithDefaults replaces zero values by the defaults.
func (q Quota) WithDefaults() Quota {
	if q.Workspace == 0 {
		q.Workspace = 1024
	}
	if q.Project == 0 {
		q.Project = 200_000
	}
	return q
}

// MaxInherited is how many sessions that this controller did not start get a row, in one machine. A fork inherits the sessions
// of its parent, at most 384 of an honest agent. The agent names them, so a hostile one invents names.
const MaxInherited = 512

// Every is the time between two sweeps, and between two counts.
const Every = time.Minute

const (
	sessionsBatch = 5000        // rows in one transaction
	projectsBatch = 50          // projects in one transaction
	settledAfter  = time.Minute // a younger row may be of a session that is about to start
)

// MaxSessionsCounted is how many rows of a project are counted: a project with more rows must not take all the time of the count.
const MaxSessionsCounted = 10_000_000

// Sweep removes the rows of sessions whose machine has ended some time ago.
func (k *Keeper) Sweep(ctx context.Context) error {
	return k.marks.Walk(ctx, "sessions", func(ctx context.Context, after string) (string, error) {
		last, err := inSystem(ctx, k.store, func(tx Tx) (core.SessionID, error) {
			last, _, err := tx.SweepSessions(ctx, core.SessionID(after), k.cfg.Kept, sessionsBatch)
			return last, err
		})
		return string(last), err
	})
}

// Count counts the rows of sessions that each project has.
func (k *Keeper) Count(ctx context.Context) error {
	return k.marks.Walk(ctx, "count_sessions", func(ctx context.Context, after string) (string, error) {
		last, err := inSystem(ctx, k.store, func(tx Tx) (core.ProjectID, error) {
			return tx.CountSessions(ctx, core.ProjectID(after), projectsBatch)
		})
		return string(last), err
	})
}

// forgetSessions makes room in a workspace that has the largest number of rows. A session that the agent has forgotten can no longer be
// reached, so its row is removed. A hostile agent can only make the controller forget sessions of its own workspace.
func (k *Keeper) forgetSessions(ctx context.Context, w model.Workspace) error {
	there, err := k.cfg.Guests.Sessions(ctx, w.Sandbox)
	if err != nil {
		return err
	}
	n, err := inProject(ctx, k.store, w.ProjectID, func(tx Tx) (int, error) {
		return tx.ForgetSessions(ctx, w.Sandbox, there.IDs(), k.settled())
	})
	k.cfg.Log.DebugContext(ctx, "sessions forgotten that the guest no longer knows", "workspace_id", w.ID, "rows", n)
	return err
}

func (k *Keeper) settled() time.Duration { return min(settledAfter, k.cfg.Kept) }

const tokensBatch = 10_000 // rows in one transaction

// SweepTokens removes attach tokens that expired long ago.
func (k *Keeper) SweepTokens(ctx context.Context) error {
	return sweep.Batches(ctx, tokensBatch, func(ctx context.Context) (int, error) {
		return inSystem(ctx, k.store, func(tx Tx) (int, error) { return tx.SweepTokens(ctx, tokensBatch) })
	})
}
