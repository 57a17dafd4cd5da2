package daemon_test

import (
	"errors"
	"net"
	"net/netip"
	"strconv"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/runner/hostport"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func codeOf(err error) core.Code {
	if p, ok := errors.AsType[*coppice.Error](err); ok {
		return core.Code(p.Code)
	}
	return core.CodeOf(err)
}

// TestForwardedAddresses is a tenant who asks for addresses of the host that are not for them, by REST, of a runner whose operator has
// said what is.
func TestForwardedAddresses(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.join(func(rc *daemon.RunnerConfig) {
		rc.Forward = hostport.Allowed{Addresses: []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()}, First: 20300, Last: 20399}
	})
	ws := create(t, c.client)
	ask := func(listen string) (coppice.Port, error) {
		return c.client.CreatePort(t.Context(), ws.ID, coppice.CreatePortRequest{GuestPort: 80, Listen: listen})
	}
	for _, listen := range []string{
		"0.0.0.0:25", "0.0.0.0:20300", "[::]:22", "[::]:20300", "127.0.0.1:10250", "[::1]:22", "[::ffff:0.0.0.0]:20300", "127.0.0.2:20300", ":80", ":20299", ":20400", "0.0.0.0:0",
	} {
		if p, err := ask(listen); codeOf(err) != core.CodePortNotAllowed {
			t.Errorf("%s: %+v, %v", listen, p, err)
		}
	}
	service, err := net.Listen("tcp4", "127.0.0.1:20333")
	if err != nil {
		t.Fatal(err)
	}
	defer service.Close()
	for _, listen := range []string{"[::1]:20333", "127.0.0.1:20333", ":20333"} {
		if p, err := ask(listen); codeOf(err) != core.CodePortTaken {
			t.Errorf("%s: %+v, %v", listen, p, err)
		}
	}
	// The named ports come first: one that the runner chooses may be any of the range.
	for _, listen := range []string{":20344", "[::1]:20345", "", ":0", "127.0.0.1:0"} {
		p, err := ask(listen)
		if err != nil {
			t.Fatalf("%s: %v", listen, err)
		}
		at := netip.MustParseAddrPort(p.Listen)
		if at.Port() < 20300 || at.Port() > 20399 || !at.Addr().IsLoopback() {
			t.Errorf("%s listens on %s", listen, p.Listen)
		}
		conn, err := net.Dial("tcp", p.Listen)
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.Close()
	}
	list, err := c.client.Ports(t.Context(), ws.ID)
	if err != nil || len(list) != 5 {
		t.Errorf("%d ports are listed, %v", len(list), err)
	}
	for _, p := range list {
		if _, err := ask(":" + strconv.Itoa(int(netip.MustParseAddrPort(p.Listen).Port()))); codeOf(err) != core.CodePortTaken {
			t.Errorf("%s is forwarded twice: %v", p.Listen, err)
		}
	}
}
