package egress

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/egress/egressapi"
	"github.com/coppice-dev/coppice/internal/sidecar"
)

// Pulse says when a process that is there counts as hung. Zero values take the defaults, which are for hosts that were asleep or have far too
// much to do: to be killed wrongly costs a process every tunnel of its host.
type Pulse struct {
	Every  time.Duration // between questions; default 1 s
	Limit  time.Duration // for an answer; default 5 s
	Misses int           // answers in a row that did not come; default 4
}

func (p Pulse) withDefaults() Pulse {
	return Pulse{cmp.Or(p.Every, time.Second), cmp.Or(p.Limit, 5*time.Second), cmp.Or(p.Misses, 4)}
}

// errSilent is that somebody listens and does not answer in time.
var errSilent = errors.New("it listens, and does not answer")

// ErrHung is returned, wrapped, when a process was killed because it did not answer.
var ErrHung = errors.New("the egress process hung")

// Attend waits for the end of the process, which is ErrGone, or of ctx. It asks all the time whether the process still works; one that does
// not, ErrHung, is gone when Attend returns without another error.
func (c *Client) Attend(ctx context.Context) error {
	watching, end := context.WithCancelCause(ctx)
	defer end(nil)
	felt := make(chan struct{})
	go func() {
		defer close(felt)
		if err := c.feel(watching); err != nil {
			end(err)
		}
	}()
	err := c.Watch(watching)
	end(nil)
	<-felt
	if errors.Is(err, ErrHung) {
		err = errors.Join(err, c.kill(ctx))
	}
	return err
}

// feel returns ErrHung when too many answers in a row did not come. What is asked for takes every lock that serving takes.
func (c *Client) feel(ctx context.Context) error {
	tick := time.NewTicker(c.pulse.Every)
	defer tick.Stop()
	for misses := 0; ; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		began := time.Now()
		_, err := c.within(ctx, c.pulse.Limit, egressapi.Request{Op: egressapi.OpStats})
		switch late := time.Since(began) - c.pulse.Limit; {
		case ctx.Err() != nil:
			return nil
		case !errors.Is(err, errSilent): // it answers; or it has ended, which Watch notices
			misses = 0
		case late > c.pulse.Limit/2: // this process did not run either, and cannot tell
		default:
			misses++
		}
		if misses >= c.pulse.Misses {
			return fmt.Errorf("%w: %d questions in a row had no answer within %s", ErrHung, misses, c.pulse.Limit)
		}
	}
}

// greet asks who the process is, as often as one that hangs is asked.
func (c *Client) greet(ctx context.Context) (h egressapi.Hello, err error) {
	for range c.pulse.Misses {
		var out egressapi.Response
		out, err = c.within(ctx, c.pulse.Limit, egressapi.Request{Op: egressapi.OpHello})
		if err == nil {
			return *out.Hello, nil
		}
		if !errors.Is(err, errSilent) || ctx.Err() != nil {
			break
		}
	}
	return h, err
}

// kill ends the process that listens. The kernel knows it: as long as a socket can be dialled, the one who listens there lives.
func (c *Client) kill(ctx context.Context) error {
	pid, err := c.listener(ctx)
	if err != nil {
		return ignoreEnd(err)
	}
	return ignoreEnd(sidecar.Kill(name, pid, func() error {
		again, err := c.listener(ctx)
		if err == nil && again != pid {
			err = fmt.Errorf("the %s is process %d now, and was process %d", name, again, pid)
		}
		return err
	}))
}

// ignoreEnd is no error where nobody listens any more.
func ignoreEnd(err error) error {
	if errors.Is(err, ErrGone) {
		return nil
	}
	return err
}

// Ended reports whether nobody listens any more: the process has ended, or serves nobody until it has. One that is only silent has not.
func (c *Client) Ended(ctx context.Context) bool {
	_, err := c.listener(ctx)
	return errors.Is(err, ErrGone)
}

func (c *Client) listener(ctx context.Context) (pid int, err error) {
	var d net.Dialer
	dialled, err := d.DialContext(ctx, "unixpacket", c.socket)
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENOENT) {
		return 0, errors.Join(ErrGone, err)
	}
	if err != nil {
		return 0, err
	}
	conn := dialled.(*net.UnixConn)
	defer conn.Close()
	peer, err := sidecar.Peer(conn)
	if err != nil {
		return 0, err
	}
	return int(peer.Pid), nil
}
