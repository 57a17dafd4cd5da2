package controller

import (
	"context"
	"errors"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/controller/attestations"
	"github.com/coppice-dev/coppice/controller/builds"
	"github.com/coppice-dev/coppice/controller/captures"
	"github.com/coppice-dev/coppice/controller/config"
	"github.com/coppice-dev/coppice/controller/countersign"
	"github.com/coppice-dev/coppice/controller/datakeys"
	"github.com/coppice-dev/coppice/controller/events"
	"github.com/coppice-dev/coppice/controller/fleet"
	"github.com/coppice-dev/coppice/controller/flows"
	"github.com/coppice-dev/coppice/controller/forkcall"
	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/controller/guestclient"
	"github.com/coppice-dev/coppice/controller/idle"
	"github.com/coppice-dev/coppice/controller/metrics"
	"github.com/coppice-dev/coppice/controller/ports"
	"github.com/coppice-dev/coppice/controller/prepare"
	"github.com/coppice-dev/coppice/controller/previews"
	"github.com/coppice-dev/coppice/controller/ratelimit"
	"github.com/coppice-dev/coppice/controller/retention"
	"github.com/coppice-dev/coppice/controller/sealing"
	"github.com/coppice-dev/coppice/controller/secretstore"
	"github.com/coppice-dev/coppice/controller/sessions"
	"github.com/coppice-dev/coppice/controller/settings"
	"github.com/coppice-dev/coppice/controller/steps"
	"github.com/coppice-dev/coppice/controller/storecheck"
	"github.com/coppice-dev/coppice/controller/storegc"
	"github.com/coppice-dev/coppice/controller/tenancy"
	"github.com/coppice-dev/coppice/controller/transfer"
	"github.com/coppice-dev/coppice/controller/tree"
	"github.com/coppice-dev/coppice/controller/upkeep"
	"github.com/coppice-dev/coppice/controller/uploads"
	"github.com/coppice-dev/coppice/core"
)

// Config tunes a controller. Zero values take their defaults; tests set them short.
type Config = config.Config

// Controller runs the use cases. Make it with New; it works only while Run does.
type Controller struct {
	*ratelimit.Limiter
	*retention.Rounds
	*sealing.Sealer
	*sessions.Keeper
	*settings.Changer
	*storegc.Collector
	*storecheck.Checker
	*transfer.Transfers

	Events  *events.Feed // of workspaces, checkpoints and operations
	Tenancy *tenancy.Manager
	Tree    *tree.Tree // of checkpoints
	Steps   *steps.Stepper
	Builds  *builds.Builder
	Uploads *uploads.Keeper
	Prepare *prepare.Manager // machines that are prepared because a client has asked for them

	cfg     Config
	store   ownStore
	runners Runners
	log     *slog.Logger

	operations *engine
	captures   captures.Ends

	metrics  *metrics.Metrics
	journal  *flows.Journal
	upkeep   *upkeep.Keeper
	secrets  *secretstore.Keeper
	dataKeys *datakeys.Keeper
	grants   *grants.Manager
	guests   *guestclient.Client
	idle     *idle.Keeper
	ports    *ports.Forwarder
	previews *previews.Manager
	fleet    *fleet.Fleet
	forks    *forkcall.Caller

	attestations *attestations.Keeper

	countersigner *countersign.Countersigner // nil without an authority
	unusable      error                      // why the authority that was given cannot be used; nothing starts then
}

// New makes a controller. It starts nothing. If the authority cannot be used, Bootstrap, Run and Ready fail.
func New(cfg Config, store Store, runners Runners, log *slog.Logger) *Controller {
	c := &Controller{
		cfg: cfg.WithDefaults(), store: ownStore{store}, runners: runners, log: log, Limiter: ratelimit.New(cfg.Limits),
	}
	if c.cfg.Metrics == nil {
		c.cfg.Metrics = prometheus.NewRegistry()
	}
	c.Events = newEvents(c)
	c.guests = newGuests(c) // before the metrics, which read these three as soon as they are registered
	c.operations = newEngine(c)
	c.metrics = newMetrics(c)
	c.journal = newJournal(c)
	c.secrets = secretstore.New(c.cfg.Wrapper, partStore[secretstore.Tx]{store, func(tx AllTx) secretstore.Tx { return tx }}, log)
	c.dataKeys = datakeys.New(c.cfg.Wrapper, c.cfg.Store, partStore[datakeys.Tx]{store, func(tx AllTx) datakeys.Tx { return tx }}, log)
	c.Tenancy = newTenancy(c)
	c.grants = newGrants(c)
	c.makeParts()
	if c.cfg.Authority != nil {
		var err error
		if c.countersigner, err = countersign.New(c.cfg.Authority, c.cfg.CertificateLife); err != nil {
			c.countersigner = nil
			c.unusable = core.Wrapf(err, core.Unavailable, core.CodeAuthorityUnusable,
				"the authority of cluster %s cannot vouch for attestations, so every fork would be refused: %v; compare the clock of this host, or restore the authority's certificate and key from a backup of the database",
				c.cfg.ClusterID, err)
		}
	}
	c.attestations = newAttestations(c)
	c.forks = newForks(c)
	c.Steps = newSteps(c)
	c.Uploads = newUploads(c)
	c.Builds = newBuilds(c)
	return c
}

// Run renews leases, resumes the operations of crashed controllers, expires workspaces and gives up silent runners, until ctx ends.
// Then it waits for running operations for the grace time, gives up the leases of the others and returns nil.
func (c *Controller) Run(ctx context.Context) error {
	if c.unusable != nil {
		return c.unusable
	}
	if c.cfg.Sole {
		if err := c.operations.TakeOver(ctx); err != nil {
			c.log.WarnContext(ctx, "operations of an earlier process wait until their leases end", "err", err)
		}
	}
	var loops errgroup.Group
	loopCtx, endLoops := context.WithCancel(context.WithoutCancel(ctx))
	defer endLoops()
	for _, loop := range []func(context.Context){c.operations.Run, c.reconcileLoop, c.grants.Run, c.periodicJobsLoop, c.Rounds.Run, c.idle.Run, c.listenLoop, c.Tenancy.Run, c.limitLoop, c.Events.Run, c.Prepare.Run} {
		loops.Go(func() error {
			loop(loopCtx)
			return nil
		})
	}
	<-ctx.Done()
	c.operations.Stop(c.cfg.ShutdownGrace)
	endLoops()
	err := loops.Wait()
	c.operations.Release(ctx)
	return err
}

// Traces is where the spans of requests go.
func (c *Controller) Traces() trace.TracerProvider { return c.cfg.Traces }

// Bootstrap makes the first project and its key, as the configuration says. It is idempotent.
func (c *Controller) Bootstrap(ctx context.Context) (Project, error) {
	if c.unusable != nil {
		return Project{}, c.unusable
	}
	if err := errors.Join(c.dataKeys.Rewrap(ctx), c.secrets.Rewrap(ctx)); err != nil {
		return Project{}, err
	}
	return c.Tenancy.Bootstrap(ctx, c.cfg.Bootstrap)
}

// Ready reports whether work can be accepted: DATABASE_UNAVAILABLE, NO_RUNNER or AUTHORITY_UNUSABLE otherwise.
func (c *Controller) Ready(ctx context.Context) error {
	if c.unusable != nil {
		return c.unusable
	}
	return c.store.InTx(ctx, System(), func(tx Tx) error {
		if there, err := tx.Reachable(ctx); err != nil || there {
			return err
		}
		return core.Errorf(core.Unavailable, core.CodeNoRunner, "no runner is registered and reachable")
	})
}
