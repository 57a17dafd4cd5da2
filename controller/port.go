package controller

import (
	"context"
	"errors"
	"net/netip"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/failpoint"
)

// Where a controller may be killed when it forwards a port.
var (
	beforePort = failpoint.New("controller.before_port") // the row is there, the runner has not been called
	afterPort  = failpoint.New("controller.after_port")  // it listens, the row does not say where
)

// MaxWorkspacePorts bounds the forwarded ports of one workspace. Its runner has the same bound for a sandbox.
const MaxWorkspacePorts = 64

// OpenPort forwards an address of the runner's host to a port of the guest. If listen has no address, the runner chooses it. The runner also
// decides whether the address is allowed and free.
func (c *Controller) OpenPort(ctx context.Context, project core.ProjectID, id core.WorkspaceID, guestPort int, listen netip.AddrPort) (Port, error) {
	w, err := c.reach(ctx, project, id)
	p := Port{ID: core.NewID[core.PortID](), ProjectID: project, WorkspaceID: id, GuestPort: guestPort}
	if err == nil {
		err = c.store.InTx(ctx, InProject(project), func(tx Tx) error {
			if err := request.Bind(ctx, tx, project, string(p.ID)); err != nil {
				return err
			}
			var err error
			p, err = tx.InsertPort(ctx, p)
			return err
		})
	} else {
		err = c.repeated(ctx, project, err)
	}
	if again, ok := errors.AsType[*request.RepeatError](err); ok {
		if again.Use.Answer != nil {
			return request.Replay[Port](ctx, again.Use)
		}
		p, err = c.findPort(ctx, project, id, core.PortID(again.Use.Object)) // the controller of the first request has not finished it
	}
	if err != nil {
		return Port{}, err
	}
	// From here on the row says that the port may exist, but not where: an address that a client asked for may be somebody else's. If the client hangs up, row and port must still agree.
	ctx = context.WithoutCancel(ctx)
	if err := beforePort.Hit(ctx); err != nil {
		return Port{}, err
	}
	got, err := c.runners.OpenPort(ctx, w.Sandbox.Endpoint, w.Sandbox.ID, runnerapi.PortAt(p.ID, p.GuestPort, listen))
	if err == nil {
		if err := afterPort.Hit(ctx); err != nil {
			return Port{}, err
		}
		return read(ctx, c, InProject(project), func(tx Tx) (Port, error) {
			p, err := tx.UpdatePort(ctx, p.ID, got.Listen.String())
			if err != nil {
				return p, err
			}
			p.Closed = got.Closed
			return p, request.ClaimOf(ctx).Answer(ctx, tx, project, string(p.ID), p)
		})
	}
	if closeErr := c.closePort(ctx, w.Sandbox, p); closeErr != nil {
		c.log.WarnContext(ctx, "port was neither opened nor closed", "port_id", p.ID, "err", closeErr)
	}
	return Port{}, err
}

// Ports lists the forwarded ports of a workspace.
func (c *Controller) Ports(ctx context.Context, project core.ProjectID, id core.WorkspaceID) ([]Port, error) {
	return read(ctx, c, InProject(project), func(tx Tx) ([]Port, error) {
		if _, err := tx.Workspace(ctx, id); err != nil {
			return nil, err
		}
		return tx.Ports(ctx, id)
	})
}

// ClosePort stops forwarding a port.
func (c *Controller) ClosePort(ctx context.Context, project core.ProjectID, workspace core.WorkspaceID, id core.PortID) error {
	w, err := c.Workspace(ctx, project, workspace)
	if err != nil {
		return err
	}
	p, err := c.findPort(ctx, project, workspace, id)
	if err != nil {
		return err
	}
	return c.closePort(context.WithoutCancel(ctx), w.Sandbox, p)
}

// ConfirmPort wakes a workspace and has its port listen. It returns the address: without the machine, the one in the row may be another's.
func (c *Controller) ConfirmPort(ctx context.Context, project core.ProjectID, workspace core.WorkspaceID, id core.PortID) (netip.AddrPort, error) {
	w, err := c.reach(ctx, project, workspace)
	if err != nil {
		return netip.AddrPort{}, err
	}
	p, err := c.findPort(ctx, project, workspace, id)
	listen, noAddress := netip.ParseAddrPort(p.Listen) // the runner has not said yet where it listens
	if err := errors.Join(err, noAddress); err != nil {
		return netip.AddrPort{}, err
	}
	got, err := c.runners.OpenPort(ctx, w.Sandbox.Endpoint, w.Sandbox.ID, runnerapi.PortAt(p.ID, p.GuestPort, listen))
	if err != nil {
		return netip.AddrPort{}, err
	}
	if _, err := c.findPort(ctx, project, workspace, id); err != nil { // it was closed meanwhile, and this has opened it again
		return netip.AddrPort{}, errors.Join(err, c.runners.ClosePort(context.WithoutCancel(ctx), w.Sandbox.Endpoint, w.Sandbox.ID, id))
	}
	return got.Listen, nil
}

func (c *Controller) findPort(ctx context.Context, project core.ProjectID, workspace core.WorkspaceID, id core.PortID) (Port, error) {
	list, err := c.Ports(ctx, project, workspace)
	if err != nil {
		return Port{}, err
	}
	for _, p := range list {
		if p.ID == id {
			return p, nil
		}
	}
	return Port{}, core.Errorf(core.NotFound, core.CodePortNotFound, "workspace %s has no forwarded port %s", workspace, id)
}

func (c *Controller) closePort(ctx context.Context, s Sandbox, p Port) error {
	if s.ID != "" {
		if err := c.runners.ClosePort(ctx, s.Endpoint, s.ID, p.ID); err != nil && core.CategoryOf(err) != core.NotFound {
			return err
		}
	}
	return c.store.InTx(ctx, InProject(p.ProjectID), func(tx Tx) error {
		if err := request.ClaimOf(ctx).Release(ctx, tx, p.ProjectID, string(p.ID)); err != nil {
			return err
		}
		return tx.DeletePort(ctx, p.WorkspaceID, p.ID)
	})
}

// reopenPorts forwards a restored workspace's ports to its new sandbox, at the same addresses. If an address is no longer available,
// its port is closed for good, and the log says so. If the workspace has yet another sandbox by now, its ports stay as they are.
func (c *Controller) reopenPorts(ctx context.Context, project core.ProjectID, id core.WorkspaceID, s Sandbox) {
	list, err := c.Ports(ctx, project, id)
	if err != nil {
		c.log.WarnContext(ctx, "ports were not forwarded again", "workspace_id", id, "err", err)
		return
	}
	for _, p := range list {
		listen, err := netip.ParseAddrPort(p.Listen)
		if err == nil {
			_, err = c.runners.OpenPort(ctx, s.Endpoint, s.ID, runnerapi.PortAt(p.ID, p.GuestPort, listen))
		}
		if err == nil {
			continue
		}
		c.log.WarnContext(ctx, "port was not forwarded again", "workspace_id", id, "port_id", p.ID, "listen", p.Listen, "err", err)
		err = c.store.InTx(ctx, InProject(project), func(tx Tx) error {
			w, err := tx.Workspace(ctx, id)
			if err != nil || w.Sandbox.ID != s.ID {
				return err
			}
			return tx.DeletePort(ctx, id, p.ID)
		})
		if err != nil {
			c.log.WarnContext(ctx, "port was not closed", "port_id", p.ID, "err", err)
		}
	}
}
