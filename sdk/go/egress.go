package coppice

import (
	"context"
	"iter"
	"net/url"
)

// EgressFilter selects what a workspace sent out; zero fields do not filter.
type EgressFilter struct {
	Outcome FlowOutcome
	Host    string
}

// Egress iterates over what a workspace sent out through the egress proxy, or tried to, newest first.
func (c *Client) Egress(ctx context.Context, id WorkspaceID, f EgressFilter) iter.Seq2[Flow, error] {
	q := url.Values{}
	set(q, "outcome", string(f.Outcome))
	set(q, "host", f.Host)
	return all[Flow](ctx, c, get("v1", "workspaces", id, "egress").with(q))
}

// EgressOmitted says how many of a workspace's flows Egress leaves out, because the workspace or its project has as many rows of them as it may;
// nil: none. What may have changed something is always there.
func (c *Client) EgressOmitted(ctx context.Context, id WorkspaceID) (*OmittedFlows, error) {
	var list FlowList
	err := c.call(ctx, get("v1", "workspaces", id, "egress").with(url.Values{"limit": {"1"}}), &list)
	return list.Omitted, err
}

// Effects iterates over what may have been changed outside on the way from the root to a checkpoint, in the order in which it happened.
func (c *Client) Effects(ctx context.Context, id CheckpointID) iter.Seq2[Effect, error] {
	return all[Effect](ctx, c, get("v1", "checkpoints", id, "effects"))
}
