package e2b

import (
	"errors"
	"io"
	"net/http"
	"time"
)

// bodyTime bounds how long the body of a request may take to arrive. Requests to a sandbox with a valid token have no such bound.
const bodyTime = 30 * time.Second

// hurry sets the time limit of a request's body: a client without a key could send a body slowly and keep the connection.
func hurry(w http.ResponseWriter, r *http.Request) {
	if r.Body != nil && r.Body != http.NoBody { // without a body, net/http would treat the end of the time as the client's disconnect
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTime)) // a test's writer may have no connection
	}
}

// unhurry removes the limit: for streams and uploads, and for answers that take longer than their request.
func unhurry(w http.ResponseWriter) {
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{}) // as above
}

// hurriedBody removes the limit when it has been read to its end.
type hurriedBody struct {
	io.ReadCloser
	w http.ResponseWriter
}

func (b hurriedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if errors.Is(err, io.EOF) {
		unhurry(b.w)
	}
	return n, err
}
