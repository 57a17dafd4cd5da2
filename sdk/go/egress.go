package coppice

import (
	"context"
	"iter"
	"net/url"
)

// EgressFilter selects flows of a workspace; zero fields do not filter.
type EgressFilter struct {
	Outcome FlowOutcome
	Host    string
}

// Egress iterates over the flows that a workspace sent through the egress proxy, or tried to send, newest first.
func (c *Client) Egress(ctx context.Context, id WorkspaceID, f EgressFilter) iter.Seq2[Flow, error] {
	q := url.Values{}
	set(q, "outcome", string(f.Outcome))
	set(q, "host", f.Host)
	return all[Flow](ctx, c, get("v1", "workspaces", id, "egress").with(q))
}

// EgressOmitted says how many of a workspace's flows Egress leaves out, because the workspace or its project has
// reached its limit of rows; nil: none. Flows that may have changed something are never left out.
func (c *Client) EgressOmitted(ctx context.Context, id WorkspaceID) (*OmittedFlows, error) {
	var list FlowList
	err := c.call(ctx, get("v1", "workspaces", id, "egress").with(url.Values{"limit": {"1"}}), &list)
	return list.Omitted, err
}

// Effects iterates over everything that may have been changed outside on the path from the root to a checkpoint, in the
// order of time.
func (c *Client) Effects(ctx context.Context, id CheckpointID) iter.Seq2[Effect, error] {
	return all[Effect](ctx, c, get("v1", "checkpoints", id, "effects"))
}
