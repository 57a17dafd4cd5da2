package controller_test

import (
	"context"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// TestPortsUnderRace has two controllers forward 1,000 ports at once where a project may have 30: 30 are forwarded, never 31. The places
// of a workspace that ends are free again.
func TestPortsUnderRace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	list := []controller.Workspace{w.create("one"), w.create("two")}
	second, _ := w.startOn(openStore(t, w.dsn), controller.Config{ClusterID: "test"})
	const room, racers, atOnce = 30, 1000, 32
	w.quota(func(p *controller.QuotasPatch) { p.Ports = new(int64(room)) })
	var admitted, refused atomic.Int64
	var group errgroup.Group
	group.SetLimit(atOnce)
	for i := range racers {
		c := []*controller.Controller{w.Controller, second}[i%2]
		group.Go(func() error {
			_, err := c.Ports().Open(t.Context(), w.project, list[i/2%2].ID, 80, netip.AddrPort{})
			switch core.CodeOf(err) {
			case "":
				admitted.Add(1)
			case core.CodeQuotaExceeded:
				refused.Add(1)
			default:
				return err
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	if admitted.Load() != room || refused.Load() != racers-room || w.usage().Ports != room {
		t.Errorf("%d admitted, %d refused, usage %+v", admitted.Load(), refused.Load(), w.usage())
	}
	_, err := w.Ports().Open(t.Context(), w.project, list[0].ID, 80, netip.AddrPort{})
	wantQuota(t, err, "ports", room, room)
	left, err := w.Ports().List(t.Context(), w.project, list[0].ID)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Terminate(t.Context(), w.project, list[1].ID, wait); err != nil {
		t.Fatal(err)
	}
	if u := w.usage(); u.Ports != int64(len(left)) {
		t.Errorf("a workspace has ended and the project has %d ports, want %d", u.Ports, len(left))
	}
	if err := w.Ports().Close(t.Context(), w.project, list[0].ID, left[0].ID); err != nil {
		t.Fatal(err)
	}
	if u := w.usage(); u.Ports != int64(len(left)-1) {
		t.Errorf("a port was closed and the project has %d", u.Ports)
	}
}

// TestPortsOfAWorkspace: one workspace has at most so many, whatever its project may have.
func TestPortsOfAWorkspace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	for range controller.MaxWorkspacePorts {
		if p, err := w.Ports().Open(t.Context(), w.project, ws.ID, 80, netip.AddrPortFrom(netip.Addr{}, 0)); err != nil || !strings.HasPrefix(p.Listen, "127.0.0.1:") {
			t.Fatalf("%+v, %v", p, err)
		}
	}
	_, err := w.Ports().Open(t.Context(), w.project, ws.ID, 80, netip.AddrPort{})
	wantCode(t, err, core.CodeQuotaExceeded)
}

// TestAddressOfAPortIsTheRunners: while the runner has not said where a port listens, its row has no address, whatever the client asked for.
func TestAddressOfAPortIsTheRunners(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	asked := netip.MustParseAddrPort("127.0.0.1:5432")
	var seen []controller.Port
	w.runner.Hook(func(ctx context.Context, at, _ string) (err error) {
		if at == runnertest.PointPort && seen == nil {
			seen, err = w.Ports().List(ctx, w.project, ws.ID)
			if err == nil && len(seen) == 1 {
				if at, confirmErr := w.Ports().Confirm(ctx, w.project, ws.ID, seen[0].ID); confirmErr == nil {
					t.Errorf("%v was confirmed", at)
				}
			}
		}
		return err
	})
	p, err := w.Ports().Open(t.Context(), w.project, ws.ID, 80, asked)
	if err != nil || p.Listen != asked.String() {
		t.Fatalf("%+v, %v", p, err)
	}
	if len(seen) != 1 || seen[0].ID != p.ID || seen[0].Listen != "" {
		t.Errorf("before the runner has answered: %+v", seen)
	}
	if got, err := w.Ports().Confirm(t.Context(), w.project, ws.ID, p.ID); err != nil || got != asked {
		t.Errorf("confirmed: %v, %v", got, err)
	}
	w.runner.Hook(func(_ context.Context, at, _ string) error {
		if at == runnertest.PointPort {
			return core.Errorf(core.Conflict, core.CodeStateConflict, "the address is taken")
		}
		return nil
	})
	_, err = w.Ports().Confirm(t.Context(), w.project, ws.ID, p.ID)
	wantCode(t, err, core.CodeStateConflict)
	w.runner.Hook(nil)
	if _, err := w.Suspend(t.Context(), w.project, ws.ID, wait); err != nil {
		t.Fatal(err)
	}
	_, err = w.Ports().Confirm(t.Context(), w.project, ws.ID, p.ID)
	wantCode(t, err, core.CodeWorkspaceNotReady)
}
