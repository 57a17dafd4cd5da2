package e2b

import (
	"context"
	"errors"
	"net/http"

	"connectrpc.com/connect"

	"github.com/coppice-dev/coppice/controller/compat/e2b/template"
	"github.com/coppice-dev/coppice/controller/compat/shared"
)

// unsupported refuses a feature of E2B that this layer does not have.
func unsupported(what string) *shared.StatusError {
	return template.Unsupported(what)
}

// notFound is one answer for an absent sandbox and for a sandbox of somebody else.
func notFound(sandbox string) *shared.StatusError {
	return shared.Failf(http.StatusNotFound, "sandbox %q was not found", shared.Clip(sandbox))
}

// retryHeader tells E2B's clients not to repeat a request that may have taken effect.
const retryHeader = "Should-Retry"

func writeFailure(w http.ResponseWriter, r *http.Request, f *shared.StatusError) {
	if f.Status >= http.StatusInternalServerError && r.Method != http.MethodGet {
		w.Header().Set(retryHeader, "false")
	}
	writeJSON(w, f.Status, map[string]any{"code": f.Status, "message": f.Message})
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
	shared.WriteJSON(w, status, v, `{"code":500,"message":"the answer cannot be encoded"}`)
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
	f := shared.Translate(err)
	code, ok := connectCodes[f.Status]
	if !ok {
		code = connect.CodeInternal
	}
	return connect.NewError(code, f)
}
