package controller

import (
	"context"

	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
)

// What a request carries in its context. Package request has it.
type (
	Origin = request.Origin
	Claim  = request.Claim
	KeyUse = request.KeyUse
)

// IdempotencyTTL is how long the key of a request is remembered.
const IdempotencyTTL = request.ClaimTTL

// WithOrigin marks a context: changes by transactions under it are recorded with this origin.
func WithOrigin(ctx context.Context, o Origin) context.Context { return request.WithOrigin(ctx, o) }

// OriginOf returns the origin of a context and the id of the request that it serves.
func OriginOf(ctx context.Context) (Origin, string) { return request.OriginOf(ctx) }

// WithClaim gives the use cases of a request its idempotency key.
func WithClaim(ctx context.Context, claim *Claim) context.Context {
	return request.WithClaim(ctx, claim)
}

// WithRequestID marks a context with the id of the request that it serves; operations that it starts carry it.
func WithRequestID(ctx context.Context, id string) context.Context {
	return core.WithRequestID(ctx, id)
}

// KeyOf returns the key that a request was made with; the zero value outside of requests.
func KeyOf(ctx context.Context) Key { return request.KeyOf(ctx) }
