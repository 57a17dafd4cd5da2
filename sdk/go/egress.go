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

// Effects iterates over what may have been changed outside on the way from the root to a checkpoint, in the order in which it happened.
func (c *Client) Effects(ctx context.Context, id CheckpointID) iter.Seq2[Effect, error] {
	return all[Effect](ctx, c, get("v1", "checkpoints", id, "effects"))
}
