package controller

import (
	"context"
	"net/http"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// SessionQuota bounds the rows of sessions.
type SessionQuota struct {
	Workspace int // of one workspace; default 1024
	Project   int // of one project, as last counted (every minute), or as many as all the workspaces that it may have, if that is more; default 200,000
}

func (q SessionQuota) withDefaults() SessionQuota {
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

const (
	sessionsEvery = time.Minute
	sessionsBatch = 5000        // rows in one transaction
	projectsBatch = 50          // projects in one transaction
	settledAfter  = time.Minute // a younger row may be of a session that is about to start
)

// MaxSessionsCounted is how many rows of a project are counted: one project with more than that must not take all the time.
const MaxSessionsCounted = 10_000_000

// sweepSessions removes the rows of sessions whose machine has ended some time ago.
func (c *Controller) sweepSessions(ctx context.Context) error {
	return c.marks.Walk(ctx, "sessions", func(ctx context.Context, after string) (string, error) {
		last, err := read(ctx, c, System(), func(tx Tx) (core.SessionID, error) {
			last, _, err := tx.SweepSessions(ctx, core.SessionID(after), c.cfg.SessionsKept, sessionsBatch)
			return last, err
		})
		return string(last), err
	})
}

// countSessions counts the rows of sessions that each project has.
func (c *Controller) countSessions(ctx context.Context) error {
	return c.marks.Walk(ctx, "count_sessions", func(ctx context.Context, after string) (string, error) {
		last, err := read(ctx, c, System(), func(tx Tx) (core.ProjectID, error) {
			return tx.CountSessions(ctx, core.ProjectID(after), projectsBatch)
		})
		return string(last), err
	})
}

// forgetSessions makes room in a workspace that has the largest number of rows. A session that the agent has forgotten can no longer be
// reached, so its row is removed. A hostile agent can only make the controller forget sessions of its own workspace.
func (c *Controller) forgetSessions(ctx context.Context, w Workspace) error {
	var there guestSessions
	if err := c.callGuest(ctx, w.Sandbox, http.MethodGet, pathSessions, nil, nil, answer{boundSessions, &there}); err != nil {
		return err
	}
	n, err := read(ctx, c, InProject(w.ProjectID), func(tx Tx) (int, error) {
		return tx.ForgetSessions(ctx, w.Sandbox, there.ids(), c.settled())
	})
	c.log.DebugContext(ctx, "sessions forgotten that the guest no longer knows", "workspace_id", w.ID, "rows", n)
	return err
}

func (c *Controller) settled() time.Duration { return min(settledAfter, c.cfg.SessionsKept) }

// ids are the well-formed ids of a list of sessions, each once.
func (g guestSessions) ids() []core.SessionID {
	seen := make(map[core.SessionID]bool, len(g.Sessions))
	ids := make([]core.SessionID, 0, len(g.Sessions))
	for _, s := range g.Sessions {
		if _, err := core.ParseID[core.SessionID](string(s.ID)); err == nil && !seen[s.ID] {
			seen[s.ID] = true
			ids = append(ids, s.ID)
		}
	}
	return ids
}
