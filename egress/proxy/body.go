package proxy

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
)

// counted is a body whose bytes are counted as they are read.
type counted struct {
	io.ReadCloser
	n atomic.Int64
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.ReadCloser.Read(p)
	c.n.Add(int64(n))
	return n, err
}

// endOfBody tells when a body was closed, how much of it was read, and with which error.
type endOfBody struct {
	io.ReadCloser
	n    int64
	err  error
	once sync.Once
	end  func(int64, error)
}

func (e *endOfBody) Read(p []byte) (int, error) {
	n, err := e.ReadCloser.Read(p)
	e.n += int64(n)
	if err != nil && err != io.EOF {
		e.err = err
	}
	return n, err
}

func (e *endOfBody) Close() error {
	err := e.ReadCloser.Close()
	e.once.Do(func() { e.end(e.n, e.err) })
	return err
}

// upgraded is the connection that a response has become. It is counted both ways.
type upgraded struct {
	io.ReadWriteCloser
	sent, received atomic.Int64
	once           sync.Once
	end            func()
}

func (u *upgraded) Read(p []byte) (int, error) {
	n, err := u.ReadWriteCloser.Read(p)
	u.received.Add(int64(n))
	return n, err
}

func (u *upgraded) Write(p []byte) (int, error) {
	n, err := u.ReadWriteCloser.Write(p)
	u.sent.Add(int64(n))
	return n, err
}

func (u *upgraded) Close() error {
	err := u.ReadWriteCloser.Close()
	u.once.Do(u.end)
	return err
}

// upgrade makes the body of a response the flow's own: when either ends, both do.
func (b *box) upgrade(o *openFlow, c *conn, resp *http.Response) error {
	rw, ok := resp.Body.(io.ReadWriteCloser)
	if !ok {
		err := fmt.Errorf("the upgraded response has a %T", resp.Body)
		b.end(o, err)
		return err
	}
	u := &upgraded{ReadWriteCloser: rw}
	stop := context.AfterFunc(o.ctx, func() {
		reset(c.Conn)
		_ = rw.Close()
	})
	u.end = func() {
		stop()
		o.Sent, o.Received = u.sent.Load(), u.received.Load()
		b.end(o, nil)
	}
	resp.Body = u
	return nil
}
