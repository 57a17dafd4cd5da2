package guest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/internal/boundjson"
)

const (
	maxHeaderBytes       = 32 << 10          // of an answer
	controlHeaderTimeout = 2 * time.Minute   // over it the call's own deadline decides
	publicHeaderTimeout  = 330 * time.Second // the longest wait of a session is 300 s
)

// The bound of an agent's answer. A report of all steps is a few KiB; clean.go says what is kept of it.
var (
	boundControl = boundjson.Bound{
		Name: "the agent's answer", Bytes: 1 << 20, Elements: 64 << 10, List: 4 << 10, Depth: 8, String: 1 << 10, Text: 512 << 10, Cut: 2, Keep: maxWorkload,
	}
	boundProblem = boundjson.Bound{
		Name: "the agent's reason", Bytes: 1 << 20, Elements: 256, List: 64, Depth: 6, String: 4 << 10, Text: 16 << 10,
	}
	boundPublic = boundjson.Bound{
		Name: "the agent's answer", Bytes: 64 << 10, Elements: 1 << 10, List: 1 << 10, Depth: 8, String: 4 << 10, Text: 64 << 10,
	}
)

// Decode reads an answer of a public route into out. It is for small answers.
func Decode(r io.Reader, out any) error { return boundjson.Decode(r, boundPublic, nil, out) }

// guestURL is a name for logs and the Host header; nothing resolves it.
const guestURL = "http://guest"

func (c *Client) transport(headerTimeout time.Duration) *http.Transport {
	return &http.Transport{
		DialContext:            func(ctx context.Context, _, _ string) (net.Conn, error) { return c.open(ctx) },
		DisableKeepAlives:      true, // a stream costs nothing, and one that was half used before a capture must never be used again
		DisableCompression:     true,
		MaxResponseHeaderBytes: maxHeaderBytes,
		ResponseHeaderTimeout:  headerTimeout,
		ExpectContinueTimeout:  time.Second,
		WriteBufferSize:        16 << 10,
		ReadBufferSize:         16 << 10,
	}
}

type callKey struct{}

// send does a request. The dial finds the request's context as a value: the one that a transport gives it does not end with the request.
func send(t *http.Transport, req *http.Request) (*http.Response, error) {
	ctx := req.Context()
	return t.RoundTrip(req.WithContext(context.WithValue(ctx, callKey{}, ctx)))
}

// open opens a stream. The multiplexer waits until the agent has accepted earlier ones, and hears of no context: at most maxOpening
// requests are there at once, and the others end with their callers.
func (c *Client) open(ctx context.Context) (net.Conn, error) {
	if call, ok := ctx.Value(callKey{}).(context.Context); ok {
		ctx = call
	}
	select {
	case c.opening <- struct{}{}:
		defer func() { <-c.opening }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-c.mux.CloseChan():
		return nil, yamux.ErrSessionShutdown
	}
	s, err := c.mux.OpenStream()
	if err != nil {
		return nil, err
	}
	return s, nil
}

// call does one control request. out is filled only when the answer is a success.
func (c *Client) call(ctx context.Context, limit time.Duration, method, path string, in, out any) (err error) {
	began := time.Now()
	ctx, end := traceCall(ctx, method, path)
	defer func() { end(err) }()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return fmt.Errorf("encode the request for %s: %w", path, err)
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, guestURL+path, body)
	if err != nil {
		return fmt.Errorf("make the request for %s: %w", path, err)
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	res, err := send(c.control, req)
	if err != nil {
		return callError(ctx, err, path)
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusOK {
		return problem(ctx, res, path)
	}
	from := &watched{Reader: res.Body}
	if err := boundjson.Decode(from, boundControl, nil, out); err != nil {
		return answerError(ctx, errors.Join(err, from.err), from.err != nil, path)
	}
	if err := ctx.Err(); err != nil {
		// At the deadline our half of the stream is closed, and the guest may close its own in good order in the middle of an answer.
		return callError(ctx, err, path)
	}
	switch v := out.(type) {
	case *core.ResealReport:
		traceSteps(ctx, began, v.Steps)
	case *guestapi.ReseedResponse:
		traceSteps(ctx, began, v.Steps)
	}
	return nil
}

// callError says whether the time was up or the connection broke.
func callError(ctx context.Context, err error, path string) error {
	if ctx.Err() != nil {
		err = errors.Join(context.Cause(ctx), err)
		return unreachable(err, "it has not answered "+path+" in time")
	}
	return unreachable(err, "the connection ended during "+path)
}

func protocolError(err error, format string, a ...any) error {
	return core.Wrapf(err, core.Internal, core.CodeGuestProtocol, "the sandbox's agent does not keep to the protocol: "+format, a...)
}

// watched remembers how its reader broke.
type watched struct {
	io.Reader
	err error
}

func (w *watched) Read(p []byte) (int, error) {
	n, err := w.Reader.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		w.err = err
	}
	return n, err
}

// answerError says whether the connection broke off or the answer is not one.
func answerError(ctx context.Context, err error, broken bool, path string) error {
	if _, long := errors.AsType[*boundjson.Error](err); long {
		return protocolError(err, "its answer to %s is too long", path)
	}
	if broken || ctx.Err() != nil {
		return callError(ctx, err, path)
	}
	return protocolError(err, "its answer to %s is not understood", path)
}

// problem turns an error answer into an error whose text is safe to show. Only categories and codes of the known form
// are believed.
func problem(ctx context.Context, res *http.Response, path string) error {
	var p guestapi.Problem
	if err := boundjson.Decode(res.Body, boundProblem, nil, &p); err != nil || !validCode(p.Code) || !validCategory(p.Category) {
		if ctx.Err() != nil {
			return callError(ctx, err, path)
		}
		return protocolError(err, "it answered %s with status %d and no reason", path, res.StatusCode)
	}
	return core.Errorf(p.Category, p.Code, "the sandbox's agent: %s", core.Clip(p.Message))
}

func validCode(c core.Code) bool {
	for _, r := range c {
		if (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '_' {
			return false
		}
	}
	return len(c) > 0 && len(c) <= 40
}

func validCategory(c core.Category) bool {
	switch c {
	case core.NotFound, core.AlreadyExists, core.Invalid, core.Conflict, core.FailedPrecondition, core.Exhausted, core.Unavailable,
		core.PermissionDenied, core.DataLoss, core.Canceled, core.TimedOut, core.Internal:
		return true
	case core.Unauthenticated: // the caller's own key is not the guest's business
	}
	return false
}
