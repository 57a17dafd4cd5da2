package devstack

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// OnExit says what becomes of the running workspaces at the end.
type OnExit string

// What can become of them.
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
	settleTime     = 15 * time.Minute // for all workspaces together
	settleTogether = 2                // a checkpoint is bound by the disk
	settleWait     = 30 * time.Second // of one request; then it asks again
)

// settle does what OnExit says to the workspaces that run. It ends early when somebody hurries. A workspace that is left is stopped with
// its VM.
func (s *stack) settle(ctx context.Context) {
	if s.cfg.OnExit != Suspend && s.cfg.OnExit != Terminate {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTime)
	defer cancel()
	list, err := s.running(ctx)
	if err != nil {
		s.log.WarnContext(ctx, "the running workspaces are not known, so they are stopped", "err", err)
		return
	}
	if len(list) == 0 {
		return
	}
	doing, done, act := "suspending", "suspended", s.control.Suspend
	if s.cfg.OnExit == Terminate {
		doing, done, act = "terminating", "terminated", s.control.Terminate
	}
	s.tell("%s %s; Ctrl-C again stops them at once", doing, count(len(list)))
	go func() {
		select {
		case <-s.cfg.Hurry:
			cancel()
		case <-ctx.Done():
		}
	}()
	var group errgroup.Group
	group.SetLimit(settleTogether)
	var settled atomic.Int64
	for _, w := range list {
		group.Go(func() error {
			for ctx.Err() == nil {
				answer, err := act(ctx, w.ProjectID, w.ID, settleWait)
				if err != nil {
					s.log.WarnContext(ctx, "a workspace is stopped with its VM", "workspace_id", w.ID, "err", err)
					return nil
				}
				if answer.Done {
					settled.Add(1)
					return nil
				}
			}
			return nil
		})
	}
	_ = group.Wait() // no function returns an error
	s.tell("%d of %s %s", settled.Load(), count(len(list)), done)
}

// running lists the workspaces of all projects whose machines run.
func (s *stack) running(ctx context.Context) ([]controller.Workspace, error) {
	const page = 500
	var all []controller.Workspace
	f := controller.WorkspaceFilter{States: []core.WorkspaceState{core.WorkspaceReady, core.WorkspaceCheckpointing}}
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

func (s *stack) tell(format string, a ...any) {
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
