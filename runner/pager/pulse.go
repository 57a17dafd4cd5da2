package pager

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/coppice-dev/coppice/internal/sidecar"
)

// ErrHung is returned, wrapped, when a pager was killed because it did not answer.
var ErrHung = errors.New("the pager hung")

// Attend does the same as Watch, and also checks regularly whether the pager still works. If the pager does not answer
// (see sidecar.Pulse), Attend kills it and returns ErrHung. Alive then tells whether the pager has ended. The machines
// of a hung pager wait for it in the kernel, and only its end frees them.
func (c *Client) Attend(ctx context.Context, each func([]Status)) error {
	watching, end := context.WithCancelCause(ctx)
	defer end(nil)
	felt := make(chan struct{})
	go func() {
		defer close(felt)
		if err := c.feel(watching); err != nil {
			end(err)
		}
	}()
	err := c.Watch(watching, each)
	end(nil)
	<-felt
	if errors.Is(err, ErrHung) {
		err = errors.Join(err, c.kill(ctx))
	}
	return err
}

// feel returns ErrHung when too many answers in a row are missing. The request takes every lock that serving takes.
func (c *Client) feel(ctx context.Context) error {
	err := c.pulse.Feel(ctx, func(ctx context.Context, limit time.Duration) error {
		return c.within(ctx, limit, request{Op: opWatch}) // version 0 is answered at once
	})
	if err != nil {
		return fmt.Errorf("%w: %w", ErrHung, err)
	}
	return nil
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
