package egress

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/ca"
	"github.com/coppice-dev/coppice/egress/egressapi"
	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/egress/policy"
	"github.com/coppice-dev/coppice/internal/osthread"
	"github.com/coppice-dev/coppice/internal/pace"
	"github.com/coppice-dev/coppice/internal/test/bench/report"
	"github.com/coppice-dev/coppice/internal/test/testpool"
	"github.com/coppice-dev/coppice/runner/egress"
)

// The server of `bench egress`: its name, its address, and the secret that it expects.
const (
	egressName    = "api.example.com"
	egressNet     = "203.0.113.0/24" // for documentation, which nothing reaches but by leave
	egressAddress = "203.0.113.7"
	egressSecret  = "the-secret-of-the-bench"
	egressBase    = "base" // the id of a grant
	egressAnswer  = "512 bytes are not much for an answer, and enough to be one. "
)

// egressWorld is a server behind a link, the proxies, and clients of them.
type egressWorld struct {
	link     *testpool.Link
	server   *http.Server
	wg       sync.WaitGroup
	plain    *proxyProcess
	ours     *proxyProcess
	client   *egress.Client
	trust    *x509.CertPool
	root     ca.Authority // of the project
	key      []byte       // that grants are sealed for
	holder   string       // its placeholder
	ways     []*egressPath
	explicit map[core.SandboxID]string // where the proxy of a sandbox listens
	stop     context.CancelFunc
}

// egressPath is one way to the server, with a client that keeps its connections.
type egressPath struct {
	name   string
	url    string
	auth   string
	client *http.Client
	proxy  *proxyProcess // nil: none
	seen   measured
}

// measured are the measurements of one way.
type measured struct {
	latency  report.Samples
	requests int
	seconds  float64
	cpu      float64
}

func openEgressWorld(ctx context.Context, cfg egressConfig, dir string, log io.Writer) (_ *egressWorld, err error) {
	w := &egressWorld{trust: x509.NewCertPool(), holder: grant.NewPlaceholder(), explicit: map[core.SandboxID]string{}}
	ctx, w.stop = context.WithCancel(ctx)
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	public, err := ca.NewRoot("public", time.Now())
	if err != nil {
		return nil, err
	}
	if w.root, err = ca.NewRoot("prj_bench", time.Now()); err != nil {
		return nil, err
	}
	for _, der := range [][]byte{public.Certificate, w.root.Certificate} {
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, err
		}
		w.trust.AddCert(cert)
	}
	if err := w.serve(ctx, public); err != nil {
		return nil, fmt.Errorf("serve on a network of its own: %w", err)
	}
	trust := filepath.Join(dir, "trust.pem")
	if err := writePEM(trust, public.Certificate); err != nil {
		return nil, err
	}
	child := egressChild{Plain: true, Upstream: egressAddress, Root: &w.root, From: w.holder, To: egressSecret}
	if w.plain, err = startProxy(ctx, child, cfg.self, trust, log); err != nil {
		return nil, err
	}
	child = egressChild{Dir: filepath.Join(dir, "egress"), Upstream: egressAddress, Private: netip.MustParsePrefix(egressNet)}
	if err := os.Mkdir(child.Dir, 0o700); err != nil {
		return nil, err
	}
	if w.ours, err = startProxy(ctx, child, cfg.self, trust, log); err != nil {
		return nil, err
	}
	w.client = egress.NewClient(egress.SocketPath(child.Dir))
	hello, err := w.client.Hello(ctx)
	if err != nil {
		return nil, err
	}
	w.key = hello.Key
	w.wg.Go(func() { w.fetch(ctx) })
	return w, w.addWays(ctx)
}

// serve answers over TLS with HTTP/1.1, in the server's own namespace.
func (w *egressWorld) serve(ctx context.Context, public ca.Authority) (err error) {
	if w.link, err = testpool.NewLink(); err != nil {
		return err
	}
	_, dst, err := net.ParseCIDR(egressAddress + "/32")
	if err != nil {
		return err
	}
	if err := netlink.RouteAdd(&netlink.Route{Dst: dst, Gw: net.ParseIP(w.link.Far)}); err != nil {
		return err
	}
	ns, err := netns.GetFromPath(w.link.Path)
	if err != nil {
		return err
	}
	defer ns.Close()
	var l net.Listener
	if err := osthread.Do(func() error { // the thread ends with it
		if err := netns.Set(ns); err != nil {
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(lo, &netlink.Addr{IPNet: dst}); err != nil {
			return err
		}
		l, err = (&net.ListenConfig{}).Listen(ctx, "tcp4", egressAddress+":443")
		return err
	}); err != nil {
		return err
	}
	issuer, err := public.Issuer([]string{egressName}, time.Now(), time.Now().Add(24*time.Hour))
	if err != nil {
		return err
	}
	leaves, err := ca.NewLeaves(issuer)
	if err != nil {
		return err
	}
	answer := make([]byte, 512)
	for i := range answer {
		answer[i] = egressAnswer[i%len(egressAnswer)]
	}
	w.server = &http.Server{
		ReadHeaderTimeout: time.Minute, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0), TLSNextProto: map[string]func(*http.Server, *tls.Conn, http.Handler){}, // HTTP/1.1 only
		TLSConfig: &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return leaves.Of(egressName) }},
		Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") != "Bearer "+egressSecret { // what passes has the secret, wherever it was put in
				rw.WriteHeader(http.StatusUnauthorized)
				return
			}
			_, _ = rw.Write(answer)
		}),
	}
	w.wg.Go(func() { _ = w.server.ServeTLS(l, "", "") })
	return nil
}

// controllerTime is the time that a controller may take to answer a runner's report of flows.
const controllerTime = 5 * time.Millisecond

// fetch takes the process's records like its runner: the next batch when a controller has the last one.
func (w *egressWorld) fetch(ctx context.Context) {
	for last := int64(0); ctx.Err() == nil; {
		b, err := w.client.Flows(ctx, last)
		if err != nil {
			return
		}
		last = b.Last
		if pace.Pause(ctx, controllerTime) != nil {
			return
		}
	}
}

// addWays makes a client for each way.
func (w *egressWorld) addWays(ctx context.Context) error {
	for _, id := range []core.SandboxID{"sbx_tunnel", "sbx_header", "sbx_base"} {
		mode := map[core.SandboxID]grant.Mode{"sbx_header": grant.ModeHeader, "sbx_base": grant.ModeBaseURL}[id]
		if err := w.put(ctx, id, mode); err != nil {
			return err
		}
	}
	real, held := "Bearer "+egressSecret, "Bearer "+w.holder
	host := "https://" + egressName + "/"
	for _, x := range []struct {
		name, url, auth, proxy string
		process                *proxyProcess
	}{
		{wayDirect, host, real, "", nil},
		{wayPlainTunnel, host, real, w.plain.at.Tunnel, w.plain},
		{wayPlainRead, host, held, w.plain.at.Read, w.plain},
		{wayTunnel, host, real, w.explicit["sbx_tunnel"], w.ours},
		{wayHeader, host, held, w.explicit["sbx_header"], w.ours},
		{wayBase, "http://" + w.explicit["sbx_base"] + grant.BasePath + egressBase + "/", held, "", w.ours},
	} {
		t := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: w.trust, MinVersion: tls.VersionTLS12}, MaxIdleConnsPerHost: 64}
		switch {
		case x.proxy != "":
			t.Proxy = http.ProxyURL(&url.URL{Scheme: "http", Host: x.proxy})
		case x.process == nil:
			t.DialContext = func(ctx context.Context, network, _ string) (net.Conn, error) {
				return (&net.Dialer{}).DialContext(ctx, network, egressAddress+":443")
			}
		}
		w.ways = append(w.ways, &egressPath{name: x.name, url: x.url, auth: x.auth, client: &http.Client{Transport: t, Timeout: time.Minute}, proxy: x.process})
	}
	return nil
}

// rules allow the server and nine other names, with a grant in a mode, unless the mode is empty.
func (w *egressWorld) rules(id core.SandboxID, version int64, mode grant.Mode) (runnerapi.EgressRules, error) {
	r := runnerapi.EgressRules{Version: version, Allow: []string{egressName}}
	for i := range 9 {
		r.Allow = append(r.Allow, fmt.Sprintf("host-%d-%d.example.org", version%2, i))
	}
	if mode == "" {
		return r, nil
	}
	h, err := policy.ParseHost(egressName)
	if err != nil {
		return r, err
	}
	issuer, err := w.root.Issuer([]string{egressName}, time.Now(), time.Now().Add(time.Hour))
	if err != nil {
		return r, err
	}
	r.Key = w.key
	r.Grants, err = grant.Encrypt(w.key, id, version, grant.Bundle{Issuer: &issuer, Grants: []grant.Grant{{
		ID: egressBase, Mode: mode, Placeholder: w.holder, Secret: grant.NewSecret(egressSecret), Header: "Authorization",
		Targets: []grant.Target{{Host: h, Port: 443}},
	}}})
	return r, err
}

// put makes the egress process serve a sandbox, at sockets of this machine's loopback device.
func (w *egressWorld) put(ctx context.Context, id core.SandboxID, mode grant.Mode) error {
	rules, err := w.rules(id, 1, mode)
	if err != nil {
		return err
	}
	var files []*os.File
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	var lc net.ListenConfig
	for range egressapi.Sockets - 1 {
		l, err := lc.Listen(ctx, "tcp4", "127.0.0.1:0")
		if err != nil {
			return err
		}
		if len(files) == 0 {
			w.explicit[id] = l.Addr().String()
		}
		f, err := l.(*net.TCPListener).File()
		if err := errors.Join(err, l.Close()); err != nil {
			return err
		}
		files = append(files, f)
	}
	u, err := lc.ListenPacket(ctx, "udp4", "127.0.0.1:0")
	if err != nil {
		return err
	}
	f, err := u.(*net.UDPConn).File()
	if err := errors.Join(err, u.Close()); err != nil {
		return err
	}
	files = append(files, f)
	return w.client.Put(ctx, egressapi.Sandbox{ID: id, Epoch: 1, Rules: rules}, files)
}

func (w *egressWorld) close() error {
	var errs []error
	for _, x := range w.ways {
		x.client.CloseIdleConnections()
	}
	for _, p := range []*proxyProcess{w.plain, w.ours} {
		if p != nil {
			errs = append(errs, p.close())
		}
	}
	w.stop()
	if w.server != nil {
		errs = append(errs, w.server.Close())
	}
	w.wg.Wait()
	if w.link != nil {
		errs = append(errs, w.link.Close())
	}
	return errors.Join(errs...)
}
