package testoutside

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	mathrand "math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/osthread"
	"github.com/coppice-dev/coppice/internal/test/testpool"
)

// Network is a network beyond this host, with a web server at one address for every name below example.com, and a name server that this host
// asks.
type Network struct {
	t         *testing.T
	Addr      string       // of all names; no other test's, whoever runs at the same time
	Names     string       // the name server, host:port
	CA        string       // the web server's authority, PEM
	Conns     atomic.Int64 // connections that the web server has had
	Streams   atomic.Int64 // answers of /stream that go on
	Datagrams atomic.Int64 // to port 53

	path string // of its namespace

	mu     sync.Mutex // guards what follows
	asked  []string
	shown  []string
	points map[string][]netip.Addr
	sites  map[string]http.Handler
	raw    map[string]bool // hosts that speak HTTP/1.1 only
}

// Prefix is the network that the address of all names is in: one for documentation, which nothing reaches but by leave.
const Prefix = "203.0.113.0/24"

// New makes one that ends with the test.
func New(t *testing.T) *Network {
	t.Helper()
	o := &Network{t: t, points: map[string][]netip.Addr{}, sites: map[string]http.Handler{}, raw: map[string]bool{}}
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
	o.path = link.Path
	must(o.route(link.Far))
	ns, err := netns.GetFromPath(link.Path)
	must(err)
	defer ns.Close()
	var lc net.ListenConfig
	var web, plain net.Listener
	var udp net.PacketConn
	must(osthread.Do(func() error { // the thread ends with it
		if err := netns.Set(ns); err != nil {
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		addr, err := netlink.ParseAddr(o.Addr + "/32")
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(lo, addr); err != nil {
			return err
		}
		if web, err = lc.Listen(t.Context(), "tcp4", o.Addr+":443"); err != nil {
			return err
		}
		if plain, err = lc.Listen(t.Context(), "tcp4", o.Addr+":80"); err != nil {
			return err
		}
		udp, err = lc.ListenPacket(t.Context(), "udp4", o.Addr+":53")
		return err
	}))
	o.serve(web, plain, udp)
	o.nameServer(link.Near)
	return o
}

// route picks an address that nobody has and has this host find it behind another one. The route goes with the link.
func (o *Network) route(far string) error {
	for range 100 {
		o.Addr = fmt.Sprintf("203.0.113.%d", 1+mathrand.IntN(254)) //nolint:gosec // G404: any that is free will do
		dst, err := netlink.ParseIPNet(o.Addr + "/32")
		if err != nil {
			return err
		}
		if err := netlink.RouteAdd(&netlink.Route{Dst: dst, Gw: net.ParseIP(far)}); !errors.Is(err, unix.EEXIST) {
			return err
		}
	}
	return unix.EADDRINUSE
}

func (o *Network) serve(web, plain net.Listener, udp net.PacketConn) {
	o.t.Helper()
	server := func() *http.Server { // one for each: what comes first would decide about HTTP/2 for both
		return &http.Server{
			Handler: http.HandlerFunc(o.answer), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0), ReadHeaderTimeout: time.Minute,
			ConnState: func(_ net.Conn, st http.ConnState) {
				if st == http.StateNew {
					o.Conns.Add(1)
				}
			},
		}
	}
	s, bare := server(), server()
	s.TLSConfig = o.certificate("*.example.com")
	old := s.TLSConfig.Clone()
	old.NextProtos = []string{"http/1.1"}
	s.TLSConfig.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		o.mu.Lock()
		defer o.mu.Unlock()
		if o.raw[hello.ServerName] {
			return old, nil
		}
		return nil, nil //nolint:nilnil // no configuration of its own: the server's
	}
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.ServeTLS(web, "", "") })
	wg.Go(func() { _ = bare.Serve(plain) })
	wg.Go(func() {
		for b := make([]byte, 512); ; o.Datagrams.Add(1) {
			if _, _, err := udp.ReadFrom(b); err != nil {
				return
			}
		}
	})
	o.t.Cleanup(func() {
		_, _, _ = s.Close(), bare.Close(), udp.Close()
		wg.Wait()
	})
}

// answer says what was asked, or says something for ever.
func (o *Network) answer(w http.ResponseWriter, r *http.Request) {
	if auth := r.Header.Get("Authorization"); auth != "" {
		o.mu.Lock()
		o.shown = append(o.shown, r.Host+" "+auth)
		o.mu.Unlock()
	}
	o.mu.Lock()
	site := o.sites[r.Host]
	o.mu.Unlock()
	if site != nil {
		site.ServeHTTP(w, r)
		return
	}
	if r.URL.Path == "/echo" { // gives back whatever it is shown
		_ = r.Header.Write(w)
		return
	}
	if r.URL.Path != "/stream" {
		fmt.Fprintf(w, "%s %s%s\n", r.Method, r.Host, r.URL.Path) //nolint:gosec // G705: for no browser
		return
	}
	o.Streams.Add(1)
	defer o.Streams.Add(-1)
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

func (o *Network) certificate(name string) *tls.Config {
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
	o.CA = b.String()
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
}

func (o *Network) nameServer(near string) {
	o.t.Helper()
	u, err := (&net.ListenConfig{}).ListenPacket(o.t.Context(), "udp4", near+":0")
	if err != nil {
		o.t.Fatal(err)
	}
	o.Names = u.LocalAddr().String()
	up, done := make(chan struct{}), make(chan struct{})
	s := &dns.Server{PacketConn: u, NotifyStartedFunc: func() { close(up) }, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		name := q.Question[0].Name
		o.mu.Lock()
		o.asked = append(o.asked, name)
		addrs := o.points[strings.ToLower(name)]
		o.mu.Unlock()
		if addrs == nil {
			addrs = []netip.Addr{netip.MustParseAddr(o.Addr)}
		}
		for _, a := range addrs {
			switch hdr := (dns.RR_Header{Name: name, Rrtype: q.Question[0].Qtype, Class: dns.ClassINET, Ttl: 1}); {
			case hdr.Rrtype == dns.TypeA && a.Is4():
				m.Answer = append(m.Answer, &dns.A{Hdr: hdr, A: a.AsSlice()})
			case hdr.Rrtype == dns.TypeAAAA && a.Is6():
				m.Answer = append(m.Answer, &dns.AAAA{Hdr: hdr, AAAA: a.AsSlice()})
			}
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

// Point gives a name addresses of its own.
func (o *Network) Point(name string, addrs ...string) {
	o.t.Helper()
	var list []netip.Addr
	for _, a := range addrs {
		addr, err := netip.ParseAddr(a)
		if err != nil {
			o.t.Fatal(err)
		}
		list = append(list, addr)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.points[dns.Fqdn(name)] = list
}

// Asked are the names that the name server was asked for.
func (o *Network) Asked() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.asked)
}

// Shown are what requests brought in their header Authorization, each behind the host that it was for.
func (o *Network) Shown() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.shown)
}

// Serve has a name below example.com answer by a handler.
func (o *Network) Serve(name string, h http.Handler) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.sites[name] = h
}

// Raw has a name below example.com answer with whatever answer writes to the connection, which ends with it.
func (o *Network) Raw(name string, answer func(c net.Conn, r *http.Request)) {
	o.mu.Lock()
	o.raw[name] = true
	o.mu.Unlock()
	o.Serve(name, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			o.t.Errorf("take the connection to %s over: %v", name, err)
			return
		}
		defer func() { _ = c.Close() }()
		answer(c, r)
	}))
}

// Forget forgets what the name server was asked for.
func (o *Network) Forget() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.asked = nil
}
