// Package ports owns forwarded ports: addresses of a runner's host that lead to a port of a guest. A row
// exists before the runner is asked to listen, and knows the address afterwards.
package ports

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/failpoint"
)

// Where a controller may be killed when it forwards a port.
var (
	beforePort = failpoint.New("controller.before_port") // the row is there, the runner has not been called
	afterPort  = failpoint.New("controller.after_port")  // it listens, the row does not say where
)

// MaxPerWorkspace bounds the forwarded ports of one workspace. Its runner has the same bound for a sandbox.
const MaxPerWorkspace = 64

// Store runs transactions. Package controller/postgres has the methods of Tx.
type Store interface {
	// InProject runs fn in a transaction of a project and commits when it returns nil.
	InProject(ctx context.Context, project core.ProjectID, fn func(Tx) error) error
}

// Tx keeps forwarded ports.
type Tx interface {
	request.Tx
	Workspace(ctx context.Context, id core.WorkspaceID) (model.Workspace, error)
	InsertPort(ctx context.Context, p model.Port) (model.Port, error)
	UpdatePort(ctx context.Context, id core.PortID, listen string) (model.Port, error)
	Ports(ctx context.Context, id core.WorkspaceID) ([]model.Port, error)
	DeletePort(ctx context.Context, workspace core.WorkspaceID, id core.PortID) error
}

// Runners calls runners by their endpoint. A repeated call changes nothing.
type Runners interface {
	OpenPort(ctx context.Context, endpoint string, sandbox core.SandboxID, p runnerapi.Port) (runnerapi.Port, error)
	ClosePort(ctx context.Context, endpoint string, sandbox core.SandboxID, id core.PortID) error
}

// Config says what a forwarder works with.
type Config struct {
	// Reach returns a workspace whose guest can get requests. It resumes a suspended workspace that has auto-resume.
	Reach func(ctx context.Context, project core.ProjectID, id core.WorkspaceID) (model.Workspace, error)
	// Repeated returns a *request.RepeatError if a request that failed before its transaction is a repeat; otherwise it returns the failure.
	Repeated func(ctx context.Context, project core.ProjectID, failure error) error
	Ended    func(workspace core.WorkspaceID) // hears of the end of a preview
	Log      *slog.Logger
}

// Forwarder opens and closes forwarded ports. It is safe for concurrent use.
type Forwarder struct {
	cfg     Config
	store   Store
	runners Runners
}

// New makes a forwarder. It starts nothing.
func New(cfg Config, store Store, runners Runners) *Forwarder {
	return &Forwarder{cfg: cfg, store: store, runners: runners}
}

// read runs a query in the scope of a project.
func read[T any](ctx context.Context, f *Forwarder, project core.ProjectID, query func(Tx) (T, error)) (out T, err error) {
	err = f.store.InProject(ctx, project, func(tx Tx) (err error) {
		out, err = query(tx)
		return err
	})
	return out, err
}

// Open forwards an address of the runner's host to a port of the guest. If listen has no address, the runner chooses it. The runner also
// decides whether the address is allowed and free.
func (f *Forwarder) Open(ctx context.Context, project core.ProjectID, id core.WorkspaceID, guestPort int, listen netip.AddrPort) (model.Port, error) {
	w, err := f.cfg.Reach(ctx, project, id)
	p := model.Port{ID: core.NewID[core.PortID](), ProjectID: project, WorkspaceID: id, GuestPort: guestPort}
	if err == nil {
		fresh := p
		p, err = read(ctx, f, project, func(tx Tx) (model.Port, error) {
			if err := request.Bind(ctx, tx, project, string(fresh.ID)); err != nil {
				return model.Port{}, err
			}
			return tx.InsertPort(ctx, fresh)
		})
	} else {
		err = f.cfg.Repeated(ctx, project, err)
	}
	if again, ok := errors.AsType[*request.RepeatError](err); ok {
		if again.Use.Answer != nil {
			return request.Replay[model.Port](ctx, again.Use)
		}
		p, err = f.find(ctx, project, id, core.PortID(again.Use.Object)) // the controller of the first request has not finished it
	}
	if err != nil {
		return model.Port{}, err
	}
	// From here on the row says that the port may exist, but not where: an address that a client asked for may be somebody else's. If the client hangs up, row and port must still agree.
	ctx = context.WithoutCancel(ctx)
	if err := beforePort.Hit(ctx); err != nil {
		return model.Port{}, err
	}
	got, err := f.runners.OpenPort(ctx, w.Sandbox.Endpoint, w.Sandbox.ID, runnerapi.PortAt(p.ID, p.GuestPort, listen))
	if err == nil {
		if err := afterPort.Hit(ctx); err != nil {
			return model.Port{}, err
		}
		return read(ctx, f, project, func(tx Tx) (model.Port, error) {
			p, err := tx.UpdatePort(ctx, p.ID, got.Listen.String())
			if err != nil {
				return p, err
			}
			p.Closed = got.Closed
			return p, request.ClaimOf(ctx).Answer(ctx, tx, project, string(p.ID), p)
		})
	}
	if closeErr := f.close(ctx, w.Sandbox, p); closeErr != nil {
		f.cfg.Log.WarnContext(ctx, "port was neither opened nor closed", "port_id", p.ID, "err", closeErr)
	}
	return model.Port{}, err
}

// List lists the forwarded ports and the previews of a workspace.
func (f *Forwarder) List(ctx context.Context, project core.ProjectID, id core.WorkspaceID) ([]model.Port, error) {
	return read(ctx, f, project, func(tx Tx) ([]model.Port, error) {
		if _, err := tx.Workspace(ctx, id); err != nil {
			return nil, err
		}
		return tx.Ports(ctx, id)
	})
}

// Close stops forwarding a port, or ends a preview.
func (f *Forwarder) Close(ctx context.Context, project core.ProjectID, workspace core.WorkspaceID, id core.PortID) error {
	w, err := read(ctx, f, project, func(tx Tx) (model.Workspace, error) { return tx.Workspace(ctx, workspace) })
	if err != nil {
		return err
	}
	p, err := f.find(ctx, project, workspace, id)
	if err != nil {
		return err
	}
	return f.close(context.WithoutCancel(ctx), w.Sandbox, p)
}

// Confirm wakes a workspace and has its port listen. It returns the address: without the machine, the one in the row may be another's.
func (f *Forwarder) Confirm(ctx context.Context, project core.ProjectID, workspace core.WorkspaceID, id core.PortID) (netip.AddrPort, error) {
	w, err := f.cfg.Reach(ctx, project, workspace)
	if err != nil {
		return netip.AddrPort{}, err
	}
	p, err := f.find(ctx, project, workspace, id)
	listen, noAddress := netip.ParseAddrPort(p.Listen) // the runner has not said yet where it listens
	if err := errors.Join(err, noAddress); err != nil {
		return netip.AddrPort{}, err
	}
	got, err := f.runners.OpenPort(ctx, w.Sandbox.Endpoint, w.Sandbox.ID, runnerapi.PortAt(p.ID, p.GuestPort, listen))
	if err != nil {
		return netip.AddrPort{}, err
	}
	if _, err := f.find(ctx, project, workspace, id); err != nil { // it was closed meanwhile, and this has opened it again
		return netip.AddrPort{}, errors.Join(err, f.runners.ClosePort(context.WithoutCancel(ctx), w.Sandbox.Endpoint, w.Sandbox.ID, id))
	}
	return got.Listen, nil
}

func (f *Forwarder) find(ctx context.Context, project core.ProjectID, workspace core.WorkspaceID, id core.PortID) (model.Port, error) {
	list, err := f.List(ctx, project, workspace)
	if err != nil {
		return model.Port{}, err
	}
	for _, p := range list {
		if p.ID == id {
			return p, nil
		}
	}
	return model.Port{}, core.Errorf(core.NotFound, core.CodePortNotFound, "workspace %s has no forwarded port %s", workspace, id)
}

func (f *Forwarder) close(ctx context.Context, s model.Sandbox, p model.Port) error {
	if s.ID != "" && p.Visibility == "" { // no runner listens for a preview
		if err := f.runners.ClosePort(ctx, s.Endpoint, s.ID, p.ID); err != nil && core.CategoryOf(err) != core.NotFound {
			return err
		}
	}
	if p.Visibility != "" {
		defer f.cfg.Ended(p.WorkspaceID)
	}
	return f.store.InProject(ctx, p.ProjectID, func(tx Tx) error {
		if err := request.ClaimOf(ctx).Release(ctx, tx, p.ProjectID, string(p.ID)); err != nil {
			return err
		}
		return tx.DeletePort(ctx, p.WorkspaceID, p.ID)
	})
}

// Reopen forwards a restored workspace's ports to its new sandbox, at the same addresses. If an address is no longer available,
// its port is closed for good, and the log says so. If the workspace has yet another sandbox by now, its ports stay as they are.
func (f *Forwarder) Reopen(ctx context.Context, project core.ProjectID, id core.WorkspaceID, s model.Sandbox) {
	list, err := f.List(ctx, project, id)
	if err != nil {
		f.cfg.Log.WarnContext(ctx, "ports were not forwarded again", "workspace_id", id, "err", err)
		return
	}
	for _, p := range list {
		if p.Visibility != "" {
			continue
		}
		listen, err := netip.ParseAddrPort(p.Listen)
		if err == nil {
			_, err = f.runners.OpenPort(ctx, s.Endpoint, s.ID, runnerapi.PortAt(p.ID, p.GuestPort, listen))
		}
		if err == nil {
			continue
		}
		f.cfg.Log.WarnContext(ctx, "port was not forwarded again", "workspace_id", id, "port_id", p.ID, "listen", p.Listen, "err", err)
		err = f.store.InProject(ctx, project, func(tx Tx) error {
			w, err := tx.Workspace(ctx, id)
			if err != nil || w.Sandbox.ID != s.ID {
				return err
			}
			return tx.DeletePort(ctx, id, p.ID)
		})
		if err != nil {
			f.cfg.Log.WarnContext(ctx, "port was not closed", "port_id", p.ID, "err", err)
		}
	}
}
