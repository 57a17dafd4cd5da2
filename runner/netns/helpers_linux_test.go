package netns

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/osthread"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testleak"
)

// crashVariable makes the test binary the process that TestReconcileAfterKill kills.
const crashVariable = "COPPICE_NETNS_TEST_CRASH"

func TestMain(m *testing.M) {
	if cluster := os.Getenv(crashVariable); cluster != "" {
		churnForever(cluster)
		return
	}
	testleak.Main(m)
}

// needNetns skips, or fails where required, on a machine that cannot make network namespaces.
func needNetns(t testing.TB) {
	t.Helper()
	require.Root(t)
	_, err := os.Stat("/dev/net/tun")
	require.That(t, "netns", err == nil, "load the tun module: modprobe tun")
}

// logged collects what a pool logs.
type logged struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func newLog(t testing.TB) (*slog.Logger, *logged) {
	t.Helper()
	l := &logged{}
	return slog.New(slog.NewTextHandler(io.MultiWriter(l, t.Output()), nil)), l
}

// newTestSpace makes a nameless namespace for the test: the host, the internet or a guest with a kernel of its own.
func newTestSpace(t testing.TB) netns.NsHandle {
	t.Helper()
	var fd netns.NsHandle
	must(t, osthread.Do(func() (err error) {
		fd, err = netns.New()
		return err
	}))
	t.Cleanup(func() { _ = fd.Close() })
	return fd
}

// testPool is a pool in a host of its own, so that a test sees the whole of it and harms nobody.
type testPool struct {
	*Pool
	host netns.NsHandle
	log  *logged
}

func newTestPool(t testing.TB, adapt func(*Config)) *testPool {
	t.Helper()
	needNetns(t)
	p := openTestPool(t, newTestSpace(t), "test "+t.Name()+" "+newID()+newID(), adapt)
	p.checkCleanAtEnd(t)
	return p
}

// openTestPool makes a pool and closes it at the end.
func openTestPool(t testing.TB, host netns.NsHandle, cluster string, adapt func(*Config)) *testPool {
	t.Helper()
	log, lines := newLog(t)
	cfg := Config{ClusterID: cluster, Max: 8, Log: log}
	if adapt != nil {
		adapt(&cfg)
	}
	p := &testPool{host: host, log: lines}
	must(t, inside(host, func() (err error) {
		p.Pool, err = NewPool(cfg)
		return err
	}))
	return p
}

// checkCleanAtEnd closes the pool at the end of the test and checks that nothing of its cluster is left.
func (p *testPool) checkCleanAtEnd(t testing.TB) {
	t.Helper()
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		p.mu.Lock()
		var used []*Namespace
		for _, n := range p.used {
			used = append(used, n)
		}
		p.mu.Unlock()
		for _, n := range used {
			check(t, n.Release(ctx))
		}
		check(t, p.Close(ctx))
		if left := tracesOf(t, p.names, p.host); len(left) != 0 {
			t.Errorf("the pool left %v", left)
		}
	})
}

// tracesOf lists everything on the host that carries the cluster's hash.
func tracesOf(t testing.TB, n names, host netns.NsHandle) []string {
	t.Helper()
	var out []string
	entries, err := os.ReadDir(runDir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.Contains(e.Name(), n.hash) {
			out = append(out, e.Name())
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, n.hash) {
			out = append(out, "mount "+strings.TrimSpace(line))
		}
	}
	must(t, inside(host, func() error {
		links, err := netlink.LinkList()
		for _, l := range links {
			if strings.Contains(l.Attrs().Name, n.hash) {
				out = append(out, "link "+l.Attrs().Name)
			}
		}
		return err
	}))
	must(t, inside(host, func() error {
		tables, err := tableNames()
		for _, name := range tables {
			if strings.Contains(name, n.hash) {
				out = append(out, "table "+name)
			}
		}
		return err
	}))
	return out
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

// identity is the n-th guest of a test.
func identity(n int) core.Identity {
	return core.Identity{
		MAC: fmt.Sprintf("02:fc:00:00:%02x:%02x", n>>8, n&0xff),
		IP:  netip.AddrFrom4([4]byte{10, 83, 1 + byte(n>>8), byte(n)}),
	}
}

// acquireOpen takes a namespace to the open state.
func acquireOpen(t testing.TB, p *testPool, id core.Identity, policy core.EgressPolicy) *Namespace {
	t.Helper()
	n, err := p.Acquire(t.Context())
	must(t, err)
	must(t, n.Assign(t.Context(), id))
	must(t, n.Open(t.Context(), policy))
	return n
}

// acquireWired is acquireOpen with the guest's end attached before the tap comes up, as a VMM's is: to a device that
// is up, the kernel tells its transmit side of a new carrier only a moment later.
func acquireWired(t testing.TB, p *testPool, id core.Identity) (*Namespace, *wire) {
	t.Helper()
	n, err := p.Acquire(t.Context())
	must(t, err)
	w := newWire(t, n)
	must(t, n.Assign(t.Context(), id))
	must(t, n.Open(t.Context(), core.EgressDenyAll))
	return n, w
}

// vnetHeaderLen is the size of virtio_net_hdr before a VMM sets another.
const vnetHeaderLen = 10

// wire is the guest's end of a tap: what a VMM would read and write.
type wire struct {
	f   *os.File
	raw interface {
		Read(func(uintptr) bool) error
	}
}

func newWire(t testing.TB, n *Namespace) *wire {
	t.Helper()
	f, err := n.TapFile(false)
	must(t, err)
	t.Cleanup(func() { _ = f.Close() })
	raw, err := f.SyscallConn()
	must(t, err)
	return &wire{f, raw}
}

func (w *wire) send(frame []byte) error {
	_, err := w.f.Write(append(make([]byte, vnetHeaderLen), frame...))
	return err
}

// pending returns a frame that is waiting now, or nil. The tap's side of the kernel answers while the frame that it
// answers is being written, so there is nothing to wait for.
func (w *wire) pending(t testing.TB) []byte {
	t.Helper()
	var n int
	var err error
	b := make([]byte, 65536)
	must(t, w.raw.Read(func(fd uintptr) bool {
		n, err = unix.Read(int(fd), b)
		return true
	}))
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EIO) { // EIO: the tap is down
		return nil
	}
	must(t, err)
	return b[vnetHeaderLen:n]
}

// The frames of a hostile or honest guest.

var broadcastMAC = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

func macOf(t testing.TB, s string) net.HardwareAddr {
	t.Helper()
	mac, err := net.ParseMAC(s)
	must(t, err)
	return mac
}

func ether(dst, src net.HardwareAddr, kind uint16, payload []byte) []byte {
	b := append(append([]byte{}, dst...), src...)
	b = binary.BigEndian.AppendUint16(b, kind)
	b = append(b, payload...)
	for len(b) < 60 {
		b = append(b, 0)
	}
	return b
}

func arp(op uint16, senderMAC net.HardwareAddr, senderIP netip.Addr, targetMAC net.HardwareAddr, targetIP netip.Addr) []byte {
	b := []byte{0, 1, 8, 0, 6, 4}
	b = binary.BigEndian.AppendUint16(b, op)
	b = append(append(b, senderMAC...), senderIP.AsSlice()...)
	return append(append(b, targetMAC...), targetIP.AsSlice()...)
}

func ip4(src, dst netip.Addr, proto byte, payload []byte) []byte {
	b := []byte{0x45, 0}
	b = binary.BigEndian.AppendUint16(b, uint16(20+len(payload)))
	b = append(b, 0, 1, 0x40, 0, 64, proto, 0, 0)
	b = append(append(b, src.AsSlice()...), dst.AsSlice()...)
	binary.BigEndian.PutUint16(b[10:], checksum(b))
	return append(b, payload...)
}

func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	if len(b)%2 == 1 {
		sum += uint32(b[len(b)-1]) << 8
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

func udp(from, to uint16, payload string) []byte {
	b := binary.BigEndian.AppendUint16(nil, from)
	b = binary.BigEndian.AppendUint16(b, to)
	b = binary.BigEndian.AppendUint16(b, uint16(8+len(payload)))
	return append(append(b, 0, 0), payload...)
}

// tcpSYN opens a connection; its checksum is right, so that only a rule can refuse it.
func tcpSYN(src, dst netip.Addr, to uint16) []byte {
	b := binary.BigEndian.AppendUint16(nil, 40000)
	b = binary.BigEndian.AppendUint16(b, to)
	b = append(b, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 0x02, 0xff, 0xff, 0, 0, 0, 0)
	pseudo := append(append(src.AsSlice(), dst.AsSlice()...), 0, unix.IPPROTO_TCP, 0, byte(len(b)))
	binary.BigEndian.PutUint16(b[16:], checksum(append(pseudo, b...)))
	return b
}

// kernelGuest is a guest with a real network stack: a namespace whose tap is patched to the sandbox's.
type kernelGuest struct {
	ns  netns.NsHandle
	end func() // unplugs the tap, as the end of a VMM does
}

// newKernelGuest patches a guest to the tap of n. It answers once n is open.
func newKernelGuest(t testing.TB, n *Namespace, id core.Identity) *kernelGuest {
	t.Helper()
	g := &kernelGuest{ns: newTestSpace(t)}
	mac := macOf(t, id.MAC)
	var own *os.File
	must(t, inside(g.ns, func() error {
		fd, err := openTap()
		if err != nil {
			return err
		}
		own = os.NewFile(uintptr(fd), "guest")
		l, err := netlink.LinkByName(TapName)
		if err != nil {
			return err
		}
		return errors.Join(
			sysctl{"ipv6/conf/all/disable_ipv6", "1"}.set(),
			netlink.LinkSetHardwareAddr(l, mac),
			netlink.AddrAdd(l, &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(id.IP, 16))}),
			netlink.LinkSetUp(l),
			netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Gw: net.ParseIP(DefaultGateway)}))
	}))
	far, err := n.TapFile(false)
	must(t, err)
	var pumps sync.WaitGroup
	pump := func(to, from *os.File) {
		b := make([]byte, 65536)
		for {
			size, err := from.Read(b)
			if errors.Is(err, os.ErrClosed) {
				return
			}
			if err == nil {
				_, _ = to.Write(b[:size]) // a tap that is down loses frames, as it should
			}
		}
	}
	pumps.Go(func() { pump(own, far) })
	pumps.Go(func() { pump(far, own) })
	g.end = sync.OnceFunc(func() {
		check(t, own.Close())
		check(t, far.Close())
		pumps.Wait()
	})
	t.Cleanup(g.end)
	return g
}

func (g *kernelGuest) listen(t testing.TB, addr string) net.Listener {
	t.Helper()
	var l net.Listener
	must(t, inside(g.ns, func() (err error) {
		l, err = (&net.ListenConfig{}).Listen(t.Context(), "tcp4", addr)
		return err
	}))
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func (g *kernelGuest) dial(ctx context.Context, addr string) (net.Conn, error) {
	var c net.Conn
	err := inside(g.ns, func() (err error) {
		c, err = (&net.Dialer{}).DialContext(ctx, "tcp4", addr)
		return err
	})
	return c, err
}

// serveEcho accepts connections and sends back what it reads, until the test ends.
func serveEcho(t testing.TB, l net.Listener) {
	t.Helper()
	var accepting, all sync.WaitGroup
	var open []net.Conn // a peer that was cut off does not end its connections
	accepting.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			open = append(open, c)
			all.Go(func() {
				_, _ = io.Copy(c, c) // ends with the connection, however that ends
				_ = c.Close()
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		accepting.Wait()
		for _, c := range open {
			_ = c.Close()
		}
		all.Wait()
	})
}

// echo sends text over c and expects it back.
func echo(t testing.TB, c net.Conn, text string) {
	t.Helper()
	must(t, c.SetDeadline(time.Now().Add(watchdog)))
	_, err := c.Write([]byte(text))
	must(t, err)
	b := make([]byte, len(text))
	_, err = io.ReadFull(c, b)
	must(t, err)
	if string(b) != text {
		t.Fatalf("echo of %q is %q", text, b)
	}
}

// watchdog ends what would hang; nothing that is tested depends on it.
const watchdog = 5 * time.Minute

func patience(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}
