package proxy

import (
	"context"
	"io"
	"net/http"
	"sync"
	"sync/atomic"

	"github.com/coppice-dev/coppice/egress/grant"
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

// endOfBody calls a function when a body is closed, with the number of bytes that were read and the error of the last
// read.
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

// inspection says how a body is inspected while it is transferred.
type inspection struct {
	scan    *grant.Scanner     // nil: no search
	take    func(int) error    // counts bytes
	trailer func() http.Header // the trailer; known at the end of the body
	found   error              // the error when scan finds something
	refuse  func(error)        // called with the reason when nothing more passes

	in   []byte
	pass []byte // inspected, not yet read
	err  error  // the error that follows pass
}

// inspected reads a body through an inspection. Bytes that may begin a searched value are kept back until the next
// bytes decide.
func inspected(body io.ReadCloser, i *inspection) io.ReadCloser {
	r := inspecting{body, i}
	if w, ok := body.(io.ReadWriteCloser); ok { // an upgraded connection
		return struct {
			io.Reader
			io.WriteCloser
		}{r, w}
	}
	return r
}

type inspecting struct {
	io.ReadCloser
	*inspection
}

func (i inspecting) Read(p []byte) (int, error) {
	for len(i.pass) == 0 && i.err == nil {
		i.more()
	}
	if len(i.pass) > 0 {
		n := copy(p, i.pass)
		i.pass = i.pass[n:]
		return n, nil
	}
	return 0, i.err
}

// more reads the next bytes and inspects them.
func (i inspecting) more() {
	if i.in == nil {
		i.in = make([]byte, 32<<10)
	}
	n, err := i.ReadCloser.Read(i.in)
	found := false
	if i.pass = i.in[:n]; i.scan != nil {
		i.pass, found = i.scan.Feed(i.in[:n])
	}
	if i.err = i.take(n); i.err == nil && err != nil {
		if i.err = err; i.scan != nil {
			i.pass = append(i.pass, i.scan.Rest()...)
			found = found || err == io.EOF && i.scan.InHeader(i.trailer())
		}
	}
	if found {
		i.err = i.found
	}
	if _, refused := isDenial(i.err); refused {
		i.pass = nil
		i.refuse(i.err)
	}
}

// upgraded is the connection that a response has become. Its bytes are counted in both directions.
type upgraded struct {
	io.ReadWriteCloser
	take           func(int) error // counts sent bytes against the budget; received bytes are counted where they are inspected
	refuse         func(error)     // called with the reason when nothing more passes
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
	if err := u.take(len(p)); err != nil {
		u.refuse(err)
		return 0, err
	}
	n, err := u.ReadWriteCloser.Write(p)
	u.sent.Add(int64(n))
	return n, err
}

func (u *upgraded) Close() error {
	err := u.ReadWriteCloser.Close()
	u.once.Do(u.end)
	return err
}

// upgrade ties an upgraded connection to its flow: when either ends, the other ends too.
func (b *sandbox) upgrade(o *openFlow, c *conn, resp *http.Response) error {
	rw, ok := resp.Body.(io.ReadWriteCloser)
	if !ok {
		b.end(o, errUpgrade)
		return errUpgrade
	}
	u := &upgraded{ReadWriteCloser: rw, take: o.use.take, refuse: func(why error) { o.cancel(why) }}
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
