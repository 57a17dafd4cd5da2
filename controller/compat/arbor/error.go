package arbor

import (
	"errors"
	"net/http"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// codes are Arbor's names of Coppice's codes, where they differ. Arbor's other codes have the same name here, or no equal.
var codes = map[coppice.Code]string{
	coppice.CodeWorkspaceNotReady:     "WORKSPACE_BUSY",
	coppice.CodeStateConflict:         "WORKSPACE_BUSY",
	coppice.CodeCheckpointNotReady:    "CHECKPOINT_NOT_SEALED",
	coppice.CodeCapacity:              "RUNNER_CAPACITY_EXHAUSTED",
	coppice.CodeNoRunner:              "RUNNER_CAPACITY_EXHAUSTED",
	coppice.CodeUnsupported:           "UNSUPPORTED_OPERATION_IN_MVP",
	coppice.CodeResealFailed:          "RESUME_RESEAL_FAILED",
	coppice.Code("INCOMPATIBLE_HOST"): "RUNNER_CLASS_INCOMPATIBLE",
	coppice.CodeDatabaseUnavailable:   "DATABASE_ERROR",
	coppice.CodeInternal:              "INTERNAL_ERROR",
	coppice.Code("GRANT_HOST_DENIED"): "SECRET_POLICY_DENIED",
	coppice.Code("SECRET_NOT_FOUND"):  "SECRET_POLICY_DENIED",
}

// byStatus are the codes of errors that this layer makes itself.
var byStatus = map[int]string{
	http.StatusBadRequest:            "INVALID_REQUEST",
	http.StatusUnauthorized:          "UNAUTHENTICATED",
	http.StatusForbidden:             "FORBIDDEN",
	http.StatusNotFound:              "NOT_FOUND",
	http.StatusMethodNotAllowed:      "METHOD_NOT_ALLOWED",
	http.StatusRequestTimeout:        "REQUEST_TIMEOUT",
	http.StatusRequestEntityTooLarge: "BODY_TOO_LARGE",
	http.StatusMisdirectedRequest:    "FORBIDDEN",
	http.StatusTooManyRequests:       "RATE_LIMITED",
	http.StatusNotImplemented:        "UNSUPPORTED_OPERATION_IN_MVP",
	http.StatusGatewayTimeout:        "REQUEST_TIMEOUT",
}

// envelope is Arbor's error.
type envelope struct {
	Code      string            `json:"code"`
	Message   string            `json:"message"`
	Retryable bool              `json:"retryable"`
	Details   map[string]string `json:"details,omitempty"`
}

// envelopeOf translates an error.
func envelopeOf(err error) (envelope, *shared.StatusError) {
	f := shared.Translate(err)
	e := envelope{Code: byStatus[f.Status], Message: f.Message, Retryable: f.Status == http.StatusTooManyRequests || f.Status == http.StatusServiceUnavailable}
	if e.Code == "" {
		e.Code = "INTERNAL_ERROR"
	}
	if refused, ok := errors.AsType[*coppice.Error](err); ok {
		e.Retryable = e.Retryable && refused.Code != coppice.CodeQuotaExceeded // waiting does not help
		e.Code, e.Details = nameOf(refused.Code), map[string]string{"coppice_code": string(refused.Code)}
		for name, value := range map[string]string{"request_id": refused.RequestID, "operation_id": refused.OperationID} {
			if value != "" {
				e.Details[name] = value
			}
		}
	}
	return e, f
}

func nameOf(code coppice.Code) string {
	if name := codes[code]; name != "" {
		return name
	}
	return string(code)
}

func writeFailure(w http.ResponseWriter, err error) {
	e, f := envelopeOf(err)
	writeJSON(w, f.Status, map[string]any{"error": e})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	shared.WriteJSON(w, status, v, `{"error":{"code":"INTERNAL_ERROR","message":"the answer cannot be encoded","retryable":false}}`)
}

// unsupported refuses what Coppice does not have.
func unsupported(format string, a ...any) *shared.StatusError {
	return shared.Failf(http.StatusNotImplemented, format+"; docs/COMPATIBILITY.md lists what Coppice does for Arbor's clients", a...)
}
