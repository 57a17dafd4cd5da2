package egress

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/egress/egressapi"
	"github.com/coppice-dev/coppice/internal/sidecar"
)

// Pulse says when a process that is there counts as hung.
type Pulse = sidecar.Pulse

// errSilent is that somebody listens and does not answer in time.
var errSilent = sidecar.ErrSilent

// Attend waits for the end of the process (ErrGone) or of ctx. It regularly asks whether the process still works, and ends a process that
// does not (sidecar.ErrHung). Without another error, that process is gone when Attend returns.
func (c *Client) Attend(ctx context.Context) error {
	return c.pulse.Attend(ctx, sidecar.Watched{Name: name, Socket: c.socket, Watch: c.Watch, Ask: func(ctx context.Context, limit time.Duration) error {
		_, err := c.within(ctx, limit, egressapi.Request{Op: egressapi.OpStats})
		return err
	}})
}

// greet asks who the process is, as often as one that hangs is asked.
func (c *Client) greet(ctx context.Context) (h egressapi.Hello, err error) {
	err = c.pulse.Greet(ctx, func(ctx context.Context, limit time.Duration) error {
		out, err := c.within(ctx, limit, egressapi.Request{Op: egressapi.OpHello})
		if err == nil {
			h = *out.Hello
		}
		return err
	})
	return h, err
}

// kill ends the process that listens.
func (c *Client) kill(ctx context.Context) error { return sidecar.KillListener(ctx, name, c.socket) }

// Ended reports whether nobody listens any more: the process has ended, or is about to end and serves nobody. A process that is only silent
// has not ended.
func (c *Client) Ended(ctx context.Context) bool {
	_, err := sidecar.Listener(ctx, c.socket)
	return sidecar.IsNobody(err)
}
