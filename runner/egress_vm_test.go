package runner

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/eventually"
	"github.com/coppice-dev/coppice/internal/osthread"
	"github.com/coppice-dev/coppice/internal/testpool"
)

// outside is a network beyond this host, with a web server at one address for every name below example.com, and a name server that this host
// asks.
type outside struct {
	t        *testing.T
	names    string // of the name server, host:port
	ca       string // PEM
	conns    atomic.Int64
	streams  atomic.Int64 // answers that go on
	datagram atomic.Int64

	mu    sync.Mutex // guards asked
	asked []string
}

const (
	outsideAddr = "203.0.113.7"
	outsideNet  = "203.0.113.0/24"
)

func newOutside(t *testing.T) *outside {
	t.Helper()
	o := &outside{t: t}
	link, err := testpool.NewLink()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := link.Close(); err != nil {
			t.Error(err)
		}
	})
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	ns, err := vnetns.GetFromPath(link.Path)
	must(err)
	defer ns.Close()
	var web, plain net.Listener
	var udp net.PacketConn
	must(osthread.Do(func() error { // the thread ends with it
		if err := vnetns.Set(ns); err != nil {
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		addr, err := netlink.ParseAddr(outsideAddr + "/32")
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(lo, addr); err != nil {
			return err
		}
		if web, err = net.Listen("tcp4", outsideAddr+":443"); err != nil {
			return err
		}
		if plain, err = net.Listen("tcp4", outsideAddr+":80"); err != nil {
			return err
		}
		udp, err = net.ListenPacket("udp4", outsideAddr+":53")
		return err
	}))
	_, dst, _ := net.ParseCIDR(outsideAddr + "/32")
	must(netlink.RouteAdd(&netlink.Route{Dst: dst, Gw: net.ParseIP(link.Far)})) // it goes with the link
	o.serve(web, plain, udp)
	o.nameServer(link.Near)
	return o
}

func (o *outside) serve(web, plain net.Listener, udp net.PacketConn) {
	o.t.Helper()
	s := &http.Server{
		Handler: http.HandlerFunc(o.answer), TLSConfig: o.certificate("*.example.com"), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0),
		ConnState: func(_ net.Conn, st http.ConnState) {
			if st == http.StateNew {
				o.conns.Add(1)
			}
		},
	}
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.ServeTLS(web, "", "") })
	wg.Go(func() { _ = s.Serve(plain) })
	wg.Go(func() {
		for b := make([]byte, 512); ; o.datagram.Add(1) {
			if _, _, err := udp.ReadFrom(b); err != nil {
				return
			}
		}
	})
	o.t.Cleanup(func() {
		_, _ = s.Close(), udp.Close()
		wg.Wait()
	})
}

// answer says what was asked, or says something for ever.
func (o *outside) answer(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/stream" {
		fmt.Fprintf(w, "%s %s%s\n", r.Method, r.Host, r.URL.Path)
		return
	}
	o.streams.Add(1)
	defer o.streams.Add(-1)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		if _, err := io.WriteString(w, "more\n"); err != nil || http.NewResponseController(w).Flush() != nil {
			return
		}
		select {
		case <-tick.C:
		case <-r.Context().Done():
			return
		}
	}
}

func (o *outside) certificate(name string) *tls.Config {
	o.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		o.t.Fatal(err)
	}
	cert := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "outside"}, DNSNames: []string{name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, key.Public(), key)
	if err != nil {
		o.t.Fatal(err)
	}
	var b bytes.Buffer
	if err := pem.Encode(&b, &pem.Block{Type: "CERTIFICATE", Bytes: der}); err != nil {
		o.t.Fatal(err)
	}
	o.ca = b.String()
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
}

func (o *outside) nameServer(near string) {
	o.t.Helper()
	u, err := net.ListenPacket("udp4", near+":0")
	if err != nil {
		o.t.Fatal(err)
	}
	o.names = u.LocalAddr().String()
	up, done := make(chan struct{}), make(chan struct{})
	s := &dns.Server{PacketConn: u, NotifyStartedFunc: func() { close(up) }, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		name := q.Question[0].Name
		o.mu.Lock()
		o.asked = append(o.asked, name)
		o.mu.Unlock()
		if q.Question[0].Qtype == dns.TypeA {
			m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 1}, A: net.ParseIP(outsideAddr)}}
		}
		_ = w.WriteMsg(m)
	})}
	go func() {
		defer close(done)
		_ = s.ActivateAndServe()
	}()
	<-up
	o.t.Cleanup(func() {
		_ = s.Shutdown()
		<-done
	})
}

// TestEgressVM: programs of a real guest, those that know of the proxy and those that do not, reach what its rules allow and nothing else.
func TestEgressVM(t *testing.T) {
	o := newOutside(t)
	r := newRig(t, func(c *Config) {
		c.Egress = egressOf(t, egressSettings{Names: o.names, Private: []netip.Prefix{netip.MustParsePrefix(outsideNet)}})
	})
	from := r.template()
	child := r.child()
	child.Rules = rulesOf(1, "a.example.com", "*.many.test")
	f, err := r.Fork(t.Context(), runnerapi.Fork{CheckpointID: from, Children: []runnerapi.Child{child}})
	if err != nil || f.Children[0].Problem != nil {
		t.Fatalf("fork: %+v, %v", f, err)
	}
	id := child.SandboxID
	r.sh(id, "cat > ca.pem <<END\n"+o.ca+"END\n")
	// sh runs a script with the outside's authority, and gives what it wrote with its status.
	sh := func(script string) string {
		t.Helper()
		return strings.TrimSpace(r.sh(id, "export CURL_CA_BUNDLE=/root/ca.pem SSL_CERT_FILE=/root/ca.pem; ("+script+") 2>&1 && echo ok || echo failed $?"))
	}
	wantSaid := func(script, want string) {
		t.Helper()
		if got := sh(script); !strings.Contains(got, want) {
			t.Errorf("%s\nsaid %q, want %q", script, got, want)
		}
	}
	const python = `python3 -c 'import sys,urllib.request as u; print(u.urlopen(sys.argv[1], timeout=20).read().decode())' `
	const unaware = `unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY; `
	for _, aware := range []string{"", unaware} {
		wantSaid(aware+"curl -sS -m 20 https://a.example.com/curl", "GET a.example.com/curl\nok")
		wantSaid(aware+"curl -sS -m 20 http://a.example.com/plain", "GET a.example.com/plain\nok")
		wantSaid(aware+python+"https://a.example.com/python", "GET a.example.com/python\n\nok")
	}
	wantSaid("env | grep -i _proxy | sort | cut -d= -f1 | tr '\\n' ' '", "HTTPS_PROXY HTTP_PROXY NO_PROXY http_proxy https_proxy no_proxy")

	// What is not allowed.
	before := o.conns.Load()
	wantSaid("curl -sS -m 20 https://b.example.com/", "failed")
	wantSaid("curl -sS -m 20 http://b.example.com/", "does not allow")
	wantSaid(unaware+"curl -sS -m 20 https://b.example.com/", "failed 6") // there is no such name
	wantSaid(unaware+"curl -sSk -m 20 https://"+outsideAddr+"/", "failed")
	wantSaid(unaware+"curl -sSk -m 20 --resolve b.example.com:443:"+outsideAddr+" https://b.example.com/", "failed")
	wantSaid(unaware+"curl -sS -m 20 --resolve a.example.com:81:"+outsideAddr+" http://a.example.com:81/", "does not allow")
	wantSaid(`python3 -c 'import socket; s=socket.create_connection(("`+outsideAddr+`",443),9); s.sendall(b"SSH-2.0-x\r\n"); print(len(s.recv(9)))'`, "failed")
	wantSaid(`python3 -c 'import socket; s=socket.socket(socket.AF_INET,socket.SOCK_DGRAM); s.sendto(b"x",("`+outsideAddr+`",53))'; true`, "ok")
	wantSaid(`python3 -c 'import socket; print(socket.gethostbyname("secret-data.b.example.com"))'`, "failed")
	if n := o.conns.Load() - before; n != 0 {
		t.Errorf("%d connections arrived outside that no rule allows", n)
	}
	if n := o.datagram.Load(); n != 0 {
		t.Errorf("%d datagrams arrived outside", n)
	}
	o.mu.Lock()
	for _, name := range o.asked {
		if name != "a.example.com." {
			t.Errorf("a name server was asked for %s", name)
		}
	}
	o.mu.Unlock()

	// New rules count at once, for what is under way as well.
	stream := func() {
		t.Helper()
		r.sh(id, "CURL_CA_BUNDLE=/root/ca.pem setsid curl -sS https://a.example.com/stream >/dev/null 2>&1 &")
		eventually.True(t, "a tunnel is open", func() bool { return o.streams.Load() == 1 })
	}
	stream()
	began := time.Now()
	if err := r.SetEgressRules(t.Context(), id, rulesOf(2, "c.example.com")); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "the tunnel has ended", func() bool { return o.streams.Load() == 0 })
	took := time.Since(began)
	t.Logf("a tunnel ended %s after its rule; load %s", took, load())
	if took > time.Second {
		t.Errorf("new rules took %s", took)
	}
	wantSaid("curl -sS -m 20 https://c.example.com/new", "GET c.example.com/new\nok")
	wantSaid("curl -sS -m 20 https://a.example.com/old", "failed")
	if err := r.SetEgressRules(t.Context(), id, rulesOf(3, "a.example.com")); err != nil {
		t.Fatal(err)
	}

	// Without the process nothing passes, and it is back soon.
	stream()
	client, err := r.egress.await(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	hello, err := client.Hello(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(hello.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	killed := time.Now()
	eventually.True(t, "the tunnel has ended", func() bool { return o.streams.Load() == 0 })
	eventually.True(t, "there is a process again that has the sandbox", func() bool {
		c, _ := r.egress.current()
		if c == nil {
			return false
		}
		list, err := c.List(t.Context())
		return err == nil && len(list) == 1
	})
	took = time.Since(killed)
	t.Logf("the sandbox was served again %s after the process was killed; load %s", took, load())
	if took > 5*time.Second {
		t.Errorf("it took %s", took)
	}
	wantSaid("curl -sS -m 20 https://a.example.com/again", "GET a.example.com/again\nok")

	// A fork of it has rules of its own, and its programs too find the proxy.
	c := r.capture(id)
	fork := r.child()
	fork.Rules = rulesOf(1, "b.example.com")
	if f, err = r.Fork(t.Context(), runnerapi.Fork{CheckpointID: c.ID, Children: []runnerapi.Child{fork}}); err != nil || f.Children[0].Problem != nil {
		t.Fatalf("fork: %+v, %v", f, err)
	}
	wantSaid("curl -sS -m 20 https://a.example.com/parent", "GET a.example.com/parent\nok")
	id = fork.SandboxID
	wantSaid("curl -sS -m 20 https://b.example.com/fork", "GET b.example.com/fork\nok")
	wantSaid("curl -sS -m 20 https://a.example.com/fork", "failed")
	wantSaid(unaware+python+"https://b.example.com/fork", "GET b.example.com/fork\n\nok")

	flows, _, err := r.Flows(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	by := map[core.SandboxID]int{}
	for _, f := range flows {
		by[f.SandboxID]++
	}
	if by[child.SandboxID] == 0 || by[fork.SandboxID] == 0 {
		t.Errorf("flows by sandbox: %v", by)
	}
}

// load is the load average of this machine.
func load() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(b))
}
