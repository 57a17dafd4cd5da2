package steps

import (
	"context"
	"errors"
	"log/slog"
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
	Epoch      int64 // of the workspace of a checkpoint
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

	Workspace func(ctx context.Context, project core.ProjectID, id core.WorkspaceID) (model.Workspace, error)
	// Reach returns a workspace whose guest can get requests; it resumes one with auto-resume.
	Reach      func(ctx context.Context, project core.ProjectID, id core.WorkspaceID) (model.Workspace, error)
	Checkpoint func(ctx context.Context, project core.ProjectID, id core.CheckpointID) (model.Checkpoint, error)
	Write      func(ctx context.Context, s model.Sandbox, f guestclient.PutFile) error
	// Audit records that a file is about to be written, or, with a problem, that it was not.
	Audit func(ctx context.Context, project core.ProjectID, id core.WorkspaceID, path string, problem error) error
	// Exec runs a program to its end and returns the last bytes of its outputs. A repeat under the same claim waits for the first program. follow
	// gets output while the program runs; it may be nil.
	Exec func(ctx context.Context, project core.ProjectID, id core.WorkspaceID, req guestclient.ExecRequest, output int, follow func([]byte)) (sessions.ExecResult, error)
	// Mark is a mark of the machine; see sessions.Keeper.Mark.
	Mark func(ctx context.Context, project core.ProjectID, id core.WorkspaceID) (string, error)
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
	// Borrowed is a workspace that was there before. The only action runs in it, and the step does not terminate it. Empty: each action has a fork.
	Borrowed core.WorkspaceID
	// Fork begins a fork of one workspace for an action. It waits in line for room. No fork is needed for a borrowed workspace.
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
func Admit(ctx context.Context, tx AdmitTx, op operations.Operation, list []Action) error {
	return tx.InsertStepActions(ctx, op.ProjectID, op.Kind, op.ID, list, maxRunning)
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
		if row.Fork == "" {
			break
		}
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
