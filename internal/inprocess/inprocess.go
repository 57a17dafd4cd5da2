// Package inprocess carries HTTP requests to a handler of the same process, without a socket. Answers
// stream as the handler writes them, with trailers. A connection cannot be taken over, so WebSockets
// do not work.
package inprocess

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
)

// Transport is an http.RoundTripper that calls a handler. The handler's requests have the context of the caller's request, with
// its values.
type Transport struct{ Handler http.Handler }

type remoteKey struct{}

// WithRemote makes the handler see a request as coming from an address: the one for which the caller acts.
func WithRemote(ctx context.Context, address string) context.Context {
	return context.WithValue(ctx, remoteKey{}, address)
}

// RoundTrip calls the handler in a goroutine of its own and returns when the handler has written the answer's head.
func (t Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancel(req.Context())
	in := req.Clone(ctx)
	in.RequestURI, in.Proto, in.ProtoMajor, in.ProtoMinor = req.URL.RequestURI(), "HTTP/1.1", 1, 1
	if in.Host == "" {
		in.Host = req.URL.Host
	}
	in.RemoteAddr, _ = ctx.Value(remoteKey{}).(string)
	if in.Body == nil {
		in.Body = http.NoBody
	} else if in.ContentLength == 0 && in.Body != http.NoBody {
		in.ContentLength = -1
	}
	r, w := io.Pipe()
	a := &answer{header: http.Header{}, pipe: w, head: make(chan *http.Response, 1), resp: &http.Response{
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Request: req, Body: &body{PipeReader: r, cancel: cancel},
	}}
	failed := make(chan error, 1)
	go func() {
		err := a.serve(t.Handler, in)
		if req.Body != nil {
			_ = req.Body.Close() // a RoundTripper must
		}
		failed <- err
	}()
	select {
	case resp := <-a.head:
		return resp, nil
	case err := <-failed:
		select {
		case resp := <-a.head: // both were ready
			return resp, nil
		default:
		}
		cancel()
		return nil, err
	case <-ctx.Done():
		cancel()
		_ = r.Close() // what the handler still writes goes nowhere
		return nil, context.Cause(ctx)
	}
}

// body ends the handler's request when the caller closes it.
type body struct {
	*io.PipeReader
	cancel context.CancelFunc
}

// Close ends the request.
func (b *body) Close() error {
	b.cancel()
	return b.PipeReader.Close()
}

// answer is the http.ResponseWriter of one request. One goroutine writes at a time, as with net/http.
type answer struct {
	header http.Header
	pipe   *io.PipeWriter
	head   chan *http.Response

	mu   sync.Mutex // guards sent: handlers flush from other goroutines
	sent bool
	resp *http.Response
}

// serve runs the handler and ends the answer. An error means that there was no answer.
func (a *answer) serve(h http.Handler, in *http.Request) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = errors.New("the answer was broken off")
			if r != http.ErrAbortHandler { //nolint:errorlint,err113 // it is compared by identity, as net/http does
				err = fmt.Errorf("the handler panicked: %v", r)
			}
			_ = a.pipe.CloseWithError(errors.Join(io.ErrUnexpectedEOF, err))
		}
	}()
	h.ServeHTTP(a, in)
	a.WriteHeader(http.StatusOK)
	for name := range a.resp.Trailer {
		a.resp.Trailer[name] = a.header[name]
	}
	for name, values := range a.header {
		if rest, ok := strings.CutPrefix(name, http.TrailerPrefix); ok {
			a.resp.Trailer[http.CanonicalHeaderKey(rest)] = values
		}
	}
	return a.pipe.Close()
}

// Header returns the header that the handler changes.
func (a *answer) Header() http.Header { return a.header }

// WriteHeader hands the head of the answer to the caller. Interim answers are dropped.
func (a *answer) WriteHeader(status int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.sent || status < http.StatusOK {
		return
	}
	a.sent = true
	r := a.resp
	r.StatusCode, r.Status = status, strconv.Itoa(status)+" "+http.StatusText(status)
	r.Header, r.Trailer, r.ContentLength = a.header.Clone(), http.Header{}, -1
	for _, line := range r.Header.Values("Trailer") {
		for name := range strings.SplitSeq(line, ",") {
			r.Trailer[http.CanonicalHeaderKey(strings.TrimSpace(name))] = nil
		}
	}
	r.Header.Del("Trailer")
	if n, err := strconv.ParseInt(r.Header.Get("Content-Length"), 10, 64); err == nil {
		r.ContentLength = n
	}
	a.head <- r
}

// Write sends bytes to the caller and waits until they are read.
func (a *answer) Write(p []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	if a.resp.Request.Method == http.MethodHead || len(p) == 0 {
		return len(p), nil
	}
	return a.pipe.Write(p)
}

// Flush sends the head.
func (a *answer) Flush() { a.WriteHeader(http.StatusOK) }
