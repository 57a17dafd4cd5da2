package coppice

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"strconv"
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

// Done reports whether the operation has ended.
func (o *Operation) Done() bool { return o.State == OperationSucceeded || o.State == OperationFailed }

// start sends a request that starts an operation, waits for the operation and decodes its result into out.
func (c *Client) start(ctx context.Context, r request, out any) error {
	var op Operation
	query := url.Values{}
	maps.Copy(query, r.query)
	query.Set("wait", strconv.Itoa(waitSeconds))
	resp, err := c.send(ctx, r.with(query))
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
