package steps

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"runtime/debug"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/operations"
	"github.com/coppice-dev/coppice/controller/sessions"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
)

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
			if w.Borrowed != "" {
				return w.borrow(ctx, row)
			}
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
	if row.Fork != "" { // else the workspace was there before
		problem, err := w.await(ctx, row.Fork)
		if err != nil {
			return err
		}
		if problem != nil {
			return problem
		}
		watch.Lap("fork")
	}
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
	m := Move{Index: row.Index, From: Forking, To: Running}
	if row.Action.OnlyIf.Changed && len(row.Action.Files) == 0 { // files are a change
		mark, err := w.mark(ctx, row)
		if err != nil {
			return err
		}
		m.Result = &Result{Index: row.Index, Mark: mark}
		watch.Lap("mark")
	}
	return w.move(ctx, m)
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
	find := w.uses.Workspace
	if w.Borrowed != "" { // it may be suspended
		find = w.uses.Reach
	}
	if err := w.insist(ctx, func() (err error) {
		ws, err = find(ctx, w.Project, row.Workspace)
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
	mark, epoch := r.Mark, int64(0)
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
		if w.Borrowed != "" {
			r.Session, epoch = out.View.ID, out.View.Epoch
		}
		if mark != "" {
			now, err := w.mark(ctx, row)
			if err != nil {
				return err
			}
			r.Unchanged = now == mark
			watch.Lap("mark")
		}
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
			if r.Session != "" && b.Epoch != epoch {
				return core.Errorf(core.NotFound, core.CodeSessionNotFound, "the workspace was restored after the command, so no checkpoint has what the command did")
			}
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
	r.Problem = &Problem{Category: core.CategoryOf(why), Code: core.CodeOf(why), Message: core.MessageOf(why)}
	if core.CategoryOf(why) == core.Internal {
		w.log.ErrorContext(ctx, "action of a step failed", "operation_id", w.ID, "action", row.Index, "err", why)
	}
	return w.end(ctx, row)
}

// end ends an action in the transaction that begins the termination of its workspace, and waits for the termination: then its room is free.
func (w *work) end(ctx context.Context, row *Row) error {
	m := Move{Index: row.Index, From: row.Phase, To: Ended, Result: &row.Result}
	if row.Workspace == "" || w.Borrowed != "" {
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

// wake tells those who follow the step that an action has ended.
func (w *work) wake() { w.streams.wake(w.ID) }
