package daemon

import (
	"context"
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"strings"

	"golang.org/x/crypto/acme"
	"golang.org/x/crypto/acme/autocert"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/previews"
	"github.com/coppice-dev/coppice/controller/previews/router"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sandboxhost"
	"github.com/coppice-dev/coppice/internal/undo"
)

// PreviewConfig says how previews are served.
type PreviewConfig struct {
	Listen  string // host:port; empty: nowhere
	Domain  string // the wildcard name that leads there, with a port if URLs have another than Listen
	TLSCert string // PEM files of a certificate for the wildcard name; both or none
	TLSKey  string
	Proxies []string // networks of the proxies in front of it, which say who the client is

	ACMEHosts     []string // the only names for which a certificate is asked
	ACMECache     string   // directory of certificates
	ACMEDirectory string   // of the authority; empty: Let's Encrypt
}

func (c PreviewConfig) secure() bool { return c.TLSCert != "" || len(c.ACMEHosts) > 0 }

// Validate refuses what cannot be served.
func (c PreviewConfig) Validate(plain bool) error {
	var errs []error
	bad := func(format string, a ...any) {
		errs = append(errs, core.Errorf(core.Invalid, core.CodeInvalidField, format, a...))
	}
	if c.Listen == "" {
		if c.Domain != "" || c.secure() {
			bad("--preview-domain and the other flags of previews need --preview-listen")
		}
		return errors.Join(errs...)
	}
	name, _ := c.domain()
	if sandboxhost.Name(name) != name || !isDomain(name) {
		bad("--preview-domain: %q is not a name in lower case, such as preview.example.com", core.Clip(c.Domain))
	}
	if (c.TLSCert == "") != (c.TLSKey == "") {
		bad("--preview-tls-cert and --preview-tls-key go together")
	}
	if len(c.ACMEHosts) > 0 && (c.TLSCert != "" || c.ACMECache == "") {
		bad("--preview-acme-host needs --preview-acme-cache, and excludes --preview-tls-cert")
	}
	for _, text := range c.Proxies {
		if _, err := netip.ParsePrefix(text); err != nil {
			bad("--preview-proxy: %q is not a network, such as 192.0.2.0/24", core.Clip(text))
		}
	}
	for _, host := range c.ACMEHosts {
		if _, ok := sandboxhost.Decode(host, name); !ok {
			bad("--preview-acme-host: %q is not the name of a preview below %s; ACME gives no certificate for a wildcard name this way", core.Clip(host), name)
		}
	}
	if !c.secure() && !loopback(c.Listen) && !plain {
		bad("previews would be served without TLS on %s: give --preview-tls-cert and --preview-tls-key, listen on 127.0.0.1, or say --plain-http if a proxy in front of it speaks TLS", c.Listen)
	}
	return errors.Join(errs...)
}

// domain splits the name from the port of URLs.
func (c PreviewConfig) domain() (name, port string) {
	name, port, _ = strings.Cut(c.Domain, ":")
	return name, port
}

func isDomain(name string) bool {
	if _, err := netip.ParseAddr(name); err == nil || name == "" || len(name) > 200 {
		return false
	}
	for label := range strings.SplitSeq(name, ".") {
		if label == "" || len(label) > 63 || strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" {
			return false
		}
	}
	return true
}

// Site is where the previews of a listener are.
func (c PreviewConfig) Site(on net.Addr, trust controller.Trust) (previews.Site, error) {
	const size = 32
	secret, err := hkdf.Key(sha256.New, trust.Passes.Seed(), nil, "coppice tokens of signed previews, v1", size)
	if err != nil {
		return previews.Site{}, err
	}
	name, port := c.domain()
	s := previews.Site{Scheme: "http", Domain: name, Port: port, Secret: secret}
	known := map[string]string{"http": "80", "https": "443"}
	if c.secure() || !loopback(c.Listen) { // a proxy in front of it speaks TLS, at the port of https
		s.Scheme = "https"
	}
	if port == "" && (c.secure() || loopback(c.Listen)) {
		if _, s.Port, err = net.SplitHostPort(on.String()); err != nil {
			return s, err
		}
	}
	if s.Port == known[s.Scheme] {
		s.Port = ""
	}
	return s, nil
}

// Router makes the handler of previews.
func (c PreviewConfig) Router(control *controller.Controller, log *slog.Logger) *router.Router {
	name, _ := c.domain()
	return router.New(router.Config{
		Previews: control.Previews(), Keys: control.Tenancy, Domain: name, Proxies: c.proxies(), Log: log.With("component", "previews"),
	})
}

// proxies are the networks of Proxies, which Validate has checked.
func (c PreviewConfig) proxies() []netip.Prefix {
	var list []netip.Prefix
	for _, text := range c.Proxies {
		if p, err := netip.ParsePrefix(text); err == nil {
			list = append(list, p.Masked())
		}
	}
	return list
}

// tls is the configuration of the listener: HTTP/1.1 and HTTP/2.
func (c PreviewConfig) tls() (*tls.Config, error) {
	protocols := []string{"h2", "http/1.1"}
	if len(c.ACMEHosts) > 0 {
		m := &autocert.Manager{Prompt: autocert.AcceptTOS, Cache: autocert.DirCache(c.ACMECache), HostPolicy: autocert.HostWhitelist(c.ACMEHosts...)}
		if c.ACMEDirectory != "" {
			m.Client = &acme.Client{DirectoryURL: c.ACMEDirectory}
		}
		return &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: m.GetCertificate, NextProtos: append(protocols, acme.ALPNProto)}, nil
	}
	cert, err := openCertFile(c.TLSCert, c.TLSKey)
	if err != nil {
		return nil, err
	}
	cfg := cert.config()
	cfg.NextProtos = protocols
	return cfg, nil
}

// listenPreviews opens the listener of previews; nil if there is none.
func (c ControllerConfig) listenPreviews(ctx context.Context, control *controller.Controller, trust controller.Trust, steps *undo.Stack) (*listener, *router.Router, error) {
	if c.Preview.Listen == "" {
		return nil, nil, nil
	}
	r := c.Preview.Router(control, c.Log)
	var l *listener
	var err error
	if c.Preview.secure() {
		var secure *tls.Config
		if secure, err = c.Preview.tls(); err == nil {
			l, err = listenTLS(ctx, c.Preview.Listen, "preview-listen", secure, r, c.Log)
		}
	} else {
		l, err = listen(ctx, c.Preview.Listen, "preview-listen", r, c.Log)
	}
	if err != nil {
		return nil, nil, err
	}
	steps.Push("listener of previews", func(context.Context) error { return l.close() })
	site, err := c.Preview.Site(l.Addr(), trust)
	if err != nil {
		return nil, nil, err
	}
	control.Previews().Serve(site)
	c.Log.InfoContext(ctx, "previews are served", "listen", l.Addr().String(), "domain", c.Preview.Domain, "tls", c.Preview.secure())
	return l, r, nil
}

// runRouter runs beside a router, if there is one.
func runRouter(r *router.Router) func(context.Context) error {
	if r == nil {
		return func(ctx context.Context) error {
			<-ctx.Done()
			return nil
		}
	}
	return r.Run
}
