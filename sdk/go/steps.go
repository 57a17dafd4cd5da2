package coppice

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"time"
)

// maxStepLine bounds the result of an action, most of which comes from a guest.
const maxStepLine = 2 << 20

const (
	stepSilence = time.Minute    // the server sends a line at least every 15 s
	keyLife     = 23 * time.Hour // the server keeps an idempotency key for a day; then a repeat would begin another step
)

var errStepBroken = fmt.Errorf("the results of the step broke off: %w", io.ErrUnexpectedEOF)

// Step tries several actions from a checkpoint, each in a fork of its own, and returns when all have ended. An action that failed has a
// Problem, and is no error of the call.
func (c *Client) Step(ctx context.Context, id CheckpointID, req StepRequest) (StepResult, error) {
	var out StepResult
	err := c.start(ctx, creation("v1", "checkpoints", id, "step").json(req), &out)
	return out, err
}

// StepWorkspace writes files, runs a program, and then makes a checkpoint of the workspace if req.When holds. The workspace goes on. If the
// program has run and the checkpoint failed, the result has a Problem, which is no error of the call.
func (c *Client) StepWorkspace(ctx context.Context, id WorkspaceID, req WorkspaceStepRequest) (StepActionResult, error) {
	var out StepActionResult
	err := c.start(ctx, creation("v1", "workspaces", id, "step").json(req), &out)
	return out, err
}

// Output returns the end of what the command wrote to stdout and stderr, decoded.
func (r *StepActionResult) Output() (stdout, stderr []byte, err error) {
	return decodeOutput(r.Stdout, r.Stderr, r.Encoding == StepBase64)
}

// StreamStep is Step with the results as they come: first an event with the operation alone, then one for each action when it ends. If the
// connection breaks, or is silent for a minute, StreamStep asks again under the same key and goes on. It ends with an error if the operation failed, because it was
// canceled for example. If ctx ends first, the step goes on, and the error is an UnfinishedError.
func (c *Client) StreamStep(ctx context.Context, id CheckpointID, req StepRequest) iter.Seq2[StepEvent, error] {
	return func(yield func(StepEvent, error) bool) {
		r := creation("v1", "checkpoints", id, "step").json(req)
		r.key, r.header = keyOf(ctx), http.Header{"Accept": {"application/x-ndjson"}}
		s := &stepStream{had: map[int]bool{}}
		first := time.Now().Round(0) // by wall clock, which goes on while this machine sleeps
		for {
			more, err := c.streamStep(ctx, r, s, yield)
			if !more {
				return
			}
			if ctx.Err() == nil && time.Since(first) < keyLife {
				if err = s.gone.endure(ctx, err); err == nil {
					continue
				}
			}
			if ctx.Err() != nil && s.operation != "" {
				err = &UnfinishedError{OperationID: s.operation, Err: context.Cause(ctx)}
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
	gone      away
}

// streamStep reads one answer. more says that it is not the end.
func (c *Client) streamStep(ctx context.Context, r request, s *stepStream, yield func(StepEvent, error) bool) (more bool, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	quiet := time.AfterFunc(stepSilence, func() { cancel(errSilent) })
	defer quiet.Stop()
	defer func() {
		if err != nil && errors.Is(context.Cause(ctx), errSilent) {
			err = errSilent
		}
	}()
	resp, err := c.send(ctx, r)
	if err != nil {
		if refused, ok := errors.AsType[*Error](err); ok && !unavailable(refused) {
			yield(StepEvent{}, err)
			return false, nil
		}
		return true, err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, maxStepLine)
	lines.Split(wholeLines)
	for quiet.Reset(stepSilence); lines.Scan(); quiet.Reset(stepSilence) {
		quiet.Stop() // the time of the caller does not count
		var e StepEvent
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			yield(e, fmt.Errorf("read the results of a step: %w", err))
			return false, nil
		}
		s.gone.back()
		switch {
		case e.State == OperationFailed:
			failed := &Error{Code: CodeInternal, Detail: "operation " + e.OperationID + " failed", OperationID: e.OperationID}
			if e.Problem != nil {
				failed.Code, failed.Detail = Code(e.Problem.Code), e.Problem.Message
			}
			yield(e, failed)
			return false, nil
		case e.State != "":
			return false, nil
		case e.Action == nil && s.operation != "", e.Action != nil && s.had[e.Action.Index]: // a sign of life, or of an earlier answer
			continue
		}
		s.operation = e.OperationID
		if e.Action != nil {
			s.had[e.Action.Index] = true
		}
		if !yield(e, nil) {
			return false, nil
		}
	}
	if err := lines.Err(); errors.Is(err, bufio.ErrTooLong) {
		yield(StepEvent{}, fmt.Errorf("read the results of a step: %w", err))
		return false, nil
	}
	return true, cmp.Or(lines.Err(), errStepBroken)
}

// unavailable reports whether a server that refuses so may be back soon.
func unavailable(e *Error) bool {
	switch e.Code { //nolint:exhaustive // the rest is for the caller
	case CodeDatabaseUnavailable, "CONTROLLER_STOPPING", "HTTP_502", "HTTP_503":
		return true
	}
	return false
}

// wholeLines is bufio.ScanLines without a last line that is cut short.
func wholeLines(data []byte, _ bool) (advance int, line []byte, err error) {
	if end := bytes.IndexByte(data, '\n'); end >= 0 {
		return end + 1, data[:end], nil
	}
	return 0, nil, nil
}
