package guestapi

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// Stream is the connection below a Link: a net.Conn, or an *os.File of a device that can be polled.
type Stream interface {
	io.ReadWriteCloser
	SetReadDeadline(t time.Time) error
	SetWriteDeadline(t time.Time) error
}

// ErrSuperseded ends a guest's Link when a host greets again, and a host's Link when the agent has restarted.
var ErrSuperseded = errors.New("the other end of the connection started again")

// ErrHangUp is the error of a Stream when the other side hung up and another one may come. The next Read waits for it.
var ErrHangUp = errors.New("the host hung up")

var errGarbage = errors.New("neither a record nor data at the start of a connection")

// helloInterval is the time between two hellos of a host until it gets an answer.
const helloInterval = 50 * time.Millisecond

// Greet does the host's part of the handshake on c and returns the connection for the multiplexer. It greets until it
// gets an answer or ctx ends, and discards everything that c delivers before. On error, c is closed.
func Greet(ctx context.Context, c net.Conn) (*Link, error) {
	g := &greeter{conn: c, dec: newDecoder(c)}
	_, _ = rand.Read(g.rec.nonce[:dialLen]) // never fails
	g.rec.version = Version
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	rec, err := g.run(ctx)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err == nil {
		err = c.SetDeadline(time.Time{})
	}
	if err != nil {
		_ = c.Close()
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		return nil, err
	}
	l := &Link{stream: c, dec: g.dec, dial: rec.dial(), peer: int(rec.version), host: true, virgin: true}
	return l, nil
}

type greeter struct {
	conn net.Conn
	dec  *decoder
	rec  record
	sent uint32
}

func (g *greeter) run(ctx context.Context) (*record, error) {
	trash := make([]byte, 4096)
	var next time.Time
	for ctx.Err() == nil {
		if now := time.Now(); !now.Before(next) {
			if err := g.hello(ctx, now); err != nil {
				return nil, err
			}
			next = now.Add(helloInterval)
		}
		if err := setDeadline(ctx, g.conn.SetReadDeadline, next); err != nil {
			return nil, err
		}
		_, rec, err := g.dec.next(trash)
		switch {
		case err != nil && !errors.Is(err, os.ErrDeadlineExceeded):
			return nil, err
		case rec == nil:
		case rec.announcement():
			next = time.Time{} // an agent has just started: it may have missed the earlier hellos
		case rec.dial() == g.rec.dial() && rec.version > 0:
			return rec, nil
		}
	}
	return nil, context.Cause(ctx)
}

func (g *greeter) hello(ctx context.Context, now time.Time) error {
	g.sent++
	binary.BigEndian.PutUint32(g.rec.nonce[dialLen:], g.sent)
	// A record is far smaller than any socket buffer. A socket that cannot take it within this time is not being read
	// at all, and a partial record does no harm.
	if err := setDeadline(ctx, g.conn.SetWriteDeadline, now.Add(helloInterval)); err != nil {
		return err
	}
	_, err := g.conn.Write(g.rec.bytes())
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil
	}
	return err
}

// setDeadline sets a deadline without replacing the one that the end of ctx has set.
func setDeadline(ctx context.Context, set func(time.Time) error, t time.Time) error {
	if err := set(t); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}

// Channel is the guest's end of a stream. It outlives the links made on it, one after the other.
type Channel struct {
	stream Stream
	dec    *decoder

	readMu  sync.Mutex // held while the stream is read
	pending *record    // a hello that ended a link; guarded by readMu

	writeMu sync.Mutex // held while the stream is written
	current *Link      // the link that may write; guarded by both locks: written with both held
}

// NewChannel returns the guest's end of s.
func NewChannel(s Stream) *Channel { return &Channel{stream: s, dec: newDecoder(s)} }

// Announce tells a host that still has a session with an earlier agent that the session is gone. It is no error if no
// host is there, or the host does not read.
func (c *Channel) Announce(timeout time.Duration) {
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	if c.stream.SetWriteDeadline(time.Now().Add(timeout)) == nil {
		_, _ = c.stream.Write(record{version: Version}.bytes())
		_ = c.stream.SetWriteDeadline(time.Time{})
	}
}

// Accept waits for a host's hello and answers it. The previous link must be closed. An error comes from the stream.
func (c *Channel) Accept() (*Link, error) {
	c.readMu.Lock()
	defer c.readMu.Unlock()
	if err := c.stream.SetReadDeadline(time.Time{}); err != nil {
		return nil, err
	}
	rec := c.pending
	c.pending = nil
	trash := make([]byte, 4096)
	// Of the buffered hellos, only the last gets an answer: a guest that was slow to start has hundreds of them.
	for rec == nil || c.dec.buffered() {
		_, r, err := c.dec.next(trash)
		if err != nil && !errors.Is(err, ErrHangUp) {
			return nil, err
		}
		if r != nil && r.version > 0 && !r.announcement() {
			rec = r
		}
	}
	c.dec.restart()
	l := &Link{stream: c.stream, dec: c.dec, ch: c, dial: rec.dial(), peer: int(rec.version), virgin: true}
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	c.current = l // from here on, an older link neither reads nor writes
	return l, c.answer(*rec)
}

// answer sends an answer. The caller holds writeMu.
func (c *Channel) answer(hello record) error {
	if err := c.stream.SetWriteDeadline(time.Time{}); err != nil {
		return err
	}
	hello.version = Version
	_, err := c.stream.Write(hello.bytes())
	return err
}

// Close closes the stream.
func (c *Channel) Close() error { return c.stream.Close() }

// Link is one host's connection, which the multiplexer reads and writes. One goroutine may read while another one
// writes.
type Link struct {
	stream Stream
	dec    *decoder
	ch     *Channel // nil on the host
	dial   [dialLen]byte
	peer   int
	host   bool
	virgin bool // no data was received yet

	wmu    sync.Mutex // on the host; the guest has Channel.writeMu
	enc    encoder
	closed bool // guarded by the write lock

	ended sync.Once
}

// PeerVersion is the protocol version that the other end speaks.
func (l *Link) PeerVersion() int { return l.peer }

// Read returns data. It ends with ErrSuperseded when the other end starts again.
func (l *Link) Read(b []byte) (int, error) {
	if l.ch != nil {
		l.ch.readMu.Lock()
		defer l.ch.readMu.Unlock()
		if l.ch.current != l || l.ch.pending != nil {
			return 0, ErrSuperseded
		}
	}
	if err := l.begin(); err != nil {
		return 0, err
	}
	for {
		n, rec, err := l.dec.next(b)
		if rec != nil {
			return 0, l.record(rec)
		}
		if n > 0 || err != nil || len(b) == 0 {
			return n, err
		}
	}
}

// begin takes the records that may come before the first byte of data. Data never begins like a magic, because the
// multiplexer's first byte is its version, 0. So nothing is ambiguous here.
func (l *Link) begin() error {
	for l.virgin {
		if err := l.dec.fill(); err != nil {
			return err
		}
		if !l.dec.buffered() {
			continue
		}
		if l.dec.idle() && l.dec.buf[l.dec.at] != magic[0] {
			l.virgin = false
			break
		}
		var one [1]byte
		_, rec, err := l.dec.next(one[:])
		switch {
		case err != nil:
			return err
		case rec != nil:
			if err := l.record(rec); err != nil {
				return err
			}
		case l.dec.idle():
			return errGarbage
		}
	}
	return nil
}

// record handles a record that arrived on a link.
func (l *Link) record(rec *record) error {
	same := rec.dial() == l.dial
	switch {
	case l.host && same && l.virgin:
		return nil // a second answer to this dial
	case l.host:
		return ErrSuperseded
	case same && l.virgin:
		l.ch.writeMu.Lock()
		defer l.ch.writeMu.Unlock()
		if l.closed {
			return net.ErrClosed
		}
		return l.ch.answer(*rec)
	}
	l.ch.pending = rec
	return ErrSuperseded
}

// Write sends data.
func (l *Link) Write(b []byte) (int, error) {
	mu := l.writeLock()
	mu.Lock()
	defer mu.Unlock()
	if l.closed || l.ch != nil && l.ch.current != l {
		return 0, net.ErrClosed
	}
	if _, err := l.stream.Write(l.enc.encode(b)); err != nil {
		return 0, err
	}
	return len(b), nil
}

func (l *Link) writeLock() *sync.Mutex {
	if l.ch != nil {
		return &l.ch.writeMu
	}
	return &l.wmu
}

// Close ends the link: blocked reads and writes return. It also closes the host's connection; the guest's stream stays
// open for the next host.
func (l *Link) Close() error {
	var err error
	l.ended.Do(func() {
		if l.ch == nil {
			err = l.stream.Close()
		} else {
			// Deadlines in the past end blocked calls; Accept removes them again.
			err = errors.Join(l.stream.SetReadDeadline(time.Unix(1, 0)), l.stream.SetWriteDeadline(time.Unix(1, 0)))
		}
		mu := l.writeLock()
		mu.Lock()
		l.closed = true
		mu.Unlock()
	})
	return err
}
