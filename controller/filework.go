package controller

import (
	"context"

	"github.com/coppice-dev/coppice/controller/guestclient"
	"github.com/coppice-dev/coppice/core"
)

// The types of files and watches in a guest. Package guestclient has them.
type (
	GuestFile         = guestclient.File
	MadeDirectory     = guestclient.MadeDirectory
	MakeDirectory     = guestclient.MakeDirectory
	RenameFile        = guestclient.RenameFile
	SetFileAttributes = guestclient.SetFileAttributes
	GuestWatch        = guestclient.Watch
	CreateWatch       = guestclient.CreateWatch
)

// PathWatches is the agent's route of watches.
const PathWatches = guestclient.PathWatches

// inGuest asks the agent of a workspace.
func inGuest[In, Out any](ctx context.Context, c *Controller, project core.ProjectID, id core.WorkspaceID, in In, call func(context.Context, Sandbox, In) (Out, error)) (out Out, err error) {
	w, err := c.reach(ctx, project, id)
	if err != nil {
		return out, err
	}
	return call(ctx, w.Sandbox, in)
}

// MakeDirectory makes a directory in a workspace.
func (c *Controller) MakeDirectory(ctx context.Context, project core.ProjectID, id core.WorkspaceID, req MakeDirectory) (MadeDirectory, error) {
	return inGuest(ctx, c, project, id, req, c.guests.MakeDirectory)
}

// RenameFile moves a file or directory of a workspace.
func (c *Controller) RenameFile(ctx context.Context, project core.ProjectID, id core.WorkspaceID, req RenameFile) (GuestFile, error) {
	return inGuest(ctx, c, project, id, req, c.guests.RenameFile)
}

// SetFileAttributes changes extended attributes of a file or directory of a workspace.
func (c *Controller) SetFileAttributes(ctx context.Context, project core.ProjectID, id core.WorkspaceID, req SetFileAttributes) (GuestFile, error) {
	return inGuest(ctx, c, project, id, req, c.guests.SetFileAttributes)
}

// CreateWatch watches a directory of a workspace.
func (c *Controller) CreateWatch(ctx context.Context, project core.ProjectID, id core.WorkspaceID, req CreateWatch) (GuestWatch, error) {
	return inGuest(ctx, c, project, id, req, c.guests.CreateWatch)
}

// Watches lists the watches of a workspace.
func (c *Controller) Watches(ctx context.Context, project core.ProjectID, id core.WorkspaceID) ([]GuestWatch, error) {
	w, err := c.reach(ctx, project, id)
	if err != nil {
		return nil, err
	}
	return c.guests.Watches(ctx, w.Sandbox)
}

// DeleteWatch ends a watch of a workspace.
func (c *Controller) DeleteWatch(ctx context.Context, project core.ProjectID, id core.WorkspaceID, watch core.WatchID) error {
	w, err := c.reach(ctx, project, id)
	if err != nil {
		return err
	}
	return c.guests.DeleteWatch(ctx, w.Sandbox, watch)
}
