package router

import (
	"errors"
	"io"
	"net/http"
	"sync/atomic"
)

// traffic says whether a request is in use. A guest may think before it answers. From then on only bytes count: a stream without any
// does not keep its workspace awake.
type traffic struct {
	answered atomic.Bool
	reads    atomic.Int64 // and writes with bytes
	seen     int64        // of reads, at the last look
}

// moves reports whether the request was in use since the last call.
func (t *traffic) moves() bool {
	n := t.reads.Load()
	moved := n != t.seen || !t.answered.Load()
	t.seen = n
	return moved
}

func (t *traffic) note(n int) {
	if n > 0 {
		t.reads.Add(1)
	}
}

// ofBody notes what is read of a request.
func (t *traffic) ofBody(b io.ReadCloser) io.ReadCloser {
	if b == nil || b == http.NoBody {
		return b
	}
	return counted{b, t}
}

// ofAnswer notes what is read of an answer. After a change of the protocol, both directions are in its body.
func (t *traffic) ofAnswer(res *http.Response) {
	t.answered.Store(true)
	if stream, ok := res.Body.(io.ReadWriteCloser); ok && res.StatusCode == http.StatusSwitchingProtocols {
		res.Body = upgraded{counted{stream, t}, stream}
		return
	}
	res.Body = t.ofBody(res.Body)
}

// counted is a body.
type counted struct {
	io.ReadCloser
	traffic *traffic
}

// Read notes that bytes were read.
func (c counted) Read(b []byte) (int, error) {
	n, err := c.ReadCloser.Read(b)
	c.traffic.note(n)
	return n, err
}

// upgraded is the guest's end of a connection that has changed its protocol. When the guest closes it, the client's end is closed as well.
type upgraded struct {
	counted
	io.Writer
}

// Read returns an error at the end, which a reverse proxy does not take for the end of one direction.
func (u upgraded) Read(b []byte) (int, error) {
	n, err := u.counted.Read(b)
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

// Write notes that bytes were written.
func (u upgraded) Write(b []byte) (int, error) {
	n, err := u.Writer.Write(b)
	u.traffic.note(n)
	return n, err
}
