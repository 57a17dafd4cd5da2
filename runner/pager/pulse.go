package pager

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/internal/sidecar"
)

// Attend does the same as Watch, and also checks regularly whether the pager still works. If the pager does not answer
// (see sidecar.Pulse), Attend kills it and returns sidecar.ErrHung. Alive then tells whether the pager has ended. The
// machines of a hung pager wait for it in the kernel, and only its end frees them.
func (c *Client) Attend(ctx context.Context, each func([]Status)) error {
	return c.pulse.Attend(ctx, sidecar.Watched{
		Name: name, Socket: c.socket, Watch: func(ctx context.Context) error { return c.Watch(ctx, each) },
		Ask: func(ctx context.Context, limit time.Duration) error {
			return c.within(ctx, limit, request{Op: opWatch}) // version 0 is answered at once
		},
	})
}

// greet asks the pager who it is, as often as a hung pager is asked.
func (c *Client) greet(ctx context.Context) (h Hello, err error) {
	err = c.pulse.Greet(ctx, func(ctx context.Context, limit time.Duration) error {
		out, err := c.ask(ctx, limit, request{Op: opHello})
		if err == nil {
			h = *out.Hello
		}
		return err
	})
	return h, err
}

// kill kills the listening process, whatever it says about itself.
func (c *Client) kill(ctx context.Context) error { return sidecar.KillListener(ctx, name, c.socket) }
