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

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

const (
	maxControlBody       = 1 << 20           // a report of all steps is a few KiB
	maxHeaderBytes       = 32 << 10          // of an answer
	controlHeaderTimeout = 2 * time.Minute   // over it the call's own deadline decides
	publicHeaderTimeout  = 330 * time.Second // the longest wait of a session is 300 s
)

// guestURL is a name for logs and the Host header; nothing resolves it.
const guestURL = "http://guest"

func (c *Client) transport(headerTimeout time.Duration) *http.Transport {
	return &http.Transport{
		DialContext:            func(context.Context, string, string) (net.Conn, error) { return c.open() },
		DisableKeepAlives:      true, // a stream costs nothing, and one that was half used before a capture must never be used again
		DisableCompression:     true,
		MaxResponseHeaderBytes: maxHeaderBytes,
		ResponseHeaderTimeout:  headerTimeout,
		ExpectContinueTimeout:  time.Second,
		WriteBufferSize:        16 << 10,
		ReadBufferSize:         16 << 10,
	}
}

func (c *Client) open() (net.Conn, error) {
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
	res, err := c.control.RoundTrip(req)
	if err != nil {
		return callError(ctx, err, path)
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(io.LimitReader(res.Body, maxControlBody+1))
	if err == nil {
		// At the deadline our half of the stream is closed, and the guest may close its own in good order in the middle of an answer.
		err = ctx.Err()
	}
	if err != nil {
		return callError(ctx, err, path)
	}
	if len(b) > maxControlBody {
		return protocolError(nil, "its answer to %s is longer than %d bytes", path, maxControlBody)
	}
	if res.StatusCode != http.StatusOK {
		return problem(res.StatusCode, b, path)
	}
	if err := json.Unmarshal(b, out); err != nil {
		return protocolError(err, "its answer to %s is not understood", path)
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

// problem turns an error answer into an error whose text is safe to show. Only categories and codes of the known form
// are believed.
func problem(status int, body []byte, path string) error {
	var p guestapi.Problem
	if err := json.Unmarshal(body, &p); err != nil || !validCode(p.Code) || !validCategory(p.Category) {
		return protocolError(err, "it answered %s with status %d and no reason", path, status)
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
