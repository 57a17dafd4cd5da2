package coppice

import (
	"context"
	"time"
)

// SignalTarget sends a signal to some of a session's processes. A guest agent that knows no targets answers with the code
// UNSUPPORTED.
func (c *Client) SignalTarget(ctx context.Context, id SessionID, signal string, target SignalRequestTarget) error {
	return c.call(ctx, post("v1", "sessions", id, "signal").json(SignalRequest{Signal: signal, Target: target}), nil)
}

// SetSessionDeadline has a session killed after a time from now, in place of an earlier deadline; 0 is never.
func (c *Client) SetSessionDeadline(ctx context.Context, id SessionID, after time.Duration) error {
	return c.call(ctx, post("v1", "sessions", id, "deadline").json(DeadlineRequest{TimeoutMS: after.Milliseconds()}), nil)
}
