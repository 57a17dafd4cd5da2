package arrakis

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// failure is an error with its status.
type failure struct {
	status  int
	message string
}

func (f *failure) Error() string { return f.message }

func failf(status int, format string, a ...any) *failure {
	return &failure{status, fmt.Sprintf(format, a...)}
}

// notFound is one answer for an absent VM and for a VM of somebody else.
func notFound(name string) *failure {
	return failf(http.StatusNotFound, "VM %q was not found", clip(name))
}

func clip(s string) string {
	const most = 64
	if len(s) > most {
		s = s[:most] + "…"
	}
	return s
}

// statusClientClosed has no name in HTTP; nobody reads it.
const statusClientClosed = 499

// translate is the one place where errors become those of Arrakis.
func translate(err error) *failure {
	var f *failure
	var refused *coppice.Error
	switch {
	case errors.As(err, &f):
		return f
	case errors.As(err, &refused):
		status := refused.Status
		switch status {
		case 0: // an operation that failed after it was accepted
			status = http.StatusInternalServerError
		case statusClientClosed:
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

// writeFailure writes an error in Arrakis' form.
func writeFailure(w http.ResponseWriter, f *failure) {
	writeJSON(w, f.status, map[string]any{"error": map[string]string{"message": f.message}})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false) // no browser reads it as HTML, and it would be six times as long
	if err := encoder.Encode(v); err != nil {
		status = http.StatusInternalServerError
		b.Reset()
		b.WriteString(`{"error":{"message":"the answer cannot be encoded"}}` + "\n")
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(b.Bytes()) // the client may have gone
}
