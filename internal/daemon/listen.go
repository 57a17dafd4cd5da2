package daemon

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/core"
)

// listener is a bound address with what serves it.
type listener struct {
	net.Listener
	http *http.Server
}

var errNoTLS = errors.New("this listener needs a TLS configuration")

// listenTLS binds an address. Without a configuration it refuses: it cannot be served without TLS by mistake.
func listenTLS(ctx context.Context, address, flag string, secure *tls.Config, h http.Handler, log *slog.Logger) (*listener, error) {
	if secure == nil || secure.GetCertificate == nil && secure.GetConfigForClient == nil {
		return nil, errNoTLS
	}
	l, err := listen(ctx, address, flag, h, log)
	if err != nil {
		return nil, err
	}
	l.Listener = tls.NewListener(l.Listener, secure)
	return l, nil
}

func listen(ctx context.Context, address, flag string, h http.Handler, log *slog.Logger) (*listener, error) {
	const headers = 5 * time.Second
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", address)
	if err != nil {
		return nil, core.Wrapf(err, core.Unavailable, core.CodeUnsupported, "cannot listen on %s; is it taken? choose another with --%s", address, flag)
	}
	return &listener{l, &http.Server{
		Handler: h, ReadHeaderTimeout: headers, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelInfo), // refused handshakes among them
	}}, nil
}

// serve serves until close or shutdown.
func (l *listener) serve() error { return ignoreClosed(l.http.Serve(l.Listener)) }

// shutdown takes no more requests, and cuts those that do not end soon: streams do not end by themselves.
func (l *listener) shutdown(ctx context.Context) error {
	const patience = 2 * time.Second
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	if err := l.http.Shutdown(ctx); err != nil {
		return ignoreClosed(l.http.Close())
	}
	return nil
}

func (l *listener) close() error { return ignoreClosed(errors.Join(l.http.Close(), l.Close())) }

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) || errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// port is the address as others reach it: wildcards are replaced by the host's name.
func (l *listener) reachable() (string, error) {
	host, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		return "", err
	}
	if ip := net.ParseIP(host); ip == nil || ip.IsUnspecified() {
		if host, err = os.Hostname(); err != nil {
			return "", err
		}
	}
	return net.JoinHostPort(host, port), nil
}

// loopback reports whether an address is of this machine only.
func loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// certFile is a certificate that somebody else renews: the files are read again when they have changed.
type certFile struct {
	cert, key string

	mu      sync.Mutex // guards what follows
	current *tls.Certificate
	read    time.Time // when it was looked at last
	changed time.Time // when the file was changed last
}

func openCertFile(cert, key string) (*certFile, error) {
	c := &certFile{cert: cert, key: key}
	_, err := c.get(nil)
	return c, err
}

// config serves it to all who speak TLS 1.2 or newer.
func (c *certFile) config() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: c.get, NextProtos: []string{"http/1.1"}}
}

func (c *certFile) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	const fresh = 10 * time.Second
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.current != nil && time.Since(c.read) < fresh {
		return c.current, nil
	}
	c.read = time.Now()
	info, err := os.Stat(c.cert)
	if err == nil && c.current != nil && info.ModTime().Equal(c.changed) {
		return c.current, nil
	}
	if err == nil {
		var pair tls.Certificate
		if pair, err = tls.LoadX509KeyPair(c.cert, c.key); err == nil {
			c.current, c.changed = &pair, info.ModTime()
		}
	}
	if c.current != nil {
		return c.current, nil // half of a renewal: the old one is good until the new one is whole
	}
	return nil, core.Wrapf(err, core.Invalid, core.CodeInvalidField, "the certificate in %s cannot be used: %s", c.cert, err)
}

// retryUnavailable repeats what needs a database that may come up at the same time as this process.
func retryUnavailable(ctx context.Context, patience time.Duration, log *slog.Logger, do func(context.Context) error) error {
	const pause = 500 * time.Millisecond
	began := time.Now()
	tick := time.NewTicker(pause)
	defer tick.Stop()
	for {
		err := do(ctx)
		if core.CategoryOf(err) != core.Unavailable || time.Since(began) > patience {
			return err
		}
		log.InfoContext(ctx, "waiting for the database", "err", err)
		select {
		case <-ctx.Done():
			return err
		case <-tick.C:
		}
	}
}

// chain runs parts until ctx ends or one fails, and then ends them one after the other: the first in the list first.
type part struct {
	name string
	run  func(context.Context) error
}

func runInOrder(ctx context.Context, parts ...part) error {
	group, ctx := errgroup.WithContext(ctx)
	ends := make([]context.CancelFunc, len(parts))
	ended := make([]chan struct{}, len(parts))
	for i, p := range parts {
		var own context.Context
		own, ends[i] = context.WithCancel(context.WithoutCancel(ctx))
		ended[i] = make(chan struct{})
		group.Go(func() error {
			defer close(ended[i])
			return p.run(own)
		})
	}
	group.Go(func() error {
		<-ctx.Done()
		for i := range parts {
			ends[i]()
			<-ended[i]
		}
		return nil
	})
	return group.Wait()
}
