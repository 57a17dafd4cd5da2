package controller

import (
	"context"
	"io"
	"net/http"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
)

const (
	idleEvery       = 2 * time.Second
	idleBatch       = 64
	idleConcurrency = 8
	idleAsk         = 5 * time.Second // for the sessions of one guest
)

// uses remembers which workspaces are in use. They are recorded together from time to time, so that not every use costs a write.
type uses struct {
	// mu guards the fields below.
	mu    sync.Mutex
	since map[core.WorkspaceID]bool // used since the last recording
	open  map[core.WorkspaceID]int  // streams that are open
}

func (u *uses) add(id core.WorkspaceID) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.since == nil {
		u.since = map[core.WorkspaceID]bool{}
	}
	u.since[id] = true
}

// hold counts a stream as use until it is released.
func (u *uses) hold(id core.WorkspaceID) (release func()) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.open == nil {
		u.open = map[core.WorkspaceID]int{}
	}
	u.open[id]++
	return sync.OnceFunc(func() {
		u.add(id)
		u.mu.Lock()
		defer u.mu.Unlock()
		if u.open[id]--; u.open[id] == 0 {
			delete(u.open, id)
		}
	})
}

// take returns the workspaces that were used since its last call.
func (u *uses) take() []core.WorkspaceID {
	u.mu.Lock()
	defer u.mu.Unlock()
	list := make([]core.WorkspaceID, 0, len(u.since)+len(u.open))
	for id := range u.since {
		list = append(list, id)
	}
	for id := range u.open {
		if !u.since[id] {
			list = append(list, id)
		}
	}
	u.since = nil
	slices.Sort(list)
	return list
}

// used notes that a workspace is in use.
func (c *Controller) used(w Workspace) {
	if w.Rest.IdleAfter > 0 {
		c.uses.add(w.ID)
	}
}

// useLoop records use. The use that a killed controller did not record is shorter than idleMargin.
func (c *Controller) useLoop(ctx context.Context) {
	record := func() {
		list := c.uses.take()
		if len(list) == 0 {
			return
		}
		write, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		if err := c.store.InTx(write, System(), func(tx Tx) error { return tx.UseWorkspaces(write, list) }); err != nil {
			for _, id := range list {
				c.uses.add(id)
			}
			c.log.WarnContext(ctx, "use of workspaces was not recorded", "err", err)
		}
	}
	pace.Every(ctx, c.cfg.UseInterval, nil, record)
	record()
}

// idleMargin is added to the idle time of a workspace, so that use that another controller has not yet recorded is never overlooked.
func (c *Controller) idleMargin() time.Duration { return 2 * c.cfg.UseInterval }

// expireIdle suspends or terminates workspaces that were not used for too long.
func (c *Controller) expireIdle(ctx context.Context) error {
	due, err := read(ctx, c, System(), func(tx Tx) ([]Workspace, error) { return tx.IdleWorkspaces(ctx, c.idleMargin(), nil, idleBatch) })
	if err != nil {
		return err
	}
	var group errgroup.Group
	group.SetLimit(idleConcurrency)
	for _, w := range due {
		group.Go(func() error {
			switch err := c.rest(ctx, w); core.CodeOf(err) {
			case "", core.CodeStateConflict, core.CodeWorkspaceNotReady, core.CodeControllerStopping: // used again, or another request was faster
			default:
				c.log.WarnContext(ctx, "idle workspace was left as it is", "workspace_id", w.ID, "err", err)
			}
			return nil
		})
	}
	return group.Wait()
}

// rest applies the idle policy to one workspace, unless a session runs in it.
func (c *Controller) rest(ctx context.Context, w Workspace) error {
	ask, cancel := context.WithTimeout(ctx, idleAsk)
	defer cancel()
	var there guestSessions
	if err := c.callGuest(ask, w.Sandbox, http.MethodGet, pathSessions, nil, nil, answer{boundSessions, &there}); err != nil {
		return err
	}
	if slices.ContainsFunc(there.Sessions, func(g GuestSession) bool { return g.State != GuestExited }) {
		c.uses.add(w.ID)
		return nil
	}
	stillIdle := func(ctx context.Context, tx Tx) error {
		list, err := tx.IdleWorkspaces(ctx, c.idleMargin(), []core.WorkspaceID{w.ID}, 1)
		if err == nil && len(list) == 0 {
			err = core.Errorf(core.Conflict, core.CodeStateConflict, "workspace %s is in use again", w.ID)
		}
		return err
	}
	if w.Rest.OnIdle == IdleTerminate {
		if _, err := c.terminateIf(ctx, w.ProjectID, w.ID, stillIdle); err != nil {
			return err
		}
		c.log.InfoContext(ctx, "idle workspace terminated", "workspace_id", w.ID)
		return nil
	}
	if _, err := c.beginCapture(ctx, w.ProjectID, OpSuspendWorkspace, w.ID, CheckpointRequest{}, nil, stillIdle); err != nil {
		return err
	}
	c.log.InfoContext(ctx, "idle workspace suspended", "workspace_id", w.ID)
	return nil
}

// usingTransport counts answers that stream through it as use of a workspace. It need not count a WebSocket: this belongs to a session,
// and a running session is use by itself.
type usingTransport struct {
	http.RoundTripper
	uses *uses
	id   core.WorkspaceID
}

// RoundTrip sends a request.
func (u usingTransport) RoundTrip(q *http.Request) (*http.Response, error) {
	release := u.uses.hold(u.id)
	res, err := u.RoundTripper.RoundTrip(q)
	if err != nil || res.StatusCode == http.StatusSwitchingProtocols {
		release()
		return res, err
	}
	res.Body = usingBody{res.Body, release}
	return res, nil
}

type usingBody struct {
	io.ReadCloser
	release func()
}

// Close ends the use.
func (b usingBody) Close() error {
	b.release()
	return b.ReadCloser.Close()
}
