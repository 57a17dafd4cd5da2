package coppice

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
)

// maxStepLine bounds the result of an action, most of which comes from a guest.
const maxStepLine = 2 << 20

var errStepBroken = fmt.Errorf("the results of the step broke off: %w", io.ErrUnexpectedEOF)

// Step tries several actions from a checkpoint, each in a fork of its own, and returns when all have ended. An action that failed has a
// Problem, and is no error of the call.
func (c *Client) Step(ctx context.Context, id CheckpointID, req StepRequest) (StepResult, error) {
	var out StepResult
	err := c.start(ctx, creation("v1", "checkpoints", id, "step").json(req), &out)
	return out, err
}

// StreamStep is Step with the results as they come: first an event with the operation alone, then one for each action when it ends. If the
// connection breaks, StreamStep asks again under the same key and goes on. It ends with an error if the operation failed, because it was
// canceled for example. If ctx ends first, the step goes on, and the error is an UnfinishedError.
func (c *Client) StreamStep(ctx context.Context, id CheckpointID, req StepRequest) iter.Seq2[StepEvent, error] {
	return func(yield func(StepEvent, error) bool) {
		r := creation("v1", "checkpoints", id, "step").json(req)
		r.key, r.header = keyOf(ctx), http.Header{"Accept": {"application/x-ndjson"}}
		s := &stepStream{had: map[int]bool{}}
		var gone away
		for {
			more, fresh, err := c.streamStep(ctx, r, s, yield)
			if !more {
				return
			}
			if fresh {
				gone.back()
			}
			if ctx.Err() != nil && s.operation != "" {
				err = &UnfinishedError{OperationID: s.operation, Err: context.Cause(ctx)}
			} else if err = gone.endure(ctx, err); err == nil {
				continue
			}
			yield(StepEvent{}, err)
			return
		}
	}
}

// stepStream is what the answers to a step have brought so far.
type stepStream struct {
	operation OperationID
	had       map[int]bool // actions
}

// streamStep reads one answer. more says that it is not the end, and fresh that it brought something new.
func (c *Client) streamStep(ctx context.Context, r request, s *stepStream, yield func(StepEvent, error) bool) (more, fresh bool, err error) {
	resp, err := c.send(ctx, r)
	if err != nil {
		if _, refused := errors.AsType[*Error](err); refused {
			yield(StepEvent{}, err)
			return false, false, nil
		}
		return true, false, err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, maxStepLine)
	for lines.Scan() {
		var e StepEvent
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			return true, fresh, fmt.Errorf("read the results of a step: %w", err)
		}
		switch {
		case e.State == OperationFailed:
			failed := &Error{Code: CodeInternal, Detail: "operation " + e.OperationID + " failed", OperationID: e.OperationID}
			if e.Problem != nil {
				failed.Code, failed.Detail = Code(e.Problem.Code), e.Problem.Message
			}
			yield(e, failed)
			return false, true, nil
		case e.State != "":
			return false, true, nil
		case e.Action == nil && s.operation != "", e.Action != nil && s.had[e.Action.Index]: // of an earlier answer
			continue
		}
		s.operation, fresh = e.OperationID, true
		if e.Action != nil {
			s.had[e.Action.Index] = true
		}
		if !yield(e, nil) {
			return false, true, nil
		}
	}
	if err := lines.Err(); err != nil {
		return true, fresh, err
	}
	return true, fresh, errStepBroken
}
