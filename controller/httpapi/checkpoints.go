package httpapi

import (
	"context"
	"strconv"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// CreateCheckpoint serves POST /v1/workspaces/{id}/checkpoints.
func (s *server) CreateCheckpoint(ctx context.Context, r api.CreateCheckpointRequestObject) (api.CreateCheckpointResponseObject, error) {
	req, err := checkpointRequestIn(*r.Body)
	if err != nil {
		return nil, err
	}
	sealed, wait := r.Params.Wait == string(api.WaitSealed), controller.DefaultWait
	if n, err := strconv.Atoi(r.Params.Wait); err == nil {
		wait = seconds(int64(n))
	}
	if sealed {
		if err := s.control.StoreConfigured(); err != nil {
			return nil, err
		}
	}
	a, err := s.control.CreateCheckpoint(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), req, wait)
	if err != nil {
		return nil, err
	}
	if sealed && a.Done && a.Result.Checkpoint != nil {
		cp, err := s.control.SealedCheckpoint(ctx, projectOf(ctx), a.Result.Checkpoint.ID, controller.DefaultWait)
		return api.CreateCheckpoint201JSONResponse(checkpointOf(cp)), err
	}
	return answered(a, nil,
		func(op api.AcceptedJSONResponse) api.CreateCheckpointResponseObject {
			return api.CreateCheckpoint202JSONResponse{AcceptedJSONResponse: op}
		},
		func() api.CreateCheckpointResponseObject { return api.CreateCheckpoint201JSONResponse(checkpointIn(a)) })
}

func checkpointList(list []controller.Checkpoint, p controller.Page) api.CheckpointList {
	list, next := cut(list, p, func(c controller.Checkpoint) string { return string(c.ID) })
	return api.CheckpointList{Items: convert(list, checkpointOf), NextCursor: next}
}

// visible are the states that lists show unless they are asked for others.
var visible = []core.CheckpointState{core.CheckpointCaptured, core.CheckpointSealed}

// ListCheckpoints serves GET /v1/checkpoints.
func (s *server) ListCheckpoints(ctx context.Context, r api.ListCheckpointsRequestObject) (api.ListCheckpointsResponseObject, error) {
	p, err := page(r.Params.Limit, r.Params.Cursor)
	if err != nil {
		return nil, err
	}
	labels, err := labelFilter(r.Params.Label)
	if err != nil {
		return nil, err
	}
	f := controller.CheckpointFilter{
		Page: p, Name: r.Params.Name, IDSuffix: r.Params.IDSuffix, Labels: labels, Kind: controller.CheckpointKind(r.Params.Kind),
		WorkspaceID: core.WorkspaceID(r.Params.WorkspaceID), Parent: core.CheckpointID(r.Params.ParentID),
		States: convert(r.Params.State, func(v api.CheckpointState) core.CheckpointState { return core.CheckpointState(v) }),
	}
	if len(f.States) == 0 {
		f.States = visible
	}
	list, err := s.control.Tree.Checkpoints(ctx, projectOf(ctx), f)
	if err != nil {
		return nil, err
	}
	return api.ListCheckpoints200JSONResponse(checkpointList(list, p)), nil
}

// ListWorkspaceCheckpoints serves GET /v1/workspaces/{id}/checkpoints.
func (s *server) ListWorkspaceCheckpoints(ctx context.Context, r api.ListWorkspaceCheckpointsRequestObject) (api.ListWorkspaceCheckpointsResponseObject, error) {
	p, err := page(r.Params.Limit, r.Params.Cursor)
	if err != nil {
		return nil, err
	}
	list, err := s.control.Tree.Checkpoints(ctx, projectOf(ctx), controller.CheckpointFilter{Page: p, WorkspaceID: core.WorkspaceID(r.WorkspaceID), States: visible})
	if err != nil {
		return nil, err
	}
	return api.ListWorkspaceCheckpoints200JSONResponse(checkpointList(list, p)), nil
}

// GetCheckpoint serves GET /v1/checkpoints/{id}.
func (s *server) GetCheckpoint(ctx context.Context, r api.GetCheckpointRequestObject) (api.GetCheckpointResponseObject, error) {
	id := core.CheckpointID(r.CheckpointID)
	cp, err := s.control.Tree.Checkpoint(ctx, projectOf(ctx), id)
	if err == nil && r.Params.Wait == api.WaitSealed {
		cp, err = s.control.SealedCheckpoint(ctx, projectOf(ctx), id, controller.DefaultWait)
	}
	if err != nil {
		return nil, err
	}
	return api.GetCheckpoint200JSONResponse(checkpointOf(cp)), nil
}

// PatchCheckpoint serves PATCH /v1/checkpoints/{id}.
func (s *server) PatchCheckpoint(ctx context.Context, r api.PatchCheckpointRequestObject) (api.PatchCheckpointResponseObject, error) {
	labels, err := labelsPatchIn(r.Body.Labels)
	if err != nil {
		return nil, err
	}
	annotations, err := annotationsIn(r.Body.Annotations)
	if err != nil {
		return nil, err
	}
	cp, err := s.control.Tree.Patch(ctx, projectOf(ctx), core.CheckpointID(r.CheckpointID),
		controller.CheckpointPatch{Version: r.Body.Version, Name: r.Body.Name, Labels: labels, Annotations: annotations, Pinned: r.Body.Pinned})
	if err != nil {
		return nil, err
	}
	return api.PatchCheckpoint200JSONResponse(checkpointOf(cp)), nil
}

// ForkCheckpoint serves POST /v1/checkpoints/{id}/fork.
func (s *server) ForkCheckpoint(ctx context.Context, r api.ForkCheckpointRequestObject) (api.ForkCheckpointResponseObject, error) {
	b := r.Body
	req, err := forkIn(forkOptions{
		count: b.Count, name: b.BranchName, allOrNothing: b.AllOrNothing, env: b.Env, labels: b.Labels, network: b.Network, ttl: b.TTLSeconds,
		grants: b.Grants, idle: b.IdleSeconds, onIdle: b.OnIdle, autoResume: b.AutoResume, onTTL: b.OnTTL,
	})
	if err != nil {
		return nil, err
	}
	req.Spread = b.Spread
	a, err := s.control.ForkCheckpoint(ctx, projectOf(ctx), core.CheckpointID(r.CheckpointID), req, waitOf(r.Params.Wait))
	var result api.ForkResult
	if err == nil && a.Done {
		result, err = s.forkResult(ctx, a)
	}
	return answered(a, err,
		func(op api.AcceptedJSONResponse) api.ForkCheckpointResponseObject {
			return api.ForkCheckpoint202JSONResponse{AcceptedJSONResponse: op}
		},
		func() api.ForkCheckpointResponseObject { return api.ForkCheckpoint201JSONResponse(result) })
}

// RestoreCheckpoint serves POST /v1/checkpoints/{id}/restore.
func (s *server) RestoreCheckpoint(ctx context.Context, r api.RestoreCheckpointRequestObject) (api.RestoreCheckpointResponseObject, error) {
	b := r.Body
	req, err := forkIn(forkOptions{
		name: b.WorkspaceName, env: b.Env, labels: b.Labels, network: b.Network, ttl: b.TTLSeconds, grants: b.Grants,
		idle: b.IdleSeconds, onIdle: b.OnIdle, autoResume: b.AutoResume, onTTL: b.OnTTL,
	})
	if err != nil {
		return nil, err
	}
	a, err := s.control.RestoreCheckpoint(ctx, projectOf(ctx), core.CheckpointID(r.CheckpointID), req, waitOf(r.Params.Wait))
	return answered(a, err,
		func(op api.AcceptedJSONResponse) api.RestoreCheckpointResponseObject {
			return api.RestoreCheckpoint202JSONResponse{AcceptedJSONResponse: op}
		},
		func() api.RestoreCheckpointResponseObject {
			return api.RestoreCheckpoint201JSONResponse(restoreResultOf(a))
		})
}

// GetLineage serves GET /v1/checkpoints/{id}/lineage.
func (s *server) GetLineage(ctx context.Context, r api.GetLineageRequestObject) (api.GetLineageResponseObject, error) {
	p, err := page(r.Params.Limit, r.Params.Cursor)
	if err != nil {
		return nil, err
	}
	list, err := s.control.Tree.Lineage(ctx, projectOf(ctx), core.CheckpointID(r.CheckpointID), p)
	if err != nil {
		return nil, err
	}
	list, next := cut(list, p, func(c controller.Ancestor) string { return string(c.ID) })
	return api.GetLineage200JSONResponse{Items: convert(list, ancestorOf), NextCursor: next}, nil
}

// ListChildren serves GET /v1/checkpoints/{id}/children.
func (s *server) ListChildren(ctx context.Context, r api.ListChildrenRequestObject) (api.ListChildrenResponseObject, error) {
	p, err := page(r.Params.Limit, r.Params.Cursor)
	if err != nil {
		return nil, err
	}
	list, err := s.control.Tree.Children(ctx, projectOf(ctx), core.CheckpointID(r.CheckpointID), p)
	if err != nil {
		return nil, err
	}
	return api.ListChildren200JSONResponse(checkpointList(list, p)), nil
}

// GetTree serves GET /v1/checkpoints/{id}/tree.
func (s *server) GetTree(ctx context.Context, r api.GetTreeRequestObject) (api.GetTreeResponseObject, error) {
	p, err := page(r.Params.Limit, r.Params.Cursor)
	if err != nil {
		return nil, err
	}
	depth, after, err := parseTreeKey(p.After)
	if err != nil {
		return nil, err
	}
	tp := controller.TreePage{Page: controller.Page{After: after, Limit: p.Limit}, AfterDepth: depth, MaxDepth: -1}
	if r.Params.Depth != nil {
		tp.MaxDepth = *r.Params.Depth
	}
	nodes, err := s.control.Tree.Subtree(ctx, projectOf(ctx), core.CheckpointID(r.CheckpointID), tp)
	if err != nil {
		return nil, err
	}
	nodes, next := cut(nodes, p, treeKey)
	return api.GetTree200JSONResponse{RootID: r.CheckpointID, Items: convert(nodes, nodeOf), NextCursor: next}, nil
}
