package e2e

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"
	"github.com/vishvananda/netns"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// ear notes whatever reaches a port of the host from a guest.
type ear struct {
	port  int
	heard []string
	mu    sync.Mutex // guards heard
}

// listenOnHost listens on every address that the host has. Another test may dial the loopback: a guest is not told by it, unless it is
// its greeting that comes. What relays a guest's connection there says so to the guest, which then does not meet with silence.
func listenOnHost(t *testing.T) *ear {
	t.Helper()
	l, err := net.Listen("tcp4", ":0")
	if err != nil {
		t.Fatal(err)
	}
	e := &ear{port: l.Addr().(*net.TCPAddr).Port}
	u, err := net.ListenPacket("udp4", fmt.Sprintf(":%d", e.port))
	if err != nil {
		t.Fatal(err)
	}
	note := func(kind string, from net.Addr, said string) {
		if netip.MustParseAddrPort(from.String()).Addr().IsLoopback() && said != "hello" {
			return
		}
		e.mu.Lock()
		defer e.mu.Unlock()
		e.heard = append(e.heard, kind+" from "+from.String())
	}
	var wg sync.WaitGroup
	t.Cleanup(func() {
		_, _ = l.Close(), u.Close()
		wg.Wait()
	})
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			note("tcp", c.RemoteAddr(), "")
			_ = c.Close()
		}
	})
	wg.Go(func() {
		for b := make([]byte, 64); ; {
			n, from, err := u.ReadFrom(b)
			if err != nil {
				return
			}
			note("udp", from, string(b[:n]))
		}
	})
	return e
}

func (e *ear) all() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.heard
}

// hostAddresses are the IPv4 addresses of the host, its loopback left out: a guest has one of its own.
func hostAddresses(t *testing.T) []string {
	t.Helper()
	list, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, a := range list {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() && !p.Addr().IsLoopback() {
			out = append(out, p.Addr().String())
		}
	}
	return out
}

// TestNothingIsReachable tries every way out of a sandbox, as root in the guest: siblings, the host on every address it has, the
// gateway, metadata services, the world. Nothing answers, and nothing arrives where somebody listens.
func TestNothingIsReachable(t *testing.T) {
	s := theStack(t)
	host := listenOnHost(t)
	children := fork(t, s, seed(t), coppiceFork{count: 3})
	const port = 7100
	for _, c := range children[1:] {
		begin(t, s, c.Workspace.ID, "listen", strconv.Itoa(port), "/root/heard")
		execute(t, s, c.Workspace.ID, probePath, "await", "/root/heard")
	}
	addresses := map[string]int{"10.83.0.1": host.port, "169.254.169.254": 80, "168.63.129.16": 80, "100.100.100.200": 80, "192.0.2.1": 80, "1.1.1.1": 53, "255.255.255.255": 67}
	for _, a := range hostAddresses(t) {
		addresses[a] = host.port
	}
	for _, c := range children[1:] {
		addresses[c.Workspace.Network.IP] = port
	}
	var targets []string
	for a, p := range addresses {
		targets = append(targets, fmt.Sprintf("tcp:%s:%d", a, p), fmt.Sprintf("udp:%s:%d", a, p), "icmp:"+a, "raw:"+a)
	}
	_, apiPort, err := net.SplitHostPort(strings.TrimPrefix(s.server, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	targets = append(targets, "tcp:10.83.0.1:"+apiPort, "tcp:10.83.0.1:22", "udp:10.83.0.1:53")

	got := ask[map[string]string](t, s, children[0].Workspace.ID, append([]string{"reach"}, targets...)...)
	if len(got) != len(targets) {
		t.Errorf("%d results of %d", len(got), len(targets))
	}
	for target, result := range got {
		switch result {
		case "silence", "no route":
		case "hung up": // by the egress proxy, which takes whatever is sent over TCP, and carries nothing of it
			if !strings.HasPrefix(target, "tcp:") {
				t.Errorf("%s: %s", target, result)
			}
		case "sent":
			if !strings.HasPrefix(target, "raw:") {
				t.Errorf("%s: %s", target, result)
			}
		default: // a refusal, too, is an answer of somebody
			if !strings.Contains(target, "255.255.255.255") || !strings.Contains(result, "permi") && !strings.Contains(result, "unreachable") {
				t.Errorf("%s: %s", target, result)
			}
		}
	}
	for _, c := range children[1:] {
		if heard := execute(t, s, c.Workspace.ID, "cat", "/root/heard"); strings.TrimSpace(heard) != "[]" {
			t.Errorf("a sibling heard %s", heard)
		}
		m := s.mustMachine(t, c.Workspace.ID)
		if got := framesTo(t, m); got != 0 {
			t.Errorf("%d frames went to a sibling", got)
		}
	}
	if heard := host.all(); len(heard) != 0 {
		t.Errorf("the host heard %q", heard)
	}

	// The listeners have ears: the way in that there is works.
	p, err := s.client.CreatePort(t.Context(), children[1].Workspace.ID, coppice.CreatePortRequest{GuestPort: port})
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("tcp", p.Listen)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Error("the listener sent something")
	}
	var heard []string
	if err := json.Unmarshal([]byte(execute(t, s, children[1].Workspace.ID, "cat", "/root/heard")), &heard); err != nil || len(heard) != 1 {
		t.Errorf("through the forwarded port a sibling heard %q, %v; want one connection", heard, err)
	}
}

// counters are how many frames passed the tap, as the host sees it: from the guest, and to it.
func counters(t *testing.T, m machine) (from, to uint64) {
	t.Helper()
	h, err := inside(m.namespace)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	tap, err := h.LinkByName(tapName)
	if err != nil {
		t.Fatal(err)
	}
	st := tap.Attrs().Statistics
	return st.RxPackets, st.TxPackets
}

func framesFrom(t *testing.T, m machine) uint64 {
	t.Helper()
	from, _ := counters(t, m)
	return from
}

func framesTo(t *testing.T, m machine) uint64 {
	t.Helper()
	_, to := counters(t, m)
	return to
}

// TestQuarantineIsSilent floods from inside a quarantined guest, by a hook that runs as root while the fork is being resealed. Not one
// frame comes out of the tap before the release, nor later of what was sent before.
func TestQuarantineIsSilent(t *testing.T) {
	s := theStack(t)
	ws := forkOne(t, s, seed(t))
	hook(t, s, ws, "10-flood", probePath+" flood 2 > /root/flooded")
	from := checkpoint(t, s, ws)
	// Under cloud-hypervisor the tap is up: the VMM announces the captured MAC at the resume, and every frame meets a rule that drops it.
	m := s.mustMachine(t, ws)
	if got, dropped := framesFrom(t, m), droppedInQuarantine(t, m); got != dropped || got != 0 && *vmmName != "cloud-hypervisor" {
		t.Errorf("%d frames came from a guest that has nothing to say, and %d were dropped", got, dropped)
	}
	child := fork(t, s, from.ID, coppiceFork{})[0].Workspace.ID
	m = s.mustMachine(t, child)
	quarantined := framesFrom(t, m)
	sent, err := strconv.Atoi(strings.TrimSpace(execute(t, s, child, "cat", "/root/flooded")))
	if err != nil || sent < 100 {
		t.Fatalf("the guest's kernel took %d frames in quarantine, %v; that is no flood", sent, err)
	}
	if dropped := droppedInQuarantine(t, m); quarantined != dropped || dropped != 0 && *vmmName != "cloud-hypervisor" {
		t.Errorf("%d of %d frames came out of quarantine, and its rules have dropped %d", quarantined, sent, dropped)
	}
	if links := linksIn(t, m); cmp.Diff([]string{"lo", tapName}, links) != "" {
		t.Errorf("the namespace has %q; there must be nothing that leads out", links)
	}
	// The same flood after the release does reach the tap, and the rules there: the count has power.
	execute(t, s, child, probePath, "flood", "1")
	if got := framesFrom(t, m); got == 0 {
		t.Error("after the release no frame reaches the tap either: the count says nothing")
	}
	t.Logf("%d frames sent in quarantine, %d seen; %d seen after the release", sent, quarantined, framesFrom(t, m))
}

// droppedInQuarantine is what the rules of a closed namespace have dropped: frames with another MAC than the guest's, those beyond its rate,
// and all others.
func droppedInQuarantine(t *testing.T, m machine) uint64 {
	t.Helper()
	all := allDropped(t, m)
	for _, name := range []string{"drop_quarantine", "drop_spoof", "drop_rate"} {
		if _, there := all[name]; !there {
			t.Fatalf("the rules of the tap do not count %s: %v", name, all)
		}
	}
	return all["drop_quarantine"] + all["drop_spoof"] + all["drop_rate"]
}

// allDropped are the counters of the rules of a namespace, by name.
func allDropped(t *testing.T, m machine) map[string]uint64 {
	t.Helper()
	ns, err := netns.GetFromPath(m.namespace)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ns.Close() }()
	conn, err := nftables.New(nftables.WithNetNSFd(int(ns)))
	if err != nil {
		t.Fatal(err)
	}
	tables, err := conn.ListTables()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]uint64{}
	for _, table := range tables {
		list, err := conn.GetObjects(table)
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range list {
			if c, ok := o.(*nftables.CounterObj); ok {
				out[c.Name] += c.Packets
			}
		}
	}
	return out
}

func linksIn(t *testing.T, m machine) []string {
	t.Helper()
	h, err := inside(m.namespace)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	list, err := h.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, l := range list {
		out = append(out, l.Attrs().Name)
	}
	return out
}

// TestForgedAddresses has a released guest change its MAC and its address to its sibling's: the host takes no frame from it then.
func TestForgedAddresses(t *testing.T) {
	s := theStack(t)
	children := fork(t, s, seed(t), coppiceFork{count: 2})
	thief, victim := children[0].Workspace, children[1].Workspace
	begin(t, s, thief.ID, "listen", "7100", "/root/heard")
	execute(t, s, thief.ID, probePath, "await", "/root/heard")
	p, err := s.client.CreatePort(t.Context(), thief.ID, coppice.CreatePortRequest{GuestPort: 7100})
	if err != nil {
		t.Fatal(err)
	}
	nic := strings.TrimSpace(shell(t, s, thief.ID, `ls /sys/class/net | grep -v -x lo | head -n 1`))
	shell(t, s, thief.ID, fmt.Sprintf("ip link set %[1]s down; ip link set %[1]s address %[2]s; ip link set %[1]s up; ip addr flush dev %[1]s; ip addr add %[3]s/32 dev %[1]s; ip route add default dev %[1]s",
		nic, victim.Network.MAC, victim.Network.IP))
	got := ask[map[string]string](t, s, thief.ID, "reach", "tcp:10.83.0.1:22", "udp:10.83.0.1:53", "icmp:10.83.0.1")
	for target, result := range got {
		if result != "silence" && result != "no route" {
			t.Errorf("%s: %s", target, result)
		}
	}
	// Even the forwarded port of its own does not work with an address that is not its own.
	c, err := net.Dial("tcp", p.Listen)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil { // the forwarder gives up
		t.Error("a guest with a forged address answers")
	}
	if heard := execute(t, s, thief.ID, "cat", "/root/heard"); strings.TrimSpace(heard) != "[]" {
		t.Errorf("a guest with a forged address heard %s", heard)
	}
	compareAlive(t, s, victim.ID)
}
