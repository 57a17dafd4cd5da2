package controller

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// IdempotencyTTL is how long the key of a request is remembered.
const IdempotencyTTL = 24 * time.Hour

// Claim is a request that its client may repeat: with one key, one request makes one object. The use case of the request binds the
// key to the object's id in the same transaction that makes the object.
type Claim struct {
	Key  string
	Hash [32]byte // of everything that distinguishes the request from others
	Kind string   // prefix of the id that it makes; other objects that the request makes do not take the key

	replayed atomic.Bool
}

// Replayed reports whether the answer is that of an earlier request.
func (c *Claim) Replayed() bool { return c.replayed.Load() }

// KeyUse is the request that a key belongs to.
type KeyUse struct {
	Hash   [32]byte
	Object string
	Answer json.RawMessage // the answer, if it cannot be read from the row of the object; nil before it is known
}

type claimKey struct{}

// WithClaim gives the use cases of a request its idempotency key.
func WithClaim(ctx context.Context, claim *Claim) context.Context {
	return context.WithValue(ctx, claimKey{}, claim)
}

func claimOf(ctx context.Context) *Claim {
	claim, _ := ctx.Value(claimKey{}).(*Claim)
	return claim
}

// repeatError says that an equal request has bound the key of this request already. It ends the transaction that would do the work
// again.
type repeatError struct{ use KeyUse }

func (e *repeatError) Error() string { return "the request was made before; it made " + e.use.Object }

// claims reports whether a request's key is for objects of this id's kind.
func (c *Claim) claims(id string) bool { return c != nil && strings.HasPrefix(id, c.Kind+"_") }

// bind claims the request's key for the object that the transaction makes. It is the first step of the transaction: a repeat waits
// there until the first request has been admitted, and then gets a *repeatError, or IDEMPOTENCY_MISMATCH.
func bind(ctx context.Context, tx Tx, project core.ProjectID, id string) error {
	claim := claimOf(ctx)
	if !claim.claims(id) {
		return nil
	}
	use, err := tx.ClaimKey(ctx, project, claim.Key, KeyUse{Hash: claim.Hash, Object: id}, IdempotencyTTL)
	if err != nil || use.Object == id {
		return err
	}
	return claim.repeats(use)
}

// repeats returns the error for a key that is taken.
func (c *Claim) repeats(use KeyUse) error {
	if use.Hash != c.Hash {
		return core.Errorf(core.Invalid, core.CodeIdempotencyMismatch,
			"the idempotency key was used for another request, which made %s; use a new key for a new request", use.Object)
	}
	return &repeatError{use}
}

// repeated finds out whether a request that failed before its transaction is a repeat: then the first request has done the work,
// whatever prevents it now. If it is not a repeat, repeated returns the failure.
func (c *Controller) repeated(ctx context.Context, project core.ProjectID, failure error) error {
	claim := claimOf(ctx)
	if claim == nil {
		return failure
	}
	use, err := read(ctx, c, InProject(project), func(tx Tx) (KeyUse, error) { return tx.KeyUse(ctx, project, claim.Key) })
	if err != nil || use.Object == "" || !claim.claims(use.Object) {
		return failure
	}
	return claim.repeats(use)
}

func inProgress(format string, a ...any) error {
	return core.Errorf(core.Conflict, core.CodeIdempotencyInProgress, "%s", fmt.Sprintf(format, a...))
}

// replay answers a repeat of a request that was admitted as an operation.
func (c *Controller) replay(ctx context.Context, project core.ProjectID, id core.OperationID) (Answer, error) {
	a, err := c.Operation(ctx, project, id, 0)
	switch {
	case err != nil:
		return Answer{}, err
	case !a.Done:
		return Answer{}, &OperationError{id, inProgress("the first request with this idempotency key has begun operation %s, which has not ended; wait for that", id)}
	}
	if claim := claimOf(ctx); claim != nil {
		claim.replayed.Store(true)
	}
	if a.Operation.Problem != nil {
		return a, &OperationError{id, a.Operation.Problem}
	}
	if err := a.whole(); err != nil {
		return a, &OperationError{id, err}
	}
	return a, nil
}

// whole refuses an answer whose object no longer exists.
func (a Answer) whole() error {
	if a.Operation.Kind == OpCreateCheckpoint && a.Result.Checkpoint == nil {
		return core.Errorf(core.NotFound, core.CodeCheckpointNotFound, "the checkpoint that the first request made was deleted since")
	}
	return nil
}

// answer records the answer of a request for repeats, in the transaction that completes the object.
func (c *Claim) answer(ctx context.Context, tx Tx, project core.ProjectID, id string, made any) error {
	if !c.claims(id) {
		return nil
	}
	b, err := json.Marshal(made)
	if err != nil {
		return fmt.Errorf("encode what the request made: %w", err)
	}
	return tx.AnswerKey(ctx, project, c.Key, id, b)
}

// release frees the key of a request that made nothing.
func (c *Claim) release(ctx context.Context, tx Tx, project core.ProjectID, id string) error {
	if !c.claims(id) {
		return nil
	}
	return tx.ReleaseKey(ctx, project, c.Key, id)
}

// keySweep is how many expired keys one transaction removes.
const keySweep = 10_000

// sweepKeys removes expired keys of requests.
func (c *Controller) sweepKeys(ctx context.Context) error {
	for {
		n, err := read(ctx, c, System(), func(tx Tx) (int, error) { return tx.SweepKeys(ctx, keySweep) })
		if err != nil || n < keySweep {
			return err
		}
	}
}

// replayed gives the recorded answer of an earlier request.
func replayed[T any](ctx context.Context, use KeyUse) (T, error) {
	var out T
	if err := json.Unmarshal(use.Answer, &out); err != nil {
		return out, fmt.Errorf("read what the first request made: %w", err)
	}
	claimOf(ctx).replayed.Store(true)
	return out, nil
}
