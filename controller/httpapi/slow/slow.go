// Package slow gives up clients that take nothing of an answer, or send nothing of a body, for too long.
package slow

import (
	"io"
	"net/http"
	"time"

	"github.com/labstack/echo/v4"
)

// Time is how long nothing may come of a file, or be taken of it. Others wait for the place.
const Time = 30 * time.Second

const part = 256 << 10

// Writer writes the body of an answer in parts that the slowest client takes in time. The returned function must be called at the end.
func Writer(c echo.Context) (io.Writer, func()) {
	connection := http.NewResponseController(c.Response())
	return paced(func(b []byte) (int, error) {
		_ = connection.SetWriteDeadline(time.Now().Add(Time)) // not every test's writer has a connection
		return c.Response().Write(b)                          //nolint:wrapcheck // a connection's own error
	}), func() { _ = connection.SetWriteDeadline(time.Time{}) }
}

// Reader reads the body of a request. If it does not come in time, it fails with os.ErrDeadlineExceeded. The returned function must be called
// when the body was read.
func Reader(c echo.Context) (io.Reader, func()) {
	connection := http.NewResponseController(c.Response())
	return awaited(func(b []byte) (int, error) {
		_ = connection.SetReadDeadline(time.Now().Add(Time)) // not every test's writer has a connection
		return c.Request().Body.Read(b)                      //nolint:wrapcheck // a connection's own error
	}), func() { _ = connection.SetReadDeadline(time.Time{}) }
}

type paced func(b []byte) (int, error)

// Write implements io.Writer.
func (p paced) Write(b []byte) (int, error) {
	done := 0
	for len(b) > 0 {
		n, err := p(b[:min(part, len(b))])
		done += n
		if err != nil {
			return done, err
		}
		b = b[n:]
	}
	return done, nil
}

type awaited func(b []byte) (int, error)

// Read implements io.Reader.
func (a awaited) Read(b []byte) (int, error) { return a(b) }
