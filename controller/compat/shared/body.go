package shared

import (
	"errors"
	"io"
	"net/http"
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
