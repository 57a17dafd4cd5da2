package coppice

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
)

// Code is the stable name of an error. It is an error itself, so that errors.Is(err, coppice.CodeCapacity) works.
type Code string

// Error returns the code.
func (c Code) Error() string { return string(c) }

// The codes that programs usually check; docs/ERRORS.md has them all.
const (
	CodeBodyTooLarge           Code = "BODY_TOO_LARGE"
	CodeAttestationNotFound    Code = "ATTESTATION_NOT_FOUND"
	CodeAttestationRefused     Code = "ATTESTATION_REFUSED"
	CodeCapacity               Code = "CAPACITY"
	CodeCheckpointInUse        Code = "CHECKPOINT_IN_USE"
	CodeCheckpointNotFound     Code = "CHECKPOINT_NOT_FOUND"
	CodeCheckpointNotReady     Code = "CHECKPOINT_NOT_READY"
	CodeCommandNotFound        Code = "COMMAND_NOT_FOUND"
	CodeCommandNotStarted      Code = "COMMAND_NOT_STARTED"
	CodeDatabaseUnavailable    Code = "DATABASE_UNAVAILABLE"
	CodeDiskFull               Code = "DISK_FULL"
	CodeEventsExpired          Code = "EVENTS_EXPIRED"
	CodeFileNotFound           Code = "FILE_NOT_FOUND"
	CodeForkFailed             Code = "FORK_FAILED"
	CodeGuestUnreachable       Code = "GUEST_UNREACHABLE"
	CodeIdempotencyInProgress  Code = "IDEMPOTENCY_IN_PROGRESS"
	CodeIdempotencyMismatch    Code = "IDEMPOTENCY_MISMATCH"
	CodeIdempotencySecretShown Code = "IDEMPOTENCY_SECRET_SHOWN" //nolint:gosec // G101: not a secret
	CodeImageNotFound          Code = "IMAGE_NOT_FOUND"
	CodeImportInvalid          Code = "IMPORT_INVALID"
	CodeInternal               Code = "INTERNAL"
	CodeInvalidField           Code = "INVALID_FIELD"
	CodeInvalidID              Code = "INVALID_ID"
	CodeInvalidName            Code = "INVALID_NAME"
	CodeNameTaken              Code = "NAME_TAKEN"
	CodeNoRunner               Code = "NO_RUNNER"
	CodeOperationCanceled      Code = "OPERATION_CANCELED"
	CodeOperationNotFound      Code = "OPERATION_NOT_FOUND"
	CodePortNotFound           Code = "PORT_NOT_FOUND"
	CodeProjectNotFound        Code = "PROJECT_NOT_FOUND"
	CodeProjectNotEmpty        Code = "PROJECT_NOT_EMPTY"
	CodeKeyNotFound            Code = "KEY_NOT_FOUND"
	CodeKeyUnavailable         Code = "KEY_UNAVAILABLE"
	CodeRateLimited            Code = "RATE_LIMITED"
	CodePermissionDenied       Code = "PERMISSION_DENIED"
	CodeQuotaExceeded          Code = "QUOTA_EXCEEDED"
	CodeResealFailed           Code = "RESEAL_FAILED"
	CodeRunnerUnreachable      Code = "RUNNER_UNREACHABLE"
	CodeSessionNotFound        Code = "SESSION_NOT_FOUND"
	CodeStateConflict          Code = "STATE_CONFLICT"
	CodeUnauthenticated        Code = "UNAUTHENTICATED"
	CodeUnknownField           Code = "UNKNOWN_FIELD"
	CodeUnsupported            Code = "UNSUPPORTED"
	CodeVersionConflict        Code = "VERSION_CONFLICT"
	CodeWorkspaceNotFound      Code = "WORKSPACE_NOT_FOUND"
	CodeWorkspaceNotReady      Code = "WORKSPACE_NOT_READY"
)

// Error is a refusal of the server, or the failure of an operation.
type Error struct {
	Code           Code
	Status         int    // HTTP status; 0 for an operation that failed after it was accepted, and for a failed child of a fork
	Detail         string // for people: what happened, to which object, and what to do next
	RequestID      string // the server's log has the cause under this id
	OperationID    string
	Fields         []FieldProblem
	CurrentVersion int64 // with CodeVersionConflict
}

// Error returns the detail and the code.
func (e *Error) Error() string {
	if e.Detail == "" {
		return string(e.Code)
	}
	return fmt.Sprintf("%s (%s)", e.Detail, e.Code)
}

// Is reports whether target is e's Code.
func (e *Error) Is(target error) bool {
	code, ok := target.(Code)
	return ok && code == e.Code
}

// Err returns the failure as an error; nil for nil.
func (f *Failure) Err() error {
	if f == nil {
		return nil
	}
	return &Error{Code: Code(f.Code), Detail: f.Message}
}

// peek reads the problem in an answer. The answer can still be read afterwards.
func peek(resp *http.Response) Problem {
	body, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	_ = resp.Body.Close()
	resp.Body = io.NopCloser(bytes.NewReader(body))
	var p Problem
	_ = json.Unmarshal(body, &p) // fails for an answer of a proxy
	return p
}

// problem reads an answer of 400 or more. If it is not a problem document, it comes from a proxy.
func problem(resp *http.Response) error {
	body, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	e := &Error{Status: resp.StatusCode, RequestID: resp.Header.Get("X-Request-Id")}
	var p Problem
	if err := json.Unmarshal(body, &p); err != nil || p.Code == "" {
		e.Code = Code(fmt.Sprintf("HTTP_%d", resp.StatusCode))
		e.Detail = fmt.Sprintf("%s %s answered %s", resp.Request.Method, resp.Request.URL.Path, resp.Status)
		return e
	}
	e.Code, e.Detail, e.Fields, e.CurrentVersion, e.OperationID = Code(p.Code), p.Detail, p.Fields, p.CurrentVersion, p.OperationID
	if p.RequestID != "" {
		e.RequestID = p.RequestID
	}
	return e
}
