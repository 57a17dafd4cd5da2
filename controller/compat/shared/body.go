package shared

import (
	"errors"
	"io"
	"net/http"
	"os"
	"time"
)

// BodyTime bounds how long the body of a request may take to arrive. A layer may lift the bound for requests that it trusts.
const BodyTime = 30 * time.Second

// Hurry sets the time limit of a request's body: a client without a key could send a body slowly and keep the connection.
func Hurry(w http.ResponseWriter, r *http.Request) {
	if r.Body != nil && r.Body != http.NoBody { // without a body, net/http would treat the end of the time as the client's disconnect
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(BodyTime)) // a test's writer may have no connection
	}
}

// Unhurry removes the limit: for streams and uploads, and for answers that take longer than their request.
func Unhurry(w http.ResponseWriter) {
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{}) // as above
}

// HurriedBody removes the limit when it has been read to its end.
type HurriedBody struct {
	io.ReadCloser
	Writer http.ResponseWriter
}

// Read reads from the body.
func (b HurriedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if errors.Is(err, io.EOF) {
		Unhurry(b.Writer)
	}
	return n, err
}

// ReadBody reads the body of a request, which has at most so many bytes and as much time as BodyTime.
func ReadBody(w http.ResponseWriter, r *http.Request, most int64) ([]byte, error) {
	body, err := io.ReadAll(HurriedBody{ReadCloser: http.MaxBytesReader(w, r.Body, most), Writer: w})
	switch {
	case errors.As(err, new(*http.MaxBytesError)):
		return nil, Failf(http.StatusRequestEntityTooLarge, "the body has more than %d bytes", most)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, Failf(http.StatusRequestTimeout, "the body did not arrive within %v", BodyTime)
	case err != nil:
		return nil, Failf(http.StatusBadRequest, "the body cannot be read")
	}
	return body, nil
}
