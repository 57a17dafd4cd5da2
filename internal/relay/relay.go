// Package relay passes answers of an agent inside a guest on to a user. A guest may lie in every byte of its answer, so the
// package keeps an allow list of headers and forwards no interim answer.
package relay

import (
	"context"
	"io"
	"net/http"
	"net/http/httptrace"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/coppice-dev/coppice/core"
)

// MaxHeaderBytes bounds the names and values of the headers of one answer, and those of its trailers.
const MaxHeaderBytes = 32 << 10

const contentType = "Content-Type"

// Final returns a transport that reports no interim answer (1xx) to its caller. A reverse proxy would otherwise send each of them
// on with all of its headers, and clear the headers that were set before. net/http bounds how many of them it reads. A switch of
// protocols (101) is a final answer.
func Final(rt http.RoundTripper) http.RoundTripper { return final{rt} }

type final struct{ inner http.RoundTripper }

func (f final) RoundTrip(req *http.Request) (*http.Response, error) {
	return f.inner.RoundTrip(req.WithContext(untraced{req.Context()}))
}

// untraced is a context without the hooks of net/http/httptrace. They can be added to a context but not removed from it.
type untraced struct{ context.Context }

func (c untraced) Value(key any) any {
	v := c.Context.Value(key)
	if _, hooks := v.(*httptrace.ClientTrace); hooks {
		return nil
	}
	return v
}

// Allowed is an allow list of headers, in their canonical form. Content-Type is always allowed, with one of the values of Types.
type Allowed struct {
	Headers map[string]bool
	Types   map[string]bool
	Type    string // instead of a content type that is not allowed
}

// Reduce removes from an answer all headers and trailers that are not allowed, that are repeated, or that hold
// control characters or no UTF-8: the name of a file may have any letters. Trailers are removed when the body ends. An answer whose headers are too long is an error.
func (a Allowed) Reduce(res *http.Response) error {
	if err := a.reduce(res.Header); err != nil {
		return err
	}
	if !a.Types[res.Header.Get(contentType)] {
		res.Header.Set(contentType, a.Type)
	}
	for name := range res.Trailer { // they are announced; the values come with the end of the body
		if !a.Headers[name] {
			delete(res.Trailer, name)
		}
	}
	res.Body = &trailers{ReadCloser: res.Body, res: res, allowed: a}
	return nil
}

func (a Allowed) reduce(h http.Header) error {
	n := 0
	for name, values := range h {
		if !a.Headers[name] && name != contentType || len(values) != 1 || !printable(values[0]) {
			delete(h, name)
			continue
		}
		n += len(name) + len(values[0])
	}
	if n > MaxHeaderBytes {
		return core.Errorf(core.Unavailable, core.CodeGuestProtocol, "the guest's agent answered with %d bytes of headers; at most %d are passed on", n, MaxHeaderBytes)
	}
	return nil
}

// trailers reduces the trailers of an answer, which are known only at the end of the body.
type trailers struct {
	io.ReadCloser
	res     *http.Response
	allowed Allowed
}

func (t *trailers) Read(p []byte) (int, error) {
	n, err := t.ReadCloser.Read(p)
	if err != nil {
		delete(t.res.Trailer, contentType)
		if t.allowed.reduce(t.res.Trailer) != nil {
			clear(t.res.Trailer)
		}
	}
	return n, err
}

// Write forwards the user's bytes on an upgraded connection.
func (t *trailers) Write(p []byte) (int, error) {
	if w, ok := t.ReadCloser.(io.Writer); ok {
		return w.Write(p)
	}
	return 0, http.ErrNotSupported
}

func printable(s string) bool {
	return utf8.ValidString(s) && strings.IndexFunc(s, unicode.IsControl) < 0
}
