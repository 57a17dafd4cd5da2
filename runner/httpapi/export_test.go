package httpapi

import (
	"io"
	"log/slog"
	"net/http"

	"github.com/coppice-dev/coppice/runner"
)

// NewWithRequests is the handler for a controller that needs no secret, with another bound of requests; usual is what New has.
func NewWithRequests(r *runner.Runner, log *slog.Logger, most int64) (h http.Handler, usual int64) {
	s := newServer(r, nil, log)
	usual, s.most = s.most, most
	return s.handler(func(*http.Request, string) error { return nil }), usual
}

// SetUpload sets how long an upload may be, and returns how long it might be before.
func (d *Data) SetUpload(most int64) (before int64) {
	before, d.upload = d.upload, most
	return before
}

// Counted counts what is read of a body.
type Counted struct {
	R io.Reader
	N int64
}

func (c *Counted) Read(p []byte) (int, error) {
	n, err := c.R.Read(p)
	c.N += int64(n)
	return n, err
}

// Endless gives one byte for ever.
type Endless byte

func (e Endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = byte(e)
	}
	return len(p), nil
}
