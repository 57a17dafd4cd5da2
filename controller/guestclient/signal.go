package guestclient

import (
	"context"
	"net/http"
	"net/url"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
)

// featureSignalTarget is the agent's name of the feature that a signal with a target needs.
const featureSignalTarget = "signal_target"

type (
	targetSignal struct {
		Signal string `json:"signal"`
		Target string `json:"target"`
	}
	deadline struct {
		TimeoutMS int64 `json:"timeout_ms"`
	}
)

// SignalTarget sends a signal to some of a session's processes. An agent that does not know targets refuses it: it would
// signal others.
func (c *Client) SignalTarget(ctx context.Context, s model.Sandbox, id core.SessionID, name, target string) error {
	need := url.Values{"need": {featureSignalTarget}}
	return c.call(ctx, s, http.MethodPost, sessionPath(id, "signal"), need, targetSignal{name, target}, answer{})
}

// SetDeadline makes the guest kill a session after a time from now; 0 means never.
func (c *Client) SetDeadline(ctx context.Context, s model.Sandbox, id core.SessionID, timeoutMS int64) error {
	return c.call(ctx, s, http.MethodPost, sessionPath(id, "deadline"), nil, deadline{timeoutMS}, answer{})
}
