package mcp

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// maxStepOutput bounds what an answer has of all output of a step, in bytes.
const maxStepOutput = 256 << 10

type stepIn struct {
	Of          string         `json:"of" jsonschema:"id or name of a checkpoint" length:"1,64"`
	Actions     []stepActionIn `json:"actions" jsonschema:"what to try, each in a fork of its own" items:"1,64"`
	Parallel    int            `json:"parallel,omitempty" jsonschema:"how many of them have a workspace at the same time" range:"1,64" default:"8"`
	WaitSeconds int            `json:"wait_seconds,omitempty" jsonschema:"how long to wait for the end; after that the step goes on, and step_results waits for its results" range:"1,600" default:"45"`
	MaxBytes    int            `json:"max_bytes,omitempty" jsonschema:"how much of each stream of an action to return" range:"1,65536" default:"2048"`
}

type stepActionIn struct {
	Command        []string          `json:"command,omitempty" jsonschema:"program and arguments; no shell is involved. Give either command or shell, or only files" items:"1,1024"`
	Shell          string            `json:"shell,omitempty" jsonschema:"a text for sh -c"`
	Files          map[string]string `json:"files,omitempty" jsonschema:"texts by absolute path; they are written before the program starts"`
	Cwd            string            `json:"cwd,omitempty" jsonschema:"directory to run in" length:"1,4096"`
	Env            map[string]string `json:"env,omitempty" jsonschema:"environment variables"`
	Stdin          string            `json:"stdin,omitempty" jsonschema:"text that the program reads"`
	TimeoutSeconds int               `json:"timeout_seconds,omitempty" jsonschema:"kill the program after this time; 60 if absent" range:"1,3600"`
	Keep           string            `json:"keep,omitempty" jsonschema:"what to leave behind" enum:"checkpoint|workspace|nothing" default:"\"checkpoint\""`
	IfExitCode     *int              `json:"if_exit_code,omitempty" jsonschema:"keep it only if the program ends with this code" range:"0,255"`
	IfMinScore     *float64          `json:"if_min_score,omitempty" jsonschema:"keep it only if the score is at least this. The score is the last line of the standard output: a number, or JSON with a number \"score\""`
	Name           string            `json:"name,omitempty" jsonschema:"of the checkpoint; unique among those of the project" length:"1,63"`
}

type stepResultsIn struct {
	Operation   string `json:"operation" jsonschema:"id of the operation, as step returned it" length:"1,64"`
	Action      *int   `json:"action,omitempty" jsonschema:"only the result of this action, by its position from 0" range:"0,255"`
	WaitSeconds int    `json:"wait_seconds,omitempty" jsonschema:"how long to wait for the end of the step" range:"0,600"`
	MaxBytes    int    `json:"max_bytes,omitempty" jsonschema:"how much of each stream of an action to return" range:"1,65536" default:"2048"`
}

type stepOut struct {
	Operation string           `json:"operation" jsonschema:"the id for step_results"`
	State     string           `json:"state" jsonschema:"running, succeeded or failed"`
	Actions   []stepActionView `json:"actions" jsonschema:"the actions that have ended, in the order of the request. step_results has none of them while the step is running"`
	Failure   *failureView     `json:"failure,omitempty" jsonschema:"why the step failed"`
}

// stepActionView is how an action ended.
type stepActionView struct {
	Index      int          `json:"index" jsonschema:"position in the request, from 0"`
	Kept       string       `json:"kept" jsonschema:"checkpoint, workspace or nothing"`
	Checkpoint string       `json:"checkpoint,omitempty" jsonschema:"id of the checkpoint, if one was kept"`
	Workspace  string       `json:"workspace,omitempty" jsonschema:"id of the workspace, if it was kept"`
	ExitCode   *int         `json:"exit_code,omitempty" jsonschema:"128 + signal if a signal ended the program"`
	TimedOut   bool         `json:"timed_out,omitempty"`
	Score      *float64     `json:"score,omitempty"`
	Stdout     *stepOutput  `json:"stdout,omitempty"`
	Stderr     *stepOutput  `json:"stderr,omitempty"`
	Failure    *failureView `json:"failure,omitempty" jsonschema:"why the action failed; it left nothing behind"`
}

// stepOutput is the end of what a program of a step wrote.
type stepOutput struct {
	guestBytes
	CutBytes int  `json:"cut_bytes,omitempty" jsonschema:"how many bytes before it step_results still has"`
	Lost     bool `json:"lost,omitempty" jsonschema:"bytes before these are not kept"`
}

func (r *registry) addStepTools() {
	add(r, tool{
		name: "step", title: "Try several actions from a checkpoint", kind: adds, open: true,
		about: "Try several actions from one checkpoint in one call. Each forks the checkpoint, writes files, runs a program, and keeps a checkpoint (the default), the workspace or nothing, if its condition holds. What is not kept is deleted. Use it to expand a search; use fork to work in the copies yourself.",
	}, r.step)
	add(r, tool{
		name: "step_results", title: "Show the results of a step", kind: reads,
		about: "Show the results of a step that has ended, or of one of its actions with more of the output. With wait_seconds it waits for the end of the step. The last 64 KiB of each stream are kept for a day, or less with more than 32 actions.",
	}, r.stepResults)
}

func (r *registry) step(ctx context.Context, in stepIn) (stepOut, string, error) {
	req := coppice.StepRequest{Parallel: in.Parallel}
	for i, a := range in.Actions {
		action, err := a.request()
		if err != nil {
			return stepOut{}, "", invalid("action %d: %v", i, err)
		}
		req.Actions = append(req.Actions, action)
	}
	cp, err := r.checkpointID(ctx, in.Of)
	if err != nil {
		return stepOut{}, "", err
	}
	waiting, cancel := context.WithTimeout(ctx, time.Duration(in.WaitSeconds)*time.Second)
	defer cancel()
	out := stepOut{State: string(coppice.OperationSucceeded), Actions: []stepActionView{}}
	limit := min(in.MaxBytes, maxStepOutput/(2*len(in.Actions)))
	key := "mcp-" + rand.Text()
	for e, err := range r.client.StreamStep(coppice.WithIdempotencyKey(waiting, key), cp, req) {
		switch {
		case err == nil:
			if out.Operation = e.OperationID; e.Action != nil {
				out.Actions = append(out.Actions, viewStepAction(*e.Action, limit))
			}
			continue
		case e.State == coppice.OperationFailed:
			out.State, out.Failure = string(e.State), viewFailure(e.Problem)
		default:
			if out.Operation, err = r.leaveStep(ctx, waiting, stepAsked{cp, req, key, out.Operation}, err); err != nil {
				return out, "", err
			}
			out.State = string(coppice.OperationRunning)
		}
		break
	}
	slices.SortFunc(out.Actions, func(x, y stepActionView) int { return x.Index - y.Index })
	return out, out.text(len(in.Actions)), nil
}

// stepAsked is a step that the API was asked for.
type stepAsked struct {
	of        coppice.CheckpointID
	request   coppice.StepRequest
	key       string
	operation coppice.OperationID // "": no answer has begun
}

// leaveStep stops reading the results of a step because of an error. If the client has canceled the call, it cancels the step, because
// nobody else knows of it; otherwise the step goes on, and leaveStep returns its operation, or an error that names it.
func (r *registry) leaveStep(ctx, waiting context.Context, s stepAsked, why error) (coppice.OperationID, error) {
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), killPause)
	defer cancel()
	canceled, waited := ctx.Err(), waiting.Err() != nil
	_, refused := errors.AsType[*coppice.Error](why)
	if s.operation == "" && (waited || !refused) { // the server may have begun it: only it knows
		next, stop := iter.Pull2(r.client.StreamStep(coppice.WithIdempotencyKey(last, s.key), s.of, s.request))
		defer stop()
		e, err, _ := next()
		if _, refused = errors.AsType[*coppice.Error](err); refused {
			return "", errors.Join(canceled, err)
		}
		if err != nil {
			hint := hints[codeServer] + " The step may have begun: call tree to see before you repeat this call."
			return "", errors.Join(canceled, &fault{code: codeServer, detail: "no answer to the step has arrived", hint: hint})
		}
		s.operation, waited = e.OperationID, true
	}
	switch {
	case canceled != nil:
		_, err := r.client.CancelOperation(last, s.operation)
		return s.operation, errors.Join(canceled, err)
	case waited:
		return s.operation, nil
	case s.operation == "":
		return "", why
	}
	f := *explain(why)
	f.detail = "step " + s.operation + ": " + f.detail
	f.hint += " The step goes on: step_results with operation " + s.operation + " has its results."
	return s.operation, &f
}

func (a stepActionIn) request() (coppice.StepAction, error) {
	if len(a.Command) > 0 && a.Shell != "" {
		return coppice.StepAction{}, errors.New("give either command or shell")
	}
	out := coppice.StepAction{
		Command: a.Command, Cwd: a.Cwd, Env: a.Env, Stdin: a.Stdin, TimeoutMS: int64(a.TimeoutSeconds) * 1000, Keep: coppice.StepKeep(a.Keep),
		OnlyIf: coppice.StepCondition{ExitCode: a.IfExitCode, MinScore: a.IfMinScore}, Checkpoint: coppice.CreateCheckpointRequest{Name: a.Name},
	}
	if a.Shell != "" {
		out.Command = []string{"sh", "-c", a.Shell}
	}
	for path, content := range a.Files {
		out.Files = append(out.Files, coppice.StepFile{Path: path, Content: content})
	}
	slices.SortFunc(out.Files, func(x, y coppice.StepFile) int { return strings.Compare(x.Path, y.Path) })
	return out, nil
}

func (r *registry) stepResults(ctx context.Context, in stepResultsIn) (stepOut, string, error) {
	op, err := r.client.Operation(ctx, in.Operation)
	if err != nil {
		return stepOut{}, "", err
	}
	if op.Kind != coppice.OperationStepCheckpoint {
		return stepOut{}, "", invalid("operation %s is no step", in.Operation)
	}
	if !op.Done() && in.WaitSeconds > 0 {
		waiting, cancel := context.WithTimeout(ctx, time.Duration(in.WaitSeconds)*time.Second)
		defer cancel()
		if ended, err := r.client.WaitOperation(waiting, op.ID); err == nil {
			op = ended
		} else if waiting.Err() == nil || ctx.Err() != nil {
			return stepOut{}, "", err
		}
	}
	out := stepOut{Operation: op.ID, State: string(op.State), Actions: []stepActionView{}, Failure: viewFailure(op.Problem)}
	var res coppice.StepResult
	if len(op.Result) > 0 {
		if err := json.Unmarshal(op.Result, &res); err != nil {
			return stepOut{}, "", fmt.Errorf("read the results of a step: %w", err)
		}
	}
	if in.Action != nil {
		res.Actions = slices.DeleteFunc(res.Actions, func(a coppice.StepActionResult) bool { return a.Index != *in.Action })
	}
	limit := min(in.MaxBytes, maxStepOutput/max(2*len(res.Actions), 1))
	for _, a := range res.Actions {
		out.Actions = append(out.Actions, viewStepAction(a, limit))
	}
	if in.Action != nil && op.Done() && len(out.Actions) == 0 {
		return stepOut{}, "", invalid("operation %s has no result of an action %d; results stay for a day", op.ID, *in.Action)
	}
	return out, out.text(len(out.Actions)), nil
}

func viewStepAction(a coppice.StepActionResult, limit int) stepActionView {
	out := stepActionView{
		Index: a.Index, Kept: string(a.Kept), Checkpoint: a.CheckpointID, ExitCode: a.ExitCode, TimedOut: a.TimedOut,
		Score: a.Score, Failure: viewFailure(a.Problem),
		Stdout: viewStepOutput(a.Stdout, a.Encoding, a.StdoutTruncated, limit), Stderr: viewStepOutput(a.Stderr, a.Encoding, a.StderrTruncated, limit),
	}
	if a.Kept == coppice.KeepWorkspace { // the server names also a workspace that is gone
		out.Workspace = a.WorkspaceID
	}
	return out
}

func viewStepOutput(text string, encoding coppice.StepActionResultEncoding, truncated bool, limit int) *stepOutput {
	b := []byte(text)
	if encoding == coppice.StepBase64 {
		b, _ = base64.StdEncoding.DecodeString(text) // the server has made it
	}
	if len(b) == 0 {
		return nil
	}
	out := &stepOutput{CutBytes: max(len(b)-limit, 0), Lost: truncated}
	if encoding != coppice.StepBase64 {
		for out.CutBytes < len(b) && !utf8.RuneStart(b[out.CutBytes]) { // the rest of a character
			out.CutBytes++
		}
	}
	out.guestBytes = newGuestBytes(b[out.CutBytes:])
	return out
}

// text is a step for a model.
func (o stepOut) text(actions int) string {
	var b strings.Builder
	switch o.State {
	case string(coppice.OperationSucceeded):
		fmt.Fprintf(&b, "step %s has ended\n", o.Operation)
	case string(coppice.OperationFailed):
		fmt.Fprintf(&b, "step %s failed", o.Operation)
		if o.Failure != nil {
			fmt.Fprintf(&b, ": %s", o.Failure.Code)
		}
		b.WriteString("\n")
	default:
		fmt.Fprintf(&b, "step %s is running; step_results with this operation and wait_seconds waits for its end\n", o.Operation)
		if actions > 0 {
			fmt.Fprintf(&b, "%d of %d actions have ended\n", len(o.Actions), actions)
		}
	}
	for _, a := range o.Actions {
		a.write(&b, o.Operation)
	}
	return b.String()
}

func (a stepActionView) write(b *strings.Builder, operation string) {
	fmt.Fprintf(b, "action %d: ", a.Index)
	switch {
	case a.Failure != nil:
		fmt.Fprintf(b, "failed: %s\n%s\n", a.Failure.Code, quote("failure; it may quote the workspace", a.Failure.Message.Text))
		return
	case a.TimedOut:
		b.WriteString("killed after its timeout, ")
	case a.ExitCode != nil:
		fmt.Fprintf(b, "exit code %d, ", *a.ExitCode)
	}
	if a.Score != nil {
		fmt.Fprintf(b, "score %g, ", *a.Score)
	}
	switch a.Kept {
	case string(coppice.KeepCheckpoint):
		fmt.Fprintf(b, "kept checkpoint %s\n", a.Checkpoint)
	case string(coppice.KeepWorkspace):
		fmt.Fprintf(b, "kept workspace %s\n", a.Workspace)
	default:
		b.WriteString("kept nothing\n")
	}
	cut := false
	for _, x := range []struct {
		name string
		*stepOutput
	}{{"stdout", a.Stdout}, {"stderr", a.Stderr}} {
		if x.stepOutput == nil {
			continue
		}
		fmt.Fprintf(b, "%s\n", quote(x.name, x.string()))
		if x.Lost {
			fmt.Fprintf(b, "(%s began earlier; those bytes are not kept. Have the program write them to a file)\n", x.name)
		}
		cut = cut || x.CutBytes > 0
	}
	if cut {
		fmt.Fprintf(b, "Earlier output: step_results with operation %s, action %d and max_bytes 65536.\n", operation, a.Index)
	}
}
