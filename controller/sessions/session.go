package sessions

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"maps"
	"net/http"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/controller/guestclient"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/failpoint"
	"github.com/coppice-dev/coppice/internal/pace"
)

const attachTTL = time.Minute

// View is what users see of a session: the public id, and the state in the guest.
type View struct {
	model.Session
	Epoch int64
	Guest guestclient.Session
}

// ExecResult is the end of a program that was waited for.
type ExecResult struct {
	View            View
	Stdout, Stderr  []byte // at most the last MaxOutput bytes of each
	StdoutTruncated bool   // the beginning is missing
	StderrTruncated bool
	Timings         []core.Timing
}

// StartSession starts a program. It inserts the row first, so that no program is without a row if the answer is lost.
func (k *Keeper) StartSession(ctx context.Context, project core.ProjectID, id core.WorkspaceID, req guestclient.ExecRequest) (View, error) {
	view, _, err := k.startSession(ctx, project, id, req)
	return view, err
}

func (k *Keeper) startSession(ctx context.Context, project core.ProjectID, id core.WorkspaceID, req guestclient.ExecRequest) (View, model.Workspace, error) {
	row := model.Session{ID: core.NewID[core.SessionID](), ProjectID: project, WorkspaceID: id}
	row.GuestID = row.ID
	asleep, woken := false, false // the workspace must be resumed before its use
	insert := func(tx Tx) (model.Workspace, error) {
		w, err := tx.Workspace(ctx, id)
		if asleep = err == nil && !woken && w.Asleep(); asleep {
			return w, nil
		}
		if err := request.Bind(ctx, tx, project, string(row.ID)); err != nil {
			return model.Workspace{}, err
		}
		if err == nil {
			err = w.Reachable()
		}
		if err != nil {
			return w, err
		}
		row.SandboxID = w.Sandbox.ID
		return w, tx.InsertSession(ctx, row, k.cfg.Quota)
	}
	w, err := inProject(ctx, k.store, project, insert)
	if err == nil && asleep {
		if w, err = k.cfg.Awaken(ctx, w); err == nil {
			woken = true
			w, err = inProject(ctx, k.store, project, insert)
		}
	}
	if core.CodeOf(err) == core.CodeQuotaExceeded && w.Sandbox.ID != "" {
		if forgot := k.forgetSessions(ctx, w); forgot != nil {
			return View{}, w, errors.Join(err, forgot)
		}
		w, err = inProject(ctx, k.store, project, insert)
	}
	if again, ok := errors.AsType[*request.RepeatError](err); ok {
		return k.repeatSession(ctx, project, again.Use, req)
	}
	if err != nil {
		return View{}, w, err
	}
	view, err := k.launch(ctx, row, w, req)
	return view, w, err
}

// Where a controller may be killed in the life of a session.
var (
	beforeLaunch = failpoint.New("controller.before_launch") // the row is there, the program does not run
	afterLaunch  = failpoint.New("controller.after_launch")  // it runs, nobody knows it yet
)

// launch starts the program of a session that has a row. The agent starts only one program per id, however often it is asked.
func (k *Keeper) launch(ctx context.Context, row model.Session, w model.Workspace, req guestclient.ExecRequest) (View, error) {
	view := View{Session: row, Epoch: w.Epoch}
	claim := request.ClaimOf(ctx)
	if err := beforeLaunch.Hit(ctx); err != nil {
		return view, err
	}
	req, err := k.withGrants(ctx, w, req)
	if err != nil {
		return view, err
	}
	view.Guest, err = k.cfg.Guests.Start(ctx, w.Sandbox, row.GuestID, req)
	if err := afterLaunch.Hit(ctx); err != nil {
		return view, err
	}
	switch {
	case err == nil:
	case core.CodeOf(err) == guestclient.CodeSessionExists: // a repeat of the request was faster
		view.Guest, err = k.cfg.Guests.Session(ctx, w.Sandbox, row.GuestID)
	case claim != nil && core.CategoryOf(err) != core.Unavailable && core.CategoryOf(err) != core.Canceled && core.CategoryOf(err) != core.TimedOut:
		// The agent refused it: nothing runs, and a repeat may succeed.
		freed := context.WithoutCancel(ctx)
		err = errors.Join(err, k.store.InProject(freed, row.ProjectID, func(tx Tx) error { return claim.Release(freed, tx, row.ProjectID, string(row.ID)) }))
	}
	if err != nil || claim == nil {
		return view, err
	}
	// From here on a repeat that does not find the session knows that it has ended and was forgotten.
	marked := context.WithoutCancel(ctx)
	if err := k.store.InProject(marked, row.ProjectID, func(tx Tx) error { return claim.Answer(marked, tx, row.ProjectID, string(row.ID), row) }); err != nil {
		k.cfg.Log.WarnContext(ctx, "start of a session was not marked", "session_id", row.ID, "err", err)
	}
	return view, nil
}

// withGrants adds the placeholders of a workspace's present grants to the environment of a new program, unless the environment has these
// variables already.
func (k *Keeper) withGrants(ctx context.Context, w model.Workspace, req guestclient.ExecRequest) (guestclient.ExecRequest, error) {
	if !w.Rules.Granted {
		return req, nil
	}
	env, err := k.cfg.Env(ctx, w.ForGrants())
	if err != nil {
		return req, err
	}
	maps.Copy(env, req.Env)
	req.Env = env
	return req, nil
}

// repeatSession answers a repeat of a request that starts a session. If the first request was cut off before the program was started,
// the repeat starts it.
func (k *Keeper) repeatSession(ctx context.Context, project core.ProjectID, use request.KeyUse, req guestclient.ExecRequest) (View, model.Workspace, error) {
	row, w, err := k.ReachSession(ctx, project, core.SessionID(use.Object))
	if err != nil {
		return View{}, w, err
	}
	view := View{Session: row, Epoch: w.Epoch}
	view.Guest, err = k.cfg.Guests.Session(ctx, w.Sandbox, row.GuestID)
	if core.CodeOf(err) == core.CodeSessionNotFound && use.Answer == nil {
		view, err = k.launch(ctx, row, w, req)
		return view, w, err
	}
	if err == nil {
		request.ClaimOf(ctx).SetReplayed(true)
	}
	return view, w, err
}

// Exec runs a program to its end. If the context ends first, the program continues.
func (k *Keeper) Exec(ctx context.Context, project core.ProjectID, id core.WorkspaceID, req guestclient.ExecRequest) (ExecResult, error) {
	watch := core.NewStopwatch()
	view, w, err := k.startSession(ctx, project, id, req)
	if err != nil {
		return ExecResult{}, err
	}
	if claim := request.ClaimOf(ctx); claim != nil && claim.Replayed() && view.Guest.State != guestclient.Exited {
		claim.SetReplayed(false)
		return ExecResult{}, request.InProgress("the first request with this idempotency key has started session %s, which has not ended; wait for that", view.ID)
	}
	return k.finish(ctx, watch, view, w, req, guestclient.MaxOutput)
}

// ExecOnce runs a program to its end, and returns at most the last bytes of each output. A repeat under the same claim waits for the program
// that the first call started.
// follow gets output while the program runs, if it is not nil.
func (k *Keeper) ExecOnce(ctx context.Context, project core.ProjectID, id core.WorkspaceID, req guestclient.ExecRequest, output int, follow func([]byte)) (ExecResult, error) {
	watch := core.NewStopwatch()
	view, w, err := k.startSession(ctx, project, id, req)
	if err != nil {
		return ExecResult{}, err
	}
	if follow == nil {
		return k.finish(ctx, watch, view, w, req, min(output, guestclient.MaxOutput))
	}
	following, end := context.WithCancel(ctx)
	f := follower{keeper: k, view: view, at: w.Sandbox, give: follow}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		pace.Every(following, followEvery, nil, func() { f.look(following, guestclient.Session{}) })
	}()
	out, err := k.finish(ctx, watch, view, w, req, min(output, guestclient.MaxOutput))
	end()
	<-ended
	if err == nil {
		f.look(ctx, out.View.Guest)
	}
	return out, err
}

// finish waits for the end of a program that has started, and reads the last bytes of its outputs.
func (k *Keeper) finish(ctx context.Context, watch *core.Stopwatch, view View, w model.Workspace, req guestclient.ExecRequest, output int) (_ ExecResult, err error) {
	watch.Lap("start")
	if view.Guest, err = k.execEnd(ctx, &w.Sandbox, view, req); err != nil {
		return ExecResult{}, err
	}
	watch.Lap("run")
	out := ExecResult{View: view}
	g := view.Guest
	var group errgroup.Group
	group.Go(func() error {
		at := w.Sandbox
		return k.throughStalls(ctx, view.Session, &at, func(s model.Sandbox) (err error) {
			out.Stdout, out.StdoutTruncated, err = k.cfg.Guests.Output(ctx, s, view.GuestID, "stdout", g.StdoutFirst, g.StdoutBytes, output)
			return err
		})
	})
	group.Go(func() error {
		at := w.Sandbox
		return k.throughStalls(ctx, view.Session, &at, func(s model.Sandbox) (err error) {
			out.Stderr, out.StderrTruncated, err = k.cfg.Guests.Output(ctx, s, view.GuestID, "stderr", g.StderrFirst, g.StderrBytes, output)
			return err
		})
	})
	err = group.Wait()
	watch.Lap("output")
	out.Timings = watch.Timings()
	return out, err
}

// ReachSession finds a session of a workspace's present sandbox. A session of an earlier epoch is gone.
func (k *Keeper) ReachSession(ctx context.Context, project core.ProjectID, id core.SessionID) (model.Session, model.Workspace, error) {
	var row model.Session
	find := func(tx Tx) (model.Workspace, error) {
		var err error
		if row, err = tx.Session(ctx, id); err != nil {
			return model.Workspace{}, err
		}
		// Each statement sees what was committed before it: a resume between two of them moves both rows to its sandbox.
		for {
			w, err := tx.Workspace(ctx, row.WorkspaceID)
			if err != nil || w.Sandbox.ID == row.SandboxID {
				return w, err
			}
			now, err := tx.Session(ctx, id)
			if err != nil || now.SandboxID == row.SandboxID {
				return w, err
			}
			row = now
		}
	}
	w, err := inProject(ctx, k.store, project, find)
	if err == nil && w.Asleep() {
		if _, err = k.cfg.Awaken(ctx, w); err == nil {
			w, err = inProject(ctx, k.store, project, find)
		}
	}
	if err != nil {
		return row, w, err
	}
	k.cfg.Used(w)
	if w.State == core.WorkspaceSuspended || w.State == core.WorkspaceRestoring {
		return row, w, w.NotReady()
	}
	if w.Sandbox.ID != row.SandboxID {
		return row, w, core.Errorf(core.NotFound, core.CodeSessionNotFound, "session %s ended with the machine that it ran in: workspace %s was restored, or its machine was lost; list what runs there now: coppice session ls %[2]s", id, w.ID)
	}
	return row, w, w.Reachable()
}

// SessionGuest returns a transport to the agent of a session, and the session's name there.
func (k *Keeper) SessionGuest(ctx context.Context, project core.ProjectID, id core.SessionID) (http.RoundTripper, core.SessionID, error) {
	row, w, err := k.ReachSession(ctx, project, id)
	if err != nil {
		return nil, "", err
	}
	return k.cfg.Guests.Transport(w.Sandbox), row.GuestID, nil
}

// Session returns a session, waiting up to wait for its end.
func (k *Keeper) Session(ctx context.Context, project core.ProjectID, id core.SessionID, wait time.Duration) (View, error) {
	row, w, err := k.ReachSession(ctx, project, id)
	if err != nil {
		return View{}, err
	}
	view := View{Session: row, Epoch: w.Epoch}
	if wait > 0 {
		until := time.Now().Add(wait)
		view.Guest, err = k.awaitExit(ctx, func() time.Duration { return time.Until(until) }, func(slice time.Duration) (guestclient.Session, error) {
			return k.cfg.Guests.Wait(ctx, w.Sandbox, row.GuestID, slice)
		})
	} else {
		view.Guest, err = k.cfg.Guests.Session(ctx, w.Sandbox, row.GuestID)
	}
	return view, err
}

// Sessions lists the sessions of a workspace's present epoch, newest first. Those that a fork inherited get ids of their own.
func (k *Keeper) Sessions(ctx context.Context, project core.ProjectID, id core.WorkspaceID, p model.Page) ([]View, error) {
	w, err := k.cfg.Reach(ctx, project, id)
	if err != nil {
		return nil, err
	}
	there, err := k.cfg.Guests.Sessions(ctx, w.Sandbox)
	if err != nil {
		return nil, err
	}
	rows, err := inProject(ctx, k.store, project, func(tx Tx) ([]model.Session, error) {
		return tx.MapSessions(ctx, w.Sandbox, there.IDs(), MaxInherited, k.cfg.Quota)
	})
	if err != nil {
		return nil, err
	}
	if lost := len(there.Sessions) - len(rows); lost > 0 {
		k.cfg.NotShown(lost)
		k.cfg.Log.DebugContext(ctx, "sessions of a guest are not shown: they have no row, and the guest has too many", "workspace_id", w.ID, "sessions", lost)
	}
	byGuest := make(map[core.SessionID]model.Session, len(rows))
	for _, r := range rows {
		byGuest[r.GuestID] = r
	}
	var list []View
	for _, g := range there.Sessions {
		r, ok := byGuest[g.ID]
		if delete(byGuest, g.ID); ok && (p.After == "" || string(r.ID) < p.After) {
			list = append(list, View{Session: r, Epoch: w.Epoch, Guest: g})
		}
	}
	slices.SortFunc(list, func(a, b View) int { return cmp.Compare(b.ID, a.ID) })
	return list[:min(len(list), p.Limit)], nil
}

// DeleteSession kills a session's processes and forgets it.
func (k *Keeper) DeleteSession(ctx context.Context, project core.ProjectID, id core.SessionID) error {
	return k.ask(ctx, project, id, func(at model.Sandbox, guest core.SessionID) error {
		return k.cfg.Guests.Delete(ctx, at, guest)
	})
}

// SignalSession sends a signal to a session's processes.
func (k *Keeper) SignalSession(ctx context.Context, project core.ProjectID, id core.SessionID, signal string) error {
	return k.ask(ctx, project, id, func(at model.Sandbox, guest core.SessionID) error {
		return k.cfg.Guests.Signal(ctx, at, guest, signal)
	})
}

// SignalTarget sends a signal to some of a session's processes; target "" are those in the foreground.
func (k *Keeper) SignalTarget(ctx context.Context, project core.ProjectID, id core.SessionID, signal, target string) error {
	if target == "" {
		return k.SignalSession(ctx, project, id, signal)
	}
	return k.ask(ctx, project, id, func(at model.Sandbox, guest core.SessionID) error {
		return k.cfg.Guests.SignalTarget(ctx, at, guest, signal, target)
	})
}

// SetDeadline has a session killed after a time from now; 0 is never.
func (k *Keeper) SetDeadline(ctx context.Context, project core.ProjectID, id core.SessionID, timeoutMS int64) error {
	return k.ask(ctx, project, id, func(at model.Sandbox, guest core.SessionID) error {
		return k.cfg.Guests.SetDeadline(ctx, at, guest, timeoutMS)
	})
}

// ResizeSession sets the size of a session's terminal.
func (k *Keeper) ResizeSession(ctx context.Context, project core.ProjectID, id core.SessionID, cols, rows uint16) error {
	return k.ask(ctx, project, id, func(at model.Sandbox, guest core.SessionID) error {
		return k.cfg.Guests.Resize(ctx, at, guest, cols, rows)
	})
}

// ask finds a session and asks its guest.
func (k *Keeper) ask(ctx context.Context, project core.ProjectID, id core.SessionID, call func(at model.Sandbox, guest core.SessionID) error) error {
	row, w, err := k.ReachSession(ctx, project, id)
	if err != nil {
		return err
	}
	return call(w.Sandbox, row.GuestID)
}

// Attach gives a token that lets its bearer attach to a session once, soon.
func (k *Keeper) Attach(ctx context.Context, project core.ProjectID, id core.SessionID) (token string, expires time.Time, err error) {
	row, w, err := k.ReachSession(ctx, project, id)
	if err != nil {
		return "", time.Time{}, err
	}
	var secret [32]byte
	_, _ = rand.Read(secret[:]) // never fails: crypto/rand ends the program instead
	token = base64.RawURLEncoding.EncodeToString(secret[:])
	t, err := inProject(ctx, k.store, project, func(tx Tx) (model.AttachToken, error) {
		return tx.InsertAttachToken(ctx, model.AttachToken{Hash: sha256.Sum256([]byte(token)), ProjectID: project, KeyID: request.KeyOf(ctx).ID, SessionID: row.ID, SandboxID: w.Sandbox.ID}, attachTTL)
	})
	return token, t.ExpiresAt, err
}

// UseAttachToken spends a token. It returns the way to the token's session, and the key that requested the token: the attachment ends
// with this key. A token from before a restore is no longer valid.
func (k *Keeper) UseAttachToken(ctx context.Context, id core.SessionID, token string) (http.RoundTripper, core.SessionID, model.Key, error) {
	var row model.Session
	var key model.Key
	w, err := inSystem(ctx, k.store, func(tx Tx) (model.Workspace, error) {
		t, err := tx.UseAttachToken(ctx, sha256.Sum256([]byte(token)), id)
		if err != nil {
			return model.Workspace{}, err
		}
		if t.KeyID != "" {
			if key, err = tx.Key(ctx, t.KeyID); err != nil {
				return model.Workspace{}, err
			}
		}
		if row, err = tx.Session(ctx, t.SessionID); err != nil {
			return model.Workspace{}, err
		}
		return tx.Workspace(ctx, row.WorkspaceID)
	})
	if err != nil {
		return nil, "", key, err
	}
	if w.Sandbox.ID != row.SandboxID {
		return nil, "", key, core.Errorf(core.Unauthenticated, core.CodeUnauthenticated, "the attach token is of an epoch of workspace %s that has ended", w.ID)
	}
	if err := w.Reachable(); err != nil {
		return nil, "", key, err
	}
	return k.cfg.Guests.Transport(w.Sandbox), row.GuestID, key, nil
}
