package httpapi

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// statuses is the one table from categories to HTTP.
var statuses = map[core.Category]int{
	core.NotFound:           http.StatusNotFound,
	core.AlreadyExists:      http.StatusConflict,
	core.Invalid:            http.StatusBadRequest,
	core.Conflict:           http.StatusConflict,
	core.FailedPrecondition: http.StatusConflict,
	core.Exhausted:          http.StatusTooManyRequests,
	core.Unavailable:        http.StatusServiceUnavailable,
	core.PermissionDenied:   http.StatusForbidden,
	core.Unauthenticated:    http.StatusUnauthorized,
	core.DataLoss:           http.StatusInternalServerError,
	core.Canceled:           statusClientClosed,
	core.TimedOut:           http.StatusGatewayTimeout,
	core.Internal:           http.StatusInternalServerError,
}

// codeStatuses are the codes whose status their category does not decide: HTTP has a word of its own for the first group; the
// second arise under several categories, and a code has one status wherever it comes from.
var codeStatuses = map[core.Code]int{
	core.CodeBodyTooLarge:     http.StatusRequestEntityTooLarge,
	core.CodeUnsupportedMedia: http.StatusUnsupportedMediaType,
	core.CodeMethodNotAllowed: http.StatusMethodNotAllowed,
	core.CodeDiskFull:         http.StatusInsufficientStorage,
	core.CodeEventsExpired:    http.StatusGone,

	core.CodeIdempotencyMismatch: http.StatusUnprocessableEntity,

	core.CodeInternal:            http.StatusInternalServerError,
	core.CodeInvalidField:        http.StatusBadRequest,
	core.CodeUnsupported:         http.StatusBadRequest,
	core.CodeCapacity:            http.StatusTooManyRequests,
	core.CodeDatabaseUnavailable: http.StatusServiceUnavailable,
	core.CodeIncompatibleHost:    http.StatusConflict,
	core.CodeStoreAuth:           http.StatusServiceUnavailable,
	core.CodeVMMFailed:           http.StatusServiceUnavailable,
	core.CodeResealFailed:        http.StatusServiceUnavailable,
	core.CodeGuestProtocol:       http.StatusServiceUnavailable,
	core.CodeNotQuiesced:         http.StatusConflict,
	codeCommandNotStarted:        http.StatusConflict,
}

// codeCommandNotStarted is the agent's.
const codeCommandNotStarted core.Code = "COMMAND_NOT_STARTED"

// statusClientClosed is what nobody reads: the client has gone.
const statusClientClosed = 499

const (
	problemType    = "application/problem+json"
	problemBase    = "https://coppice.dev/problems/"
	retryAfter     = 5 * time.Second // of what may succeed later
	headerRequest  = "X-Request-Id"
	headerRetry    = "Retry-After"
	headerNoSniff  = "X-Content-Type-Options"
	headerContent  = "Content-Type"
	titleClientEnd = "Client Closed Request"
)

// fieldsError is an Invalid error that names its fields.
type fieldsError struct {
	err    *core.Error
	fields []api.FieldProblem
}

func (e *fieldsError) Error() string { return e.err.Error() }

// Unwrap returns the core error.
func (e *fieldsError) Unwrap() error { return e.err }

// invalid refuses one field.
func invalid(field, detail string) error {
	return &fieldsError{core.Errorf(core.Invalid, core.CodeInvalidField, "%s: %s", field, detail), []api.FieldProblem{{Field: field, Detail: detail}}}
}

// below puts the name of an object before the fields in its error.
func below(object string, err error) error {
	e, ok := errors.AsType[*fieldsError](err)
	if !ok {
		return err
	}
	fields := slices.Clone(e.fields)
	for i := range fields {
		fields[i].Field = object + fields[i].Field
	}
	return &fieldsError{core.Errorf(e.err.Category, e.err.Code, "%s%s", object, e.err.Msg), fields}
}

// Status is the HTTP status of an error.
func Status(err error) int {
	if s, ok := codeStatuses[core.CodeOf(err)]; ok {
		return s
	}
	return statuses[core.CategoryOf(err)]
}

// problemOf is the body for an error.
func problemOf(err error, requestID string) api.Problem {
	status := Status(err)
	p := api.Problem{
		Type: problemBase + string(core.CodeOf(err)), Title: http.StatusText(status), Status: status, Detail: core.MessageOf(err),
		Code: string(core.CodeOf(err)), RequestID: requestID,
	}
	if status == statusClientClosed {
		p.Title = titleClientEnd
	}
	if fields, ok := errors.AsType[*fieldsError](err); ok {
		p.Fields = fields.fields
	}
	if conflict, ok := errors.AsType[*controller.VersionConflictError](err); ok {
		p.CurrentVersion = conflict.Current
	}
	if op, ok := errors.AsType[*controller.OperationError](err); ok {
		p.OperationID = string(op.Operation)
	}
	return p
}

// fromEcho gives echo's own errors their codes.
func fromEcho(err error) error {
	var he *echo.HTTPError
	if !errors.As(err, &he) {
		return err
	}
	switch he.Code {
	case http.StatusNotFound:
		return core.Errorf(core.NotFound, core.CodeRouteNotFound, "there is no such route; GET /openapi.yaml has them all")
	case http.StatusMethodNotAllowed:
		return core.Errorf(core.Invalid, core.CodeMethodNotAllowed, "this route does not take that method; the Allow header has those that it takes")
	case http.StatusRequestEntityTooLarge:
		return tooLarge(maxBody)
	case http.StatusBadRequest:
		return core.Wrapf(err, core.Invalid, core.CodeInvalidField, "the request cannot be read: a parameter or field has the wrong form")
	}
	return err
}

func tooLarge(limit int64) error {
	return core.Errorf(core.Invalid, core.CodeBodyTooLarge, "the body is larger than the %d bytes that are allowed here", limit)
}

// fail answers a request that failed, and logs what only people may see. It is the one place where errors end.
func fail(log *slog.Logger) echo.HTTPErrorHandler {
	return func(err error, c echo.Context) {
		err = fromEcho(err)
		ctx, id := c.Request().Context(), requestIDOf(c)
		p := problemOf(err, id)
		switch {
		case p.Status == http.StatusInternalServerError:
			log.ErrorContext(ctx, "request failed", "request_id", id, "code", p.Code, "err", err)
		case p.Status >= http.StatusInternalServerError:
			log.WarnContext(ctx, "request failed", "request_id", id, "code", p.Code, "err", err)
		case errors.Is(err, context.Canceled):
			log.DebugContext(ctx, "client has gone", "request_id", id)
		}
		if c.Response().Committed {
			panic(http.ErrAbortHandler) // a stream broke midway: the client must not take it for whole
		}
		h := c.Response().Header()
		setRetryAfter(h, p, err)
		if p.Status == http.StatusUnauthorized {
			h.Set("WWW-Authenticate", `Bearer realm="coppice"`)
		}
		h.Del("Content-Length")
		h.Set(headerContent, problemType)
		if c.Request().Method == http.MethodHead {
			c.Response().WriteHeader(p.Status)
			return
		}
		if err := writeJSON(c.Response(), p.Status, p); err != nil {
			log.DebugContext(ctx, "problem was not sent", "request_id", id, "err", err)
		}
	}
}
