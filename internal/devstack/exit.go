package devstack

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// OnExit says what becomes of the running workspaces at the end.
type OnExit string

// The values of OnExit.
const (
	Suspend   OnExit = "suspend"   // checkpointed and stopped: the next start can resume them
	Terminate OnExit = "terminate" // ended for good; their checkpoints stay
	Stop      OnExit = "stop"      // their VMs are stopped: the next start finds them lost
)

// ParseOnExit reads a word.
func ParseOnExit(s string) (OnExit, error) {
	switch o := OnExit(s); o {
	case Suspend, Terminate, Stop:
		return o, nil
	}
	return "", fmt.Errorf("%q is none of suspend, terminate and stop", core.Clip(s))
}

const (
	settleTime     = 15 * time.Minute       // for all workspaces together
	settleTogether = 2                      // a checkpoint is bound by the disk
	settleWait     = 30 * time.Second       // of one request; then it asks again
	settlePause    = 200 * time.Millisecond // between two looks at what is left
)

// settle applies OnExit to the running workspaces. It ends early when somebody hurries. A workspace that is left is stopped with
// its VM.
func (s *stack) settle(ctx context.Context) {
	if s.cfg.OnExit != Suspend && s.cfg.OnExit != Terminate {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTime)
	defer cancel()
	go func() {
		select {
		case <-s.cfg.Hurry:
			cancel()
		case <-ctx.Done():
		}
	}()
	e := settling{list: s.running, act: s.control.Suspend, doing: "suspending", done: "suspended", report: s.report, log: s.log, over: map[core.WorkspaceID]bool{}}
	if s.cfg.OnExit == Terminate {
		e.act, e.doing, e.done = s.control.Terminate, "terminating", "terminated"
	}
	e.run(ctx)
}

// settling ends workspaces in passes, until none is left or the context ends. A workspace can be busy in one pass: it starts, or somebody's
// checkpoint of it runs. Then the next pass finds it again.
type settling struct {
	list        func(context.Context) ([]controller.Workspace, error)
	act         func(context.Context, core.ProjectID, core.WorkspaceID, time.Duration) (controller.Answer, error)
	doing, done string
	report      func(format string, a ...any)
	log         *slog.Logger

	// mu guards the fields below.
	mu      sync.Mutex
	over    map[core.WorkspaceID]bool // workspaces that were ended, or cannot be
	settled int
}

func (e *settling) run(ctx context.Context) {
	seen := map[core.WorkspaceID]bool{}
	for pass := 0; ; pass++ {
		list, err := e.list(ctx)
		if err != nil && ctx.Err() == nil {
			e.log.WarnContext(ctx, "the running workspaces could not be listed, so they are stopped", "err", err)
		}
		list = slices.DeleteFunc(list, func(w controller.Workspace) bool { return e.over[w.ID] })
		for _, w := range list {
			seen[w.ID] = true
		}
		if err != nil || ctx.Err() != nil || len(list) == 0 {
			break
		}
		if pass == 0 {
			e.report("%s %s; Ctrl-C again stops them at once", e.doing, count(len(list)))
		}
		e.pass(ctx, list)
		select {
		case <-time.After(settlePause):
		case <-ctx.Done():
		}
	}
	if len(seen) > 0 {
		e.report("%d of %s %s", e.settled, count(len(seen)), e.done)
	}
}

func (e *settling) pass(ctx context.Context, list []controller.Workspace) {
	var group errgroup.Group
	group.SetLimit(settleTogether)
	for _, w := range list {
		group.Go(func() error {
			e.end(ctx, w)
			return nil
		})
	}
	_ = group.Wait() // no function returns an error
}

// end ends one workspace, unless it is busy.
func (e *settling) end(ctx context.Context, w controller.Workspace) {
	for ctx.Err() == nil {
		answer, err := e.act(ctx, w.ProjectID, w.ID, settleWait)
		if err == nil && !answer.Done {
			continue
		}
		code := core.CodeOf(err)
		if code == core.CodeWorkspaceNotReady || code == core.CodeStateConflict {
			return
		}
		if err != nil {
			e.log.WarnContext(ctx, "a workspace is stopped with its VM", "workspace_id", w.ID, "err", err)
		}
		e.mu.Lock()
		defer e.mu.Unlock()
		e.over[w.ID] = true
		if err == nil {
			e.settled++
		}
		return
	}
}

// running lists the workspaces of all projects whose machines run or are about to.
func (s *stack) running(ctx context.Context) ([]controller.Workspace, error) {
	const page = 500
	var all []controller.Workspace
	f := controller.WorkspaceFilter{States: []core.WorkspaceState{
		core.WorkspaceCreating, core.WorkspaceRestoring, core.WorkspaceQuarantined, core.WorkspaceReady, core.WorkspaceCheckpointing,
	}}
	f.Limit = page
	for {
		var list []controller.Workspace
		err := s.store.InTx(ctx, controller.System(), func(tx controller.AllTx) (err error) {
			list, err = tx.Workspaces(ctx, f)
			return err
		})
		if err != nil || len(list) == 0 {
			return all, err
		}
		all = append(all, list...)
		f.After = string(list[len(list)-1].ID)
	}
}

func (s *stack) report(format string, a ...any) {
	if s.cfg.Tell != nil {
		s.cfg.Tell(fmt.Sprintf(format, a...))
	}
}

func count(workspaces int) string {
	if workspaces == 1 {
		return "1 workspace"
	}
	return fmt.Sprintf("%d workspaces", workspaces)
}
