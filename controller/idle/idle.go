// Package idle knows which workspaces are in use, and applies the idle policies of those that are not:
// it has them suspended or terminated. Use is recorded in batches, so every idle time is extended by a
// margin of two of them. It also has workspaces suspended at the end of their time.
package idle

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
)

const (
	idleEvery       = 2 * time.Second
	idleBatch       = 64
	idleConcurrency = 8
	idleAsk         = 5 * time.Second // for the sessions of one guest
)

// Every is the time between two looks for idle workspaces.
const Every = idleEvery

// Store runs transactions that see all projects. Package controller/postgres has the methods of Tx.
type Store interface {
	// InSystem runs fn in a transaction and commits when it returns nil.
	InSystem(ctx context.Context, fn func(Tx) error) error
}

// Tx keeps the use of workspaces.
type Tx interface {
	CheckTx
	// UseWorkspaces records that workspaces are in use now.
	UseWorkspaces(ctx context.Context, ids []core.WorkspaceID) error
	// ClaimOverdue returns ready workspaces to suspend whose time is up, at most each of one project. A workspace is due again after growing pauses.
	ClaimOverdue(ctx context.Context, each, limit int) ([]model.Workspace, error)
}

// CheckTx is what a Check needs of the transaction that suspends or terminates a workspace.
type CheckTx interface {
	// IdleWorkspaces returns ready workspaces that were not used for longer than their idle time plus margin. If ids is not empty,
	// it looks only at these workspaces.
	IdleWorkspaces(ctx context.Context, margin time.Duration, ids []core.WorkspaceID, limit int) ([]model.Workspace, error)
	// Overdue reports whether a ready workspace is to be suspended because its time is up. Pauses do not count.
	Overdue(ctx context.Context, id core.WorkspaceID) (bool, error)
}

// Check refuses with STATE_CONFLICT if a workspace is in use again, or was given more time.
type Check func(ctx context.Context, tx CheckTx) error

// Config says what a keeper works with.
type Config struct {
	Interval time.Duration // between two records of use
	Sessions func(ctx context.Context, s model.Sandbox) (running bool, err error)
	// Suspend and Terminate begin to suspend or terminate a workspace, in a transaction that runs the check.
	Suspend   func(ctx context.Context, w model.Workspace, still Check) error
	Terminate func(ctx context.Context, w model.Workspace, still Check) error
	Log       *slog.Logger
}

// Keeper records use and applies idle policies. It is safe for concurrent use.
type Keeper struct {
	cfg   Config
	store Store
	uses  uses
}

// New makes a keeper. It starts nothing.
func New(cfg Config, store Store) *Keeper { return &Keeper{cfg: cfg, store: store} }

// Add notes that a workspace is in use.
func (k *Keeper) Add(id core.WorkspaceID) { k.uses.add(id) }

// uses remembers which workspaces are in use. They are recorded together from time to time, so that not every use costs a write.
type uses struct {
	// mu guards the fields below.
	mu    sync.Mutex
	since map[core.WorkspaceID]bool // used since the last recording
	open  map[core.WorkspaceID]int  // streams that are open
}

func (u *uses) add(id core.WorkspaceID) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.since == nil {
		u.since = map[core.WorkspaceID]bool{}
	}
	u.since[id] = true
}

// hold counts a stream as use until it is released.
func (u *uses) hold(id core.WorkspaceID) (release func()) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.open == nil {
		u.open = map[core.WorkspaceID]int{}
	}
	u.open[id]++
	return sync.OnceFunc(func() {
		u.add(id)
		u.mu.Lock()
		defer u.mu.Unlock()
		if u.open[id]--; u.open[id] == 0 {
			delete(u.open, id)
		}
	})
}

// take returns the workspaces that were used since its last call.
func (u *uses) take() []core.WorkspaceID {
	u.mu.Lock()
	defer u.mu.Unlock()
	list := make([]core.WorkspaceID, 0, len(u.since)+len(u.open))
	for id := range u.since {
		list = append(list, id)
	}
	for id := range u.open {
		if !u.since[id] {
			list = append(list, id)
		}
	}
	u.since = nil
	slices.Sort(list)
	return list
}

// Used notes that a workspace is in use.
func (k *Keeper) Used(w model.Workspace) {
	if w.IdlePolicy.IdleAfter > 0 {
		k.uses.add(w.ID)
	}
}

// Run records use. The use that a killed controller did not record is shorter than the margin.
func (k *Keeper) Run(ctx context.Context) {
	record := func() {
		list := k.uses.take()
		if len(list) == 0 {
			return
		}
		write, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		if err := k.store.InSystem(write, func(tx Tx) error { return tx.UseWorkspaces(write, list) }); err != nil {
			for _, id := range list {
				k.uses.add(id)
			}
			k.cfg.Log.WarnContext(ctx, "use of workspaces was not recorded", "err", err)
		}
	}
	pace.Every(ctx, k.cfg.Interval, nil, record)
	record()
}

// margin is added to the idle time of a workspace, so that use that another controller has not yet recorded is never overlooked.
func (k *Keeper) margin() time.Duration { return 2 * k.cfg.Interval }

// Expire suspends or terminates workspaces that were not used for too long.
func (k *Keeper) Expire(ctx context.Context) error {
	var due []model.Workspace
	err := k.store.InSystem(ctx, func(tx Tx) (err error) {
		due, err = tx.IdleWorkspaces(ctx, k.margin(), nil, idleBatch)
		return err
	})
	if err != nil {
		return err
	}
	var group errgroup.Group
	group.SetLimit(idleConcurrency)
	for _, w := range due {
		group.Go(func() error {
			switch err := k.apply(ctx, w); core.CodeOf(err) {
			case "", core.CodeStateConflict, core.CodeWorkspaceNotReady, core.CodeControllerStopping: // used again, or another request was faster
			default:
				k.cfg.Log.WarnContext(ctx, "idle workspace was left as it is", "workspace_id", w.ID, "err", err)
			}
			return nil
		})
	}
	return group.Wait()
}

// apply applies the idle policy to one workspace, unless a session runs in it.
func (k *Keeper) apply(ctx context.Context, w model.Workspace) error {
	ask, cancel := context.WithTimeout(ctx, idleAsk)
	defer cancel()
	running, err := k.cfg.Sessions(ask, w.Sandbox)
	if err != nil {
		return err
	}
	if running {
		k.uses.add(w.ID)
		return nil
	}
	stillIdle := func(ctx context.Context, tx CheckTx) error {
		list, err := tx.IdleWorkspaces(ctx, k.margin(), []core.WorkspaceID{w.ID}, 1)
		if err == nil && len(list) == 0 {
			err = core.Errorf(core.Conflict, core.CodeStateConflict, "workspace %s is in use again", w.ID)
		}
		return err
	}
	if w.IdlePolicy.OnIdle == model.IdleTerminate {
		if err := k.cfg.Terminate(ctx, w, stillIdle); err != nil {
			return err
		}
		k.cfg.Log.InfoContext(ctx, "idle workspace terminated", "workspace_id", w.ID)
		return nil
	}
	if err := k.cfg.Suspend(ctx, w, stillIdle); err != nil {
		return err
	}
	k.cfg.Log.InfoContext(ctx, "idle workspace suspended", "workspace_id", w.ID)
	return nil
}

// Transport counts answers that stream through a transport as use of a workspace.
func (k *Keeper) Transport(id core.WorkspaceID, way http.RoundTripper) http.RoundTripper {
	return usingTransport{way, &k.uses, id}
}

// usingTransport counts answers that stream through it as use of a workspace. It need not count a WebSocket: this belongs to a session,
// and a running session is use by itself.
type usingTransport struct {
	http.RoundTripper
	uses *uses
	id   core.WorkspaceID
}

// RoundTrip sends a request.
func (u usingTransport) RoundTrip(q *http.Request) (*http.Response, error) {
	release := u.uses.hold(u.id)
	res, err := u.RoundTripper.RoundTrip(q)
	if err != nil || res.StatusCode == http.StatusSwitchingProtocols {
		release()
		return res, err
	}
	res.Body = usingBody{res.Body, release}
	return res, nil
}

type usingBody struct {
	io.ReadCloser
	release func()
}

// Close ends the use.
func (b usingBody) Close() error {
	b.release()
	return b.ReadCloser.Close()
}
