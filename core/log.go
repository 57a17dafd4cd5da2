package core

import (
	"context"
	"log/slog"
	"strings"
)

type (
	requestKey   struct{}
	operationKey struct{}
)

// WithRequestID marks a context with the id of the request that it serves, across processes.
func WithRequestID(ctx context.Context, id string) context.Context {
	return context.WithValue(ctx, requestKey{}, id)
}

// RequestIDOf returns the id of the request that a context serves; empty when it serves none.
func RequestIDOf(ctx context.Context) string {
	id, _ := ctx.Value(requestKey{}).(string)
	return id
}

// WithOperationID marks a context with the operation that it works on.
func WithOperationID(ctx context.Context, id OperationID) context.Context {
	return context.WithValue(ctx, operationKey{}, id)
}

// OperationIDOf returns the operation that a context works on; empty when it works on none.
func OperationIDOf(ctx context.Context) OperationID {
	id, _ := ctx.Value(operationKey{}).(OperationID)
	return id
}

// Traceable says whether a text from another process may stand in the log as an id.
func Traceable(id string) bool {
	const allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"
	return id != "" && len(id) <= 64 && strings.Trim(id, allowed) == ""
}

// LogHandler adds request_id and operation_id of the context to every line that does not have them.
func LogHandler(next slog.Handler) slog.Handler { return logHandler{next} }

type logHandler struct{ slog.Handler }

// Handle adds the ids.
func (h logHandler) Handle(ctx context.Context, r slog.Record) error {
	said := map[string]bool{}
	r.Attrs(func(a slog.Attr) bool {
		said[a.Key] = true
		return true
	})
	for _, a := range []slog.Attr{slog.String("request_id", RequestIDOf(ctx)), slog.String("operation_id", string(OperationIDOf(ctx)))} {
		if a.Value.String() != "" && !said[a.Key] {
			r = r.Clone()
			r.AddAttrs(a)
		}
	}
	return h.Handler.Handle(ctx, r)
}

// WithAttrs keeps adding the ids.
func (h logHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return logHandler{h.Handler.WithAttrs(attrs)}
}

// WithGroup keeps adding the ids.
func (h logHandler) WithGroup(name string) slog.Handler { return logHandler{h.Handler.WithGroup(name)} }
