package mcp

import (
	"context"
	"errors"
	"iter"
	"strings"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// The beginnings of ids.
const (
	workspacePrefix  = "ws_"
	checkpointPrefix = "ckpt_"
)

// workspace finds a workspace by its id, or a live one by its name.
func (r *registry) workspace(ctx context.Context, ref string) (coppice.Workspace, error) {
	if strings.HasPrefix(ref, workspacePrefix) {
		return r.client.Workspace(ctx, ref)
	}
	for ws, err := range r.client.Workspaces(ctx, coppice.WorkspaceFilter{Name: ref}) {
		if err != nil {
			return ws, badName(err)
		}
		if ws.State != coppice.WorkspaceTerminated {
			return ws, nil
		}
	}
	return coppice.Workspace{}, &fault{code: string(coppice.CodeWorkspaceNotFound), detail: "there is no workspace " + clip(ref, 80)}
}

// workspaceID returns only the id of a workspace. It makes no request if the reference is an id.
func (r *registry) workspaceID(ctx context.Context, ref string) (coppice.WorkspaceID, error) {
	if strings.HasPrefix(ref, workspacePrefix) {
		return ref, nil
	}
	ws, err := r.workspace(ctx, ref)
	return ws.ID, err
}

// checkpoint finds a checkpoint by its id or its name.
func (r *registry) checkpointID(ctx context.Context, ref string) (coppice.CheckpointID, error) {
	if strings.HasPrefix(ref, checkpointPrefix) {
		return ref, nil
	}
	for cp, err := range r.client.Checkpoints(ctx, coppice.CheckpointFilter{Name: ref}) {
		return cp.ID, badName(err)
	}
	return "", &fault{code: string(coppice.CodeCheckpointNotFound), detail: "there is no checkpoint " + clip(ref, 80)}
}

// node finds the workspace or the checkpoint that a reference names. Without an error, exactly one of the two is set.
func (r *registry) node(ctx context.Context, ref string) (*coppice.Workspace, coppice.CheckpointID, error) {
	if strings.HasPrefix(ref, checkpointPrefix) {
		return nil, ref, nil
	}
	ws, errWorkspace := r.workspace(ctx, ref)
	if strings.HasPrefix(ref, workspacePrefix) {
		return &ws, "", errWorkspace
	}
	cp, errCheckpoint := r.checkpointID(ctx, ref)
	notWorkspace, notCheckpoint := missing(errWorkspace), missing(errCheckpoint)
	switch {
	case errWorkspace != nil && !notWorkspace:
		return nil, "", errWorkspace
	case errCheckpoint != nil && !notCheckpoint:
		return nil, "", errCheckpoint
	case notWorkspace && notCheckpoint:
		return nil, "", &fault{code: string(coppice.CodeCheckpointNotFound), detail: "there is no workspace and no checkpoint " + clip(ref, 80), hint: "Call workspace_list and tree for what there is."}
	case notWorkspace:
		return nil, cp, nil
	case notCheckpoint:
		return &ws, "", nil
	}
	return nil, "", &fault{code: codeAmbiguous, detail: clip(ref, 80) + " is the name of the workspace " + ws.ID + " and of the checkpoint " + cp}
}

// missing reports whether the error says that no object has the name or the id.
func missing(err error) bool {
	if err == nil {
		return false
	}
	code := coppice.Code(explain(err).code)
	return code == coppice.CodeWorkspaceNotFound || code == coppice.CodeCheckpointNotFound
}

// badName says more about a name that the API refuses.
func badName(err error) error {
	if errors.Is(err, coppice.CodeInvalidName) || errors.Is(err, coppice.CodeInvalidField) {
		return invalid("a name has 1 to 63 lower-case letters, digits and hyphens; an id begins with %s or %s", workspacePrefix, checkpointPrefix)
	}
	return err
}

// take returns the items of a list from an offset on, and whether there are more.
func take[T any](seq iter.Seq2[T, error], offset, limit int) (items []T, more bool, err error) {
	items = []T{}
	n := 0
	for item, err := range seq {
		if err != nil {
			return nil, false, err
		}
		if n++; n <= offset {
			continue
		}
		if len(items) == limit {
			return items, true, nil
		}
		items = append(items, item)
	}
	return items, false, nil
}
