package proxy

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/policy"
)

// maxHello bounds how many bytes of a connection are read before its destination is known.
const maxHello = 16 << 10

// extensionECH is the number of the extension for an encrypted ClientHello.
const extensionECH = 0xfe0d

// The reasons why a ClientHello is refused.
var (
	errNoSNI     = errors.New("its ClientHello has no server name")
	errECH       = errors.New("its ClientHello is encrypted (ECH)")
	errBadHello  = errors.New("its ClientHello cannot be read")
	errHelloSize = errors.New("its ClientHello is longer than 16 KiB")
)

// readHello reads the ClientHello of a connection. Afterwards the same bytes can be read from conn again. name is zero
// when the hello has none.
func readHello(ctx context.Context, conn *peeked) (name policy.Host, err error) {
	var hello *tls.ClientHelloInfo
	recorded := &recorder{conn: conn}
	server := tls.Server(recorded, &tls.Config{
		GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			hello = h
			return nil, errHeard
		},
	})
	err = server.HandshakeContext(ctx)
	conn.unread(recorded.seen.Bytes())
	switch {
	case hello == nil && errors.Is(err, errHelloSize):
		return policy.Host{}, errHelloSize
	case hello == nil && ctx.Err() != nil:
		return policy.Host{}, context.Cause(ctx)
	case hello == nil:
		return policy.Host{}, errBadHello
	case slices.Contains(hello.Extensions, extensionECH):
		return policy.Host{}, errECH
	case hello.ServerName == "":
		return policy.Host{}, nil
	}
	h, err := policy.ParseHost(hello.ServerName)
	if _, isAddr := h.Addr(); err != nil || isAddr {
		return policy.Host{}, errBadHello
	}
	return h, nil
}

var errHeard = errors.New("the ClientHello was read")

// recorder keeps what is read and discards what is written.
type recorder struct {
	conn net.Conn
	seen bytes.Buffer
}

func (r *recorder) Read(p []byte) (int, error) {
	if r.seen.Len() >= maxHello {
		return 0, errHelloSize
	}
	n, err := r.conn.Read(p[:min(len(p), maxHello-r.seen.Len())])
	r.seen.Write(p[:n])
	return n, err
}

func (r *recorder) Write(p []byte) (int, error)        { return len(p), nil }
func (r *recorder) Close() error                       { return nil }
func (r *recorder) LocalAddr() net.Addr                { return r.conn.LocalAddr() }
func (r *recorder) RemoteAddr() net.Addr               { return r.conn.RemoteAddr() }
func (r *recorder) SetDeadline(t time.Time) error      { return r.conn.SetDeadline(t) }
func (r *recorder) SetReadDeadline(t time.Time) error  { return r.conn.SetReadDeadline(t) }
func (r *recorder) SetWriteDeadline(t time.Time) error { return r.conn.SetWriteDeadline(t) }

// peeked is a connection with some bytes that were read ahead and will be read again.
type peeked struct {
	net.Conn
	ahead []byte
}

func (p *peeked) Read(b []byte) (int, error) {
	if len(p.ahead) > 0 {
		n := copy(b, p.ahead)
		p.ahead = p.ahead[n:]
		return n, nil
	}
	return p.Conn.Read(b)
}

func (p *peeked) unread(b []byte) { p.ahead = append(slices.Clone(b), p.ahead...) }

// first returns the first bytes of a connection without consuming them, at least one and at most n.
func (p *peeked) first(n int) ([]byte, error) {
	if len(p.ahead) == 0 {
		b := make([]byte, n)
		got, err := p.Conn.Read(b)
		if got == 0 {
			if err == nil {
				err = io.ErrNoProgress
			}
			return nil, err
		}
		p.ahead = b[:got]
	}
	return p.ahead[:min(n, len(p.ahead))], nil
}

// CloseWrite says that nothing more will be sent.
func (p *peeked) CloseWrite() error { return closeWrite(p.Conn) }

func closeWrite(c net.Conn) error {
	if half, ok := c.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return c.Close()
}

// sniff detects the protocol of a connection from its first bytes.
func sniff(first []byte) core.Spoken {
	const recordHandshake = 0x16
	switch {
	case len(first) > 0 && first[0] == recordHandshake:
		return core.SpokenTLS
	case isMethod(first):
		return core.SpokenHTTP
	}
	return core.SpokenTCP
}

// isMethod reports whether the bytes can be the beginning of a request: an upper-case word, then a space if there are
// more bytes.
func isMethod(first []byte) bool {
	for i, c := range first {
		if c == ' ' {
			return i >= 3
		}
		if c < 'A' || c > 'Z' {
			return false
		}
	}
	return len(first) > 0
}
