package shared

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// StatusError is an error with its status. Each layer writes it in its product's form.
type StatusError struct {
	Status  int
	Message string
}

// Error implements error.
func (f *StatusError) Error() string { return f.Message }

// Failf makes a failure.
func Failf(status int, format string, a ...any) *StatusError {
	return &StatusError{status, fmt.Sprintf(format, a...)}
}

// Clip bounds a text of a client in a message.
func Clip(s string) string {
	const most = 64
	if len(s) > most {
		s = s[:most] + "…"
	}
	return s
}

// statusClientClosed has no name in HTTP, and some clients fail on it. Nobody reads it anyway.
const statusClientClosed = 499

// Translate is the one place where errors become failures.
func Translate(err error) *StatusError {
	var f *StatusError
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
		return Failf(status, "%s", refused.Error())
	case errors.As(err, new(*http.MaxBytesError)):
		return Failf(http.StatusRequestEntityTooLarge, "the body is too large")
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return Failf(http.StatusGatewayTimeout, "the request ended before there was an answer")
	}
	return Failf(http.StatusInternalServerError, "something went wrong inside Coppice; the server's log has the cause")
}

// Recover must be deferred by a handler. It logs a panic and answers with what answer writes. It passes http.ErrAbortHandler on.
func Recover(r *http.Request, log *slog.Logger, answer func(*StatusError)) {
	p := recover()
	if p == nil {
		return
	}
	if p == http.ErrAbortHandler { //nolint:errorlint,err113 // it is compared by identity, as net/http does
		panic(p)
	}
	log.ErrorContext(r.Context(), "request panicked", "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
	answer(Translate(errors.New("panic")))
}

// CloseStranger has the connection of a client without a key closed after the answer. Otherwise the server would read the unread body of the
// request before it answers.
func CloseStranger(w http.ResponseWriter, status int) {
	if status == http.StatusUnauthorized {
		w.Header().Set("Connection", "close")
	}
}

// WriteJSON writes an answer. absent is written with status 500 in place of one that cannot be encoded.
func WriteJSON(w http.ResponseWriter, status int, v any, absent string) {
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false) // no browser reads it as HTML, and it would be six times as long
	if err := encoder.Encode(v); err != nil {
		status = http.StatusInternalServerError
		b.Reset()
		b.WriteString(absent + "\n")
	}
	CloseStranger(w, status)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(b.Bytes()) // the client may have gone
}
