package steps

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"math"
	"slices"
	"time"
	"unicode"

	"github.com/coppice-dev/coppice/controller/guestclient"
	"github.com/coppice-dev/coppice/controller/operations"
	"github.com/coppice-dev/coppice/controller/prepare"
	"github.com/coppice-dev/coppice/core"
)

// Bounds of steps.
const (
	MaxActions  = 256 // of a step
	MaxParallel = 64  // actions of a step that have a workspace at the same time
	MaxFiles    = 64  // of an action

	maxTime      = 20 * time.Hour // of a step: shorter than the life of its idempotency key, so that a repeat never begins another step
	maxInLine    = 4              // actions of a step that wait in the line for room at the same time
	maxRunning   = 32             // steps of a project that have not ended
	maxWithin    = 256            // steps of a project's workspaces that have not ended
	maxKept      = 1_000          // ended steps of a project whose results are kept
	maxOutput    = 64 << 10       // of each output of an action
	maxOutputAll = 4 << 20        // of all outputs of a step
)

const (
	defaultParallel = 8
	defaultTimeout  = time.Minute
	kept            = 24 * time.Hour // results

	// Every is the time between two sweeps.
	Every = time.Minute
)

// Annotation is the annotation of a node that a step made. Clients can set it on other nodes, so it proves nothing.
const Annotation = "coppice.step/v1"

// Keep says what an action leaves behind.
type Keep string

// What actions leave behind.
const (
	KeepCheckpoint Keep = "checkpoint"
	KeepWorkspace  Keep = "workspace"
	KeepNothing    Keep = "nothing"
)

// Action is one action of a step. Its row keeps it as JSON until the action has ended.
type Action struct {
	Name    string                   `json:"name,omitempty"` // of the workspace
	Files   []guestclient.PutFile    `json:"files,omitempty"`
	Command *guestclient.ExecRequest `json:"command,omitempty"` // nil: only files are written
	Keep    Keep                     `json:"keep"`
	OnlyIf  Condition                `json:"only_if,omitzero"`
	Node    Node                     `json:"node,omitzero"`

	// Prepare is done in the workspace after its files are written and before its command runs; Step.Prepare reads it. Nil: nothing.
	Prepare json.RawMessage `json:"prepare,omitempty"`
}

// Node has what the checkpoint of an action gets.
type Node struct {
	Name        string                     `json:"name,omitempty"`
	Labels      map[string]string          `json:"labels,omitempty"`
	Annotations map[string]json.RawMessage `json:"annotations,omitempty"`
	Pinned      bool                       `json:"pinned,omitempty"`
	Prepare     prepare.Wanted             `json:"prepare,omitzero"`
}

// Condition says when an action leaves something behind. All that is set must hold.
type Condition struct {
	ExitCode *int     `json:"exit_code,omitempty"`
	MinScore *float64 `json:"min_score,omitempty"`
	MaxScore *float64 `json:"max_score,omitempty"`
	Changed  bool     `json:"changed,omitempty"` // the command is not known to have left the machine unchanged
}

// Phase says how far an action has come. A phase that waits for an operation begins in the transaction that begins the
// operation.
type Phase string

// The phases of an action.
const (
	Pending   Phase = "pending"   // it has made nothing
	Forking   Phase = "forking"   // its fork has begun; files may have been written
	Running   Phase = "running"   // all files are written; its command may run
	Capturing Phase = "capturing" // its command has ended; its checkpoint has begun
	Ended     Phase = "ended"     // it has its result
)

// Row is the row of an action.
type Row struct {
	Index      int
	Phase      Phase
	Action     Action // the zero value when it has ended
	Fork       core.OperationID
	Workspace  core.WorkspaceID
	Checkpoint core.CheckpointID
	Result     Result
}

// Result is the result of an action.
type Result struct {
	Index           int               `json:"index"`
	Kept            Keep              `json:"kept"`
	Checkpoint      core.CheckpointID `json:"checkpoint_id,omitempty"` // if a checkpoint is kept
	Workspace       core.WorkspaceID  `json:"workspace_id,omitempty"`
	ExitCode        *int              `json:"exit_code,omitempty"` // nil: no command has ended
	Signal          string            `json:"signal,omitempty"`
	TimedOut        bool              `json:"timed_out,omitempty"`
	Score           *float64          `json:"score,omitempty"`
	Stdout          []byte            `json:"stdout,omitempty"`
	Stderr          []byte            `json:"stderr,omitempty"`
	StdoutTruncated bool              `json:"stdout_truncated,omitempty"`
	StderrTruncated bool              `json:"stderr_truncated,omitempty"`
	Unchanged       bool              `json:"unchanged,omitempty"` // the command has changed nothing, as far as the agent can tell; only if the condition asks
	Problem         *Problem          `json:"problem,omitempty"`
	Timings         []core.Timing     `json:"timings,omitempty"`

	Session core.SessionID `json:"session_id,omitempty"` // of the command, if it ran in a workspace that is not the step's own
	Mark    string         `json:"mark,omitempty"`       // of the machine before the command; empty if there is none, or if the condition does not ask
}

// Problem says why an action failed.
type Problem struct {
	Category core.Category `json:"category,omitempty"`
	Code     core.Code     `json:"code"`
	Message  string        `json:"message"`
}

// Err is the problem as an error.
func (p *Problem) Err() error {
	return core.Errorf(cmp.Or(p.Category, core.Internal), p.Code, "%s", p.Message)
}

// Ref names a step and the epoch of the lease on it.
type Ref struct {
	ID      core.OperationID
	Project core.ProjectID
	Epoch   int64
}

// Move takes an action from one phase to the next. Empty fields leave what the row has.
type Move struct {
	Index      int
	From, To   Phase
	Fork       core.OperationID
	Workspace  core.WorkspaceID
	Checkpoint core.CheckpointID
	Result     *Result
}

// NoteTx has the write that is part of other transactions.
type NoteTx interface {
	// MoveStepAction moves an action. It fails with operations.ErrLeaseLost if the step has ended or has another lease epoch, and with ErrMoved
	// if the action is not in the phase.
	MoveStepAction(ctx context.Context, ref Ref, m Move) error
}

// AdmitTx has what the transactions of a step itself need.
type AdmitTx interface {
	NoteTx
	// InsertStepActions inserts the actions of an operation of a kind. It fails with QUOTA_EXCEEDED if as many of the kind as running have not
	// ended in the project.
	InsertStepActions(ctx context.Context, project core.ProjectID, kind operations.Kind, step core.OperationID, list []Action, running int) error
	// StepResults returns the results of actions that have ended, except some, in the order in which they ended.
	StepResults(ctx context.Context, step core.OperationID, except []int) ([]Result, error)
}

// Tx keeps the actions of steps.
type Tx interface {
	AdmitTx
	// StepActions returns the actions of a step, by their index, without their requests and results.
	StepActions(ctx context.Context, step core.OperationID) ([]Row, error)
	StepAction(ctx context.Context, step core.OperationID, index int) (Row, error)
	// Operation is that of package operations.
	Operation(ctx context.Context, id core.OperationID) (operations.Operation, error)
	// InsertStepAction inserts an action, unless there is one with the index. It fails with operations.ErrLeaseLost as MoveStepAction does.
	InsertStepAction(ctx context.Context, ref Ref, index int, a Action) error
	// SweepSteps removes the actions of at most limit steps that ended more than kept ago, or that are not among the newest of their project.
	SweepSteps(ctx context.Context, kept time.Duration, newest, limit int) (int, error)
}

// ErrMoved says that an action is no longer in the phase in which it was read.
var ErrMoved = errors.New("the action is in another phase")

// errTooLong is the problem of the actions that have not ended when the step has taken too long.
var errTooLong = core.Errorf(core.TimedOut, core.CodeTimedOut, "the step has taken longer than %v; try fewer actions, or more at the same time", maxTime)

// Check completes the actions of a request, and refuses those that cannot be carried out.
func Check(actions []Action, parallel int) (int, error) {
	if n := len(actions); n < 1 || n > MaxActions {
		return 0, core.Errorf(core.Invalid, core.CodeInvalidField, "a step of %d actions; it must have between 1 and %d", n, MaxActions)
	}
	if parallel < 0 || parallel > MaxParallel {
		return 0, core.Errorf(core.Invalid, core.CodeInvalidField, "parallel is %d; it must be between 1 and %d", parallel, MaxParallel)
	}
	for i := range actions {
		if err := actions[i].check(); err != nil {
			return 0, core.Errorf(core.Invalid, core.CodeOf(err), "actions.%d: %s", i, core.MessageOf(err))
		}
	}
	if parallel == 0 {
		parallel = defaultParallel
	}
	return parallel, nil
}

func (a *Action) check() error {
	if a.Keep == "" {
		a.Keep = KeepCheckpoint
	}
	if a.Command != nil && a.Command.TimeoutMS == 0 {
		a.Command.TimeoutMS = defaultTimeout.Milliseconds()
	}
	wrong := func(format string, args ...any) error {
		return core.Errorf(core.Invalid, core.CodeInvalidField, format, args...)
	}
	node := a.Node.Name != "" || a.Node.Pinned || a.Node.Prepare != (prepare.Wanted{}) || len(a.Node.Labels) > 0 || len(a.Node.Annotations) > 0
	switch {
	case a.Command == nil && len(a.Files) == 0:
		return wrong("it has neither a command nor files, so it would change nothing: fork the checkpoint instead")
	case len(a.Files) > MaxFiles:
		return wrong("it has %d files, more than %d", len(a.Files), MaxFiles)
	case a.Command == nil && a.OnlyIf != (Condition{}):
		return wrong("only_if needs a command")
	case a.Keep == KeepNothing && a.OnlyIf != (Condition{}):
		return wrong("only_if has no meaning if nothing is kept")
	case a.Keep != KeepCheckpoint && node:
		return wrong("checkpoint has a meaning only if keep is checkpoint")
	case a.Node.Annotations[Annotation] != nil:
		return wrong("the annotation %s is the step's own", Annotation)
	}
	if a.Node.Name != "" {
		if err := core.ValidateName("checkpoint.name", a.Node.Name); err != nil {
			return err
		}
	}
	if a.Name != "" {
		return core.ValidateName("name", a.Name)
	}
	return nil
}

// meets reports whether the result of a command meets the condition.
func (c Condition) meets(r Result) bool {
	switch {
	case c.ExitCode != nil && (r.ExitCode == nil || *r.ExitCode != *c.ExitCode):
		return false
	case c.MinScore != nil && (r.Score == nil || *r.Score < *c.MinScore):
		return false
	case c.MaxScore != nil && (r.Score == nil || *r.Score > *c.MaxScore):
		return false
	case c.Changed && r.Unchanged:
		return false
	}
	return true
}

// scoreOf reads the score out of the last line of an output. If the output does not have the start of this line, there is no score.
func scoreOf(stdout []byte, truncated bool) *float64 {
	line := bytes.TrimRightFunc(stdout, unicode.IsSpace)
	switch at := bytes.LastIndexByte(line, '\n'); {
	case at >= 0:
		line = line[at+1:]
	case truncated:
		return nil
	}
	line = bytes.TrimSpace(line)
	var number float64
	if json.Unmarshal(line, &number) != nil || bytes.Equal(line, []byte("null")) {
		var object struct {
			Score *float64 `json:"score"`
		}
		if json.Unmarshal(line, &object) != nil || object.Score == nil {
			return nil
		}
		number = *object.Score
	}
	if math.IsInf(number, 0) || math.IsNaN(number) {
		return nil
	}
	return &number
}

// clip leaves the last bytes of an output of an action: all actions of a step share the room equally.
func clip(output []byte, truncated bool, actions int) ([]byte, bool) {
	if over := len(output) - min(maxOutput, maxOutputAll/(2*max(actions, 1))); over > 0 {
		return bytes.Clone(output[over:]), true
	}
	return output, truncated
}

// WithoutOutput returns a copy of results without what the commands wrote.
func WithoutOutput(list []Result) []Result {
	list = slices.Clone(list)
	for i := range list {
		r := &list[i]
		r.Stdout, r.Stderr, r.StdoutTruncated, r.StderrTruncated, r.Score = nil, nil, false, false, nil
	}
	return list
}

// annotation is what a node has from its step.
type annotation struct {
	Operation core.OperationID `json:"operation_id"`
	Action    int              `json:"action"`
	ExitCode  *int             `json:"exit_code,omitempty"`
	Score     *float64         `json:"score,omitempty"`
}
