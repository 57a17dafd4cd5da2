package sessions

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/controller/guestclient"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
)

// Pauses between two questions to an agent that answers a wait too early.
const (
	firstWaitPause = 100 * time.Millisecond
	maxWaitPause   = 5 * time.Second
)

// awaitExit asks the agent for the end of a session until the session has ended or no time is left. It asks at least once. The
// agent should answer when the session ends or the requested time is over. If it answers earlier, it is asked again after a pause,
// which doubles each time.
func (k *Keeper) awaitExit(ctx context.Context, left func() time.Duration, ask func(slice time.Duration) (guestclient.Session, error)) (guestclient.Session, error) {
	early := firstWaitPause
	for {
		slice := min(max(0, left()), guestclient.WaitSlice)
		asked := time.Now()
		g, err := ask(slice)
		if err != nil || g.State == guestclient.Exited || left() <= 0 {
			return g, err
		}
		if time.Since(asked) >= slice-firstWaitPause {
			early = firstWaitPause
			continue
		}
		if err := pace.Pause(ctx, min(early, left())); err != nil {
			return g, err
		}
		early = min(2*early, maxWaitPause)
	}
}

// execEnd waits for the end of a program. The agent ends a program when its timeout is over. If the agent still reports a running
// program long after that, it is not believed. Without a timeout, execEnd waits until the caller gives up.
//
// The agent measures the timeout by the clock of its machine, which stops while the machine stands still. So only the time
// that the agent was asked to wait counts here: if the machine stood still meanwhile, the answer comes later by that time.
func (k *Keeper) execEnd(ctx context.Context, s *model.Sandbox, view View, req guestclient.ExecRequest) (guestclient.Session, error) {
	if view.Guest.State == guestclient.Exited {
		return view.Guest, nil
	}
	limit, ran := time.Duration(req.TimeoutMS)*time.Millisecond+k.cfg.ExecGrace, time.Duration(0)
	paused := time.Now() // since the last answer
	left := func() time.Duration {
		if req.TimeoutMS <= 0 {
			return guestclient.WaitSlice
		}
		return limit - ran - time.Since(paused)
	}
	g, err := k.awaitExit(ctx, left, func(slice time.Duration) (g guestclient.Session, err error) {
		ran += time.Since(paused)
		err = k.throughStalls(ctx, view.Session, s, func(at model.Sandbox) (err error) {
			asked := time.Now()
			g, err = k.cfg.Guests.Wait(ctx, at, view.GuestID, slice)
			if err == nil {
				ran += min(time.Since(asked), slice)
			}
			return err
		})
		paused = time.Now()
		return g, err
	})
	if err == nil && g.State != guestclient.Exited {
		err = core.Errorf(core.Unavailable, core.CodeGuestProtocol, "session %s did not end within %s; the guest's agent reports that it still runs", view.ID, limit)
	}
	return g, err
}

// stallNotice is how late the rows may show that a runner has stopped or continued a machine.
const stallNotice = 5 * time.Second

// throughStalls asks the guest of a session. It asks again if the machine stood still. A machine stands still while it waits for
// the store, while it is captured, and while its workspace is suspended. After a resume, s is the session's new sandbox. The rows
// decide whether a machine stands still: a claim of the guest alone delays a caller by at most stallNotice.
func (k *Keeper) throughStalls(ctx context.Context, row model.Session, s *model.Sandbox, ask func(model.Sandbox) error) error {
	var doubtful time.Time // when the first error came that the rows do not explain
	for wait := firstWaitPause; ; wait = min(2*wait, maxWaitPause) {
		err := ask(*s)
		if err == nil || ctx.Err() != nil {
			return err
		}
		now, still, lookErr := k.standing(ctx, row, *s)
		switch code := core.CodeOf(err); {
		case lookErr != nil:
			return lookErr
		case still:
			doubtful = time.Time{}
		case now.ID != s.ID:
			*s, wait, doubtful = now, firstWaitPause, time.Time{}
			continue
		case code != core.CodeStoreUnavailable && code != core.CodeDiskFull:
			return err
		case doubtful.IsZero():
			doubtful = time.Now()
		case time.Since(doubtful) > stallNotice:
			return err
		}
		if err := pace.Pause(ctx, wait); err != nil {
			return err
		}
	}
}

// standing reports whether the machine of a session stands still and will continue. It returns the present sandbox of the session,
// which is another one after a resume.
func (k *Keeper) standing(ctx context.Context, row model.Session, s model.Sandbox) (now model.Sandbox, still bool, err error) {
	w, err := inProject(ctx, k.store, row.ProjectID, func(tx Tx) (model.Workspace, error) {
		w, err := tx.Workspace(ctx, row.WorkspaceID)
		if err != nil || w.Sandbox.ID == "" || w.Sandbox.ID == s.ID {
			return w, err
		}
		// The transaction sees what was committed before each statement: the session's row moves with the workspace.
		row, err = tx.Session(ctx, row.ID)
		return w, err
	})
	if err != nil {
		return s, false, err
	}
	switch w.State {
	case core.WorkspaceSuspended, core.WorkspaceCheckpointing, core.WorkspaceRestoring:
		return s, true, nil
	case core.WorkspaceReady:
		if w.Sandbox.ID == s.ID {
			return s, !w.Stall.Since.IsZero(), nil
		}
		if w.Sandbox.ID == row.SandboxID {
			return w.Sandbox, false, nil
		}
		return s, false, core.Errorf(core.NotFound, core.CodeSessionNotFound, "session %s ended with the machine that it ran in: workspace %s was restored, or its machine was lost; list what runs there now: coppice session ls %[2]s", row.ID, w.ID)
	case core.WorkspaceCreating, core.WorkspaceQuarantined, core.WorkspaceTerminating, core.WorkspaceTerminated, core.WorkspaceFailed, core.WorkspaceLost:
	}
	return s, false, nil
}
