package steps

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/controller/guestclient"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/operations"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/controller/sessions"
	"github.com/coppice-dev/coppice/controller/sweep"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/failpoint"
	"github.com/coppice-dev/coppice/internal/pace"
)

const (
	firstPause   = 50 * time.Millisecond // between attempts while the database cannot be reached; it doubles
	longestPause = 2 * time.Second
	awaitSlice   = time.Minute // of one wait for an operation
	sweepBatch   = 50          // steps that one transaction removes

	// keyPrefix begins the idempotency keys of commands. The API accepts no key that begins with a space, so no client can use one of these first.
	keyPrefix = " step:"
)

// Where a controller may be killed in the life of an action.
var (
	afterFork    = failpoint.New("controller.after_step_fork")    // the fork has ended, no file is written
	afterFiles   = failpoint.New("controller.after_step_files")   // the files are written, no row says so
	afterCommand = failpoint.New("controller.after_step_command") // the command has ended, no row says so
	afterCapture = failpoint.New("controller.after_step_capture") // the checkpoint is made, the workspace goes on
	afterAction  = failpoint.New("controller.after_step_action")  // the action has ended, its workspace is being terminated
)

// Begun is an operation that has begun for an action.
type Begun struct {
	Operation  core.OperationID
	Workspace  core.WorkspaceID
	Checkpoint core.CheckpointID
}

// Note is run in the transaction that begins an operation.
type Note func(ctx context.Context, tx NoteTx, begun Begun) error

// Uses are the use cases that actions consist of. Each does what a separate request does.
type Uses struct {
	// Capture begins a checkpoint of a workspace, and Terminate its termination. Both return without waiting for the end. Terminate fails with
	// STATE_CONFLICT if the workspace is terminated already, or being terminated.
	Capture   func(ctx context.Context, project core.ProjectID, id core.WorkspaceID, node Node, note Note) error
	Terminate func(ctx context.Context, project core.ProjectID, id core.WorkspaceID, note Note) (core.OperationID, error)
	Cancel    func(ctx context.Context, project core.ProjectID, id core.OperationID) error
	// Await waits for the end of an operation. It returns why the operation failed, or why the only child of a fork did.
	Await func(ctx context.Context, project core.ProjectID, id core.OperationID, wait time.Duration) (done bool, err error)

	Workspace  func(ctx context.Context, project core.ProjectID, id core.WorkspaceID) (model.Workspace, error)
	Checkpoint func(ctx context.Context, project core.ProjectID, id core.CheckpointID) (model.Checkpoint, error)
	Write      func(ctx context.Context, s model.Sandbox, f guestclient.PutFile) error
	// Audit records that a file is about to be written, or, with a problem, that it was not.
	Audit func(ctx context.Context, project core.ProjectID, id core.WorkspaceID, path string, problem error) error
	// Exec runs a program to its end and returns the last bytes of its outputs. A repeat under the same claim waits for the first program. follow
	// gets output while the program runs; it may be nil.
	Exec func(ctx context.Context, project core.ProjectID, id core.WorkspaceID, req guestclient.ExecRequest, output int, follow func([]byte)) (sessions.ExecResult, error)
	// Insist repeats a call to a runner that does not answer for a while.
	Insist func(ctx context.Context, call func() error) error
}

// Store runs transactions. Package controller/postgres/steprows has the methods of Tx.
type Store interface {
	// InProject runs fn in a transaction of a project and commits when it returns nil.
	InProject(ctx context.Context, project core.ProjectID, fn func(Tx) error) error
	// InSystem runs fn in a transaction that sees all projects.
	InSystem(ctx context.Context, fn func(Tx) error) error
}

// Step is a step that this controller works on.
type Step struct {
	Ref
	Parallel int
	Created  time.Time
	// Fork begins a fork of one workspace for an action. It waits in line for room.
	Fork func(ctx context.Context, row *Row, note Note) error
	// Prepare does what Action.Prepare says, in the ready workspace of the action. It may be called again. Nil: no action needs it.
	Prepare func(ctx context.Context, ws model.Workspace, row *Row) error
	// Follow gets the output of commands while they run. It may get a part twice if another controller takes over. Nil: nobody follows.
	Follow func(output []byte)
	// Lease returns nil while no other controller can have claimed the step.
	Lease func(ctx context.Context) error
}

// Stepper carries out steps. It is safe for concurrent use.
type Stepper struct {
	uses  Uses
	store Store
	log   *slog.Logger

	streams streams
}

// New makes a stepper. It starts nothing.
func New(uses Uses, store Store, log *slog.Logger) *Stepper {
	return &Stepper{uses: uses, store: store, log: log, streams: newStreams()}
}

// Admit inserts the actions of a step, in the transaction that begins it.
func Admit(ctx context.Context, tx AdmitTx, project core.ProjectID, step core.OperationID, list []Action) error {
	return tx.InsertStepActions(ctx, project, step, list, maxRunning)
}

// Run carries out the actions that have not ended. A problem of an action is its result, and no error.
func (s *Stepper) Run(ctx context.Context, step Step) error {
	var rows []Row
	if err := s.query(ctx, step.Project, func(tx Tx) (err error) {
		rows, err = tx.StepActions(ctx, step.ID)
		return err
	}); err != nil {
		return err
	}
	w := newWork(s, step, rows)
	rows = slices.DeleteFunc(rows, func(r Row) bool { return r.Phase == Ended })
	// What has a workspace comes first: others may wait for its room.
	slices.SortStableFunc(rows, func(a, b Row) int { return rank(a) - rank(b) })
	for _, r := range rows {
		if r.Phase != Pending {
			w.holding++
		}
	}
	ctx, cancel := context.WithDeadlineCause(ctx, step.Created.Add(maxTime), errTooLong)
	defer cancel()
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(max(1, step.Parallel))
	for _, r := range rows {
		group.Go(func() error {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return w.guarded(ctx, r.Index, func() error { return w.act(ctx, r.Index, r.Phase != Pending) })
		})
	}
	return group.Wait()
}

func rank(r Row) int {
	if r.Phase == Pending {
		return 1
	}
	return 0
}

// RunOne carries out one action from where its row says, and returns its result.
func (s *Stepper) RunOne(ctx context.Context, step Step, index int) (Result, error) {
	var row Row
	read := func() error {
		return s.query(ctx, step.Project, func(tx Tx) (err error) {
			row, err = tx.StepAction(ctx, step.ID, index)
			return err
		})
	}
	if err := read(); err != nil {
		return Result{}, err
	}
	if row.Phase != Ended {
		w := newWork(s, step, []Row{row})
		if row.Phase != Pending {
			w.holding++
		}
		if err := w.guarded(ctx, index, func() error { return w.act(ctx, index, row.Phase != Pending) }); err != nil {
			return Result{}, err
		}
		if err := read(); err != nil {
			return Result{}, err
		}
	}
	return row.Result, nil
}

// Add inserts an action of an operation that makes its actions one after the other. It changes nothing if there is one with the index.
func (s *Stepper) Add(ctx context.Context, ref Ref, index int, a Action) error {
	return s.query(ctx, ref.Project, func(tx Tx) error { return tx.InsertStepAction(ctx, ref, index, a) })
}

// Settle ends an action that has made nothing and need not.
func (s *Stepper) Settle(ctx context.Context, ref Ref, index int, r Result) error {
	err := s.query(ctx, ref.Project, func(tx Tx) error {
		return tx.MoveStepAction(ctx, ref, Move{Index: index, From: Pending, To: Ended, Result: &r})
	})
	if errors.Is(err, ErrMoved) {
		return nil
	}
	return err
}

// Rows returns the phases of the actions of an operation, without their requests and results.
func (s *Stepper) Rows(ctx context.Context, project core.ProjectID, id core.OperationID) (rows []Row, err error) {
	err = s.query(ctx, project, func(tx Tx) (err error) {
		rows, err = tx.StepActions(ctx, id)
		return err
	})
	return rows, err
}

// Bind makes a call that may be repeated begin its session only once. what tells the sessions of an action apart.
func Bind(ctx context.Context, step core.OperationID, index int, what string) context.Context {
	return request.WithClaim(ctx, &request.Claim{Key: keyPrefix + string(step) + ":" + strconv.Itoa(index) + what, Kind: "sess"})
}

// TakeBack ends what a step has begun and not finished: forks are canceled, and workspaces terminated. A checkpoint that has begun is
// finished first, so that its action ends with its result. Nothing may work on the step meanwhile.
func (s *Stepper) TakeBack(ctx context.Context, step Step, why error) error {
	var rows []Row
	if err := s.query(ctx, step.Project, func(tx Tx) (err error) {
		rows, err = tx.StepActions(ctx, step.ID)
		return err
	}); err != nil {
		return err
	}
	w := newWork(s, step, rows)
	var group errgroup.Group
	group.SetLimit(max(1, step.Parallel))
	for _, r := range rows {
		if r.Phase == Ended {
			continue
		}
		group.Go(func() error {
			for { // a transaction of the controller that had the lease before may still move the action
				err := w.guarded(ctx, r.Index, func() error { return w.takeBack(ctx, r.Index, why) })
				if !errors.Is(err, ErrMoved) {
					return err
				}
			}
		})
	}
	return group.Wait()
}

func (w *work) takeBack(ctx context.Context, index int, why error) error {
	row, err := w.read(ctx, index)
	if err != nil {
		return err
	}
	switch row.Phase {
	case Ended:
		w.wake()
		return nil
	case Capturing:
		return w.act(ctx, index, true)
	case Forking:
		if err := w.insist(ctx, func() error { return w.uses.Cancel(ctx, w.Project, row.Fork) }); err != nil {
			return err
		}
		if _, err := w.await(ctx, row.Fork); err != nil {
			return err
		}
	case Pending, Running:
	}
	return w.fail(ctx, &row, why)
}

// work is the work on one step.
type work struct {
	*Stepper
	Step
	actions int
	line    chan struct{} // has a value for each action that waits in line for room

	// room guards the fields below.
	room            sync.Mutex
	trying, holding int           // actions of this step that look for room, and that have it
	freed           chan struct{} // closed and replaced when one has it no longer
	hopeless        chan struct{} // closed and replaced when there are neither
}

func newWork(s *Stepper, step Step, rows []Row) *work {
	return &work{
		Stepper: s, Step: step, actions: len(rows), line: make(chan struct{}, maxInLine), freed: make(chan struct{}), hopeless: make(chan struct{}),
	}
}

// act carries out one action, from its present phase to its end.
func (w *work) act(ctx context.Context, index int, holds bool) error {
	if holds {
		defer w.release()
	}
	watch := core.NewStopwatch()
	for {
		row, err := w.read(ctx, index)
		if err != nil {
			return err
		}
		if row.Phase == Ended {
			w.wake()
			return nil
		}
		begun, err := w.advance(ctx, &row, watch)
		if begun {
			defer w.release()
		}
		switch {
		case err == nil || errors.Is(err, ErrMoved): // an attempt before was committed although its answer was lost
		case stops(ctx, err):
			return stopped(ctx, err)
		default:
			err = w.fail(ctx, &row, err)
			switch {
			case err == nil || errors.Is(err, ErrMoved):
			case stops(ctx, err):
				return stopped(ctx, err)
			default:
				return err
			}
		}
	}
}

// guarded does something for an action. A panic is an error of it, and does not end the controller.
func (w *work) guarded(ctx context.Context, action int, do func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			w.log.ErrorContext(ctx, "action of a step panicked", "operation_id", w.ID, "action", action, "panic", fmt.Sprint(r), "stack", string(debug.Stack()))
			err = core.Errorf(core.Internal, core.CodeInternal, "something went wrong inside Coppice; the log has the cause under operation %s", w.ID)
		}
	}()
	return do()
}

// advance takes an action out of its phase. A panic ends this action as failed. begun says that the action has a workspace from now on.
func (w *work) advance(ctx context.Context, row *Row, watch *core.Stopwatch) (begun bool, err error) {
	err = w.guarded(ctx, row.Index, func() (err error) {
		switch row.Phase {
		case Pending:
			begun, err = w.fork(ctx, row)
		case Forking:
			err = w.prepare(ctx, row, watch)
		case Running:
			err = w.run(ctx, row, watch)
		case Capturing:
			err = w.captured(ctx, row, watch)
		case Ended:
		}
		return err
	})
	return begun, err
}

// stops reports whether an error ends the work on the whole step here, instead of one action.
func stops(ctx context.Context, err error) bool {
	return ctx.Err() != nil || errors.Is(err, operations.ErrLeaseLost) || core.CodeOf(err) == core.CodeControllerStopping
}

// stopped says why the step is left to another controller, or to a later start.
func stopped(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, operations.ErrLeaseLost):
		return err
	}
	return fmt.Errorf("%w: %w", operations.ErrLeaseLost, err) // this controller stops
}

// prepare waits for the fork of an action, and writes its files.
func (w *work) prepare(ctx context.Context, row *Row, watch *core.Stopwatch) error {
	problem, err := w.await(ctx, row.Fork)
	if err != nil {
		return err
	}
	if problem != nil {
		return problem
	}
	watch.Lap("fork")
	if err := afterFork.Hit(ctx); err != nil {
		return err
	}
	if len(row.Action.Files) > 0 {
		if err := w.write(ctx, row); err != nil {
			return err
		}
		watch.Lap("files")
	}
	if row.Action.Prepare != nil {
		if err := w.insist(ctx, func() error { return w.prepareMore(ctx, row) }); err != nil {
			return err
		}
		watch.Lap("prepare")
	}
	if err := afterFiles.Hit(ctx); err != nil {
		return err
	}
	return w.move(ctx, Move{Index: row.Index, From: Forking, To: Running})
}

func (w *work) prepareMore(ctx context.Context, row *Row) error {
	ws, err := w.uses.Workspace(ctx, w.Project, row.Workspace)
	if err != nil {
		return err
	}
	err = w.uses.Insist(ctx, func() error {
		if err := w.Lease(ctx); err != nil { // as for files
			return err
		}
		return w.Prepare(ctx, ws, row)
	})
	if err != nil && stops(ctx, err) {
		return stopped(ctx, err)
	}
	return err
}

func (w *work) write(ctx context.Context, row *Row) error {
	var ws model.Workspace
	if err := w.insist(ctx, func() (err error) {
		ws, err = w.uses.Workspace(ctx, w.Project, row.Workspace)
		return err
	}); err != nil {
		return err
	}
	for i, f := range row.Action.Files {
		if err := w.insist(ctx, func() error { return w.uses.Audit(ctx, w.Project, ws.ID, f.Path, nil) }); err != nil {
			return err
		}
		err := w.uses.Insist(ctx, func() error {
			if err := w.Lease(ctx); err != nil { // another controller may have started the command, which may have changed the file
				return err
			}
			return w.uses.Write(ctx, ws.Sandbox, f)
		})
		if err != nil {
			if stops(ctx, err) {
				return stopped(ctx, err)
			}
			if err := w.insist(ctx, func() error { return w.uses.Audit(ctx, w.Project, ws.ID, f.Path, err) }); err != nil {
				return err
			}
			return core.Wrapf(err, core.CategoryOf(err), core.CodeOf(err), "files.%d: %s", i, core.MessageOf(err))
		}
	}
	return nil
}

// run runs the command of an action and decides what is kept.
func (w *work) run(ctx context.Context, row *Row, watch *core.Stopwatch) error {
	r := &row.Result
	*r = Result{Index: row.Index, Kept: KeepNothing, Workspace: row.Workspace}
	if row.Action.Command != nil {
		out, err := w.exec(ctx, row)
		if err != nil {
			return err
		}
		watch.Lap("command")
		if err := afterCommand.Hit(ctx); err != nil {
			return err
		}
		g := out.View.Guest
		r.ExitCode, r.Signal, r.TimedOut = g.ExitCode, core.Clip(g.Signal), g.TimedOut
		r.Score = scoreOf(out.Stdout, out.StdoutTruncated)
		r.Stdout, r.StdoutTruncated = clip(out.Stdout, out.StdoutTruncated, w.actions)
		r.Stderr, r.StderrTruncated = clip(out.Stderr, out.StderrTruncated, w.actions)
	}
	r.Timings = watch.Timings()
	if row.Action.Keep == KeepNothing || !row.Action.OnlyIf.meets(*r) {
		return w.end(ctx, row)
	}
	r.Kept = row.Action.Keep
	if r.Kept == KeepWorkspace {
		return w.move(ctx, Move{Index: row.Index, From: Running, To: Ended, Result: r})
	}
	node, err := w.node(row)
	if err != nil {
		return err
	}
	err = w.insist(ctx, func() error {
		return w.uses.Capture(ctx, w.Project, row.Workspace, node, func(ctx context.Context, tx NoteTx, b Begun) error {
			r.Checkpoint = b.Checkpoint
			return tx.MoveStepAction(ctx, w.Ref, Move{Index: row.Index, From: Running, To: Capturing, Checkpoint: b.Checkpoint, Result: r})
		})
	})
	return err
}

// exec runs the command once, however often it is called for the action.
func (w *work) exec(ctx context.Context, row *Row) (out sessions.ExecResult, err error) {
	err = w.insist(ctx, func() error {
		return w.uses.Insist(ctx, func() (err error) {
			out, err = w.uses.Exec(Bind(ctx, w.ID, row.Index, ""), w.Project, row.Workspace, *row.Action.Command, maxOutput, w.Step.Follow)
			return err
		})
	})
	return out, err
}

// node is the checkpoint of an action, with the step's annotation.
func (w *work) node(row *Row) (Node, error) {
	b, err := json.Marshal(annotation{Operation: w.ID, Action: row.Index, ExitCode: row.Result.ExitCode, Score: row.Result.Score})
	if err != nil {
		return Node{}, fmt.Errorf("encode annotation: %w", err)
	}
	node := row.Action.Node
	node.Annotations = maps.Clone(node.Annotations)
	if node.Annotations == nil {
		node.Annotations = map[string]json.RawMessage{}
	}
	node.Annotations[Annotation] = b
	return node, nil
}

// captured waits for the checkpoint of an action, and ends the action.
func (w *work) captured(ctx context.Context, row *Row, watch *core.Stopwatch) error {
	var cp model.Checkpoint
	err := w.insist(ctx, func() (err error) {
		cp, err = w.uses.Checkpoint(ctx, w.Project, row.Checkpoint)
		return err
	})
	if err != nil {
		return err
	}
	problem, err := w.await(ctx, cp.OperationID)
	if err != nil {
		return err
	}
	if problem != nil {
		return problem
	}
	watch.Lap("checkpoint")
	if err := afterCapture.Hit(ctx); err != nil {
		return err
	}
	row.Result.Timings = watch.Timings()
	return w.end(ctx, row)
}

// fail ends an action with a problem. What is known of its command stays in its result.
func (w *work) fail(ctx context.Context, row *Row, why error) error {
	r := &row.Result
	r.Index, r.Workspace, r.Kept, r.Checkpoint = row.Index, row.Workspace, KeepNothing, ""
	r.Problem = &Problem{Code: core.CodeOf(why), Message: core.MessageOf(why)}
	if core.CategoryOf(why) == core.Internal {
		w.log.ErrorContext(ctx, "action of a step failed", "operation_id", w.ID, "action", row.Index, "err", why)
	}
	return w.end(ctx, row)
}

// end ends an action in the transaction that begins the termination of its workspace, and waits for the termination: then its room is free.
func (w *work) end(ctx context.Context, row *Row) error {
	m := Move{Index: row.Index, From: row.Phase, To: Ended, Result: &row.Result}
	if row.Workspace == "" {
		return w.move(ctx, m)
	}
	var termination core.OperationID
	err := w.insist(ctx, func() (err error) {
		for {
			termination, err = w.uses.Terminate(ctx, w.Project, row.Workspace, func(ctx context.Context, tx NoteTx, _ Begun) error {
				return tx.MoveStepAction(ctx, w.Ref, m)
			})
			if core.CodeOf(err) != core.CodeStateConflict {
				return err
			}
			ws, err := w.uses.Workspace(ctx, w.Project, row.Workspace)
			switch {
			case err != nil:
				return err
			case ws.State == core.WorkspaceTerminating || ws.State == core.WorkspaceTerminated: // somebody else terminates it
				return w.move(ctx, m)
			}
			if err := pace.Pause(ctx, firstPause); err != nil { // it has changed meanwhile: it was restored, for example
				return err
			}
		}
	})
	if err != nil {
		return err
	}
	w.wake()
	if termination == "" {
		return nil
	}
	if err := afterAction.Hit(ctx); err != nil {
		return err
	}
	_, err = w.await(ctx, termination)
	return err
}

// move moves an action in a transaction of its own.
func (w *work) move(ctx context.Context, m Move) error {
	return w.query(ctx, w.Project, func(tx Tx) error { return tx.MoveStepAction(ctx, w.Ref, m) })
}

func (w *work) read(ctx context.Context, index int) (row Row, err error) {
	err = w.query(ctx, w.Project, func(tx Tx) (err error) {
		row, err = tx.StepAction(ctx, w.ID, index)
		return err
	})
	return row, err
}

// await waits for the end of an operation. problem says why it failed.
func (w *work) await(ctx context.Context, id core.OperationID) (problem, err error) {
	for {
		var done bool
		err := w.insist(ctx, func() (err error) {
			done, err = w.uses.Await(ctx, w.Project, id, awaitSlice)
			if done {
				problem, err = err, nil
			}
			return err
		})
		if err != nil || done {
			return problem, err
		}
	}
}

// query runs a transaction until the database accepts it.
func (s *Stepper) query(ctx context.Context, project core.ProjectID, fn func(Tx) error) error {
	return s.insist(ctx, func() error { return s.store.InProject(ctx, project, fn) })
}

// insist repeats a call while the database cannot be reached: a step that was accepted is not given up for that.
func (s *Stepper) insist(ctx context.Context, call func() error) error {
	for wait := firstPause; ; wait = min(2*wait, longestPause) {
		err := call()
		if err != nil && ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if core.CodeOf(err) != core.CodeDatabaseUnavailable {
			return err
		}
		if err := pace.Pause(ctx, wait); err != nil {
			return err
		}
	}
}

// wake tells those who follow the step that an action has ended.
func (w *work) wake() { w.streams.wake(w.ID) }

// Results returns the results of the actions that have ended, by their index.
func (s *Stepper) Results(ctx context.Context, project core.ProjectID, step core.OperationID) (list []Result, err error) {
	err = s.store.InProject(ctx, project, func(tx Tx) (err error) {
		list, err = tx.StepResults(ctx, step, nil)
		return err
	})
	slices.SortFunc(list, func(a, b Result) int { return a.Index - b.Index })
	return list, err
}

// Sweep removes the results of steps that ended long ago, and of all but the newest steps of a project.
func (s *Stepper) Sweep(ctx context.Context) error {
	return sweep.Batches(ctx, sweepBatch, func(ctx context.Context) (n int, err error) {
		err = s.store.InSystem(ctx, func(tx Tx) (err error) {
			n, err = tx.SweepSteps(ctx, kept, maxKept, sweepBatch)
			return err
		})
		return n, err
	})
}
