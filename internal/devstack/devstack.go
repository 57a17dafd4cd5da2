// Package devstack is `coppice dev`: a private PostgreSQL, a controller and a runner in one process
// group, out of one data directory. It wires the parts that a real installation runs separately,
// over the same sockets, and adds nothing.
//
// # The data directory
//
//	lock          held while a stack runs on it
//	cluster-id    names everything that this installation makes on the host
//	api-key       the bootstrap key, readable by root only
//	cluster.key   seals the key of the authority that certifies attestation keys, which is in the database
//	postgres/     see pgcluster
//	images/       guest images, unless another store is named
//	volume.xfs    the runner's volume where the file system has no reflink, mounted on volume/
//	volume/runner or runner/   checkpoints, bases and the sandboxes of now
package devstack

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/httpapi"
	"github.com/coppice-dev/coppice/controller/internalapi"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/controller/previews/router"
	"github.com/coppice-dev/coppice/controller/runnerclient"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/hostcheck"
	"github.com/coppice-dev/coppice/internal/imageref"
	"github.com/coppice-dev/coppice/internal/masterkey"
	"github.com/coppice-dev/coppice/internal/pgcluster"
	"github.com/coppice-dev/coppice/internal/undo"
	"github.com/coppice-dev/coppice/migrations"
	"github.com/coppice-dev/coppice/runner/heartbeat"
	runnerhttp "github.com/coppice-dev/coppice/runner/httpapi"
)

// Config says what to run where.
type Config struct {
	daemon.HostConfig

	Metrics string // host:port of the metrics, on loopback; empty: nowhere

	Secrets daemon.SecretsConfig
	// ImageRegistries are those from which projects may pull images: see imageref.ParseRegistries.
	ImageRegistries []string

	Listen    string // host:port of the public API, on loopback; port 0 picks a free one
	PlainHTTP bool   // serve the public API without TLS although it is not on loopback
	E2B       daemon.E2BConfig
	Arrakis   daemon.ArrakisConfig // requests without a key use that of the stack, unless ArrakisNeedsKey

	ArrakisNeedsKey bool

	Arbor         daemon.ArborConfig // likewise, unless ArborNeedsKey
	ArborNeedsKey bool

	Preview daemon.PreviewConfig // without TLS, on loopback
	OnExit  OnExit               // empty: Stop
	// Hurry ends what OnExit says early when it is closed. nil: nobody hurries.
	Hurry <-chan struct{}
	Tell  func(string) // tells a person what happens at the end; may be nil
	PGBin string       // directory of PostgreSQL's programs; empty finds them
}

// Ready is what a user needs to know once everything answers.
type Ready struct {
	Server  string // http://host:port, as this machine reaches it
	E2B     string `json:",omitempty"` // likewise, for E2B's clients
	Arrakis string `json:",omitempty"` // likewise, for Arrakis' clients

	ArrakisTerms string `json:",omitempty"` // who may do what there

	Arbor      string `json:",omitempty"` // likewise, for Arbor's clients
	ArborTerms string `json:",omitempty"`

	Preview string `json:",omitempty"` // the form of the URLs of previews
	Key     string
	DataDir string
	Volume  string // what the runner's files are on

	Weak []string `json:",omitempty"` // what keeps guests apart less well than it could
}

// Run starts everything, calls ready, and runs until ctx ends; then it does with the workspaces what OnExit says. Checkpoints, images and the
// database stay. It needs root. It listens on the addresses first. So a start that fails on one of them leaves nothing behind.
func Run(ctx context.Context, cfg Config, ready func(Ready) error) (err error) {
	if err := cfg.Check(); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return core.Errorf(core.PermissionDenied, core.CodeUnsupported,
			"coppice dev needs root: it makes network namespaces and runs every VM under a user of its own; run it with sudo")
	}
	if cfg.Machines == nil {
		if err := hostcheck.VMs(ctx); err != nil {
			return err
		}
	}
	s := &stack{cfg: cfg, log: cfg.Log}
	defer func() {
		err = errors.Join(err, s.steps.Undo(ctx))
	}()
	for _, step := range []struct {
		name string
		run  func(context.Context) error
	}{
		{"listen", s.listen},
		{"open the data directory", s.openData},
		{"start PostgreSQL", s.startPostgres},
		{"open the runner", s.openRunner},
		{"open the controller", s.openController},
		{"serve", s.serveAll},
	} {
		if err := step.run(ctx); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return s.run(ctx, ready)
}

type stack struct {
	cfg Config
	log *slog.Logger

	steps      undo.Stack // how to end what was started, last first
	clusterID  string
	key        string // of the API
	secret     string // between controller and runner, of this process only
	runDir     string // sockets
	database   *database
	host       *daemon.Host
	metrics    *daemon.Metrics
	store      *postgres.Store
	control    *controller.Controller
	trusted    controller.Trust
	onAPI      net.Listener // public ones, before anything is served; nil: not served
	onE2B      net.Listener
	onArrakis  net.Listener
	onArbor    net.Listener
	onPreview  net.Listener
	previews   *router.Router // nil: none are served
	inner      []server       // between controller and runner
	public     []server
	server     string
	e2b        string
	arrakis    string
	terms      string // of Arrakis' clients
	arbor      string
	arborTerms string
	preview    string
}

type server struct {
	http *http.Server
	on   net.Listener
}

// Check refuses addresses on which the keys would be visible on the network, unless PlainHTTP permits it.
func (cfg Config) Check() error {
	err := cfg.checkAddress("listen", cfg.Listen)
	if err == nil && cfg.E2B.Listen != "" {
		err = cfg.checkAddress("e2b-listen", cfg.E2B.Listen)
	}
	if err == nil && cfg.Arrakis.Listen != "" {
		err = errors.Join(cfg.checkAddress("arrakis-listen", cfg.Arrakis.Listen), cfg.arrakisConfig("any").Validate())
	}
	if err == nil && cfg.Arbor.Listen != "" {
		err = errors.Join(cfg.checkAddress("arbor-listen", cfg.Arbor.Listen), cfg.arborConfig("any").Validate())
	}
	if err == nil && cfg.Preview.Listen != "" {
		err = cfg.checkAddress("preview-listen", cfg.Preview.Listen)
	}
	return errors.Join(err, cfg.Preview.Validate(cfg.PlainHTTP))
}

func (cfg Config) checkAddress(flag, address string) error {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "--%s %s: an address is HOST:PORT, such as 127.0.0.1:7070", flag, core.Clip(address))
	}
	if ip := net.ParseIP(host); cfg.PlainHTTP || host == "localhost" || ip != nil && ip.IsLoopback() {
		return nil
	}
	return core.Errorf(core.Invalid, core.CodeInvalidField,
		"--%[1]s %[2]s: the API would be served without TLS, with its keys, to everybody who reaches that address; listen on 127.0.0.1:%[3]s, or say --plain-http if a proxy in front of it speaks TLS", flag, core.Clip(address), core.Clip(port))
}

// listen listens on the addresses. Nothing is served on them before everything runs.
func (s *stack) listen(ctx context.Context) error {
	for _, at := range []struct {
		address, flag string
		to            *net.Listener
	}{{s.cfg.Listen, "listen", &s.onAPI}, {s.cfg.E2B.Listen, "e2b-listen", &s.onE2B}, {s.cfg.Arrakis.Listen, "arrakis-listen", &s.onArrakis}, {s.cfg.Arbor.Listen, "arbor-listen", &s.onArbor}, {s.cfg.Preview.Listen, "preview-listen", &s.onPreview}} {
		if at.address == "" {
			continue
		}
		l, err := s.take(ctx, "tcp", at.address, at.flag)
		if err != nil {
			return err
		}
		*at.to = l
	}
	var err error
	if s.metrics, err = daemon.OpenMetrics(ctx, s.cfg.Metrics, s.log); err != nil {
		return err
	}
	s.steps.Push("metrics", func(context.Context) error { return s.metrics.Close() })
	s.cfg.Registry = s.metrics
	s.server = "http://" + reachable(s.onAPI.Addr())
	if s.onE2B != nil {
		s.e2b = "http://" + reachable(s.onE2B.Addr())
	}
	if s.onArrakis != nil {
		s.arrakis = "http://" + reachable(s.onArrakis.Addr())
	}
	if s.onArbor != nil {
		s.arbor = "http://" + reachable(s.onArbor.Addr())
	}
	return nil
}

// reachable is the address at which this machine reaches a listener. A client cannot dial the address that stands for all.
func reachable(a net.Addr) string {
	if tcp, ok := a.(*net.TCPAddr); ok && tcp.IP.IsUnspecified() {
		return net.JoinHostPort("127.0.0.1", strconv.Itoa(tcp.Port))
	}
	return a.String()
}

func (s *stack) openData(ctx context.Context) error {
	if err := os.MkdirAll(s.cfg.DataDir, 0o711); err != nil { //nolint:gosec // G301: the database's user must pass
		return err
	}
	lock, err := os.OpenFile(filepath.Join(s.cfg.DataDir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = core.Errorf(core.Conflict, core.CodeStateConflict, "another coppice dev runs on %s; stop it, or give this one another --data-dir", s.cfg.DataDir)
		}
		return errors.Join(err, lock.Close())
	}
	s.steps.Push("lock", func(context.Context) error { return lock.Close() })
	if s.clusterID, err = daemon.Keep(filepath.Join(s.cfg.DataDir, "cluster-id"), daemon.NewSecret); err != nil {
		return err
	}
	if s.key, err = daemon.Keep(filepath.Join(s.cfg.DataDir, "api-key"), func() string { return "coppice_" + daemon.NewSecret() }); err != nil {
		return err
	}
	s.secret = daemon.NewSecret()
	s.runDir = daemon.RunDir(s.clusterID)
	return nil
}

func (s *stack) startPostgres(ctx context.Context) error {
	bin, err := pgcluster.Find(ctx, s.cfg.PGBin)
	if err != nil {
		return err
	}
	s.database, err = openDatabase(ctx, pgcluster.Config{Dir: filepath.Join(s.cfg.DataDir, "postgres"), Binaries: bin, Durable: true, Log: s.log})
	if err != nil {
		return err
	}
	s.steps.Push("postgres", s.database.stop)
	return migrations.Up(ctx, s.database.dsn())
}

func (s *stack) openRunner(ctx context.Context) error {
	id, err := daemon.Keep(filepath.Join(s.cfg.DataDir, "runner-id"), func() string { return string(core.NewID[core.RunnerID]()) })
	if err != nil {
		return err
	}
	s.host, err = daemon.OpenHost(ctx, s.cfg.HostConfig, core.RunnerID(id), s.clusterID, &s.steps)
	return err
}

func (s *stack) openController(ctx context.Context) error {
	store, err := postgres.Open(ctx, postgres.Config{DSN: s.database.dsn()})
	if err != nil {
		return err
	}
	s.store = store
	s.steps.Push("store", func(context.Context) error {
		store.Close()
		return nil
	})
	if err := store.Register(s.metrics); err != nil {
		return err
	}
	blobs, err := s.cfg.Store.Open(ctx, s.log, &s.steps)
	if err != nil {
		return err
	}
	path := filepath.Join(s.cfg.DataDir, "master.key")
	if _, err := daemon.Keep(path, daemon.NewSecret); err != nil {
		return err
	}
	wrapper, err := masterkey.OpenRing(path)
	if err != nil {
		return err
	}
	source, err := s.cfg.Secrets.Open(ctx, s.log)
	if err != nil {
		return err
	}
	if s.trusted, err = s.trust(ctx); err != nil {
		return err
	}
	// Its Trust stays unset: runners of elsewhere cannot join, for nothing here listens to them.
	registries, err := imageref.ParseRegistries(s.cfg.ImageRegistries)
	if err != nil {
		return err
	}
	s.control = controller.New(controller.Config{AllowAllEgress: true, ImageRegistries: registries, Sole: true, ClusterID: s.clusterID, Authority: s.trusted.Authority, Store: blobs, Wrapper: wrapper, Secrets: source, Metrics: s.metrics, Traces: s.cfg.Traces, Bootstrap: controller.Bootstrap{Key: s.key}},
		store, runnerclient.New(s.secret), s.log.With("component", "controller"))
	_, err = s.control.Bootstrap(ctx)
	return err
}

// trust is what certifies the runner's attestation key. It is in the database, sealed with a key in the data directory.
func (s *stack) trust(ctx context.Context) (controller.Trust, error) {
	path := filepath.Join(s.cfg.DataDir, "cluster.key")
	key, found, err := masterkey.Open(path)
	if err != nil {
		return controller.Trust{}, err
	}
	if !found {
		key = nil
	}
	return controller.OpenTrust(ctx, s.store, key, func() (*masterkey.Key, error) { return masterkey.Create(path) })
}

// The sockets between controller and runner.
func (s *stack) runnerSocket() string     { return filepath.Join(s.runDir, "runner.sock") }
func (s *stack) controllerSocket() string { return filepath.Join(s.runDir, "controller.sock") }

func (s *stack) serveAll(ctx context.Context) error {
	api := httpapi.New(s.control, s.log.With("component", "api"))
	internal, err := internalapi.New(s.control, s.secret, s.log.With("component", "internal"))
	if err != nil {
		return err
	}
	runners, err := runnerhttp.New(s.host.Runner, s.host.Pulls, s.secret, s.log.With("component", "runner"))
	if err != nil {
		return err
	}
	for _, on := range []struct {
		socket  string
		handler http.Handler
	}{{s.runnerSocket(), runners}, {s.controllerSocket(), internal}} {
		if err := os.Remove(on.socket); err != nil && !errors.Is(err, os.ErrNotExist) { // left by a process that was killed
			return err
		}
		l, err := s.take(ctx, "unix", on.socket, "data-dir")
		if err != nil {
			return err
		}
		s.serve(&s.inner, l, on.handler)
	}
	s.serve(&s.public, s.onAPI, api)
	if s.onE2B != nil {
		s.cfg.E2B.LocalPorts = true
		compat, err := s.cfg.E2B.Handler(api, s.control, s.trusted, s.log)
		if err != nil {
			return err
		}
		s.serve(&s.public, s.onE2B, compat)
	}
	if err := errors.Join(
		s.serveLayer(ctx, api, s.onArrakis, s.cfg.arrakisConfig(s.key), &s.terms), s.serveLayer(ctx, api, s.onArbor, s.cfg.arborConfig(s.key), &s.arborTerms),
	); err != nil {
		return err
	}
	if s.onPreview == nil {
		return nil
	}
	site, err := s.cfg.Preview.Site(s.onPreview.Addr(), s.trusted)
	if err != nil {
		return err
	}
	s.control.Previews().Serve(site)
	s.preview = site.Form()
	s.previews = s.cfg.Preview.Router(s.control, s.log)
	s.serve(&s.public, s.onPreview, s.previews)
	return nil
}

// take listens on an address, which a flag names.
func (s *stack) take(ctx context.Context, network, address, flag string) (net.Listener, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, network, address)
	if errors.Is(err, unix.EADDRINUSE) {
		return nil, core.Errorf(core.Unavailable, core.CodeUnsupported, // the cause would say it again
			"another program listens on %s, perhaps another coppice dev; choose another address with --%s, and another --data-dir if both are to run", core.Clip(address), flag)
	}
	if err != nil {
		return nil, core.Wrapf(err, core.Unavailable, core.CodeUnsupported, "cannot listen on %s; choose another address with --%s", core.Clip(address), flag)
	}
	s.steps.Push("listener "+address, func(context.Context) error { return ignoreClosed(l.Close()) })
	return l, nil
}

func (s *stack) serve(to *[]server, l net.Listener, h http.Handler) {
	*to = append(*to, server{&http.Server{Handler: h, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10, ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug)}, l})
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) || errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// run runs the parts until ctx ends or one fails, and ends them in the order in which they need each other: no more requests,
// then what OnExit says, then the controller's operations, then the VMs.
func (s *stack) run(asked context.Context, ready func(Ready) error) error {
	group, ctx := errgroup.WithContext(asked)
	vms, stopVMs := context.WithCancel(context.WithoutCancel(ctx))
	ops, stopOps := context.WithCancel(context.WithoutCancel(ctx))
	defer stopVMs()
	defer stopOps()
	link, err := heartbeat.New(s.host.Runner, heartbeat.Config{
		Controllers: []string{"unix:" + s.controllerSocket()}, Secret: s.secret, Endpoint: "unix:" + s.runnerSocket(), Log: s.log.With("component", "heartbeat"),
	})
	if err != nil {
		return err
	}
	group.Go(func() error { return s.database.keep(vms) })
	group.Go(func() error { return s.host.Pool.Run(vms) })
	group.Go(func() error {
		err := s.host.Run(vms)
		for _, srv := range s.inner { // both ends have ended
			err = errors.Join(err, ignoreClosed(srv.http.Close()))
		}
		return err
	})
	group.Go(func() error { return link.Run(vms) })
	group.Go(func() error { return link.Deliver(ops) })
	group.Go(func() error { return s.host.Runner.Seal(ops, link, link.Epoch) })
	group.Go(func() error { return s.metrics.Run(ctx) })
	if s.previews != nil {
		group.Go(func() error { return s.previews.Run(ctx) })
	}
	group.Go(func() error {
		defer stopVMs()
		return s.control.Run(ops)
	})
	for _, srv := range slices.Concat(s.inner, s.public) {
		group.Go(func() error { return ignoreClosed(srv.http.Serve(srv.on)) })
	}
	group.Go(func() error {
		<-ctx.Done()
		defer stopOps()
		err := s.shutdown(ctx)
		if asked.Err() != nil { // otherwise a part has failed, and nothing can be asked of the rest
			s.settle(ctx)
		}
		return err
	})
	if err := s.awaitReady(ctx, ready); err != nil && ctx.Err() == nil {
		group.Go(func() error { return err })
	}
	return group.Wait()
}

// shutdown ends the public listeners: no more requests.
func (s *stack) shutdown(ctx context.Context) error {
	const patience = 2 * time.Second // streams do not end by themselves
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	var errs []error
	for _, srv := range s.public {
		if srv.http.Shutdown(ctx) != nil {
			errs = append(errs, ignoreClosed(srv.http.Close()))
		}
	}
	return errors.Join(errs...)
}

// awaitReady waits until the runner has registered.
func (s *stack) awaitReady(ctx context.Context, ready func(Ready) error) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if err := s.control.Ready(ctx); err == nil {
			return ready(Ready{Server: s.server, E2B: s.e2b, Arrakis: s.arrakis, ArrakisTerms: s.terms, Arbor: s.arbor, ArborTerms: s.arborTerms, Preview: s.preview, Key: s.key, DataDir: s.cfg.DataDir, Volume: s.host.Volume, Weak: s.host.Weak})
		} else if code := core.CodeOf(err); code != core.CodeNoRunner {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}
