package egress_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/egressapi"
	"github.com/coppice-dev/coppice/egress/host"
	"github.com/coppice-dev/coppice/egress/resolver"
	"github.com/coppice-dev/coppice/internal/sidecar"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/runner/egress"
)

const (
	beAProcess = "be-an-egress-process"
	inside     = "COPPICE_TEST_INSIDE_NETWORK" // set in the environment of the tests' own process, which has a network of its own
)

// TestMain runs the tests in a network of their own, where the loopback device is the Internet; or, started again with an argument, is the
// egress process.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == beAProcess {
		if err := serve(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Geteuid() != 0 || os.Getenv(inside) != "" {
		testleak.Main(m)
		return
	}
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	cmd := exec.Command(self, os.Args[1:]...)
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	err = cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		os.Exit(exit.ExitCode())
	} else if err != nil {
		panic(err)
	}
}

// settings are what a process of a test is told.
type settings struct {
	Dir, Spool, Resolver string
	MaxSpool             int64
	UID                  uint32
	Alone                time.Duration
}

func serve() error {
	var cfg settings
	if err := json.NewDecoder(os.Stdin).Decode(&cfg); err != nil {
		return err
	}
	if err := os.MkdirAll(cfg.Spool, 0o700); err != nil {
		return err
	}
	spool, err := os.OpenRoot(cfg.Spool)
	if err != nil {
		return err
	}
	listen, err := sidecar.Listen(egress.SocketPath(cfg.Dir))
	if err != nil {
		return err
	}
	s, err := host.New(context.Background(), host.Config{
		Listen: listen, Spool: spool, Log: slog.New(slog.NewTextHandler(os.Stderr, nil)), UID: cfg.UID, MaxSpool: cfg.MaxSpool, Alone: cfg.Alone,
		Private: []netip.Prefix{netip.MustParsePrefix(publicNet)},
		Resolver: &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, network, cfg.Resolver)
		}},
	})
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	return s.Run(ctx)
}

// Addresses of the tests' Internet, which is public as far as the processes of these tests know. None but the first is one of the device's own.
const (
	publicNet = "203.0.113.0/24"
	nameAddr  = "203.0.113.53:53"
	siteAddr  = "203.0.113.10"
	guestAddr = "203.0.113.200:0" // where a sandbox's sockets are
)

var network = sync.OnceValue(func() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	addr, err := netlink.ParseAddr(publicNet)
	if err != nil {
		return err
	}
	_, n, _ := net.ParseCIDR(publicNet)
	return errors.Join(netlink.LinkSetUp(lo), netlink.AddrAdd(lo, addr),
		netlink.RouteReplace(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: n, Type: syscall.RTN_LOCAL, Table: 255, Scope: netlink.SCOPE_HOST}))
})

// rig is an egress process with an Internet around it: every name under example.com is at siteAddr, and every other at an address of this host.
type rig struct {
	t       *testing.T
	cfg     settings
	client  *egress.Client
	pid     int
	queries func() []string
}

func newRig(t *testing.T, change func(*settings)) *rig {
	t.Helper()
	require.Root(t)
	if err := network(); err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "egress") //nolint:usetesting // the path of a socket must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	x := &rig{t: t, cfg: settings{Dir: dir, Spool: filepath.Join(dir, "spool")}}
	x.cfg.Resolver, x.queries = nameServer(t)
	change(&x.cfg)
	x.start()
	t.Cleanup(func() {
		if err := x.client.Stop(context.WithoutCancel(t.Context())); err != nil && !errors.Is(err, egress.ErrGone) {
			t.Error(err)
		}
		b, _ := os.ReadFile(filepath.Join(dir, "log"))
		t.Logf("the process said:\n%s", b)
	})
	return x
}

func (x *rig) start() {
	x.t.Helper()
	config, err := json.Marshal(x.cfg)
	if err != nil {
		x.t.Fatal(err)
	}
	client, hello, err := egress.Ensure(x.t.Context(), egress.Process{Dir: x.cfg.Dir, Command: []string{os.Args[0], beAProcess}, Config: config})
	if err != nil {
		x.t.Fatal(err)
	}
	x.client, x.pid = client, hello.PID
}

// kill ends the process as a crash does.
func (x *rig) kill() {
	x.t.Helper()
	watch := make(chan error, 1)
	go func() { watch <- x.client.Watch(x.t.Context()) }()
	if err := unix.Kill(x.pid, unix.SIGKILL); err != nil {
		x.t.Fatal(err)
	}
	if err := <-watch; !errors.Is(err, egress.ErrGone) {
		x.t.Fatalf("the end of the process is %v", err)
	}
}

func nameServer(t *testing.T) (string, func() []string) {
	t.Helper()
	u, err := net.ListenPacket("udp4", "203.0.113.53:0")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var asked []string
	up := make(chan struct{})
	s := &dns.Server{PacketConn: u, NotifyStartedFunc: func() { close(up) }, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		name := q.Question[0].Name
		mu.Lock()
		asked = append(asked, name)
		mu.Unlock()
		to := "203.0.113.0" // this host's own
		if strings.HasSuffix(name, "example.com.") {
			to = siteAddr
		}
		if q.Question[0].Qtype == dns.TypeA {
			m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 1}, A: net.ParseIP(to)}}
		}
		_ = w.WriteMsg(m)
	})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.ActivateAndServe()
	}()
	<-up
	t.Cleanup(func() {
		_ = s.Shutdown()
		<-done
	})
	return u.LocalAddr().String(), func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(asked)
	}
}

// guest is a sandbox's sockets, as its programs know them.
type guest struct {
	id           core.SandboxID
	proxy, names string
	files        []*os.File
}

func (x *rig) guest() *guest {
	x.t.Helper()
	g := &guest{id: core.NewID[core.SandboxID]()}
	g.open(x.t, guestAddr, guestAddr, guestAddr)
	return g
}

// open opens the sockets, again at the same addresses after they were closed.
func (g *guest) open(t *testing.T, at, intercepted, names string) {
	t.Helper()
	g.files = nil
	listen := func(at string) string {
		l, err := net.Listen("tcp4", at)
		if err != nil {
			t.Fatal(err)
		}
		f, err := l.(*net.TCPListener).File()
		if err != nil {
			t.Fatal(err)
		}
		_ = l.Close()
		g.files = append(g.files, f)
		return l.Addr().String()
	}
	g.proxy = listen(at)
	listen(intercepted)
	g.names = listen(names)
	u, err := net.ListenPacket("udp4", g.names)
	if err != nil {
		t.Fatal(err)
	}
	f, err := u.(*net.UDPConn).File()
	if err != nil {
		t.Fatal(err)
	}
	_ = u.Close()
	g.files = append(g.files, f)
}

func (x *rig) put(g *guest, version int64, allow ...string) {
	x.t.Helper()
	if err := x.client.Put(x.t.Context(), egressapi.Sandbox{ID: g.id, Epoch: 3, Rules: runnerapi.EgressRules{Version: version, Allow: allow}}, g.files); err != nil {
		x.t.Fatal(err)
	}
	sidecar.CloseAll(g.files)
}

func (x *rig) rules(g *guest, version int64, allow ...string) {
	x.t.Helper()
	if err := x.client.SetRules(x.t.Context(), g.id, runnerapi.EgressRules{Version: version, Allow: allow}); err != nil {
		x.t.Fatal(err)
	}
}

// site runs a server of the Internet that answers every line with it.
func site(t *testing.T) (port string) {
	t.Helper()
	l, err := net.Listen("tcp4", siteAddr+":0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var conns []net.Conn
	t.Cleanup(func() {
		_ = l.Close()
		mu.Lock()
		for _, c := range conns {
			_ = c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns = append(conns, c)
			mu.Unlock()
			wg.Go(func() {
				_, _ = io.Copy(c, c)
				_ = c.Close()
			})
		}
	})
	_, port, _ = net.SplitHostPort(l.Addr().String())
	return port
}

// tunnel is a connection through a guest's proxy.
type tunnel struct {
	net.Conn
	r *bufio.Reader
}

func connect(t *testing.T, g *guest, target string) (*tunnel, int) {
	t.Helper()
	c, err := net.DialTimeout("tcp4", g.proxy, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(5 * time.Minute))
	fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", target, target)
	out := &tunnel{c, bufio.NewReader(c)}
	resp, err := http.ReadResponse(out.r, &http.Request{Method: http.MethodConnect})
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close() // that of a refusal
	return out, resp.StatusCode
}

func (c *tunnel) say(text string) (string, error) {
	if _, err := io.WriteString(c, text+"\n"); err != nil {
		return "", err
	}
	s, err := c.r.ReadString('\n')
	return strings.TrimSuffix(s, "\n"), err
}

func (c *tunnel) want(t *testing.T, text string) {
	t.Helper()
	if got, err := c.say(text); err != nil || got != text {
		t.Fatalf("the tunnel answered %q, %v to %q", got, err, text)
	}
}

func lookup(t *testing.T, g *guest, name string) (rcode int, addr string) {
	t.Helper()
	m, err := dns.Exchange(new(dns.Msg).SetQuestion(name, dns.TypeA), g.names)
	if err != nil {
		t.Fatal(err)
	}
	if len(m.Answer) == 1 {
		addr = m.Answer[0].(*dns.A).A.String()
	}
	return m.Rcode, addr
}

// flows takes what was recorded, until that many came.
func (x *rig) flows(after, n int64) ([]core.Flow, int64) {
	x.t.Helper()
	ctx, cancel := context.WithTimeout(x.t.Context(), 5*time.Minute)
	defer cancel()
	var out []core.Flow
	for int64(len(out)) < n {
		b, err := x.client.Flows(ctx, after)
		if err != nil {
			x.t.Fatalf("%d of %d flows came: %v", len(out), n, err)
		}
		out, after = append(out, b.Flows...), b.Last
	}
	return out, after
}

func TestServe(t *testing.T) {
	x := newRig(t, func(*settings) {})
	port := site(t)
	g, other := x.guest(), x.guest()
	x.put(g, 1, "tcp://a.example.com:"+port, "tcp://elsewhere.test:"+port)
	x.put(other, 1)

	c, status := connect(t, g, "a.example.com:"+port)
	if status != http.StatusOK {
		t.Fatalf("an allowed host: %d", status)
	}
	c.want(t, "hello")
	for target, guests := range map[string]*guest{"b.example.com:" + port: g, "a.example.com:" + port: other} {
		if _, status := connect(t, guests, target); status != http.StatusForbidden {
			t.Errorf("%s: %d", target, status)
		}
	}
	if c, _ := connect(t, g, "elsewhere.test:"+port); true { // allowed, but it is this host
		if got, err := c.say("hello"); err == nil {
			t.Errorf("this host answered %q", got)
		}
	}
	if code, addr := lookup(t, g, "a.example.com."); code != dns.RcodeSuccess || !resolver.Network.Contains(netip.MustParseAddr(addr)) {
		t.Errorf("an allowed name: %d %s", code, addr)
	}
	if code, _ := lookup(t, other, "a.example.com."); code != dns.RcodeNameError {
		t.Errorf("a name that is not allowed: %d", code)
	}
	_ = c.Close()
	list, _ := x.flows(0, 6) // two of each that was allowed, one of each that was not
	byHost := map[string][]string{}
	for _, f := range list {
		if f.Epoch != 3 || f.At.IsZero() {
			t.Errorf("flow %+v", f)
		}
		key := f.Host
		if f.SandboxID == other.id {
			key = "other"
		}
		byHost[key] = append(byHost[key], fmt.Sprint(f.Outcome, " ", !f.Ended.IsZero()))
	}
	want := map[string][]string{
		"a.example.com": {"allowed false", "allowed true"}, "b.example.com": {"denied false"}, "other": {"denied false"}, "elsewhere.test": {"allowed false", "denied true"},
	}
	if fmt.Sprint(byHost) != fmt.Sprint(want) {
		t.Errorf("flows %v, want %v", byHost, want)
	}
	for _, q := range x.queries() {
		if strings.Contains(q, "b.example") {
			t.Errorf("the world was asked for %s", q)
		}
	}
	st, err := x.client.Stats(t.Context())
	if err != nil || st.Sandboxes != 2 || st.Open != 0 || st.Flows[core.FlowAllowed] != 1 || st.Flows[core.FlowDenied] != 3 || st.Answers["given"] != 1 || st.Answers["not_found"] != 1 {
		t.Errorf("stats %+v, %v", st, err)
	}

	// What is removed is closed, at once, and the other goes on.
	if err := x.client.Remove(t.Context(), g.id); err != nil {
		t.Fatal(err)
	}
	if c, err := net.DialTimeout("tcp4", g.proxy, time.Minute); err == nil {
		_ = c.Close()
		t.Error("the sockets of a sandbox that was removed are open")
	}
	if _, status := connect(t, other, "a.example.com:"+port); status != http.StatusForbidden {
		t.Errorf("the other sandbox: %d", status)
	}
}

// TestRules: newer rules count at once, also for what is under way; older ones change nothing.
func TestRules(t *testing.T) {
	x := newRig(t, func(*settings) {})
	port := site(t)
	g := x.guest()
	a, b := "tcp://a.example.com:"+port, "tcp://b.example.com:"+port
	x.put(g, 5, a)
	ca, _ := connect(t, g, "a.example.com:"+port)
	ca.want(t, "hello")

	x.rules(g, 6, a, b)
	cb, status := connect(t, g, "b.example.com:"+port)
	if status != http.StatusOK {
		t.Fatalf("allowed later: %d", status)
	}
	cb.want(t, "hello")
	x.rules(g, 5) // an old message
	ca.want(t, "still")
	cb.want(t, "still")
	x.rules(g, 7, a)
	if _, err := cb.r.ReadByte(); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a tunnel to what is not allowed any more goes on: %v", err)
	}
	ca.want(t, "still")
	if _, status := connect(t, g, "b.example.com:"+port); status != http.StatusForbidden {
		t.Errorf("not allowed any more: %d", status)
	}
	if err := x.client.SetRules(t.Context(), g.id, runnerapi.EgressRules{Version: 8, Allow: []string{"127.1"}}); core.CategoryOf(err) != core.Invalid {
		t.Errorf("rules that are none: %v", err)
	}
	if err := x.client.SetRules(t.Context(), core.NewID[core.SandboxID](), runnerapi.EgressRules{Version: 8}); core.CategoryOf(err) != core.NotFound {
		t.Errorf("rules of nobody: %v", err)
	}
	ca.want(t, "still")
}

// TestKill: with the process every way ends, and what it had recorded is not lost.
func TestKill(t *testing.T) {
	x := newRig(t, func(*settings) {})
	port := site(t)
	g := x.guest()
	x.put(g, 1, "tcp://a.example.com:"+port)
	c, _ := connect(t, g, "a.example.com:"+port)
	c.want(t, "hello")
	_, after := x.flows(0, 1)
	connect(t, g, "b.example.com:"+port) // recorded, and nobody has fetched it
	x.kill()

	if got, err := c.say("hello"); err == nil {
		t.Errorf("a tunnel goes on without the process: %q", got)
	}
	if c, err := net.DialTimeout("tcp4", g.proxy, time.Minute); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("who serves the sandbox: %v, %v", c, err)
	}
	if _, err := x.client.Hello(t.Context()); !errors.Is(err, egress.ErrGone) {
		t.Errorf("who answers: %v", err)
	}

	// A record that was not finished.
	segments, err := filepath.Glob(filepath.Join(x.cfg.Spool, "flows-*"))
	if err != nil || len(segments) != 1 {
		t.Fatalf("segments %q, %v", segments, err)
	}
	f, err := os.OpenFile(segments[0], os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteString(`{"n":3,"flow":{"id":"torn","host":"torn.exa`)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}

	x.start()
	g.open(t, g.proxy, guestAddr, g.names)
	x.put(g, 1, "tcp://a.example.com:"+port)
	c, status := connect(t, g, "a.example.com:"+port)
	if status != http.StatusOK {
		t.Fatalf("served again: %d", status)
	}
	c.want(t, "hello")
	// All but the acknowledged ones, or, because they were acknowledged to nobody who lives, all.
	var all []string
	for len(all) == 0 || !strings.Contains(all[len(all)-1], "allowed false") || len(all) < 3 {
		var list []core.Flow
		list, after = x.flows(after, 1)
		for _, f := range list {
			all = append(all, fmt.Sprint(f.Host, " ", f.Outcome, " ", !f.Ended.IsZero()))
		}
	}
	for _, want := range []string{"b.example.com denied false", "a.example.com failed true", "a.example.com allowed false"} {
		if !slices.Contains(all, want) {
			t.Errorf("%q is not among %q", want, all)
		}
	}
	if slices.ContainsFunc(all, func(s string) bool { return strings.Contains(s, "torn") }) {
		t.Errorf("half a record was read: %q", all)
	}
	_ = c.Close()
	if list, _ := x.flows(after, 1); list[0].Ended.IsZero() || list[0].Outcome != core.FlowAllowed {
		t.Errorf("the end of a flow is %+v", list[0])
	}
}

// TestFull: what cannot be recorded does not happen, until there is room again.
func TestFull(t *testing.T) {
	x := newRig(t, func(c *settings) { c.MaxSpool = 16 << 10 })
	port := site(t)
	g := x.guest()
	x.put(g, 1, "tcp://a.example.com:"+port)
	first, _ := connect(t, g, "a.example.com:"+port)
	first.want(t, "hello")
	full := false
	for range 200 {
		c, _ := connect(t, g, "a.example.com:"+port)
		_, err := c.say("hello")
		_ = c.Close()
		if full = err != nil; full {
			break
		}
	}
	if !full {
		t.Fatal("a spool of 16 KiB took 200 flows")
	}
	st, err := x.client.Stats(t.Context())
	if err != nil || st.Unrecorded == 0 || st.SpoolBytes > st.SpoolMax {
		t.Errorf("stats %+v, %v", st, err)
	}
	first.want(t, "what is under way goes on")
	_ = first.Close()
	eventually.True(t, "the end of what was under way is recorded", func() bool {
		st, err := x.client.Stats(t.Context())
		return err == nil && st.Open == 0
	})
	if st, err = x.client.Stats(t.Context()); err != nil || st.SpoolBytes > st.SpoolMax {
		t.Errorf("stats %+v, %v", st, err)
	}
}

// TestStrangers: nobody but the runner's user and root is listened to.
func TestStrangers(t *testing.T) {
	x := newRig(t, func(c *settings) { c.UID = 4242 })
	if err := os.Chmod(x.cfg.Dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(egress.SocketPath(x.cfg.Dir)); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the socket is %v, %v", info.Mode(), err)
	}
	if err := os.Chmod(egress.SocketPath(x.cfg.Dir), 0o666); err != nil {
		t.Fatal(err)
	}
	perl := require.Program(t, "perl", "perl") // of the system: others may run it
	for uid, want := range map[uint32]string{4242: "instance", 4243: ""} {
		cmd := exec.CommandContext(t.Context(), perl, "-MSocket", "-e", `
			socket(my $s, AF_UNIX, SOCK_SEQPACKET, 0) or die; connect($s, pack_sockaddr_un($ARGV[0])) or die "connect: $!";
			syswrite($s, '{"op":"hello"}'); sysread($s, my $b, 4096); print $b`, egress.SocketPath(x.cfg.Dir))
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), want) || want == "" && strings.TrimSpace(string(out)) != "" {
			t.Errorf("user %d got %q, %v", uid, out, err)
		}
	}
}
