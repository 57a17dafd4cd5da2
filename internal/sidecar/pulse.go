package sidecar

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// Pulse says when a listening process counts as hung. Zero values take the defaults. These tolerate a host that was
// asleep or is far too busy, because killing a working process loses everything that it carries.
type Pulse struct {
	Every  time.Duration // between questions; default 1 s
	Limit  time.Duration // for an answer; default 5 s
	Misses int           // missing answers in a row; default 4
}

// WithDefaults replaces zero values.
func (p Pulse) WithDefaults() Pulse {
	return Pulse{cmp.Or(p.Every, time.Second), cmp.Or(p.Limit, 5*time.Second), cmp.Or(p.Misses, 4)}
}

// ErrSilent is the cause of a context that ended because an answer did not come in time.
var ErrSilent = errors.New("it listens, and does not answer")

// ErrHung is returned, wrapped, when a process was killed because it did not answer.
var ErrHung = errors.New("it hung")

// Watched are the calls to a process that Attend needs.
type Watched struct {
	Name   string // of the process, in messages
	Socket string
	Watch  func(ctx context.Context) error // returns when the process has ended, or ctx does: its cause then
	// Ask is a request that takes every lock that serving takes. Its error must have ErrSilent if the answer did not come within the limit.
	Ask func(ctx context.Context, limit time.Duration) error
}

// Attend watches a process, and also asks regularly whether it still works. If too many answers in a row are missing, Attend kills the process
// and returns ErrHung. The process has ended then, unless there is another error too.
func (p Pulse) Attend(ctx context.Context, w Watched) error {
	watching, end := context.WithCancelCause(ctx)
	defer end(nil)
	felt := make(chan struct{})
	go func() {
		defer close(felt)
		if err := p.feel(watching, w.Ask); err != nil {
			end(fmt.Errorf("the %s: %w: %w", w.Name, ErrHung, err))
		}
	}()
	err := w.Watch(watching)
	end(nil)
	<-felt
	if errors.Is(err, ErrHung) {
		err = errors.Join(err, KillListener(ctx, w.Name, w.Socket))
	}
	return err
}

// feel asks again and again. It returns an error when too many answers in a row are missing, and nil when ctx ends. ask
// must return an error with ErrSilent if its answer did not come within the limit.
func (p Pulse) feel(ctx context.Context, ask func(ctx context.Context, limit time.Duration) error) error {
	tick := time.NewTicker(p.Every)
	defer tick.Stop()
	for misses := 0; ; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		began := time.Now()
		err := ask(ctx, p.Limit)
		switch late := time.Since(began) - p.Limit; {
		case ctx.Err() != nil:
			return nil
		case !errors.Is(err, ErrSilent): // it answers, or it has ended, which other code notices
			misses = 0
		case late > p.Limit/2: // this process itself did not run, so it does not know
		default:
			misses++
		}
		if misses >= p.Misses {
			return fmt.Errorf("%d requests in a row had no answer within %s", misses, p.Limit)
		}
	}
}

// Dial connects to the process that listens at a socket. The error has ErrSilent if the kernel's queue of waiting
// connections is full.
func Dial(ctx context.Context, socket string) (*net.UnixConn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unixpacket", socket)
	switch {
	case errors.Is(err, unix.EAGAIN):
		return nil, errors.Join(ErrSilent, err)
	case err != nil:
		return nil, err
	}
	return conn.(*net.UnixConn), nil
}

// Greet asks until there is an answer, at most as often as a hung process is asked. The error has ErrSilent if none
// came.
func (p Pulse) Greet(ctx context.Context, ask func(ctx context.Context, limit time.Duration) error) (err error) {
	for range p.Misses {
		if err = ask(ctx, p.Limit); !errors.Is(err, ErrSilent) || ctx.Err() != nil {
			return err
		}
	}
	return err
}

// KillListener kills the process that listens at a socket, and waits until it is gone. It is no error if no process
// listens. The kernel names the process: while the socket can be dialled, its listening process lives.
func KillListener(ctx context.Context, name, socket string) error {
	pid, err := Listener(ctx, socket)
	if err != nil {
		return ignoreNobody(err)
	}
	return ignoreNobody(Kill(name, pid, func() error {
		again, err := Listener(ctx, socket)
		if err == nil && again != pid {
			err = fmt.Errorf("the %s is process %d now, and was process %d", name, again, pid)
		}
		return err
	}))
}

// IsNobody reports whether a call to dial failed because no process listens there.
func IsNobody(err error) bool {
	return errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENOENT)
}

func ignoreNobody(err error) error {
	if IsNobody(err) {
		return nil
	}
	return err
}

// Listener returns the id of the process that listens at a socket, as the kernel knows it. If no process listens,
// IsNobody reports true for the error.
func Listener(ctx context.Context, socket string) (pid int, err error) {
	conn, err := Dial(ctx, socket)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	peer, err := Peer(conn)
	if err != nil {
		return 0, err
	}
	return int(peer.Pid), nil
}
