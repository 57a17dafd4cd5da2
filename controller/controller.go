package controller

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/controller/attestations"
	"github.com/coppice-dev/coppice/controller/captures"
	"github.com/coppice-dev/coppice/controller/countersign"
	"github.com/coppice-dev/coppice/controller/datakeys"
	"github.com/coppice-dev/coppice/controller/events"
	"github.com/coppice-dev/coppice/controller/fleet"
	"github.com/coppice-dev/coppice/controller/flows"
	"github.com/coppice-dev/coppice/controller/forkcall"
	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/controller/guestclient"
	"github.com/coppice-dev/coppice/controller/idle"
	"github.com/coppice-dev/coppice/controller/ports"
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
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/bootclock"
	"github.com/coppice-dev/coppice/internal/mtls"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

// Config tunes a controller. Zero values take the defaults of DECISIONS 14 and 20; tests set them short.
type Config struct {
	ClusterID      string                // runners mark everything on their hosts with it
	OperationLease time.Duration         // how long the operations of a crashed controller wait for another one; default 8 s, so that all continue within 15
	Sole           bool                  // every other controller of the database has ended, as a lock proves: Run resumes their operations at once
	RunnerLease    time.Duration         // how long a silent runner counts as reachable; default 15 s
	RunnerFence    time.Duration         // how long after that its workspaces are LOST; default 10 min
	RunnerRetry    time.Duration         // how long an operation keeps calling a runner that cannot be reached; default 20 s
	LoopInterval   time.Duration         // of the loops for claims and expiry; default 1 s
	UseInterval    time.Duration         // how often the use of workspaces that expire when idle is recorded; default 5 s
	CaptureWait    time.Duration         // how long a request waits for a checkpoint of the same workspace to end; default 30 s
	ShutdownGrace  time.Duration         // how long operations may go on after Run's context has ended; default 10 s
	EventsKept     time.Duration         // how long events can be asked for; by whole days; default 7 days
	FlowsKept      time.Duration         // how long what sandboxes sent is kept; by whole months, so up to one longer; default 90 days, at least one
	FlowQuota      flows.Quota           // of rows of flows; default flows.FlowsOfWorkspace and the constants beside it
	KeyCache       time.Duration         // how long a valid key is cached; default 3 s, at most 5 s (revocation)
	Limits         Limits                // of requests
	Traces         trace.TracerProvider  // of requests; nil: none
	Metrics        prometheus.Registerer // where metrics are registered; nil: nobody sees them
	AdmissionWait  time.Duration         // how long a request waits for room on a runner; default 10 s, negative: not at all
	AdmissionQueue int                   // how many requests may wait for that; default 256
	UsageInterval  time.Duration         // how often the usage of a sandbox is written; default 1 min
	Bootstrap      Bootstrap

	// Clock is that of leases; nil: bootclock.Now. Tests put a host to sleep with it.
	Clock bootclock.Clock `json:"-"`

	GuestCall    time.Duration // how long one call of a guest's agent may take; default 60 s
	ExecGrace    time.Duration // how long the controller waits for a program after its timeout; default 15 s
	SessionQuota SessionQuota  // how many rows of sessions are kept
	SessionsKept time.Duration // how long the rows of an ended machine's sessions are kept; default 1 h
	// AllowAllEgress allows the egress policy allow-all to projects without a setting of their own.
	AllowAllEgress bool

	// Store is the store in which runners keep checkpoints for each other; nil: there is none. The controller only removes garbage from it.
	Store      blob.Blobs
	StoreGrace time.Duration // how long an object that is no longer needed stays; default 1 h
	Wrapper    Wrapper       // of the keys of projects; nil: none of them can be used

	Secrets grants.SecretSource // the source of secrets of grants that are not in the database; nil: there is none

	Trust           *Trust        // nil if controller and runner share a secret, as in coppice dev; then no runner can join
	CertificateLife time.Duration // of runners' certificates; default 24 h
	// Authority certifies the keys that sign attestations. If Trust is set, its authority does this. Without an authority no fork is accepted.
	Authority        *mtls.Authority
	AttestationsKept time.Duration // how long attestations are kept; by whole months, so up to one longer; default 400 days
}

func (c Config) withDefaults() Config {
	set := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	if c.Clock == nil {
		c.Clock = bootclock.Now
	}
	set(&c.OperationLease, 8*time.Second)
	set(&c.RunnerLease, 15*time.Second)
	set(&c.RunnerFence, 10*time.Minute)
	set(&c.RunnerRetry, 20*time.Second)
	set(&c.LoopInterval, time.Second)
	set(&c.UsageInterval, time.Minute)
	set(&c.UseInterval, 5*time.Second)
	set(&c.AdmissionWait, 10*time.Second)
	if c.AdmissionQueue == 0 {
		c.AdmissionQueue = 256
	}
	set(&c.CaptureWait, 30*time.Second)
	set(&c.ShutdownGrace, 10*time.Second)
	set(&c.StoreGrace, time.Hour)
	set(&c.EventsKept, 7*24*time.Hour)
	set(&c.FlowsKept, flows.DefaultKept)
	set(&c.AttestationsKept, attestations.Kept)
	if c.Authority == nil && c.Trust != nil {
		c.Authority = c.Trust.Authority
	}
	c.FlowQuota = c.FlowQuota.WithDefaults()
	set(&c.KeyCache, 3*time.Second)
	set(&c.CertificateLife, mtls.Lifetime)
	set(&c.GuestCall, 60*time.Second)
	set(&c.ExecGrace, 15*time.Second)
	set(&c.SessionsKept, time.Hour)
	c.SessionQuota = c.SessionQuota.WithDefaults()
	c.KeyCache = min(c.KeyCache, 5*time.Second)
	if c.Bootstrap.Project == "" {
		c.Bootstrap.Project = "default"
	}
	return c
}

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

	cfg     Config
	store   ownStore
	runners Runners
	log     *slog.Logger

	operations *engine
	captures   captures.Ends

	metrics  *metrics
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
		cfg: cfg.withDefaults(), store: ownStore{store}, runners: runners, log: log, Limiter: ratelimit.New(cfg.Limits),
	}
	if c.cfg.Metrics == nil {
		c.cfg.Metrics = prometheus.NewRegistry()
	}
	c.Events = newEvents(c)
	c.guests = newGuests(c) // before the metrics, which read these three as soon as they are registered
	c.operations = newEngine(c)
	c.metrics = newMetrics(c, c.cfg.Metrics)
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
	for _, loop := range []func(context.Context){c.operations.Run, c.reconcileLoop, c.grants.Run, c.periodicJobsLoop, c.Rounds.Run, c.idle.Run, c.listenLoop, c.Tenancy.Run, c.limitLoop, c.Events.Run} {
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
