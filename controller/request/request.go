// Package request has what a request or a piece of the controller's own work carries in its context:
// who acts (Origin), with which API key, and which idempotency key its client has given (Claim). It
// binds an idempotency key to the object that the request makes, in the transaction that makes the
// object.
package request

import (
	"context"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
)

// Origin says for whom a transaction works, and which action it belongs to. The database writes it into the audit record of every change.
type Origin struct {
	Actor     string // id of a key or runner; empty: the controller itself
	Source    string // address that the request came from
	Action    string // the API's operationId, or the name of the controller's own work
	Operation core.OperationID
}

type originKey struct{}

// WithOrigin marks a context: changes by transactions under it are recorded with this origin.
func WithOrigin(ctx context.Context, o Origin) context.Context {
	return context.WithValue(ctx, originKey{}, o)
}

// OriginOf returns the origin of a context and the id of the request that it serves.
func OriginOf(ctx context.Context) (Origin, string) {
	o, _ := ctx.Value(originKey{}).(Origin)
	if o.Actor == "" {
		o.Actor = "controller"
	}
	if o.Action == "" {
		o.Action = "controller"
	}
	return o, core.RequestIDOf(ctx)
}

type keyContext struct{}

// WithKey marks a context with the key that a request was made with.
func WithKey(ctx context.Context, key model.Key) context.Context {
	return context.WithValue(ctx, keyContext{}, key)
}

// KeyOf returns the key that a request was made with; the zero value outside of requests.
func KeyOf(ctx context.Context) model.Key {
	key, _ := ctx.Value(keyContext{}).(model.Key)
	return key
}
