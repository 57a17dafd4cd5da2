package coppice

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strconv"
	"sync/atomic"
	"time"
)

// How long one request waits for an operation, in seconds; then the client asks again.
const waitSeconds = 60

// Operation returns the present state of an operation.
func (c *Client) Operation(ctx context.Context, id OperationID) (Operation, error) {
	return c.operation(ctx, id, 0)
}

// WaitOperation waits until an operation has ended and returns it; its Problem says whether it failed.
func (c *Client) WaitOperation(ctx context.Context, id OperationID) (Operation, error) {
	for {
		op, err := c.operation(ctx, id, waitSeconds)
		if err != nil || op.Done() {
			return op, err
		}
		if err := ctx.Err(); err != nil {
			return op, context.Cause(ctx)
		}
	}
}

func (c *Client) operation(ctx context.Context, id OperationID, wait int) (Operation, error) {
	var op Operation
	err := c.call(ctx, get("v1", "operations", id).with(url.Values{"wait": {strconv.Itoa(wait)}}), &op)
	return op, err
}

// OperationFilter narrows a list of operations. Its zero value lists all.
type OperationFilter struct {
	States       []OperationState
	Kinds        []OperationKind
	WorkspaceID  WorkspaceID
	CheckpointID CheckpointID

	// IdempotencyKey is of the request that began the operation. The server keeps keys for 24 hours.
	IdempotencyKey string
}

// Operations iterates over the operations that match, newest first. They have no Result.
func (c *Client) Operations(ctx context.Context, f OperationFilter) iter.Seq2[Operation, error] {
	q := url.Values{}
	set(q, "workspace_id", f.WorkspaceID)
	set(q, "checkpoint_id", f.CheckpointID)
	set(q, "idempotency_key", f.IdempotencyKey)
	for _, s := range f.States {
		q.Add("state", string(s))
	}
	for _, k := range f.Kinds {
		q.Add("kind", string(k))
	}
	return all[Operation](ctx, c, get("v1", "operations").with(q))
}

// CancelOperation cancels an operation that makes workspaces, and waits for its end. Its State says whether it had succeeded before.
func (c *Client) CancelOperation(ctx context.Context, id OperationID) (Operation, error) {
	var op Operation
	r := request{method: http.MethodPost, path: []string{"v1", "operations", id, "cancel"}}
	err := c.call(ctx, r.with(url.Values{"wait": {strconv.Itoa(waitSeconds)}}), &op)
	if err != nil || op.Done() {
		return op, err
	}
	return c.WaitOperation(ctx, id)
}

// Done reports whether the operation has ended.
func (o *Operation) Done() bool { return o.State == OperationSucceeded || o.State == OperationFailed }

// UnfinishedError is the error of a call whose context ended while the server works on it: the operation goes on.
type UnfinishedError struct {
	OperationID OperationID
	Err         error
}

// Error names the operation.
func (e *UnfinishedError) Error() string {
	return fmt.Sprintf("operation %s goes on: %v", e.OperationID, e.Err)
}

// Unwrap returns why the call did not wait longer.
func (e *UnfinishedError) Unwrap() error { return e.Err }

// begun asks what a request started whose answer did not come because the caller's context ended. It sends the request again under its key,
// without a wait, so that the server starts nothing new. It returns the operation, or decodes the result into out if the operation has succeeded.
func (c *Client) begun(ctx context.Context, r request, out any) (id OperationID, succeeded bool) {
	const patience = 5 * time.Second
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	query := url.Values{}
	maps.Copy(query, r.query)
	query.Set("wait", "0")
	r.once = true
	resp, err := c.send(ctx, r.with(query))
	if e, ok := errors.AsType[*Error](err); ok {
		return e.OperationID, false
	}
	if err != nil {
		return "", false
	}
	if resp.StatusCode != http.StatusAccepted {
		return "", decode(resp, out) == nil
	}
	var op Operation
	if err := decode(resp, &op); err != nil || op.Done() {
		return "", false
	}
	return op.ID, false
}

// start sends a request that starts an operation, waits for the operation and decodes its result into out.
func (c *Client) start(ctx context.Context, r request, out any) error {
	var op Operation
	query := url.Values{}
	maps.Copy(query, r.query)
	query.Set("wait", strconv.Itoa(waitSeconds))
	var sent atomic.Bool
	if r.keyed {
		r.key = keyOf(ctx)
	}
	traced := httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteRequest: func(i httptrace.WroteRequestInfo) {
		if i.Err == nil {
			sent.Store(true)
		}
	}})
	resp, err := c.send(traced, r.with(query))
	if err != nil && ctx.Err() != nil && r.key != "" && sent.Load() {
		id, succeeded := c.begun(ctx, r, out)
		switch {
		case succeeded:
			return nil
		case id != "":
			return &UnfinishedError{OperationID: id, Err: context.Cause(ctx)}
		}
		return err
	}
	running, _ := errors.AsType[*Error](err)
	switch {
	case running != nil && running.Code == CodeIdempotencyInProgress && running.OperationID != "": // the server received an earlier try
		op.ID = running.OperationID
	case err != nil:
		return err
	case resp.StatusCode != http.StatusAccepted:
		return decode(resp, out)
	default:
		if err := decode(resp, &op); err != nil {
			return err
		}
	}
	if !op.Done() {
		id := op.ID
		if op, err = c.WaitOperation(ctx, id); err != nil {
			if ctx.Err() != nil {
				return &UnfinishedError{OperationID: id, Err: context.Cause(ctx)}
			}
			return fmt.Errorf("wait for operation %s: %w", id, err)
		}
	}
	if op.State == OperationFailed {
		e := &Error{Code: CodeInternal, Detail: "operation " + op.ID + " failed", OperationID: op.ID}
		if op.Problem != nil {
			e.Code, e.Detail = Code(op.Problem.Code), op.Problem.Message
		}
		return e
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(op.Result, out); err != nil {
		return fmt.Errorf("decode the result of operation %s: %w", op.ID, err)
	}
	return nil
}
