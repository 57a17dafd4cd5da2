package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/httpapi"
	"github.com/coppice-dev/coppice/controller/internalapi"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/controller/postgres/durability"
	"github.com/coppice-dev/coppice/controller/runnerclient"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/imageref"
	"github.com/coppice-dev/coppice/internal/masterkey"
	"github.com/coppice-dev/coppice/internal/mtls"
	"github.com/coppice-dev/coppice/internal/undo"
	"github.com/coppice-dev/coppice/migrations"
)

// ControllerConfig says how a controller runs.
type ControllerConfig struct {
	Database     string        // DSN
	DatabaseWait time.Duration // how long to wait for it at start
	AllowWeak    []string      // settings of the database server that may let it lose acknowledged commits; see durability.Report
	Listen       string        // host:port of the public API
	TLSCert      string        // PEM files of the public API; both or none
	TLSKey       string
	PlainHTTP    bool          // serve the public API without TLS although it is not on loopback
	RunnerListen string        // host:port for runners
	KeyFile      string        // of the key that seals the cluster's keys; made by the first controller
	MasterKeys   string        // file of the keys that wrap those of projects; empty: none
	APIKeyFile   string        // holds, or gets, the first API key; empty: none is made
	JoinKeyFile  string        // likewise, a key that makes join tokens and nothing else
	E2B          E2BConfig     // with the certificate of the public API, or without TLS if the public API is
	Arrakis      ArrakisConfig // likewise
	Arbor        ArborConfig   // likewise
	Preview      PreviewConfig
	Metrics      string // host:port of the metrics, on loopback; empty: nowhere
	Store        StoreConfig
	Secrets      SecretsConfig
	// ImageRegistries are those from which projects may pull images: see imageref.ParseRegistries.
	ImageRegistries []string
	Tune            controller.Config
	Log             *slog.Logger
}

// ControllerReady is what a user needs to know once the controller answers.
type ControllerReady struct {
	Server    string `json:"server"`
	Runners   string `json:"runners"` // for --controller of runners
	ClusterID string `json:"cluster_id"`
	Metrics   string `json:"metrics,omitempty"` // host:port
	E2B       string `json:"e2b,omitempty"`     // for clients of E2B
	Arrakis   string `json:"arrakis,omitempty"` // for clients of Arrakis
	Arbor     string `json:"arbor,omitempty"`   // for clients of Arbor

	ArrakisTerms string `json:"arrakis_terms,omitempty"` // who may do what there

	Database DatabaseFacts `json:"database"`
}

// tuned is Tune with what validate has read.
func (c ControllerConfig) tuned() controller.Config {
	c.Tune.ImageRegistries, _ = imageref.ParseRegistries(c.ImageRegistries)
	return c.Tune
}

func (c ControllerConfig) validate() error {
	var errs []error
	bad := func(format string, a ...any) {
		errs = append(errs, core.Errorf(core.Invalid, core.CodeInvalidField, format, a...))
	}
	if _, err := imageref.ParseRegistries(c.ImageRegistries); err != nil {
		bad("--image-registry: %s", core.MessageOf(err))
	}
	if c.Tune.RunnerLease < 0 || c.Tune.RunnerFence < 0 {
		bad("--runner-lease and --runner-fence must not be negative")
	}
	if c.Tune.StoreGrace < 0 || c.Tune.StoreGrace != 0 && c.Tune.StoreGrace < c.Tune.RunnerLease+c.Tune.RunnerFence {
		bad("--store-grace must be at least as long as --runner-lease and --runner-fence together: until then a runner may not know that an upload was given up")
	}
	if q := c.Tune.FlowQuota; min(q.Reads.Workspace, q.Reads.Project, q.Denied.Workspace, q.Effects.Workspace) < 0 {
		bad("--flow-rows, --flow-rows-project, --flow-rows-denied and --flow-rows-effects must be 1 at least")
	}
	if c.Tune.FlowsKept != 0 && c.Tune.FlowsKept < 24*time.Hour {
		bad("--flow-retention must be a day at least, 24h")
	}
	if c.Tune.AttestationsKept != 0 && c.Tune.AttestationsKept < 24*time.Hour {
		bad("--attestation-retention must be a day at least, 24h")
	}
	if c.Database == "" {
		bad("--database: the address of a PostgreSQL database is needed, such as postgres://user@host/coppice")
	}
	for _, name := range c.AllowWeak {
		if !slices.Contains(durability.Settings(), name) {
			bad("--allow-weak-database: there is no setting %q to allow; the settings are %s", core.Clip(name), strings.Join(durability.Settings(), ", "))
		}
	}
	if c.KeyFile == "" {
		bad("--key-file: a file for the key that seals the cluster's secrets is needed; the first controller makes it")
	}
	if (c.TLSCert == "") != (c.TLSKey == "") {
		bad("--tls-cert and --tls-key go together")
	}
	if c.TLSCert == "" && c.E2B.Listen != "" && !loopback(c.E2B.Listen) && !c.PlainHTTP {
		bad("E2B's clients would be served without TLS on %s: give --tls-cert and --tls-key, listen on 127.0.0.1, or say --plain-http if a proxy in front of it speaks TLS", c.E2B.Listen)
	}
	if c.TLSCert == "" && c.Arrakis.Listen != "" && !loopback(c.Arrakis.Listen) && !c.PlainHTTP {
		bad("Arrakis' clients would be served without TLS on %s: give --tls-cert and --tls-key, listen on 127.0.0.1, or say --plain-http if a proxy in front of it speaks TLS", c.Arrakis.Listen)
	}
	if c.TLSCert == "" && c.Arbor.Listen != "" && !loopback(c.Arbor.Listen) && !c.PlainHTTP {
		bad("Arbor's clients would be served without TLS on %s: give --tls-cert and --tls-key, listen on 127.0.0.1, or say --plain-http if a proxy in front of it speaks TLS", c.Arbor.Listen)
	}
	for _, err := range []error{c.Arrakis.Validate(), c.Arbor.Validate(), c.Preview.Validate(c.PlainHTTP)} {
		if err != nil {
			errs = append(errs, err)
		}
	}
	if c.TLSCert == "" && !loopback(c.Listen) && !c.PlainHTTP {
		bad("the API would be served without TLS on %s: give --tls-cert and --tls-key, listen on 127.0.0.1, or say --plain-http if a proxy in front of it speaks TLS", c.Listen)
	}
	return errors.Join(append(errs, c.Secrets.validate())...)
}

// keepKeys reads the API keys that must exist before the first request, or makes them.
func (c ControllerConfig) keepKeys(b *controller.Bootstrap) (err error) {
	fresh := func() string { return "coppice_" + NewSecret() }
	if c.APIKeyFile != "" {
		if b.Key, err = Keep(c.APIKeyFile, fresh); err != nil {
			return err
		}
	}
	if c.JoinKeyFile == "" {
		return nil
	}
	if b.JoinKey, err = Keep(c.JoinKeyFile, fresh); err == nil && b.JoinKey == b.Key {
		err = core.Errorf(core.Invalid, core.CodeInvalidField, "--join-key-file and --api-key-file hold the same key; use different keys")
	}
	return err
}

// RunController runs a controller until ctx ends. Several may run over one database.
func RunController(ctx context.Context, cfg ControllerConfig, ready func(ControllerReady) error) (err error) {
	if err := cfg.validate(); err != nil {
		return err
	}
	var steps undo.Stack
	defer func() { err = errors.Join(err, steps.Undo(ctx)) }()
	metrics, err := OpenMetrics(ctx, cfg.Metrics, cfg.Log)
	if err != nil {
		return err
	}
	steps.Push("metrics", func(context.Context) error { return metrics.Close() })
	store, watch, err := openDatabase(ctx, cfg, metrics)
	if err != nil {
		return err
	}
	steps.Push("store", func(context.Context) error {
		store.Close()
		return nil
	})
	trust, err := openTrust(ctx, cfg, store)
	if err != nil {
		return err
	}
	identity, err := controllerIdentity(trust.Authority)
	if err != nil {
		return err
	}
	runners, err := runnerclient.NewTLS(identity)
	if err != nil {
		return err
	}
	defer runners.Close()
	tune := cfg.tuned()
	tune.ClusterID, tune.Trust, tune.Metrics = trust.ClusterID, &trust, metrics
	if tune.Store, err = cfg.Store.Open(ctx, cfg.Log, &steps); err != nil {
		return err
	}
	if cfg.MasterKeys != "" {
		ring, err := masterkey.OpenRing(cfg.MasterKeys)
		if err != nil {
			return err
		}
		tune.Wrapper = ring
	}
	if tune.Secrets, err = cfg.Secrets.Open(ctx, cfg.Log); err != nil {
		return err
	}
	if err := cfg.keepKeys(&tune.Bootstrap); err != nil {
		return err
	}
	control := controller.New(tune, store, runners, cfg.Log.With("component", "controller"))
	if _, err := control.Bootstrap(ctx); err != nil {
		return err
	}
	api := httpapi.New(control, cfg.Log.With("component", "api"))
	public, err := listenPublic(ctx, cfg, cfg.Listen, "listen", api)
	if err != nil {
		return err
	}
	steps.Push("public listener", func(context.Context) error { return public.close() })
	compat, err := cfg.listenLayers(ctx, api, control, trust, &steps)
	if err != nil {
		return err
	}
	preview, router, err := cfg.listenPreviews(ctx, control, trust, &steps)
	if err != nil {
		return err
	}
	inner, err := listenTLS(ctx, cfg.RunnerListen, "runner-listen", identity.JoinServer(), internalapi.NewTLS(control, cfg.Log.With("component", "internal")), cfg.Log)
	if err != nil {
		return err
	}
	steps.Push("runners' listener", func(context.Context) error { return inner.close() })
	address, err := inner.reachable()
	if err != nil {
		return err
	}
	if err := ready(ControllerReady{Server: cfg.scheme() + "://" + public.Addr().String(), E2B: cfg.urlOf(compat.e2b), Arrakis: cfg.urlOf(compat.arrakis), ArrakisTerms: compat.terms, Arbor: cfg.urlOf(compat.arbor), Runners: "https://" + address, ClusterID: trust.ClusterID, Metrics: metrics.Address(), Database: watch.facts()}); err != nil {
		return err
	}
	// No more requests first, then the operations end, and last nobody listens to runners any more.
	return runInOrder(ctx,
		part{"public listeners", served(public, compat.e2b, compat.arrakis, compat.arbor, preview)},
		part{"previews", runRouter(router)},
		part{"controller", control.Run},
		part{"runners' listener", served(inner)},
		part{"metrics", metrics.Run},
		part{"database watch", func(ctx context.Context) error { return watch.run(ctx, store) }},
		part{"certificate", func(ctx context.Context) error { return renewIdentity(ctx, identity, trust.Authority, cfg.Log) }},
	)
}

// openDatabase opens the store over a server that keeps what it acknowledges, and brings the schema forward.
func openDatabase(ctx context.Context, cfg ControllerConfig, metrics *Metrics) (_ *postgres.Store, _ *databaseWatch, err error) {
	watch := newDatabaseWatch(cfg.AllowWeak, cfg.Log.With("component", "database"), metrics)
	store, err := postgres.Open(ctx, postgres.Config{DSN: cfg.Database, Check: watch.check})
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			store.Close()
		}
	}()
	if err := watch.start(ctx, store, cfg.DatabaseWait); err != nil {
		return nil, nil, fmt.Errorf("look at the database: %w", err)
	}
	if err := migrateOn(ctx, cfg.Database, store.CheckNew, cfg.DatabaseWait, cfg.Log); err != nil {
		return nil, nil, err
	}
	return store, watch, store.Register(metrics)
}

// Migrate brings a database to the schema that this program knows, waiting for the database where it is not up yet.
func Migrate(ctx context.Context, dsn string, wait time.Duration, log *slog.Logger) error {
	return migrateOn(ctx, dsn, nil, wait, log)
}

// migrateOn is Migrate on a server that passes a check, as those of the store do.
func migrateOn(ctx context.Context, dsn string, check func(pgconn.ValidateConnectFunc) pgconn.ValidateConnectFunc, wait time.Duration, log *slog.Logger) error {
	err := retryUnavailable(ctx, wait, log, func(ctx context.Context) error { return migrations.UpOn(ctx, dsn, check) })
	if err != nil {
		return fmt.Errorf("prepare the database: %w", err)
	}
	return nil
}

// served serves listeners, those that are nil left out, until ctx ends or one of them fails.
func served(listeners ...*listener) func(context.Context) error {
	return func(ctx context.Context) error {
		group, ctx := errgroup.WithContext(ctx)
		for _, l := range listeners {
			if l == nil {
				continue
			}
			group.Go(l.serve)
			group.Go(func() error {
				<-ctx.Done()
				return l.shutdown(ctx)
			})
		}
		return group.Wait()
	}
}

func openTrust(ctx context.Context, cfg ControllerConfig, store *postgres.Store) (controller.Trust, error) {
	key, found, err := masterkey.Open(cfg.KeyFile)
	if err != nil {
		return controller.Trust{}, err
	}
	if !found {
		key = nil
	}
	return controller.OpenTrust(ctx, store, key, func() (*masterkey.Key, error) {
		cfg.Log.InfoContext(ctx, "key file made; other controllers of this database need a copy", "path", cfg.KeyFile)
		return masterkey.Create(cfg.KeyFile)
	})
}

func (c ControllerConfig) scheme() string {
	if c.TLSCert != "" {
		return "https"
	}
	return "http"
}

func listenPublic(ctx context.Context, cfg ControllerConfig, address, flag string, h http.Handler) (*listener, error) {
	if cfg.TLSCert == "" {
		if !loopback(address) {
			cfg.Log.WarnContext(ctx, "the API is served without TLS: everybody who sees the traffic can read keys and data", flag, address)
		}
		return listen(ctx, address, flag, h, cfg.Log)
	}
	cert, err := openCertFile(cfg.TLSCert, cfg.TLSKey)
	if err != nil {
		return nil, err
	}
	return listenTLS(ctx, address, flag, cert.config(), strict(h), cfg.Log)
}

// strict orders browsers to use only TLS.
func strict(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Strict-Transport-Security", "max-age=31536000")
		h.ServeHTTP(w, r)
	})
}

// controllerIdentity makes this process a certificate: only runners' need to be kept.
func controllerIdentity(authority *mtls.Authority) (*mtls.Identity, error) {
	cert, err := authority.IssueNew(mtls.ControllerName, mtls.Lifetime)
	if err != nil {
		return nil, err
	}
	return mtls.NewIdentity(authority.Certificate(), cert)
}

func renewIdentity(ctx context.Context, identity *mtls.Identity, authority *mtls.Authority, log *slog.Logger) error {
	for {
		timer := time.NewTimer(max(time.Until(identity.RenewAt()), time.Minute))
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C:
		}
		cert, err := authority.IssueNew(mtls.ControllerName, mtls.Lifetime)
		if err == nil {
			err = identity.Replace(authority.Certificate(), cert)
		}
		if err != nil {
			log.ErrorContext(ctx, "the controller's certificate was not renewed", "err", err)
		}
	}
}
