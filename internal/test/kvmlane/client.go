package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync"

	"github.com/coppice-dev/coppice/internal/test/kvmlane/wire"
)

// client speaks with the first-level machine.
type client struct {
	conn net.Conn

	mu    sync.Mutex // guards what follows, and writes
	next  uint64
	calls map[uint64]chan<- wire.Reply
	err   error         // why the connection has ended
	ended chan struct{} // closed when it has
}

// dial connects to the machine's port. The machine need not have booted: what is asked of it waits.
func dial(ctx context.Context, socket string) (*client, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, fmt.Errorf("reach the machine: %w", err)
	}
	// IDs begin anywhere: a program of an earlier connection may still say something.
	c := &client{conn: conn, next: rand.Uint64() >> 1, calls: map[uint64]chan<- wire.Reply{}, ended: make(chan struct{})} //nolint:gosec // G404: no secret
	go c.read()
	// The machine may have read half of a line from an earlier connection.
	_, err = conn.Write([]byte{'\n'})
	if err = errors.Join(err, wire.Write(conn, wire.Request{Hello: true})); err != nil {
		return nil, errors.Join(fmt.Errorf("reach the machine: %w", err), c.Close())
	}
	return c, nil
}

func (c *client) read() {
	err := wire.Read(c.conn, func(r wire.Reply) error {
		c.mu.Lock()
		call := c.calls[r.ID]
		c.mu.Unlock()
		if call != nil {
			call <- r
		}
		return nil
	})
	if err == nil {
		err = errors.New("the machine has ended")
	}
	c.err = err
	close(c.ended)
}

func (c *client) Close() error {
	err := c.conn.Close()
	<-c.ended
	return err
}

// call sends a request and gives every reply to f until the last. A cancelled context kills what runs.
func (c *client) call(ctx context.Context, r wire.Request, f func(wire.Reply) error) (int, error) {
	replies := make(chan wire.Reply)
	done := make(chan struct{})
	defer close(done)
	inner := make(chan wire.Reply)
	go func() { // the reader never waits for a caller that has gone
		for {
			select {
			case v := <-inner:
				select {
				case replies <- v:
				case <-done:
				}
			case <-done:
				return
			}
		}
	}()
	c.mu.Lock()
	c.next++
	r.ID = c.next
	c.calls[r.ID] = inner
	err := wire.Write(c.conn, r)
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		delete(c.calls, r.ID)
		c.mu.Unlock()
	}()
	if err != nil {
		return 0, err
	}
	for {
		select {
		case <-ctx.Done():
			c.mu.Lock()
			err := wire.Write(c.conn, wire.Request{ID: r.ID, Kill: true})
			c.mu.Unlock()
			return 0, errors.Join(context.Cause(ctx), err)
		case <-c.ended:
			return 0, c.err
		case v := <-replies:
			if v.Error != "" {
				return 0, errors.New(v.Error)
			}
			if err := f(v); err != nil {
				return 0, err
			}
			if v.Exit != nil {
				return *v.Exit, nil
			}
		}
	}
}

// run runs a program in the machine and returns its exit status.
func (c *client) run(ctx context.Context, r wire.Run, stdout, stderr io.Writer) (int, error) {
	return c.call(ctx, wire.Request{Run: &r}, func(v wire.Reply) error {
		_, err := stdout.Write(v.Stdout)
		_, err2 := stderr.Write(v.Stderr)
		return errors.Join(err, err2)
	})
}

// put copies a file into the machine.
func (c *client) put(ctx context.Context, from, to string) error {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	buf := make([]byte, wire.MaxData)
	for offset := int64(0); ; {
		n, err := io.ReadFull(f, buf)
		last := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		if err != nil && !last {
			return err
		}
		if n > 0 || offset == 0 {
			p := wire.Put{Path: to, Mode: uint32(info.Mode().Perm()), Offset: offset, Data: buf[:n]}
			if _, err := c.call(ctx, wire.Request{Put: &p}, func(wire.Reply) error { return nil }); err != nil {
				return err
			}
		}
		if offset += int64(n); last {
			return nil
		}
	}
}
