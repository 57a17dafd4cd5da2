package e2b

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"connectrpc.com/connect"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// failure is an error in E2B's form: {"code", "message"}, where the code is the status.
type failure struct {
	status  int
	message string
}

func (f *failure) Error() string { return f.message }

func failf(status int, format string, a ...any) *failure {
	return &failure{status, fmt.Sprintf(format, a...)}
}

// unsupported refuses a feature of E2B that this layer does not have.
func unsupported(what string) *failure {
	return failf(http.StatusNotImplemented, "%s: Coppice does not support this through E2B's API; docs/COMPATIBILITY.md lists what it does", what)
}

// notFound is one answer for an absent sandbox and for a sandbox of somebody else.
func notFound(sandbox string) *failure {
	return failf(http.StatusNotFound, "sandbox %q was not found", clip(sandbox))
}

func clip(s string) string {
	const most = 64
	if len(s) > most {
		s = s[:most] + "…"
	}
	return s
}

// statusClientClosed has no name in HTTP, and Python's clients fail on it; nobody reads it anyway.
const statusClientClosed = 499

// translate is the one place where errors become those of E2B.
func translate(err error) *failure {
	var f *failure
	var refused *coppice.Error
	switch {
	case errors.As(err, &f):
		return f
	case errors.As(err, &refused):
		status := refused.Status
		if status == 0 { // an operation that failed after it was accepted
			status = http.StatusInternalServerError
		}
		if status == statusClientClosed {
			status = http.StatusBadRequest
		}
		return failf(status, "%s", refused.Error())
	case errors.As(err, new(*http.MaxBytesError)):
		return failf(http.StatusRequestEntityTooLarge, "the body is too large")
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return failf(http.StatusGatewayTimeout, "the request ended before there was an answer")
	}
	return failf(http.StatusInternalServerError, "something went wrong inside Coppice; the server's log has the cause")
}

// retryHeader tells E2B's clients not to repeat a request that may have taken effect.
const retryHeader = "Should-Retry"

func writeFailure(w http.ResponseWriter, r *http.Request, f *failure) {
	if f.status >= http.StatusInternalServerError && r.Method != http.MethodGet {
		w.Header().Set(retryHeader, "false")
	}
	writeJSON(w, f.status, map[string]any{"code": f.status, "message": f.message})
}

// writeGone is the answer of E2B's proxy where the sandbox of a request does not run.
func writeGone(w http.ResponseWriter, sandbox string) {
	writeJSON(w, http.StatusBadGateway, map[string]any{"sandboxId": sandbox, "message": "The sandbox was not found", "code": http.StatusBadGateway})
}

// writeClosed is the answer of E2B's proxy where nothing listens at a port.
func writeClosed(w http.ResponseWriter, t target) {
	writeJSON(w, http.StatusBadGateway, map[string]any{
		"sandboxId": t.ID, "message": "The sandbox is running but port is not open", "port": t.Port, "code": http.StatusBadGateway,
	})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		status, b = http.StatusInternalServerError, []byte(`{"code":500,"message":"the answer cannot be encoded"}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(b, '\n')) // the client may have gone
}

// connectCodes is the one table from statuses to codes of Connect.
var connectCodes = map[int]connect.Code{
	http.StatusBadRequest:            connect.CodeInvalidArgument,
	http.StatusUnauthorized:          connect.CodeUnauthenticated,
	http.StatusForbidden:             connect.CodePermissionDenied,
	http.StatusNotFound:              connect.CodeNotFound,
	http.StatusConflict:              connect.CodeFailedPrecondition,
	http.StatusRequestEntityTooLarge: connect.CodeResourceExhausted,
	http.StatusTooManyRequests:       connect.CodeResourceExhausted,
	http.StatusNotImplemented:        connect.CodeUnimplemented,
	http.StatusServiceUnavailable:    connect.CodeUnavailable,
	http.StatusGatewayTimeout:        connect.CodeUnavailable,
	http.StatusInsufficientStorage:   connect.CodeResourceExhausted,
}

// rpcError translates an error for a Connect handler.
func rpcError(ctx context.Context, err error) error {
	if err == nil || errors.As(err, new(*connect.Error)) {
		return err
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return connect.NewError(connect.CodeDeadlineExceeded, errors.New("the deadline of the request has passed"))
	}
	f := translate(err)
	code, ok := connectCodes[f.status]
	if !ok {
		code = connect.CodeInternal
	}
	return connect.NewError(code, f)
}
