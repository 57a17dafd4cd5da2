package request

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// ClaimTTL is how long the key of a request is remembered.
const ClaimTTL = 24 * time.Hour

// Claim is a request that its client may repeat: with one key, one request makes one object. The use case of the request binds the
// key to the object's id in the same transaction that makes the object.
type Claim struct {
	Key  string
	Hash [32]byte // of everything that distinguishes the request from others
	Kind string   // prefix of the id that it makes; other objects that the request makes do not take the key

	replayed atomic.Bool
}

// KeyUse is the request that a key belongs to.
type KeyUse struct {
	Hash   [32]byte
	Object string
	Answer json.RawMessage // the answer, if it cannot be read from the row of the object; nil before it is known
}

// Tx keeps the keys of requests.
type Tx interface {
	// ClaimKey binds a key, unless an earlier request has it, and returns the request that has the key then. Claims of the same key
	// wait for each other's transactions. If this takes too long, it fails with IDEMPOTENCY_IN_PROGRESS.
	ClaimKey(ctx context.Context, project core.ProjectID, key string, use KeyUse, ttl time.Duration) (KeyUse, error)
	// KeyUse returns the request that has a key; the zero value if none has it.
	KeyUse(ctx context.Context, project core.ProjectID, key string) (KeyUse, error)
	// AnswerKey and ReleaseKey change nothing if the key does not belong to the object.
	AnswerKey(ctx context.Context, project core.ProjectID, key, object string, answer json.RawMessage) error
	ReleaseKey(ctx context.Context, project core.ProjectID, key, object string) error
}

type claimKey struct{}

// WithClaim gives the use cases of a request its idempotency key.
func WithClaim(ctx context.Context, claim *Claim) context.Context {
	return context.WithValue(ctx, claimKey{}, claim)
}

// ClaimOf returns the claim of a request; nil if its client has given no key.
func ClaimOf(ctx context.Context) *Claim {
	claim, _ := ctx.Value(claimKey{}).(*Claim)
	return claim
}

// Replayed reports whether the answer is that of an earlier request.
func (c *Claim) Replayed() bool { return c.replayed.Load() }

// SetReplayed says whether the answer is that of an earlier request.
func (c *Claim) SetReplayed(yes bool) { c.replayed.Store(yes) }

// RepeatError says that an equal request has bound the key of this request already. It ends the transaction that would do the work
// again.
type RepeatError struct{ Use KeyUse }

func (e *RepeatError) Error() string { return "the request was made before; it made " + e.Use.Object }

// Claims reports whether a request's key is for objects of this id's kind.
func (c *Claim) Claims(id string) bool { return c != nil && strings.HasPrefix(id, c.Kind+"_") }

// Bind claims the request's key for the object that the transaction makes. It is the first step of the transaction: a repeat waits
// there until the first request has been admitted, and then gets a *RepeatError, or IDEMPOTENCY_MISMATCH.
func Bind(ctx context.Context, tx Tx, project core.ProjectID, id string) error {
	claim := ClaimOf(ctx)
	if !claim.Claims(id) {
		return nil
	}
	use, err := tx.ClaimKey(ctx, project, claim.Key, KeyUse{Hash: claim.Hash, Object: id}, ClaimTTL)
	if err != nil || use.Object == id {
		return err
	}
	return claim.Repeats(use)
}

// Repeats returns the error for a key that is taken.
func (c *Claim) Repeats(use KeyUse) error {
	if use.Hash != c.Hash {
		return core.Errorf(core.Invalid, core.CodeIdempotencyMismatch,
			"the idempotency key was used for another request, which made %s; use a new key for a new request", use.Object)
	}
	return &RepeatError{use}
}

// InProgress refuses a repeat whose first request has not ended.
func InProgress(format string, a ...any) error {
	return core.Errorf(core.Conflict, core.CodeIdempotencyInProgress, "%s", fmt.Sprintf(format, a...))
}

// Answer records the answer of a request for repeats, in the transaction that completes the object.
func (c *Claim) Answer(ctx context.Context, tx Tx, project core.ProjectID, id string, made any) error {
	if !c.Claims(id) {
		return nil
	}
	b, err := json.Marshal(made)
	if err != nil {
		return fmt.Errorf("encode what the request made: %w", err)
	}
	return tx.AnswerKey(ctx, project, c.Key, id, b)
}

// Release frees the key of a request that made nothing.
func (c *Claim) Release(ctx context.Context, tx Tx, project core.ProjectID, id string) error {
	if !c.Claims(id) {
		return nil
	}
	return tx.ReleaseKey(ctx, project, c.Key, id)
}

// Replay gives the recorded answer of an earlier request.
func Replay[T any](ctx context.Context, use KeyUse) (T, error) {
	var out T
	if err := json.Unmarshal(use.Answer, &out); err != nil {
		return out, fmt.Errorf("read what the first request made: %w", err)
	}
	ClaimOf(ctx).SetReplayed(true)
	return out, nil
}
