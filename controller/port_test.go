package controller_test

import (
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/controller"
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
			_, err := c.OpenPort(t.Context(), w.project, list[i/2%2].ID, 80, netip.AddrPort{})
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
	_, err := w.OpenPort(t.Context(), w.project, list[0].ID, 80, netip.AddrPort{})
	wantQuota(t, err, "ports", room, room)
	left, err := w.Ports(t.Context(), w.project, list[0].ID)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Terminate(t.Context(), w.project, list[1].ID, wait); err != nil {
		t.Fatal(err)
	}
	if u := w.usage(); u.Ports != int64(len(left)) {
		t.Errorf("a workspace has ended and the project has %d ports, want %d", u.Ports, len(left))
	}
	if err := w.ClosePort(t.Context(), w.project, list[0].ID, left[0].ID); err != nil {
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
		if p, err := w.OpenPort(t.Context(), w.project, ws.ID, 80, netip.AddrPortFrom(netip.Addr{}, 0)); err != nil || !strings.HasPrefix(p.Listen, "127.0.0.1:") {
			t.Fatalf("%+v, %v", p, err)
		}
	}
	_, err := w.OpenPort(t.Context(), w.project, ws.ID, 80, netip.AddrPort{})
	wantCode(t, err, core.CodeQuotaExceeded)
}
