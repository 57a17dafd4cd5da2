package e2b

import (
	"errors"
	"io"
	"net/http"
	"time"
)

// bodyTime is how long the body of a request may take, unless it is one to a sandbox of somebody with a token.
const bodyTime = 30 * time.Second

// hurry gives the body of a request its time: whoever sends it slowly needs no key.
func hurry(w http.ResponseWriter, r *http.Request) {
	if r.Body != nil && r.Body != http.NoBody { // without a body, net/http would take the end of the time for the end of the client
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTime)) // not every test's writer has a connection
	}
}

// unhurry takes the limit away, for streams and uploads, and for answers that take longer than their request.
func unhurry(w http.ResponseWriter) {
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{}) // as above
}

// hurriedBody has no limit once it has been read to its end.
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
