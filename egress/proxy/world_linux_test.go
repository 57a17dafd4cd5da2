package proxy_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/policy"
	"github.com/coppice-dev/coppice/egress/proxy"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testleak"
)

// inside is set in the environment of the tests' own process, which has its own network: its loopback device is the
// Internet of these tests.
const inside = "COPPICE_TEST_INSIDE_NETWORK"

func TestMain(m *testing.M) {
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

// Addresses of the tests' Internet. The proxies of these tests take the first network for a public one.
const (
	publicNet   = "203.0.113.0/24"
	allowedAddr = "203.0.113.10"
	evilAddr    = "203.0.113.66"
	secretAddr  = "192.168.77.1"     // a private network that must not be reached
	aliasNet    = "198.18.0.0/15"    // redirected to the sandbox's transparent listener
	metadata    = "169.254.169.254"  // also on the loopback device
	transparent = "203.0.113.200:15" // also the explicit listener
)

var network = sync.OnceValue(func() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	errs := []error{netlink.LinkSetUp(lo)}
	for _, a := range []string{publicNet, secretAddr + "/32", metadata + "/32"} {
		addr, err := netlink.ParseAddr(a)
		if err != nil {
			return err
		}
		errs = append(errs, netlink.AddrAdd(lo, addr))
		_, n, _ := net.ParseCIDR(a)
		errs = append(errs, netlink.RouteReplace(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: n, Type: syscall.RTN_LOCAL, Table: 255, Scope: netlink.SCOPE_HOST}))
	}
	_, all, _ := net.ParseCIDR(aliasNet)
	return errors.Join(append(errs, netlink.RouteReplace(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: all}))...)
})

// world is a proxy with one sandbox, and an Internet around it.
type world struct {
	t       *testing.T
	server  *proxy.Server
	journal *journal
	names   *names
	ca      *authority
	id      core.SandboxID
	rules   proxy.Rules // those that it has

	explicit, transparent netip.AddrPort
}

var sandboxes atomic.Int64

// promptly bounds waits for something that takes milliseconds, or six seconds for the expiry of a grant. A busy machine
// still keeps it; a proxy that only checks from time to time does not.
const promptly = 30 * time.Second

// firstTime is the time that a guest of most tests has to send its first bytes. Tests that wait for its end use less;
// see impatient.
const firstTime = time.Minute

// impatient gives a guest only a short time for its first bytes, but enough for a test on a busy machine.
func impatient(c *proxy.Config) { c.FirstTime = 3 * time.Second }

func newWorld(t *testing.T, allow ...string) *world {
	t.Helper()
	return newWorldWith(t, func(*proxy.Config) {}, allow...)
}

func newWorldWith(t *testing.T, change func(*proxy.Config), allow ...string) *world {
	t.Helper()
	require.Root(t)
	if err := network(); err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, journal: &journal{begun: map[string]core.Flow{}}, names: &names{addrs: map[string][]string{}}, ca: newAuthority(t)}
	cfg := proxy.Config{
		Reach: func() policy.Reach { return policy.Reach{Private: []netip.Prefix{netip.MustParsePrefix(publicNet)}} }, Resolver: w.names, Journal: w.journal,
		Log: slog.New(slog.NewTextHandler(t.Output(), nil)), FirstTime: firstTime, Roots: w.ca.pool,
	}
	change(&cfg)
	w.server = proxy.New(cfg)
	t.Cleanup(func() {
		if err := w.server.Close(); err != nil {
			t.Error(err)
		}
	})
	n := sandboxes.Add(1)
	w.id = core.SandboxID(fmt.Sprintf("sbx_%d", n))
	listen := func() (net.Listener, netip.AddrPort) {
		l, err := net.Listen("tcp", "203.0.113.200:0")
		if err != nil {
			t.Fatal(err)
		}
		return l, l.Addr().(*net.TCPAddr).AddrPort()
	}
	var le, lt net.Listener
	le, w.explicit = listen()
	lt, w.transparent = listen()
	w.rules.Policy = w.policy(allow...)
	if err := w.server.Add(proxy.Sandbox{ID: w.id, Epoch: 7, Rules: w.rules}, le, lt); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *world) policy(allow ...string) policy.Policy {
	w.t.Helper()
	p, err := policy.Parse("allow", allow)
	if err != nil {
		w.t.Fatal(err)
	}
	return p
}

// allow replaces the policy of the sandbox, and keeps its grants.
func (w *world) allow(allow ...string) {
	w.t.Helper()
	w.rules.Policy = w.policy(allow...)
	w.setRules()
}

// setRules gives the sandbox the rules that the test has changed.
func (w *world) setRules() {
	w.t.Helper()
	if ok, err := w.server.SetRules(w.id, w.rules); !ok || err != nil {
		w.t.Error("rules were not set: ", ok, err)
	}
}

// names is the Internet's DNS.
type names struct {
	mu    sync.Mutex
	addrs map[string][]string
	next  func(name string) []string // nil: use addrs
	asked []string
}

func (n *names) LookupNetIP(_ context.Context, _, host string) ([]netip.Addr, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	host = strings.TrimSuffix(host, ".")
	n.asked = append(n.asked, host)
	list := n.addrs[host]
	if n.next != nil {
		list = n.next(host)
	}
	if list == nil {
		return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
	}
	out := make([]netip.Addr, len(list))
	for i, a := range list {
		out[i] = netip.MustParseAddr(a)
	}
	return out, nil
}

func (n *names) set(name string, addrs ...string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.addrs[name] = addrs
}

// journal keeps flows in memory.
type journal struct {
	mu    sync.Mutex
	begun map[string]core.Flow
	ended []core.Flow
	fails error
}

func (j *journal) Begin(f core.Flow) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.fails != nil {
		return j.fails
	}
	if _, ok := j.begun[f.ID]; ok {
		panic("a flow began twice")
	}
	j.begun[f.ID] = f
	return nil
}

func (j *journal) End(f core.Flow) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if was, ok := j.begun[f.ID]; !ok || was.Outcome == core.FlowDenied || slices.ContainsFunc(j.ended, func(o core.Flow) bool { return o.ID == f.ID }) {
		panic("a flow ended that had not begun, or was denied, or had ended")
	}
	j.ended = append(j.ended, f)
}

// flows waits until all flows have ended, returns them as text with their outcomes, and removes them from the journal.
func (w *world) flows() []string {
	w.t.Helper()
	eventually.True(w.t, "all flows have ended", func() bool {
		w.journal.mu.Lock()
		defer w.journal.mu.Unlock()
		open := 0
		for _, f := range w.journal.begun {
			if f.Outcome == core.FlowAllowed {
				open++
			}
		}
		return open == len(w.journal.ended)
	})
	w.journal.mu.Lock()
	defer w.journal.mu.Unlock()
	all := slices.Clone(w.journal.ended)
	for _, f := range w.journal.begun {
		if f.Outcome == core.FlowDenied {
			all = append(all, f)
		}
	}
	slices.SortFunc(all, func(a, b core.Flow) int { return a.At.Compare(b.At) })
	var out []string
	for _, f := range all {
		if f.SandboxID != w.id || f.Epoch != 7 || f.ID == "" || f.At.IsZero() || (f.Outcome == core.FlowDenied && f.Ended.IsZero() && f.Reason == "") {
			w.t.Errorf("the flow %+v is not whole", f)
		}
		s := fmt.Sprintf("%s %s", f.Outcome, f.Spoken)
		if f.Method != "" {
			s += " " + f.Method
		}
		s += fmt.Sprintf(" %s:%d%s", f.Host, f.Port, f.Path)
		if f.Grant != "" {
			s += " with " + f.Grant
		}
		if f.Status != 0 {
			s += fmt.Sprintf(" %d", f.Status)
		}
		out = append(out, s)
	}
	w.journal.begun, w.journal.ended = map[string]core.Flow{}, nil
	return out
}

// authority issues the Internet's certificates.
type authority struct {
	t    *testing.T
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
	pool *x509.CertPool
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t, pool: x509.NewCertPool()}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	a.key, a.cert = a.sign(template, nil)
	a.pool.AddCert(a.cert)
	return a
}

func (a *authority) sign(template *x509.Certificate, parent *x509.Certificate) (*ecdsa.PrivateKey, *x509.Certificate) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	signer := a.key
	if parent == nil {
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	if err != nil {
		a.t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return key, cert
}

func (a *authority) config(names ...string) *tls.Config {
	a.t.Helper()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageDigitalSignature,
	}
	for _, n := range names {
		if ip := net.ParseIP(n); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, n)
		}
	}
	key, cert := a.sign(template, a.cert)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{cert.Raw}, PrivateKey: key}}}
}

// site is a server of the Internet that counts its requests.
type site struct {
	conns, requests atomic.Int64
}

// serve runs a server at an address, with TLS for tlsNames if there are any. It answers with what it received.
func (w *world) serve(addr string, h http.HandlerFunc, tlsNames ...string) *site {
	w.t.Helper()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		w.t.Fatal(err)
	}
	out := new(site)
	if h == nil {
		h = func(rw http.ResponseWriter, r *http.Request) {
			b, _ := io.ReadAll(r.Body)
			rw.Header().Set("X-Seen-Host", r.Host)
			fmt.Fprintf(rw, "%s %s %s", r.Method, r.URL.Path, b)
		}
	}
	s := &http.Server{
		Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			out.requests.Add(1)
			h(rw, r)
		}),
		ReadHeaderTimeout: time.Minute, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0),
		ConnState: func(_ net.Conn, st http.ConnState) {
			if st == http.StateNew {
				out.conns.Add(1)
			}
		},
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		if tlsNames != nil {
			s.TLSConfig = w.ca.config(tlsNames...)
			_ = s.ServeTLS(l, "", "")
		} else {
			_ = s.Serve(l)
		}
	})
	w.t.Cleanup(func() {
		_ = s.Close()
		wg.Wait()
	})
	return out
}

// client is a program in the sandbox that uses the explicit proxy.
func (w *world) client() *http.Client {
	t := &http.Transport{
		Proxy:           http.ProxyURL(&url.URL{Scheme: "http", Host: w.explicit.String()}),
		TLSClientConfig: &tls.Config{RootCAs: w.ca.pool},
	}
	w.t.Cleanup(t.CloseIdleConnections)
	return &http.Client{Transport: t, Timeout: 2 * time.Minute}
}

// unaware is a program in the sandbox that knows of no proxy: all its connections arrive at the transparent listener.
func (w *world) unaware() *http.Client {
	d := net.Dialer{}
	t := &http.Transport{
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			_, port, _ := net.SplitHostPort(addr)
			return d.DialContext(ctx, "tcp", w.redirected(port))
		},
		TLSClientConfig: &tls.Config{RootCAs: w.ca.pool}, ForceAttemptHTTP2: true,
	}
	w.t.Cleanup(t.CloseIdleConnections)
	return &http.Client{Transport: t, Timeout: 2 * time.Minute}
}

var redirects atomic.Int64

// redirected returns an address with the port. As in a namespace, connections to it are redirected to the sandbox's
// transparent listener.
func (w *world) redirected(port string) string {
	w.t.Helper()
	nft := require.Program(w.t, "nft", "nftables")
	n := redirects.Add(1)
	addr := fmt.Sprintf("198.18.%d.%d", n/250, 1+n%250)
	cmd := exec.Command(nft, "-f", "-")
	cmd.Stdin = strings.NewReader(fmt.Sprintf(`add table ip t
add chain ip t out { type nat hook output priority -100; }
add rule ip t out ip daddr %s tcp dport %s dnat to %s
`, addr, port, w.transparent))
	if out, err := cmd.CombinedOutput(); err != nil {
		w.t.Fatalf("nft: %v: %s", err, out)
	}
	return net.JoinHostPort(addr, port)
}

// get sends a request and returns status and body.
func get(t *testing.T, c *http.Client, target string) (int, string) {
	t.Helper()
	resp, err := c.Get(target)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Error(err)
	}
	return resp.StatusCode, string(b)
}
