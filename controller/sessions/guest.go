package sessions

import (
	"context"

	"github.com/coppice-dev/coppice/controller/guestclient"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
)

// inGuest asks the agent of a workspace.
func inGuest[In, Out any](ctx context.Context, k *Keeper, project core.ProjectID, id core.WorkspaceID, in In, call func(context.Context, model.Sandbox, In) (Out, error)) (out Out, err error) {
	w, err := k.cfg.Reach(ctx, project, id)
	if err != nil {
		return out, err
	}
	return call(ctx, w.Sandbox, in)
}

// MakeDirectory makes a directory in a workspace.
func (k *Keeper) MakeDirectory(ctx context.Context, project core.ProjectID, id core.WorkspaceID, req guestclient.MakeDirectory) (guestclient.MadeDirectory, error) {
	return inGuest(ctx, k, project, id, req, k.cfg.Guests.MakeDirectory)
}

// RenameFile moves a file or directory of a workspace.
func (k *Keeper) RenameFile(ctx context.Context, project core.ProjectID, id core.WorkspaceID, req guestclient.RenameFile) (guestclient.File, error) {
	return inGuest(ctx, k, project, id, req, k.cfg.Guests.RenameFile)
}

// SetFileAttributes changes extended attributes of a file or directory of a workspace.
func (k *Keeper) SetFileAttributes(ctx context.Context, project core.ProjectID, id core.WorkspaceID, req guestclient.SetFileAttributes) (guestclient.File, error) {
	return inGuest(ctx, k, project, id, req, k.cfg.Guests.SetFileAttributes)
}

// CreateWatch watches a directory of a workspace.
func (k *Keeper) CreateWatch(ctx context.Context, project core.ProjectID, id core.WorkspaceID, req guestclient.CreateWatch) (guestclient.Watch, error) {
	return inGuest(ctx, k, project, id, req, k.cfg.Guests.CreateWatch)
}

// Watches lists the watches of a workspace.
func (k *Keeper) Watches(ctx context.Context, project core.ProjectID, id core.WorkspaceID) ([]guestclient.Watch, error) {
	w, err := k.cfg.Reach(ctx, project, id)
	if err != nil {
		return nil, err
	}
	return k.cfg.Guests.Watches(ctx, w.Sandbox)
}

// DeleteWatch ends a watch of a workspace.
func (k *Keeper) DeleteWatch(ctx context.Context, project core.ProjectID, id core.WorkspaceID, watch core.WatchID) error {
	w, err := k.cfg.Reach(ctx, project, id)
	if err != nil {
		return err
	}
	return k.cfg.Guests.DeleteWatch(ctx, w.Sandbox, watch)
}

// Processes lists the processes of the workload.
func (k *Keeper) Processes(ctx context.Context, project core.ProjectID, id core.WorkspaceID) ([]guestclient.Process, error) {
	w, err := k.cfg.Reach(ctx, project, id)
	if err != nil {
		return nil, err
	}
	return k.cfg.Guests.Processes(ctx, w.Sandbox)
}

// Mark returns a mark of a workspace's machine; see guestclient.Client.Mark. It is empty if the agent makes none, or is too old for marks.
func (k *Keeper) Mark(ctx context.Context, project core.ProjectID, id core.WorkspaceID) (string, error) {
	w, err := k.cfg.Reach(ctx, project, id)
	if err != nil {
		return "", err
	}
	mark, err := k.cfg.Guests.Mark(ctx, w.Sandbox)
	if core.CodeOf(err) == core.CodeUnsupported {
		return "", nil
	}
	return mark, err
}
