// Package stepjson is the wire of steps: their actions, their results, and answers with a result in each
// line.
package stepjson

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"mime"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/labstack/echo/v4"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller/guestclient"
	"github.com/coppice-dev/coppice/controller/httpapi/sse"
	"github.com/coppice-dev/coppice/controller/operations"
	"github.com/coppice-dev/coppice/controller/steps"
	"github.com/coppice-dev/coppice/core"
)

const contentLines = "application/x-ndjson"

type linesKey struct{}

// TakesLines is the middleware that notes for a handler that the client wants the answer in lines.
func TakesLines(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		for _, header := range c.Request().Header.Values("Accept") {
			for one := range strings.SplitSeq(header, ",") {
				if media, _, err := mime.ParseMediaType(one); err == nil && media == contentLines {
					c.SetRequest(c.Request().WithContext(context.WithValue(c.Request().Context(), linesKey{}, true)))
				}
			}
		}
		return next(c)
	}
}

// InLines reports whether the client wants the answer in lines.
func InLines(ctx context.Context) bool {
	lines, _ := ctx.Value(linesKey{}).(bool)
	return lines
}

// ActionIn reads an action, without its node and its command. exec is the command, if there is one. invalid makes the error about a field.
func ActionIn(field string, b api.StepAction, invalid func(field, detail string) error) (a steps.Action, exec *api.ExecRequest, err error) {
	a = steps.Action{
		Name: b.Name, Keep: steps.Keep(b.Keep), OnlyIf: steps.Condition{ExitCode: b.OnlyIf.ExitCode, MinScore: b.OnlyIf.MinScore, MaxScore: b.OnlyIf.MaxScore, Changed: b.OnlyIf.Changed},
	}
	for i, f := range b.Files {
		at := fmt.Sprintf("%sfiles.%d.", field, i)
		if f.Content != "" && len(f.ContentBase64) > 0 {
			return a, nil, invalid(at+"content_base64", "it cannot be given together with content")
		}
		content := f.ContentBase64
		if f.Content != "" {
			content = []byte(f.Content)
		}
		a.Files = append(a.Files, guestclient.PutFile{Path: f.Path, Content: content, Mode: f.Mode, User: f.User})
	}
	if len(b.Command) > 0 {
		return a, &api.ExecRequest{
			Command: b.Command, Cwd: b.Cwd, Env: b.Env, User: b.User, Stdin: b.Stdin, StdinBase64: b.StdinBase64, TimeoutMS: b.TimeoutMS,
		}, nil
	}
	if b.Cwd != "" || len(b.Env) > 0 || b.User != "" || b.Stdin != "" || len(b.StdinBase64) > 0 || b.TimeoutMS != 0 {
		return a, nil, invalid(field+"command", "it is missing, but the action has fields that are about a command")
	}
	return a, nil, nil
}

// Within is the action of a step of a workspace.
func Within(b api.WorkspaceStepRequest) api.StepAction {
	return api.StepAction{
		Files: b.Files, Command: b.Command, Cwd: b.Cwd, Env: b.Env, User: b.User, Stdin: b.Stdin, StdinBase64: b.StdinBase64, TimeoutMS: b.TimeoutMS,
		Checkpoint: b.Checkpoint,
	}
}

// OneOf is the answer to a step of a workspace.
func OneOf(op operations.Operation, list []steps.Result) api.StepActionResult {
	out := api.StepActionResult{
		Kept: api.KeepNothing, Timings: api.Timings{},
		Problem: &api.Failure{Code: string(core.CodeOperationNotFound), Message: "the result of this step is not kept any more"},
	}
	if len(list) > 0 {
		out = actionOf(list[0])
	}
	out.OperationID = string(op.ID)
	return out
}

// ResultOf is the answer to a step.
func ResultOf(op operations.Operation, list []steps.Result) api.StepResult {
	list = slices.SortedFunc(slices.Values(list), func(a, b steps.Result) int { return cmp.Compare(a.Index, b.Index) })
	out := api.StepResult{OperationID: string(op.ID), CheckpointID: string(op.CheckpointID), Timings: TimingsOf(op.Timings), Actions: make([]api.StepActionResult, len(list))}
	for i, r := range list {
		out.Actions[i] = actionOf(r)
	}
	return out
}

// TimingsOf are stages with their times.
func TimingsOf(list []core.Timing) api.Timings {
	out := make(api.Timings, len(list))
	for i, t := range list {
		out[i] = api.Timing{Stage: t.Stage, DurationMS: t.DurationMS}
	}
	return out
}

func actionOf(r steps.Result) api.StepActionResult {
	out := api.StepActionResult{
		Index: r.Index, Kept: api.StepKeep(r.Kept), CheckpointID: string(r.Checkpoint), WorkspaceID: string(r.Workspace), ExitCode: r.ExitCode, Signal: r.Signal,
		SessionID: string(r.Session), Unchanged: r.Unchanged, TimedOut: r.TimedOut, Score: r.Score, StdoutTruncated: r.StdoutTruncated, StderrTruncated: r.StderrTruncated, Timings: TimingsOf(r.Timings),
	}
	if r.ExitCode != nil {
		out.Stdout, out.Stderr, out.Encoding = string(r.Stdout), string(r.Stderr), api.StepUTF8
		if !utf8.Valid(r.Stdout) || !utf8.Valid(r.Stderr) {
			out.Stdout, out.Stderr, out.Encoding = base64.StdEncoding.EncodeToString(r.Stdout), base64.StdEncoding.EncodeToString(r.Stderr), api.StepBase64
		}
	}
	if r.Problem != nil {
		out.Problem = &api.Failure{Code: string(r.Problem.Code), Message: r.Problem.Message}
	}
	return out
}

// Lines is the answer to a step whose results are streamed.
type Lines struct {
	Within time.Duration // a client that has not taken a line by then is cut off
	Alive  time.Duration // between the signs of life
	Log    *slog.Logger

	ctx    context.Context //nolint:containedctx // of the request, whose answer this is
	id     core.OperationID
	follow func(ctx context.Context, give func(steps.Result) error) (operations.Operation, error)
	leave  func()
}

// Stream makes the answer to a request that begins a step, or that repeats one which has: a repeat gets the same results. No step begins if
// there are too many streams.
func Stream[R any](ctx context.Context, stepper *steps.Stepper, project core.ProjectID, begin func() (operations.Answer[R], error)) (*Lines, error) {
	leave, err := stepper.Enter(project)
	if err != nil {
		return nil, err
	}
	streaming := false
	defer func() { // also after a panic
		if !streaming {
			leave()
		}
	}()
	a, err := begin()
	id := a.Operation.ID
	if failed, ok := errors.AsType[*operations.Error](err); ok && (core.CodeOf(err) == core.CodeIdempotencyInProgress || a.Done) {
		id, err = failed.Operation, nil
	}
	if err != nil {
		return nil, err
	}
	streaming = true
	return &Lines{
		ctx: ctx, id: id, leave: leave,
		follow: func(ctx context.Context, give func(steps.Result) error) (operations.Operation, error) {
			return stepper.Follow(ctx, project, id, give)
		},
	}, nil
}

// VisitStepCheckpointResponse writes the lines. If it cannot, the step goes on.
func (l *Lines) VisitStepCheckpointResponse(w http.ResponseWriter) error {
	defer l.leave()
	lines := sse.New(w, l.Within)
	w.Header().Set("Content-Type", contentLines)
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Accel-Buffering", "no") // proxies must not collect
	w.WriteHeader(http.StatusOK)
	send := func(e api.StepEvent) error {
		e.OperationID = string(l.id)
		b, err := json.Marshal(e)
		if err != nil {
			return fmt.Errorf("encode a line of a step: %w", err)
		}
		return lines.Send(append(b, '\n'))
	}
	if err := l.write(send); err != nil { // the answer has begun, so its end must show that it is not whole
		l.Log.InfoContext(l.ctx, "stream of a step cut off", "operation_id", l.id, "err", err)
		panic(http.ErrAbortHandler)
	}
	return nil
}

func (l *Lines) write(send func(api.StepEvent) error) error {
	if err := send(api.StepEvent{}); err != nil {
		return err
	}
	last, err := l.results(send)
	if err != nil {
		return err
	}
	end := api.StepEvent{State: api.OperationState(last.State)}
	if p := last.Problem; p != nil {
		end.Problem = &api.Failure{Code: string(p.Code), Message: p.Msg}
	}
	return send(end)
}

// results sends the results until the step ends. It repeats the first line again and again: otherwise a proxy would take a quiet connection
// for an idle one, and neither side would notice that it is lost.
func (l *Lines) results(send func(api.StepEvent) error) (operations.Operation, error) {
	var mu sync.Mutex
	one := func(e api.StepEvent) error {
		mu.Lock()
		defer mu.Unlock()
		return send(e)
	}
	ctx, cancel := context.WithCancelCause(l.ctx)
	ended := make(chan struct{})
	defer func() {
		cancel(nil)
		<-ended // nothing comes after the last line
	}()
	go func() {
		defer close(ended)
		tick := time.NewTicker(l.Alive)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if err := one(api.StepEvent{}); err != nil {
				cancel(err)
				return
			}
		}
	}()
	return l.follow(ctx, func(r steps.Result) error {
		action := actionOf(r)
		return one(api.StepEvent{Action: &action})
	})
}
