package egress

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/elazarl/goproxy"

	"github.com/coppice-dev/coppice/egress/ca"
	egresshost "github.com/coppice-dev/coppice/egress/host"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/procfs"
	"github.com/coppice-dev/coppice/internal/sidecar"
)

// Each compared proxy is a separate process, so that its memory and CPU time can be measured: it is this program,
// started again.

// egressChild is the configuration of such a process on its standard input. The process ends when the input ends.
type egressChild struct {
	Plain    bool // plain goproxy instead of the egress process
	Dir      string
	Upstream string // the address of every name
	Private  netip.Prefix
	Root     *ca.Authority // for goproxy's certificates
	From, To string        // what goproxy replaces in the header Authorization
}

// egressAddresses are the addresses on which goproxy listens.
type egressAddresses struct{ Tunnel, Read string }

// ChildCommand is the argument with which this program is started again.
const ChildCommand = "egress-process"

// ChildMain is the proxy that is measured, in a process of its own.
func ChildMain(ctx context.Context, in io.Reader, out io.Writer) error {
	d := json.NewDecoder(in)
	var cfg egressChild
	if err := d.Decode(&cfg); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		defer stop()
		_, _ = io.Copy(io.Discard, in)
	}()
	daemon.RelaxGC() // as in the egress process
	if cfg.Plain {
		return plainProxy(ctx, cfg, out)
	}
	spool, err := os.OpenRoot(cfg.Dir)
	if err != nil {
		return err
	}
	defer spool.Close()
	listen, err := sidecar.Listen(sidecar.Process{Dir: cfg.Dir}.SocketPath())
	if err != nil {
		return err
	}
	s, err := egresshost.New(ctx, egresshost.Config{
		Listen: listen, Spool: spool, Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
		Private: []netip.Prefix{cfg.Private}, Resolver: oneAddress(cfg.Upstream),
	})
	if err != nil {
		return errors.Join(err, listen.Close())
	}
	if err := json.NewEncoder(out).Encode(egressAddresses{}); err != nil {
		return err
	}
	return s.Run(ctx)
}

// oneAddress resolves every name to the upstream.
type oneAddress string

func (o oneAddress) LookupNetIP(context.Context, string, string) ([]netip.Addr, error) {
	a, err := netip.ParseAddr(string(o))
	return []netip.Addr{a}, err
}

// plainProxy is goproxy with its own tunnels at one address, and with its own TLS interception at another.
func plainProxy(ctx context.Context, cfg egressChild, out io.Writer) error {
	var d net.Dialer
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		_, port, err := net.SplitHostPort(address)
		if err != nil {
			return nil, err
		}
		return d.DialContext(ctx, network, net.JoinHostPort(cfg.Upstream, port))
	}
	makeProxy := func() *goproxy.ProxyHttpServer {
		p := goproxy.NewProxyHttpServer()
		p.Logger = quiet{}
		p.Tr = &http.Transport{DialContext: dial, TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12}, MaxIdleConnsPerHost: 64, DisableCompression: true} // trusts what the egress process does
		p.ConnectDial = func(network, address string) (net.Conn, error) { return dial(ctx, network, address) }
		return p
	}
	key, err := x509.ParsePKCS8PrivateKey(cfg.Root.Key)
	if err != nil {
		return err
	}
	authority := &tls.Certificate{Certificate: [][]byte{cfg.Root.Certificate}, PrivateKey: key}
	if authority.Leaf, err = x509.ParseCertificate(cfg.Root.Certificate); err != nil {
		return err
	}
	tunnel, read := makeProxy(), makeProxy()
	action := &goproxy.ConnectAction{Action: goproxy.ConnectMitm, TLSConfig: goproxy.TLSConfigFromCA(authority)}
	read.OnRequest().HandleConnect(goproxy.FuncHttpsHandler(func(to string, _ *goproxy.ProxyCtx) (*goproxy.ConnectAction, string) { return action, to }))
	read.OnRequest().DoFunc(func(r *http.Request, _ *goproxy.ProxyCtx) (*http.Request, *http.Response) {
		r.Header.Set("Authorization", strings.ReplaceAll(r.Header.Get("Authorization"), cfg.From, cfg.To))
		return r, nil
	})
	var at egressAddresses
	for to, p := range map[*string]*goproxy.ProxyHttpServer{&at.Tunnel: tunnel, &at.Read: read} {
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp4", "127.0.0.1:0")
		if err != nil {
			return err
		}
		s := &http.Server{Handler: p, ReadHeaderTimeout: time.Minute}
		defer s.Close() // ends the goroutine below
		go func() { _ = s.Serve(l) }()
		*to = l.Addr().String()
	}
	if err := json.NewEncoder(out).Encode(at); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

type quiet struct{}

func (quiet) Printf(string, ...any) {}

// proxyProcess is such a process, as seen by its parent.
type proxyProcess struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	at  egressAddresses
}

// startProxy starts this program again. It trusts the authorities in a file, like a host that trusts its upstream.
func startProxy(ctx context.Context, cfg egressChild, self []string, trust string, log io.Writer) (_ *proxyProcess, err error) {
	p := &proxyProcess{cmd: exec.CommandContext(ctx, self[0], self[1:]...)} //nolint:gosec // G204: this program
	p.cmd.Env = append(os.Environ(), "SSL_CERT_FILE="+trust)
	p.cmd.Stderr = log
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	err = json.NewEncoder(p.in).Encode(cfg)
	if err == nil {
		err = json.NewDecoder(out).Decode(&p.at)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("a proxy did not start: %w", err), p.close())
	}
	return p, nil
}

func (p *proxyProcess) close() error { return errors.Join(p.in.Close(), p.cmd.Wait()) }

// residentKiB returns the resident memory of the process.
func (p *proxyProcess) residentKiB() (float64, error) {
	kib, err := procfs.KiB(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid), "VmRSS")
	return float64(kib), err
}

// cpu returns the CPU time of the process so far, in milliseconds.
func (p *proxyProcess) cpu() float64 {
	stat, err := procfs.ReadStat(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	if err != nil {
		return 0
	}
	ticks, err := stat.Sum(procfs.UserTicks, procfs.SystemTicks)
	if err != nil {
		return 0
	}
	return 1000 / procfs.TicksPerSecond * float64(ticks)
}

// writePEM writes certificates to a file.
func writePEM(path string, certificates ...[]byte) error {
	var out []byte
	for _, der := range certificates {
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})...)
	}
	return os.WriteFile(path, out, 0o600)
}
