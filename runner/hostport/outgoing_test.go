package hostport //nolint:testpackage // the kernel's settings of a host are not the test's to change

import (
	"net"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
)

// TestOutgoingPorts: the default range has no port of the kernel's for outgoing connections, where there is any other; and what an operator
// chooses is counted against what the kernel has reserved.
func TestOutgoingPorts(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]span{
		"32768\t60999\n": {1024, 32767}, "1024 20000": {20001, 65535}, "1024 65535": {1024, 65535}, "15000 65000": {1024, 14999}, "1 65535": {1024, 65535},
		"500 600": {1024, 65535},
	} {
		taken, ok := parseOutgoing(text)
		if got := outside(taken); !ok || got != want {
			t.Errorf("%q leaves %v, want %v", text, got, want)
		}
	}
	for _, text := range []string{"", "1", "x y", "5 4", "1 70000", "1 2 3"} {
		if got, ok := parseOutgoing(text); ok {
			t.Errorf("%q is %v", text, got)
		}
	}
	for kept, want := range map[string]int{"": 1000, "33000-33999": 0, "33000,33002-33003,x,40000\n": 997, "33000-": 1000} {
		if got := (Allowed{First: 33000, Last: 33999}).shared(linuxOutgoing, reserved(kept)); got != want {
			t.Errorf("with %q reserved, %d ports are shared, want %d", kept, got, want)
		}
	}
	if got := (Allowed{First: 20000, Last: 29999}).shared(linuxOutgoing, nil); got != 0 {
		t.Errorf("%d ports are shared", got)
	}
}

// TestBesideOutgoingConnections: by default a tenant never gets a port that a connection of this host may have, neither by its number nor a free
// one, and a host whose range is narrow says so.
func TestBesideOutgoingConnections(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp4", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	used := uint16(c.LocalAddr().(*net.TCPAddr).Port)
	kernel := outgoing()
	if int(used) < kernel.first || int(used) > kernel.last {
		t.Fatalf("the kernel has given port %d, and says that it gives %v", used, kernel)
	}
	h := New(Allowed{})
	if got, err := h.Listen(t.Context(), Want{Port: used}); core.CodeOf(err) != core.CodePortNotAllowed {
		if err == nil {
			_ = got.Close()
		}
		t.Errorf("the port of a connection: %v", err)
	}
	for range 20 {
		got, err := h.Listen(t.Context(), Want{})
		if err != nil {
			t.Fatal(err)
		}
		if port := int(got.Address().Port()); port >= kernel.first && port <= kernel.last {
			t.Errorf("a free port is %d, which a connection may need", port)
		}
		if err := got.Close(); err != nil {
			t.Error(err)
		}
	}
	if w := (Allowed{}).Warning(); w != "" {
		t.Errorf("the default is warned of: %s", w)
	}
	if w := (Allowed{First: Lowest, Last: 65535}).Warning(); !strings.Contains(w, "net.ipv4.ip_local_reserved_ports") {
		t.Errorf("every port: %q", w)
	}
}
