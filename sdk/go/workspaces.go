package coppice

import (
	"context"
	"io"
	"iter"
	"net/http"
	"net/url"
)

// WorkspaceFilter narrows a list of workspaces. Its zero value lists all except terminated ones.
type WorkspaceFilter struct {
	Name               string
	IDSuffix           string           // at least four characters
	Labels             []string         // "key=value" or "key"; all must match
	States             []WorkspaceState // empty: all but terminated
	CheckpointID       CheckpointID     // head
	ParentCheckpointID CheckpointID     // forked from
}

func (f WorkspaceFilter) query() url.Values {
	q := url.Values{}
	set(q, "name", f.Name)
	set(q, "id_suffix", f.IDSuffix)
	set(q, "checkpoint_id", f.CheckpointID)
	set(q, "parent_checkpoint_id", f.ParentCheckpointID)
	for _, l := range f.Labels {
		q.Add("label", l)
	}
	for _, s := range f.States {
		q.Add("state", string(s))
	}
	return q
}

// CreateWorkspace makes a workspace from an image and returns it ready.
func (c *Client) CreateWorkspace(ctx context.Context, req CreateWorkspaceRequest) (Workspace, error) {
	var out Workspace
	err := c.start(ctx, creation("v1", "workspaces").json(req), &out)
	return out, err
}

// Workspace returns a workspace.
func (c *Client) Workspace(ctx context.Context, id WorkspaceID) (Workspace, error) {
	var out Workspace
	err := c.call(ctx, get("v1", "workspaces", id), &out)
	return out, err
}

// Workspaces iterates over the workspaces that match, newest first.
func (c *Client) Workspaces(ctx context.Context, f WorkspaceFilter) iter.Seq2[Workspace, error] {
	return all[Workspace](ctx, c, get("v1", "workspaces").with(f.query()))
}

// PatchWorkspace changes labels, time to live or egress rules, and returns the changed workspace.
func (c *Client) PatchWorkspace(ctx context.Context, id WorkspaceID, req PatchWorkspaceRequest) (Workspace, error) {
	var out Workspace
	err := c.call(ctx, request{method: http.MethodPatch, path: []string{"v1", "workspaces", id}, body: req}, &out)
	return out, err
}

// TerminateWorkspace terminates a workspace permanently. Its checkpoints stay. Idempotent.
func (c *Client) TerminateWorkspace(ctx context.Context, id WorkspaceID) (Workspace, error) {
	var out Workspace
	err := c.start(ctx, request{method: http.MethodDelete, path: []string{"v1", "workspaces", id}}, &out)
	return out, err
}

// SuspendWorkspace checkpoints a workspace and stops it. Idempotent.
func (c *Client) SuspendWorkspace(ctx context.Context, id WorkspaceID) (Workspace, error) {
	var out Workspace
	err := c.start(ctx, post("v1", "workspaces", id, "suspend"), &out)
	return out, err
}

// ResumeWorkspace resumes a suspended workspace in its next epoch; its programs go on. Idempotent.
func (c *Client) ResumeWorkspace(ctx context.Context, id WorkspaceID) (Workspace, error) {
	var out Workspace
	err := c.start(ctx, post("v1", "workspaces", id, "resume"), &out)
	return out, err
}

// WorkspaceUsage returns the usage of a workspace, in all its epochs.
func (c *Client) WorkspaceUsage(ctx context.Context, id WorkspaceID) (Usage, error) {
	var out Usage
	err := c.call(ctx, get("v1", "workspaces", id, "usage"), &out)
	return out, err
}

// ForkWorkspace checkpoints a running workspace and forks the checkpoint, as one operation. It succeeds when at least
// one child is ready (with AllOrNothing: all children); look at each child's Problem.
func (c *Client) ForkWorkspace(ctx context.Context, id WorkspaceID, req ForkWorkspaceRequest) (ForkResult, error) {
	var out ForkResult
	err := c.start(ctx, creation("v1", "workspaces", id, "fork").json(req), &out)
	return out, err
}

// RestoreWorkspace restores a workspace in place to a checkpoint: it is the same workspace in its next epoch.
func (c *Client) RestoreWorkspace(ctx context.Context, id WorkspaceID, checkpoint CheckpointID) (RestoreResult, error) {
	var out RestoreResult
	err := c.start(ctx, creation("v1", "workspaces", id, "restore").json(RestoreWorkspaceRequest{CheckpointID: checkpoint}), &out)
	return out, err
}

// ResealReports iterates over what was renewed in a workspace at its fork and at each restore, newest first.
func (c *Client) ResealReports(ctx context.Context, id WorkspaceID) iter.Seq2[ResealRecord, error] {
	return all[ResealRecord](ctx, c, get("v1", "workspaces", id, "reseal-reports"))
}

// Console returns the end of the machine's serial console. The guest controls its content.
func (c *Client) Console(ctx context.Context, id WorkspaceID) ([]byte, error) {
	resp, err := c.send(ctx, get("v1", "workspaces", id, "console"))
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
}

// Processes lists the processes of the workload.
func (c *Client) Processes(ctx context.Context, id WorkspaceID) ([]Process, error) {
	var out ProcessList
	err := c.call(ctx, get("v1", "workspaces", id, "processes"), &out)
	return out.Items, err
}

// Ports lists the forwarded ports.
func (c *Client) Ports(ctx context.Context, id WorkspaceID) ([]Port, error) {
	var out PortList
	err := c.call(ctx, get("v1", "workspaces", id, "ports"), &out)
	return out.Items, err
}

// CreatePort forwards a TCP address of the runner's host to a port of the guest.
func (c *Client) CreatePort(ctx context.Context, id WorkspaceID, req CreatePortRequest) (Port, error) {
	var out Port
	err := c.call(ctx, creation("v1", "workspaces", id, "ports").json(req), &out)
	return out, err
}

// DeletePort stops forwarding.
func (c *Client) DeletePort(ctx context.Context, id WorkspaceID, port PortID) error {
	return c.call(ctx, request{method: http.MethodDelete, path: []string{"v1", "workspaces", id, "ports", port}}, nil)
}

// Grants lists the grants of a workspace.
func (c *Client) Grants(ctx context.Context, id WorkspaceID) ([]Grant, error) {
	var out GrantList
	err := c.call(ctx, get("v1", "workspaces", id, "secrets", "grants"), &out)
	return out.Items, err
}

// Grant returns one grant of a workspace.
func (c *Client) Grant(ctx context.Context, id WorkspaceID, grant GrantID) (Grant, error) {
	var out Grant
	err := c.call(ctx, get("v1", "workspaces", id, "secrets", "grants", grant), &out)
	return out, err
}

// PutGrant grants the use of a secret to a workspace and its forks, or changes a grant.
func (c *Client) PutGrant(ctx context.Context, id WorkspaceID, grant GrantID, req PutGrantRequest) (Grant, error) {
	var out Grant
	err := c.call(ctx, request{method: http.MethodPut, path: []string{"v1", "workspaces", id, "secrets", "grants", grant}}.json(req), &out)
	return out, err
}

// RevokeGrant revokes a grant from a workspace and its forks.
func (c *Client) RevokeGrant(ctx context.Context, id WorkspaceID, grant GrantID) error {
	return c.call(ctx, request{method: http.MethodDelete, path: []string{"v1", "workspaces", id, "secrets", "grants", grant}}, nil)
}

// Images iterates over the images that runners have.
func (c *Client) Images(ctx context.Context) iter.Seq2[Image, error] {
	return all[Image](ctx, c, get("v1", "images"))
}

// Runners iterates over the runners.
func (c *Client) Runners(ctx context.Context) iter.Seq2[Runner, error] {
	return all[Runner](ctx, c, get("v1", "runners"))
}

// Ready asks the server once whether it can accept work.
func (c *Client) Ready(ctx context.Context) (Health, error) {
	var out Health
	err := c.call(ctx, request{method: http.MethodGet, path: []string{"readyz"}, once: true}, &out)
	return out, err
}
