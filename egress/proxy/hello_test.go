package proxy

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"net"
	"testing"
	"time"
)

// heard keeps the first thing that is written to it, and never answers.
type heard struct {
	net.Conn
	b bytes.Buffer
}

var errNoAnswer = errors.New("no answer")

func (h *heard) Write(p []byte) (int, error)    { return h.b.Write(p) }
func (*heard) Read([]byte) (int, error)         { return 0, errNoAnswer }
func (*heard) Close() error                     { return nil }
func (*heard) SetDeadline(time.Time) error      { return nil }
func (*heard) SetWriteDeadline(time.Time) error { return nil }

// clientHello returns the first bytes of a TLS client for a name, or of a client without SNI when the name is empty.
func clientHello(name string) ([]byte, error) {
	var h heard
	err := tls.Client(&h, &tls.Config{ServerName: name, InsecureSkipVerify: name == ""}).HandshakeContext(context.Background())
	if !errors.Is(err, errNoAnswer) {
		return nil, err
	}
	return h.b.Bytes(), nil
}

func TestReadHello(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"allowed.example", ""} {
		b, err := clientHello(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range []net.Conn{bytesConn{r: bytes.NewReader(b)}, slowConn{bytesConn{r: bytes.NewReader(b)}}} {
			h, err := readHello(t.Context(), &peeked{Conn: c})
			if err != nil || h.String() != name {
				t.Errorf("%q from a %T: %q, %v", name, c, h, err)
			}
		}
	}
}

// slowConn delivers one byte at a time, as if each arrived in a segment of its own.
type slowConn struct{ bytesConn }

func (c slowConn) Read(p []byte) (int, error) { return c.bytesConn.Read(p[:min(len(p), 1)]) }
