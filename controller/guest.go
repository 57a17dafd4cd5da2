package controller

import (
	"context"
	"io"
	"net/http"

	"github.com/coppice-dev/coppice/controller/guestclient"
	"github.com/coppice-dev/coppice/core"
)

// reach returns a workspace whose guest can get requests. The call counts as use of the workspace. During a capture the agent itself
// delays requests. A suspended workspace is resumed first if it has auto-resume.
func (c *Controller) reach(ctx context.Context, project core.ProjectID, id core.WorkspaceID) (Workspace, error) {
	w, err := c.Workspace(ctx, project, id)
	if err == nil {
		w, err = c.awaken(ctx, w)
	}
	if err != nil {
		return w, err
	}
	c.idle.Used(w)
	return w, w.Reachable()
}

// Guest returns a transport for the public routes of the agent in a ready workspace.
func (c *Controller) Guest(ctx context.Context, project core.ProjectID, id core.WorkspaceID) (http.RoundTripper, error) {
	w, err := c.reach(ctx, project, id)
	if err != nil {
		return nil, err
	}
	return c.guestOf(w), nil
}

// guestOf returns the transport to a guest. Streams through it count as use of its workspace.
func (c *Controller) guestOf(w Workspace) http.RoundTripper {
	way := c.guests.Transport(w.Sandbox)
	if w.IdlePolicy.IdleAfter == 0 {
		return way
	}
	return c.idle.Transport(w.ID, way)
}

// Console returns the tail of a workspace's serial console. The caller closes it.
func (c *Controller) Console(ctx context.Context, project core.ProjectID, id core.WorkspaceID) (io.ReadCloser, error) {
	w, err := c.Workspace(ctx, project, id)
	if err != nil {
		return nil, err
	}
	if w.Sandbox.ID == "" {
		return nil, w.NotReady()
	}
	return c.runners.Console(ctx, w.Sandbox.Endpoint, w.Sandbox.ID)
}

// GuestBytes is how many bytes of guests' answers are held now.
func (c *Controller) GuestBytes() int {
	used, _ := c.guests.Used()
	return used
}

// GuestProblem turns an answer of 300 or more, of a runner or of an agent behind it, into an error. It reads the body and does
// not close it.
func GuestProblem(res *http.Response) error { return guestclient.Problem(res) }
