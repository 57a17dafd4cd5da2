package answer

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"strconv"
	"syscall"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// MaxControlBody bounds the body of a request that carries no data of a user.
const MaxControlBody = 1 << 20

// Handler answers a request, or returns an error for it. Once it has begun its answer, it returns nil.
type Handler func(w http.ResponseWriter, r *http.Request) error

// ServeHTTP answers a request, with a problem if the handler returns an error.
func (h Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if err := h(w, r); err != nil {
		p := guestapi.ProblemOf(err)
		WriteJSON(w, Status(p.Category), p)
	}
}

// WriteJSON sends an answer.
func WriteJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // an error means that the host is gone
}

// ReadJSON reads a request's body. Unknown fields are ignored: they come from a newer host.
func ReadJSON(w http.ResponseWriter, r *http.Request, limit int64, v any) error {
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, limit))
	if err != nil {
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			return core.Errorf(core.Invalid, core.CodeBodyTooLarge, "the request's body is longer than %d bytes", limit)
		}
		return BodyError(r.Context(), err)
	}
	if err := json.Unmarshal(b, v); err != nil {
		return core.Errorf(core.Invalid, core.CodeMalformedBody, "the request's body cannot be read: %s", core.Clip(err.Error()))
	}
	return nil
}

// BodyError is the error of a body that ended too early.
func BodyError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return core.Errorf(core.Invalid, core.CodeMalformedBody, "the request's body broke off: %s", core.Clip(err.Error()))
}

// FileError builds the error for an operation on a path from the kernel's error.
func FileError(err error, what, path string) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[*core.Error](err); ok {
		return err
	}
	path = core.Clip(path)
	reason := "failed"
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		reason = errno.Error()
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return core.Errorf(core.NotFound, core.CodeFileNotFound, "%s %s: there is no such file or directory in the sandbox", what, path)
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		return core.Errorf(core.PermissionDenied, guestapi.CodeFileDenied, "%s %s: %s", what, path, reason)
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return core.Errorf(core.Exhausted, core.CodeDiskFull, "%s %s: the sandbox's disk is full", what, path)
	case errors.Is(err, fs.ErrExist), errors.Is(err, syscall.ENOTEMPTY), errors.Is(err, syscall.EISDIR), errors.Is(err, syscall.ENOTDIR),
		errors.Is(err, syscall.EBUSY), errors.Is(err, syscall.ETXTBSY):
		return core.Errorf(core.Conflict, guestapi.CodeFileConflict, "%s %s: %s", what, path, reason)
	case errors.Is(err, syscall.ELOOP), errors.Is(err, syscall.ENAMETOOLONG), errors.Is(err, syscall.EINVAL):
		return core.Errorf(core.Invalid, core.CodeInvalidField, "%s %s: %s", what, path, reason)
	}
	return core.Wrapf(err, core.Internal, core.CodeInternal, "%s %s: %s", what, path, reason)
}

// IntParam reads a non-negative number from the query.
func IntParam(r *http.Request, name string, missing int64) (int64, error) {
	v := r.URL.Query().Get(name)
	if v == "" {
		return missing, nil
	}
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil || n < 0 {
		return 0, core.Errorf(core.Invalid, core.CodeInvalidField, "%s must be a number of at least 0, not %q", name, core.Clip(v))
	}
	return n, nil
}

// BoolParam reads a flag from the query.
func BoolParam(r *http.Request, name string) bool {
	v, err := strconv.ParseBool(r.URL.Query().Get(name))
	return err == nil && v
}

// Status returns the HTTP status of an error.
func Status(c core.Category) int {
	switch c {
	case core.NotFound:
		return http.StatusNotFound
	case core.AlreadyExists, core.Conflict, core.FailedPrecondition:
		return http.StatusConflict
	case core.Invalid:
		return http.StatusBadRequest
	case core.Exhausted:
		return http.StatusTooManyRequests
	case core.PermissionDenied, core.Unauthenticated:
		return http.StatusForbidden
	case core.Unavailable, core.Canceled:
		return http.StatusServiceUnavailable
	case core.TimedOut:
		return http.StatusGatewayTimeout
	case core.DataLoss, core.Internal:
	}
	return http.StatusInternalServerError
}

// StartError explains why the kernel did not run a program.
func StartError(name string, err error) error {
	name = core.Clip(name)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return core.Errorf(core.NotFound, guestapi.CodeCommandNotFound, "%s: no such program, or its interpreter or working directory is missing", name)
	case errors.Is(err, os.ErrPermission):
		return core.Errorf(core.PermissionDenied, guestapi.CodeCommandFailed, "%s: not permitted to run", name)
	case errors.Is(err, syscall.ENOEXEC):
		return core.Errorf(core.Invalid, guestapi.CodeCommandFailed, "%s: not a program that this guest can run", name)
	case errors.Is(err, syscall.E2BIG):
		return core.Errorf(core.Invalid, guestapi.CodeCommandFailed, "%s: the arguments and the environment are too long", name)
	case errors.Is(err, syscall.EAGAIN), errors.Is(err, syscall.ENOMEM):
		return core.Errorf(core.Exhausted, guestapi.CodeCommandFailed, "%s: the guest has no room for another process: %v", name, err)
	}
	return core.Wrapf(err, core.Internal, guestapi.CodeCommandFailed, "%s: not started: %v", name, err)
}
