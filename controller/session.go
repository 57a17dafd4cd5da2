package controller

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/boundjson"
	"github.com/coppice-dev/coppice/internal/failpoint"
	"github.com/coppice-dev/coppice/internal/pace"
)

// MaxOutput is how many bytes of each output stream the answer of an exec has: as many as the agent keeps.
const MaxOutput = 1 << 20

const attachTTL = time.Minute

// codeSessionExists is a code of the agent.
const codeSessionExists core.Code = "SESSION_EXISTS"

// SessionView is what users see of a session: the public id, and the state in the guest.
type SessionView struct {
	Session
	Epoch int64
	Guest GuestSession
}

// ExecResult is the end of a program that was waited for.
type ExecResult struct {
	View            SessionView
	Stdout, Stderr  []byte // at most the last MaxOutput bytes of each
	StdoutTruncated bool   // the beginning is missing
	StderrTruncated bool
	Timings         []core.Timing
}

// StartSession starts a program. It inserts the row first, so that no program is without a row if the answer is lost.
func (c *Controller) StartSession(ctx context.Context, project core.ProjectID, id core.WorkspaceID, req ExecRequest) (SessionView, error) {
	view, _, err := c.startSession(ctx, project, id, req)
	return view, err
}

func (c *Controller) startSession(ctx context.Context, project core.ProjectID, id core.WorkspaceID, req ExecRequest) (SessionView, Workspace, error) {
	row := Session{ID: core.NewID[core.SessionID](), ProjectID: project, WorkspaceID: id}
	row.GuestID = row.ID
	resting, woken := false, false // the workspace must be resumed before its use
	insert := func(tx Tx) (Workspace, error) {
		w, err := tx.Workspace(ctx, id)
		if resting = err == nil && !woken && w.Asleep(); resting {
			return w, nil
		}
		if err := request.Bind(ctx, tx, project, string(row.ID)); err != nil {
			return Workspace{}, err
		}
		if err == nil {
			err = w.Reachable()
		}
		if err != nil {
			return w, err
		}
		row.SandboxID = w.Sandbox.ID
		return w, tx.InsertSession(ctx, row, c.cfg.SessionQuota)
	}
	w, err := read(ctx, c, InProject(project), insert)
	if err == nil && resting {
		if w, err = c.awaken(ctx, w); err == nil {
			woken = true
			w, err = read(ctx, c, InProject(project), insert)
		}
	}
	if core.CodeOf(err) == core.CodeQuotaExceeded && w.Sandbox.ID != "" {
		if forgot := c.forgetSessions(ctx, w); forgot != nil {
			return SessionView{}, w, errors.Join(err, forgot)
		}
		w, err = read(ctx, c, InProject(project), insert)
	}
	if again, ok := errors.AsType[*request.RepeatError](err); ok {
		return c.repeatSession(ctx, project, again.Use, req)
	}
	if err != nil {
		return SessionView{}, w, err
	}
	view, err := c.launch(ctx, row, w, req)
	return view, w, err
}

// Where a controller may be killed in the life of a session.
var (
	beforeLaunch = failpoint.New("controller.before_launch") // the row is there, the program does not run
	afterLaunch  = failpoint.New("controller.after_launch")  // it runs, nobody has been told
)

// launch starts the program of a session that has a row. The agent starts only one program per id, however often it is asked.
func (c *Controller) launch(ctx context.Context, row Session, w Workspace, req ExecRequest) (SessionView, error) {
	view := SessionView{Session: row, Epoch: w.Epoch}
	claim := request.ClaimOf(ctx)
	if err := beforeLaunch.Hit(ctx); err != nil {
		return view, err
	}
	req, err := c.withGrants(ctx, w, req)
	if err != nil {
		return view, err
	}
	err = c.callGuest(ctx, w.Sandbox, http.MethodPost, pathSessions, nil, guestExec{ID: row.GuestID, ExecRequest: req}, answer{boundSession, &view.Guest})
	if err := afterLaunch.Hit(ctx); err != nil {
		return view, err
	}
	switch {
	case err == nil:
	case core.CodeOf(err) == codeSessionExists: // a repeat of the request was faster
		err = c.callGuest(ctx, w.Sandbox, http.MethodGet, guestSessionPath(row.GuestID, ""), nil, nil, answer{boundSession, &view.Guest})
	case claim != nil && core.CategoryOf(err) != core.Unavailable && core.CategoryOf(err) != core.Canceled && core.CategoryOf(err) != core.TimedOut:
		// The agent refused it: nothing runs, and a repeat may succeed.
		freed := context.WithoutCancel(ctx)
		err = errors.Join(err, c.store.InTx(freed, InProject(row.ProjectID), func(tx Tx) error { return claim.Release(freed, tx, row.ProjectID, string(row.ID)) }))
	}
	if err != nil || claim == nil {
		return view, err
	}
	// From here on a repeat that does not find the session knows that it has ended and was forgotten.
	marked := context.WithoutCancel(ctx)
	if err := c.store.InTx(marked, InProject(row.ProjectID), func(tx Tx) error { return claim.Answer(marked, tx, row.ProjectID, string(row.ID), row) }); err != nil {
		c.log.WarnContext(ctx, "start of a session was not marked", "session_id", row.ID, "err", err)
	}
	return view, nil
}

// withGrants adds the placeholders of a workspace's present grants to the environment of a new program, unless the environment has these
// variables already.
func (c *Controller) withGrants(ctx context.Context, w Workspace, req ExecRequest) (ExecRequest, error) {
	if !w.Rules.Granted {
		return req, nil
	}
	env, err := c.grants.Env(ctx, w.ForGrants())
	if err != nil {
		return req, err
	}
	maps.Copy(env, req.Env)
	req.Env = env
	return req, nil
}

// repeatSession answers a repeat of a request that starts a session. If the first request was cut off before the program was started,
// the repeat starts it.
func (c *Controller) repeatSession(ctx context.Context, project core.ProjectID, use KeyUse, req ExecRequest) (SessionView, Workspace, error) {
	row, w, err := c.ReachSession(ctx, project, core.SessionID(use.Object))
	if err != nil {
		return SessionView{}, w, err
	}
	view := SessionView{Session: row, Epoch: w.Epoch}
	err = c.callGuest(ctx, w.Sandbox, http.MethodGet, guestSessionPath(row.GuestID, ""), nil, nil, answer{boundSession, &view.Guest})
	if core.CodeOf(err) == core.CodeSessionNotFound && use.Answer == nil {
		view, err = c.launch(ctx, row, w, req)
		return view, w, err
	}
	if err == nil {
		request.ClaimOf(ctx).SetReplayed(true)
	}
	return view, w, err
}

// Exec runs a program to its end. If the context ends first, the program continues.
func (c *Controller) Exec(ctx context.Context, project core.ProjectID, id core.WorkspaceID, req ExecRequest) (ExecResult, error) {
	watch := core.NewStopwatch()
	view, w, err := c.startSession(ctx, project, id, req)
	if err != nil {
		return ExecResult{}, err
	}
	watch.Lap("start")
	if claim := request.ClaimOf(ctx); claim != nil && claim.Replayed() && view.Guest.State != GuestExited {
		claim.SetReplayed(false)
		return ExecResult{}, request.InProgress("the first request with this idempotency key has started session %s, which has not ended; wait for that", view.ID)
	}
	if view.Guest, err = c.execEnd(ctx, &w.Sandbox, view, req); err != nil {
		return ExecResult{}, err
	}
	watch.Lap("run")
	out := ExecResult{View: view}
	g := view.Guest
	var group errgroup.Group
	group.Go(func() error {
		at := w.Sandbox
		return c.throughStalls(ctx, view.Session, &at, func(s Sandbox) (err error) {
			out.Stdout, out.StdoutTruncated, err = c.tail(ctx, s, view.GuestID, "stdout", g.StdoutFirst, g.StdoutBytes)
			return err
		})
	})
	group.Go(func() error {
		at := w.Sandbox
		return c.throughStalls(ctx, view.Session, &at, func(s Sandbox) (err error) {
			out.Stderr, out.StderrTruncated, err = c.tail(ctx, s, view.GuestID, "stderr", g.StderrFirst, g.StderrBytes)
			return err
		})
	})
	err = group.Wait()
	watch.Lap("output")
	out.Timings = watch.Timings()
	return out, err
}

func guestSessionPath(id core.SessionID, verb string) string {
	if verb == "" {
		return pathSessions + "/" + string(id)
	}
	return pathSessions + "/" + string(id) + "/" + verb
}

func (c *Controller) waitGuest(ctx context.Context, s Sandbox, id core.SessionID, wait time.Duration) (GuestSession, error) {
	var g GuestSession
	q := url.Values{"timeout_ms": {strconv.FormatInt(wait.Milliseconds(), 10)}}
	err := c.callGuest(ctx, s, http.MethodGet, guestSessionPath(id, "wait"), q, nil, answer{boundSession, &g})
	return g, err
}

// roomPause is the time between two looks for room.
const roomPause = 20 * time.Millisecond

// roomFor waits until there is room for an answer of n bytes. The program has run, so its output is not given up at once when the guests of the
// project send too much. Each stream waits for its own room and holds none meanwhile.
func (c *Controller) roomFor(ctx context.Context, account *boundjson.Account, n int) error {
	limit, cancel := context.WithTimeout(ctx, c.cfg.GuestCall)
	defer cancel()
	for !account.Reserve(n) {
		if pace.Pause(limit, roomPause) != nil {
			return context.Cause(ctx) // nil when the caller still waits: then it is read as far as there is room, as other answers are
		}
	}
	return nil
}

// tail reads the end of the kept output of a stream.
func (c *Controller) tail(ctx context.Context, s Sandbox, id core.SessionID, stream string, first, end int64) ([]byte, bool, error) {
	if end <= 0 {
		return nil, false, nil
	}
	if first > end {
		return nil, false, core.Errorf(core.Unavailable, core.CodeGuestProtocol, "the guest's agent reports output of session %s that begins after its end", id)
	}
	offset := max(first, end-MaxOutput, 0)
	q := url.Values{"stream": {stream}, "offset": {strconv.FormatInt(offset, 10)}}
	account := c.guestBytes.Open(string(s.ProjectID))
	defer account.Close()
	if err := c.roomFor(ctx, account, int(min(end-offset, MaxOutput))); err != nil {
		return nil, false, err
	}
	ctx, cancel := context.WithTimeout(ctx, c.cfg.GuestCall)
	defer cancel()
	res, err := c.askGuest(ctx, s, http.MethodGet, guestSessionPath(id, "output"), q, "", nil)
	if err != nil {
		return nil, false, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(boundjson.Charged(io.LimitReader(res.Body, MaxOutput), account))
	if err != nil {
		if ctx.Err() != nil || errors.Is(err, boundjson.ErrFull) {
			return nil, false, guestFault(ctx, err)
		}
		return nil, false, core.Wrapf(err, core.Unavailable, core.CodeGuestUnreachable, "the output of session %s could not be read to its end", id)
	}
	// A background process may have written more, so that the agent dropped output that was there a moment ago.
	start, err := strconv.ParseInt(res.Header.Get("Coppice-Offset"), 10, 64)
	return b, offset > 0 || err == nil && start > 0, nil
}

// ReachSession finds a session of a workspace's present sandbox. A session of an earlier epoch is gone.
func (c *Controller) ReachSession(ctx context.Context, project core.ProjectID, id core.SessionID) (Session, Workspace, error) {
	var row Session
	find := func(tx Tx) (Workspace, error) {
		var err error
		if row, err = tx.Session(ctx, id); err != nil {
			return Workspace{}, err
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
	w, err := read(ctx, c, InProject(project), find)
	if err == nil && w.Asleep() {
		if _, err = c.awaken(ctx, w); err == nil {
			w, err = read(ctx, c, InProject(project), find)
		}
	}
	if err != nil {
		return row, w, err
	}
	c.used(w)
	if w.State == core.WorkspaceSuspended || w.State == core.WorkspaceRestoring {
		return row, w, w.NotReady()
	}
	if w.Sandbox.ID != row.SandboxID {
		return row, w, core.Errorf(core.NotFound, core.CodeSessionNotFound, "session %s ended with its epoch of workspace %s", id, w.ID)
	}
	return row, w, w.Reachable()
}

// SessionGuest returns a transport to the agent of a session, and the session's name there.
func (c *Controller) SessionGuest(ctx context.Context, project core.ProjectID, id core.SessionID) (http.RoundTripper, core.SessionID, error) {
	row, w, err := c.ReachSession(ctx, project, id)
	if err != nil {
		return nil, "", err
	}
	return c.runners.Guest(w.Sandbox.Endpoint, w.Sandbox.ID), row.GuestID, nil
}

// Session returns a session, waiting up to wait for its end.
func (c *Controller) Session(ctx context.Context, project core.ProjectID, id core.SessionID, wait time.Duration) (SessionView, error) {
	row, w, err := c.ReachSession(ctx, project, id)
	if err != nil {
		return SessionView{}, err
	}
	view := SessionView{Session: row, Epoch: w.Epoch}
	if wait > 0 {
		until := time.Now().Add(wait)
		view.Guest, err = c.awaitExit(ctx, func() time.Duration { return time.Until(until) }, func(slice time.Duration) (GuestSession, error) {
			return c.waitGuest(ctx, w.Sandbox, row.GuestID, slice)
		})
	} else {
		err = c.callGuest(ctx, w.Sandbox, http.MethodGet, guestSessionPath(row.GuestID, ""), nil, nil, answer{boundSession, &view.Guest})
	}
	return view, err
}

// Sessions lists the sessions of a workspace's present epoch, newest first. Those that a fork inherited get ids of their own.
func (c *Controller) Sessions(ctx context.Context, project core.ProjectID, id core.WorkspaceID, p Page) ([]SessionView, error) {
	w, err := c.reach(ctx, project, id)
	if err != nil {
		return nil, err
	}
	var there guestSessions
	if err := c.callGuest(ctx, w.Sandbox, http.MethodGet, pathSessions, nil, nil, answer{boundSessions, &there}); err != nil {
		return nil, err
	}
	rows, err := read(ctx, c, InProject(project), func(tx Tx) ([]Session, error) {
		return tx.MapSessions(ctx, w.Sandbox, there.ids(), MaxInherited, c.cfg.SessionQuota)
	})
	if err != nil {
		return nil, err
	}
	if lost := len(there.Sessions) - len(rows); lost > 0 {
		c.metrics.inventedSessions.Add(float64(lost))
		c.log.DebugContext(ctx, "sessions of a guest are not shown: they have no row, and the guest has too many", "workspace_id", w.ID, "sessions", lost)
	}
	byGuest := make(map[core.SessionID]Session, len(rows))
	for _, r := range rows {
		byGuest[r.GuestID] = r
	}
	var list []SessionView
	for _, g := range there.Sessions {
		r, ok := byGuest[g.ID]
		if delete(byGuest, g.ID); ok && (p.After == "" || string(r.ID) < p.After) {
			list = append(list, SessionView{Session: r, Epoch: w.Epoch, Guest: g})
		}
	}
	slices.SortFunc(list, func(a, b SessionView) int { return cmp.Compare(b.ID, a.ID) })
	return list[:min(len(list), p.Limit)], nil
}

// DeleteSession kills a session's processes and forgets it.
func (c *Controller) DeleteSession(ctx context.Context, project core.ProjectID, id core.SessionID) error {
	return c.sessionCall(ctx, project, id, http.MethodDelete, "", nil)
}

// SignalSession sends a signal to a session's processes.
func (c *Controller) SignalSession(ctx context.Context, project core.ProjectID, id core.SessionID, signal string) error {
	return c.sessionCall(ctx, project, id, http.MethodPost, "signal", guestSignal{signal})
}

// ResizeSession sets the size of a session's terminal.
func (c *Controller) ResizeSession(ctx context.Context, project core.ProjectID, id core.SessionID, cols, rows uint16) error {
	return c.sessionCall(ctx, project, id, http.MethodPost, "resize", guestResize{cols, rows})
}

func (c *Controller) sessionCall(ctx context.Context, project core.ProjectID, id core.SessionID, method, verb string, in any) error {
	row, w, err := c.ReachSession(ctx, project, id)
	if err != nil {
		return err
	}
	return c.callGuest(ctx, w.Sandbox, method, guestSessionPath(row.GuestID, verb), nil, in, answer{})
}

// Attach gives a token that lets its bearer attach to a session once, soon.
func (c *Controller) Attach(ctx context.Context, project core.ProjectID, id core.SessionID) (token string, expires time.Time, err error) {
	row, w, err := c.ReachSession(ctx, project, id)
	if err != nil {
		return "", time.Time{}, err
	}
	var secret [32]byte
	_, _ = rand.Read(secret[:]) // never fails: crypto/rand ends the program instead
	token = base64.RawURLEncoding.EncodeToString(secret[:])
	t, err := read(ctx, c, InProject(project), func(tx Tx) (AttachToken, error) {
		return tx.InsertAttachToken(ctx, AttachToken{Hash: sha256.Sum256([]byte(token)), ProjectID: project, KeyID: KeyOf(ctx).ID, SessionID: row.ID, SandboxID: w.Sandbox.ID}, attachTTL)
	})
	return token, t.ExpiresAt, err
}

// UseAttachToken spends a token. It returns the way to the token's session, and the key that requested the token: the attachment ends
// with this key. A token from before a restore is no longer valid.
func (c *Controller) UseAttachToken(ctx context.Context, id core.SessionID, token string) (http.RoundTripper, core.SessionID, Key, error) {
	var row Session
	var key Key
	w, err := read(ctx, c, System(), func(tx Tx) (Workspace, error) {
		t, err := tx.UseAttachToken(ctx, sha256.Sum256([]byte(token)), id)
		if err != nil {
			return Workspace{}, err
		}
		if t.KeyID != "" {
			if key, err = tx.Key(ctx, t.KeyID); err != nil {
				return Workspace{}, err
			}
		}
		if row, err = tx.Session(ctx, t.SessionID); err != nil {
			return Workspace{}, err
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
	return c.runners.Guest(w.Sandbox.Endpoint, w.Sandbox.ID), row.GuestID, key, nil
}
