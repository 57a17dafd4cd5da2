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

// Attend does what Watch does, and also asks all the time whether the pager still works. If the
// pager does not answer (see sidecar.Pulse), Attend kills it and returns ErrHung. Alive then tells
// whether the pager has ended. The machines of a pager that hangs wait for it in the kernel, and
// only its end frees them.
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

// feel returns ErrHung when too many answers in a row did not come. What is asked for takes every lock that serving takes.
func (c *Client) feel(ctx context.Context) error {
	err := c.pulse.Feel(ctx, func(ctx context.Context, limit time.Duration) error {
		return c.within(ctx, limit, request{Op: opWatch}) // of no version yet: it is answered at once
	})
	if err != nil {
		return fmt.Errorf("%w: %w", ErrHung, err)
	}
	return nil
}

// greet asks who the pager is, as often as one that hangs is asked.
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

// kill ends the process that listens, whatever it says of itself.
func (c *Client) kill(ctx context.Context) error { return sidecar.KillListener(ctx, name, c.socket) }
