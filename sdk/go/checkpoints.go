package coppice

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"strconv"
)

// CheckpointFilter narrows a list of checkpoints. Its zero value lists all that can be forked.
type CheckpointFilter struct {
	Name        string
	IDSuffix    string            // at least four characters
	Labels      []string          // "key=value" or "key"; all must match
	States      []CheckpointState // empty: captured and sealed
	Kind        CheckpointKind
	WorkspaceID WorkspaceID  // taken of this workspace
	ParentID    CheckpointID // direct children of this one
}

func (f CheckpointFilter) query() url.Values {
	q := url.Values{}
	set(q, "name", f.Name)
	set(q, "id_suffix", f.IDSuffix)
	set(q, "kind", string(f.Kind))
	set(q, "workspace_id", f.WorkspaceID)
	set(q, "parent_id", f.ParentID)
	for _, l := range f.Labels {
		q.Add("label", l)
	}
	for _, s := range f.States {
		q.Add("state", string(s))
	}
	return q
}

// CreateCheckpoint captures a running workspace, which goes on running. The checkpoint can be forked at once.
func (c *Client) CreateCheckpoint(ctx context.Context, id WorkspaceID, req CreateCheckpointRequest) (Checkpoint, error) {
	var out Checkpoint
	err := c.start(ctx, creation("v1", "workspaces", id, "checkpoints").json(req), &out)
	return out, err
}

// Checkpoint returns a checkpoint.
func (c *Client) Checkpoint(ctx context.Context, id CheckpointID) (Checkpoint, error) {
	var out Checkpoint
	err := c.call(ctx, get("v1", "checkpoints", id), &out)
	return out, err
}

// WaitSealed waits until a checkpoint is in the store, so that it outlives its host, or until it is certain that it
// never will be: its State says which. It fails with CodeUnsupported if there is no store.
func (c *Client) WaitSealed(ctx context.Context, id CheckpointID) (Checkpoint, error) {
	for {
		var out Checkpoint
		err := c.call(ctx, get("v1", "checkpoints", id).with(url.Values{"wait": {"sealed"}}), &out)
		if err != nil || out.State != CheckpointCaptured && out.State != CheckpointCapturing {
			return out, err
		}
		if err := ctx.Err(); err != nil {
			return out, context.Cause(ctx)
		}
	}
}

// Checkpoints iterates over the checkpoints that match, newest first.
func (c *Client) Checkpoints(ctx context.Context, f CheckpointFilter) iter.Seq2[Checkpoint, error] {
	return all[Checkpoint](ctx, c, get("v1", "checkpoints").with(f.query()))
}

// PatchCheckpoint changes name, labels or annotations. If Version is not the checkpoint's present version, it fails
// with CodeVersionConflict.
func (c *Client) PatchCheckpoint(ctx context.Context, id CheckpointID, req PatchCheckpointRequest) (Checkpoint, error) {
	var out Checkpoint
	err := c.call(ctx, request{method: http.MethodPatch, path: []string{"v1", "checkpoints", id}, body: req}, &out)
	return out, err
}

// The number of times that Annotate tries when others keep changing the checkpoint.
const annotateAttempts = 100

// Annotate changes annotations by compare-and-set: change gets the present checkpoint and returns the annotations to
// set (a nil value removes its annotation). If somebody else was faster, change is called again. An error of change
// ends the call.
func (c *Client) Annotate(ctx context.Context, id CheckpointID, change func(Checkpoint) (Annotations, error)) (Checkpoint, error) {
	for range annotateAttempts {
		cp, err := c.Checkpoint(ctx, id)
		if err != nil {
			return cp, err
		}
		annotations, err := change(cp)
		if err != nil {
			return cp, err
		}
		cp, err = c.PatchCheckpoint(ctx, id, PatchCheckpointRequest{Version: cp.Version, Annotations: annotations})
		if !errors.Is(err, CodeVersionConflict) {
			return cp, err
		}
	}
	return Checkpoint{}, fmt.Errorf("annotate %s: others changed it %d times in a row: %w", id, annotateAttempts, CodeVersionConflict)
}

// DeleteCheckpoint deletes a checkpoint's bytes. Its forks live on. Idempotent.
func (c *Client) DeleteCheckpoint(ctx context.Context, id CheckpointID) error {
	return c.call(ctx, request{method: http.MethodDelete, path: []string{"v1", "checkpoints", id}}, nil)
}

// DeleteCheckpoints deletes a checkpoint and, with cascade, all its descendants: all of them or none. With dryRun it
// only reports what it would delete.
func (c *Client) DeleteCheckpoints(ctx context.Context, id CheckpointID, cascade, dryRun bool) (PruneResult, error) {
	q := url.Values{"cascade": {strconv.FormatBool(cascade)}, "dry_run": {strconv.FormatBool(dryRun)}}
	var out PruneResult
	if !cascade && !dryRun {
		return out, c.DeleteCheckpoint(ctx, id)
	}
	err := c.start(ctx, request{method: http.MethodDelete, path: []string{"v1", "checkpoints", id}}.with(q), &out)
	return out, err
}

// PruneCheckpoints deletes the checkpoints that a policy does not keep, among a checkpoint and its descendants. With
// DryRun it only reports them.
func (c *Client) PruneCheckpoints(ctx context.Context, id CheckpointID, req PruneRequest) (PruneResult, error) {
	var out PruneResult
	err := c.start(ctx, post("v1", "checkpoints", id, "prune").json(req), &out)
	return out, err
}

// Prepared returns how many machines are prepared for forks of a checkpoint.
func (c *Client) Prepared(ctx context.Context, id CheckpointID) (Prepared, error) {
	var out Prepared
	err := c.call(ctx, get("v1", "checkpoints", id, "prepared"), &out)
	return out, err
}

// Prepare asks for machines that are prepared for forks of a checkpoint. It replaces what was asked for before; a count of 0 ends it.
func (c *Client) Prepare(ctx context.Context, id CheckpointID, req PrepareRequest) (Prepared, error) {
	var out Prepared
	err := c.call(ctx, request{method: http.MethodPut, path: []string{"v1", "checkpoints", id, "prepared"}, body: req}, &out)
	return out, err
}

// Retention returns the stored policy of a checkpoint and its descendants.
func (c *Client) Retention(ctx context.Context, id CheckpointID) (Retention, error) {
	var out Retention
	err := c.call(ctx, get("v1", "checkpoints", id, "retention"), &out)
	return out, err
}

// PutRetention stores a policy. The server applies it about once a minute.
func (c *Client) PutRetention(ctx context.Context, id CheckpointID, policy RetentionPolicy) (Retention, error) {
	var out Retention
	err := c.call(ctx, request{method: http.MethodPut, path: []string{"v1", "checkpoints", id, "retention"}, body: policy}, &out)
	return out, err
}

// DeleteRetention removes the stored policy of a checkpoint. Idempotent.
func (c *Client) DeleteRetention(ctx context.Context, id CheckpointID) error {
	return c.call(ctx, request{method: http.MethodDelete, path: []string{"v1", "checkpoints", id, "retention"}}, nil)
}

// CheckpointUsage returns the usage of all descendants of a checkpoint.
func (c *Client) CheckpointUsage(ctx context.Context, id CheckpointID) (Usage, error) {
	var out Usage
	err := c.call(ctx, get("v1", "checkpoints", id, "usage"), &out)
	return out, err
}

// ForkCheckpoint forks workspaces from a checkpoint, all at once. It succeeds when at least one child is ready (with
// AllOrNothing: all children); look at each child's Problem.
func (c *Client) ForkCheckpoint(ctx context.Context, id CheckpointID, req ForkCheckpointRequest) (ForkResult, error) {
	var out ForkResult
	err := c.start(ctx, creation("v1", "checkpoints", id, "fork").json(req), &out)
	return out, err
}

// RestoreCheckpoint forks one workspace, which may have a name, from a checkpoint.
func (c *Client) RestoreCheckpoint(ctx context.Context, id CheckpointID, req RestoreCheckpointRequest) (RestoreResult, error) {
	var out RestoreResult
	err := c.start(ctx, creation("v1", "checkpoints", id, "restore").json(req), &out)
	return out, err
}

// Lineage iterates from a checkpoint to its root.
func (c *Client) Lineage(ctx context.Context, id CheckpointID) iter.Seq2[Ancestor, error] {
	return all[Ancestor](ctx, c, get("v1", "checkpoints", id, "lineage"))
}

// Children iterates over the direct children of a checkpoint, oldest first.
func (c *Client) Children(ctx context.Context, id CheckpointID) iter.Seq2[Checkpoint, error] {
	return all[Checkpoint](ctx, c, get("v1", "checkpoints", id, "children"))
}

// DiffCheckpoints iterates over the pages of the differences from a checkpoint to another one of its tree. The first
// page has the processes and the memory; any page before the last may have few files, or none.
func (c *Client) DiffCheckpoints(ctx context.Context, from, to CheckpointID) iter.Seq2[CheckpointDiff, error] {
	return func(yield func(CheckpointDiff, error) bool) {
		q := url.Values{"to": {to}, "limit": {strconv.Itoa(pageSize)}}
		for {
			var p CheckpointDiff
			err := c.call(ctx, get("v1", "checkpoints", from, "diff").with(q), &p)
			if !yield(p, err) || err != nil || p.NextCursor == "" {
				return
			}
			q.Set("cursor", p.NextCursor)
		}
	}
}

// Tree iterates, breadth first, over a checkpoint and its descendants, down to depth generations; -1 means all.
func (c *Client) Tree(ctx context.Context, id CheckpointID, depth int) iter.Seq2[TreeNode, error] {
	q := url.Values{}
	if depth >= 0 {
		q.Set("depth", strconv.Itoa(depth))
	}
	return all[TreeNode](ctx, c, get("v1", "checkpoints", id, "tree").with(q))
}
