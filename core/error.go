package core

import (
	"context"
	"errors"
	"fmt"
)

// Category is the closed set of error classes inside the program. It decides the HTTP status and whether a
// repeat can help; the public, stable name of an error is its Code.
type Category string

// The categories.
const (
	NotFound           Category = "not_found"
	AlreadyExists      Category = "already_exists"
	Invalid            Category = "invalid"
	Conflict           Category = "conflict"
	FailedPrecondition Category = "failed_precondition"
	Exhausted          Category = "exhausted"
	Unavailable        Category = "unavailable"
	PermissionDenied   Category = "permission_denied"
	Unauthenticated    Category = "unauthenticated"
	DataLoss           Category = "data_loss"
	Canceled           Category = "canceled"
	TimedOut           Category = "timed_out"
	Internal           Category = "internal"
)

// Code is the stable public name of an error, in UPPER_SNAKE. Codes are added, never renamed.
type Code string

// The codes that are shared by several packages. docs/ERRORS.md lists them all with their meaning.
const (
	CodeInternal             Code = "INTERNAL"
	CodeCanceled             Code = "CANCELED"
	CodeTimedOut             Code = "TIMED_OUT"
	CodeInvalidID            Code = "INVALID_ID"
	CodeInvalidDigest        Code = "INVALID_DIGEST"
	CodeInvalidName          Code = "INVALID_NAME"
	CodeInvalidField         Code = "INVALID_FIELD"
	CodeUnknownField         Code = "UNKNOWN_FIELD"
	CodeMalformedBody        Code = "MALFORMED_BODY"
	CodeBodyTooLarge         Code = "BODY_TOO_LARGE"
	CodeUnsupportedMedia     Code = "UNSUPPORTED_MEDIA_TYPE"
	CodeMethodNotAllowed     Code = "METHOD_NOT_ALLOWED"
	CodeUnauthenticated      Code = "UNAUTHENTICATED"
	CodePermissionDenied     Code = "PERMISSION_DENIED"
	CodeRouteNotFound        Code = "ROUTE_NOT_FOUND"
	CodeWorkspaceNotFound    Code = "WORKSPACE_NOT_FOUND"
	CodeCheckpointNotFound   Code = "CHECKPOINT_NOT_FOUND"
	CodeOperationNotFound    Code = "OPERATION_NOT_FOUND"
	CodeSessionNotFound      Code = "SESSION_NOT_FOUND"
	CodeImageNotFound        Code = "IMAGE_NOT_FOUND"
	CodeUploadNotFound       Code = "UPLOAD_NOT_FOUND"
	CodeBuildFailed          Code = "BUILD_FAILED"
	CodeDockerfileInvalid    Code = "DOCKERFILE_INVALID"
	CodeImageShape           Code = "IMAGE_SHAPE"
	CodeRunnerNotFound       Code = "RUNNER_NOT_FOUND"
	CodePortNotFound         Code = "PORT_NOT_FOUND"
	CodePortNotAllowed       Code = "PORT_NOT_ALLOWED"
	CodePortTaken            Code = "PORT_TAKEN"
	CodePortClosed           Code = "PORT_CLOSED"
	CodeProjectNotFound      Code = "PROJECT_NOT_FOUND"
	CodeKeyNotFound          Code = "KEY_NOT_FOUND"
	CodeFileNotFound         Code = "FILE_NOT_FOUND"
	CodeWatchNotFound        Code = "WATCH_NOT_FOUND"
	CodeSandboxNotFound      Code = "SANDBOX_NOT_FOUND"
	CodeNameTaken            Code = "NAME_TAKEN"
	CodeWorkspaceNotReady    Code = "WORKSPACE_NOT_READY"
	CodeCheckpointNotReady   Code = "CHECKPOINT_NOT_READY"
	CodeCheckpointInUse      Code = "CHECKPOINT_IN_USE"
	CodeRetentionNotFound    Code = "RETENTION_NOT_FOUND"
	CodeCheckpointPinned     Code = "CHECKPOINT_PINNED"
	CodeVersionConflict      Code = "VERSION_CONFLICT"
	CodeStateConflict        Code = "STATE_CONFLICT"
	CodeOperationCanceled    Code = "OPERATION_CANCELED"
	CodeNotCancelable        Code = "OPERATION_NOT_CANCELABLE"
	CodeProjectNotEmpty      Code = "PROJECT_NOT_EMPTY"
	CodeQuotaExceeded        Code = "QUOTA_EXCEEDED"
	CodeRateLimited          Code = "RATE_LIMITED"
	CodeCapacity             Code = "CAPACITY"
	CodeEventsExpired        Code = "EVENTS_EXPIRED"
	CodeDiskFull             Code = "DISK_FULL"
	CodeNoRunner             Code = "NO_RUNNER"
	CodeRunnerUnreachable    Code = "RUNNER_UNREACHABLE"
	CodeDatabaseUnavailable  Code = "DATABASE_UNAVAILABLE"
	CodeIncompatibleHost     Code = "INCOMPATIBLE_HOST"
	CodeVMMFailed            Code = "VMM_FAILED"
	CodeGuestUnreachable     Code = "GUEST_UNREACHABLE"
	CodeGuestProtocol        Code = "GUEST_PROTOCOL"
	CodeGuestBusy            Code = "GUEST_BUSY"
	CodeNotQuiesced          Code = "NOT_QUIESCED"
	CodeResealFailed         Code = "RESEAL_FAILED"
	CodeForkFailed           Code = "FORK_FAILED"
	CodeAttestationRefused   Code = "ATTESTATION_REFUSED"
	CodeAttestationNotFound  Code = "ATTESTATION_NOT_FOUND"
	CodeCheckpointCorrupt    Code = "CHECKPOINT_CORRUPT"
	CodeCheckpointIncomplete Code = "CHECKPOINT_INCOMPLETE"
	CodeManifestInvalid      Code = "MANIFEST_INVALID"
	CodeImportInvalid        Code = "IMPORT_INVALID"
	CodeStoreUnavailable     Code = "STORE_UNAVAILABLE"
	CodeStoreAuth            Code = "STORE_AUTH"
	CodeKeyUnavailable       Code = "KEY_UNAVAILABLE"
	CodeDiskUnreadable       Code = "DISK_UNREADABLE"
	CodeUnsupported          Code = "UNSUPPORTED"
	CodeSandboxLost          Code = "SANDBOX_LOST"
	CodePagerGone            Code = "PAGER_GONE"
	CodeEgressGone           Code = "EGRESS_GONE"
	CodeEgressReduced        Code = "EGRESS_REDUCED"
	CodeRulesNotWritten      Code = "RULES_NOT_WRITTEN"
	CodeAuthorityUnusable    Code = "AUTHORITY_UNUSABLE"
	CodeWriteNotLogged       Code = "WRITE_NOT_LOGGED"
	CodeRunnerLost           Code = "RUNNER_LOST"
	CodeHeartbeatStale       Code = "HEARTBEAT_STALE"
	CodeControllerStopping   Code = "CONTROLLER_STOPPING"
	CodeEgressForbidden      Code = "EGRESS_FORBIDDEN"
	CodeEgressBeyondParent   Code = "EGRESS_BEYOND_PARENT"
	CodeGrantNotFound        Code = "GRANT_NOT_FOUND"
	CodeSecretNotFound       Code = "SECRET_NOT_FOUND"
	CodeSecretUnavailable    Code = "SECRET_UNAVAILABLE"
	CodeGrantHostDenied      Code = "GRANT_HOST_DENIED"
	CodeSecretRequired       Code = "SECRET_REQUIRED"
	CodeGrantsTooLarge       Code = "GRANTS_TOO_LARGE"

	CodeIdempotencyInProgress  Code = "IDEMPOTENCY_IN_PROGRESS"
	CodeIdempotencyMismatch    Code = "IDEMPOTENCY_MISMATCH"
	CodeIdempotencySecretShown Code = "IDEMPOTENCY_SECRET_SHOWN" //nolint:gosec // G101: not a secret
)

// The codes between controllers and runners.
const (
	CodeCertificateRefused    Code = "CERTIFICATE_REFUSED"
	CodeJoinTokenRefused      Code = "JOIN_TOKEN_REFUSED" //nolint:gosec // G101: a name
	CodeRunnerRevoked         Code = "RUNNER_REVOKED"
	CodeRunnerInUse           Code = "RUNNER_IN_USE"
	CodeControllerUnreachable Code = "CONTROLLER_UNREACHABLE"
)

// Error is an error that may travel to a caller. Msg says what happened, to which object and what to do next; the
// caller may see all of it. Err is the cause, which the caller never sees.
type Error struct {
	Category Category
	Code     Code
	Msg      string
	Err      error
}

// Error returns the message and, for the log, the cause.
func (e *Error) Error() string {
	if e.Err == nil {
		return e.Msg
	}
	return e.Msg + ": " + e.Err.Error()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Is reports whether target carries the same code, so that errors.Is(err, ErrX) works on sentinels of this type.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Code == e.Code && t.Category == e.Category
}

// Errorf makes an Error without a cause; its whole text is shown to the caller.
func Errorf(c Category, code Code, format string, a ...any) *Error {
	return &Error{Category: c, Code: code, Msg: fmt.Sprintf(format, a...)}
}

// Wrapf makes an Error with a cause that callers do not see.
func Wrapf(err error, c Category, code Code, format string, a ...any) *Error {
	return &Error{Category: c, Code: code, Msg: fmt.Sprintf(format, a...), Err: err}
}

// CategoryOf returns the category of the outermost Error in err's chain; a context error is Canceled or
// TimedOut, anything else Internal. It is "" for nil.
func CategoryOf(err error) Category {
	var e *Error
	switch {
	case err == nil:
		return ""
	case errors.As(err, &e):
		return e.Category
	case errors.Is(err, context.Canceled):
		return Canceled
	case errors.Is(err, context.DeadlineExceeded):
		return TimedOut
	default:
		return Internal
	}
}

// CodeOf returns the public code of err by the same rules.
func CodeOf(err error) Code {
	var e *Error
	switch {
	case err == nil:
		return ""
	case errors.As(err, &e):
		return e.Code
	case errors.Is(err, context.Canceled):
		return CodeCanceled
	case errors.Is(err, context.DeadlineExceeded):
		return CodeTimedOut
	default:
		return CodeInternal
	}
}

// MessageOf returns the part of err that a caller may see.
func MessageOf(err error) string {
	var e *Error
	switch {
	case err == nil:
		return ""
	case errors.As(err, &e):
		return e.Msg
	default:
		return "something went wrong inside Coppice; the log has the cause under this request id"
	}
}
