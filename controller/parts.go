package controller

import (
	"context"
	"net/http"

	"github.com/coppice-dev/coppice/controller/attestations"
	"github.com/coppice-dev/coppice/controller/builds"
	"github.com/coppice-dev/coppice/controller/cluster"
	"github.com/coppice-dev/coppice/controller/datakeys"
	"github.com/coppice-dev/coppice/controller/events"
	"github.com/coppice-dev/coppice/controller/fleet"
	"github.com/coppice-dev/coppice/controller/flows"
	"github.com/coppice-dev/coppice/controller/forkcall"
	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/controller/guestclient"
	"github.com/coppice-dev/coppice/controller/identity"
	"github.com/coppice-dev/coppice/controller/idle"
	"github.com/coppice-dev/coppice/controller/model"
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

// AllTx is a transaction with the methods of the controller and of every package below it. A Store gives it; each package gets the part
// that it has declared.
type AllTx interface {
	Tx
	attestations.Tx
	builds.Tx
	cluster.Tx
	datakeys.Tx
	events.Tx
	fleet.Tx
	flows.Tx
	grants.Tx
	idle.Tx
	ports.Tx
	prepare.Tx
	previews.Tx
	retention.Tx
	sealing.Tx
	secretstore.Tx
	sessions.Tx
	settings.Tx
	storecheck.Tx
	steps.Tx
	storegc.Tx
	tenancy.Tx
	transfer.Tx
	tree.Tx
	upkeep.Tx
	uploads.Tx
}

// ownStore runs the transactions of the controller itself.
type ownStore struct{ Store }

// InTx is Store.InTx with the controller's own methods.
func (s ownStore) InTx(ctx context.Context, scope Scope, fn func(Tx) error) error {
	return s.Store.InTx(ctx, scope, func(tx AllTx) error { return fn(tx) })
}

// partStore runs the transactions of one package, which sees only the methods that it has declared.
type partStore[T any] struct {
	store Store
	part  func(AllTx) T
}

// InTx runs fn in a transaction of a scope and commits when it returns nil.
func (s partStore[T]) InTx(ctx context.Context, scope Scope, fn func(T) error) error {
	return s.store.InTx(ctx, scope, func(tx AllTx) error { return fn(s.part(tx)) })
}

// InProject runs fn in a transaction of a project and commits when it returns nil.
func (s partStore[T]) InProject(ctx context.Context, project core.ProjectID, fn func(T) error) error {
	return s.store.InTx(ctx, InProject(project), func(tx AllTx) error { return fn(s.part(tx)) })
}

// InSystem runs fn in a transaction that sees all projects and commits when it returns nil.
func (s partStore[T]) InSystem(ctx context.Context, fn func(T) error) error {
	return s.store.InTx(ctx, System(), func(tx AllTx) error { return fn(s.part(tx)) })
}

func newEvents(c *Controller) *events.Feed {
	return events.New(events.Config{Kept: c.cfg.EventsKept, Log: c.log}, partStore[events.Tx]{c.store.Store, func(tx AllTx) events.Tx { return tx }})
}

func newTenancy(c *Controller) *tenancy.Manager {
	return tenancy.New(tenancy.Config{
		KeyCache: c.cfg.KeyCache, Interval: c.cfg.LoopInterval, Clock: c.cfg.Clock, FreshKey: c.dataKeys.Fresh, Log: c.log,
	}, partStore[tenancy.Tx]{c.store.Store, func(tx AllTx) tenancy.Tx { return tx }})
}

func newGuests(c *Controller) *guestclient.Client {
	guest := func(endpoint string, s core.SandboxID) http.RoundTripper { return c.runners.Guest(endpoint, s) }
	return guestclient.New(guestclient.Config{Guest: guest, Timeout: c.cfg.GuestCall})
}

func newForks(c *Controller) *forkcall.Caller {
	return forkcall.New(forkcall.Config{
		Retry: c.cfg.RunnerRetry, Keys: c.dataKeys, Secrets: c.secrets, Grants: c.grants, Attestations: c.attestations, Log: c.log,
	}, c.runners)
}

// makeParts makes the packages whose use cases are those of the controller.
func (c *Controller) makeParts() {
	store := c.store.Store
	c.idle = idle.New(idle.Config{
		Interval: c.cfg.UseInterval, Log: c.log,
		Sessions: func(ctx context.Context, s Sandbox) (running bool, err error) {
			list, err := c.guests.Sessions(ctx, s)
			return list.Running(), err
		},
		Suspend: func(ctx context.Context, w Workspace, still idle.Check) error {
			_, err := c.beginCapture(ctx, w.ProjectID, w.ID, suspension(whileIdle(still)))
			return err
		},
		Terminate: func(ctx context.Context, w Workspace, still idle.Check) error {
			_, err := c.terminateIf(ctx, w.ProjectID, w.ID, whileIdle(still))
			return err
		},
	}, partStore[idle.Tx]{store, func(tx AllTx) idle.Tx { return tx }})
	c.upkeep = upkeep.New(upkeep.Config{
		EventsKept: c.cfg.EventsKept, FlowsKept: c.cfg.FlowsKept, AttestationsKept: c.cfg.AttestationsKept, Failed: c.jobFailed,
	}, partStore[upkeep.Tx]{store, func(tx AllTx) upkeep.Tx { return tx }})
	c.Keeper = sessions.New(c.sessionsConfig(), partStore[sessions.Tx]{store, func(tx AllTx) sessions.Tx { return tx }})
	c.Rounds = retention.New(retention.Config{
		Delete: c.pruneRound, Batch: retention.MaxDeletions, Log: c.log,
		Failed: func() { c.metrics.JobsFailed.WithLabelValues("retention").Inc() },
	}, partStore[retention.Tx]{store, func(tx AllTx) retention.Tx { return tx }})
	c.Sealer = sealing.New(sealing.Config{
		Blobs: c.cfg.Store, Keys: c.dataKeys, Log: c.log,
		Sealed: func(bytes int64, timings []core.Timing) {
			c.metrics.Sealed(bytes, timings)
			c.Events.Hint()
		},
		Ended: func(outcome string) { c.metrics.Seals.WithLabelValues(outcome).Inc() },
	}, partStore[sealing.Tx]{store, func(tx AllTx) sealing.Tx { return tx }})
	c.Collector = storegc.New(storegc.Config{
		Blobs: c.cfg.Store, Grace: c.cfg.StoreGrace, Removed: c.metrics.Removed, Log: c.log,
	}, partStore[storegc.Tx]{store, func(tx AllTx) storegc.Tx { return tx }})
	c.Tree = tree.New(tree.Config{ShowQueued: c.ShowQueued, Runners: c.runners}, partStore[tree.Tx]{store, func(tx AllTx) tree.Tx { return tx }})
	c.Transfers = transfer.New(transfer.Config{
		Blobs: c.cfg.Store, Keys: c.dataKeys, Clock: c.cfg.Clock, Log: c.log, Remove: c.RemoveBelow, Runners: c.runners, Holder: c.Tree.Holder,
		Imported: func(bytes int64) {
			c.metrics.Stored.Add(float64(bytes))
			c.Events.Hint()
		},
	}, partStore[transfer.Tx]{store, func(tx AllTx) transfer.Tx { return tx }})
	c.Changer = settings.New(partStore[settings.Tx]{store, func(tx AllTx) settings.Tx { return tx }}, c.deliverRules)
	c.Prepare = prepare.New(prepare.Config{Authority: c.secrets.Trusted, Log: c.log}, partStore[prepare.Tx]{store, func(tx AllTx) prepare.Tx { return tx }}, c.runners)
	c.fleet = newFleet(c)
	c.previews = newPreviews(c)
	c.ports = ports.New(ports.Config{Reach: c.reach, Repeated: c.operations.Repeated, Ended: c.previews.Changed, Log: c.log},
		partStore[ports.Tx]{store, func(tx AllTx) ports.Tx { return tx }}, c.runners)
	c.Checker = storecheck.New(c.cfg.Store, c.dataKeys.For, partStore[storecheck.Tx]{store, func(tx AllTx) storecheck.Tx { return tx }})
}

// Ports returns the forwarded ports of workspaces.
func (c *Controller) Ports() *ports.Forwarder { return c.ports }

// whileIdle is a condition of an operation: the workspace is still idle.
func whileIdle(still idle.Check) func(context.Context, Tx) error {
	return func(ctx context.Context, tx Tx) error { return still(ctx, tx) }
}

func (c *Controller) sessionsConfig() sessions.Config {
	cfg := sessions.Config{
		Guests: c.guests, Quota: c.cfg.SessionQuota, Kept: c.cfg.SessionsKept, ExecGrace: c.cfg.ExecGrace, Log: c.log,
		Reach: c.reach, Awaken: c.awaken, Used: c.idle.Used, Env: c.grants.Env,
		NotShown: func(n int) { c.metrics.InventedSessions.Add(float64(n)) },
	}
	if c.cfg.Trust != nil {
		cfg.Passes, cfg.Authority = c.cfg.Trust.Passes, c.cfg.Trust.Authority.Certificate()
	}
	return cfg
}

// The types of the parts that callers of the controller use.
type (
	Event            = events.Event
	AddressesWanted  = identity.AddressesWanted
	Bootstrap        = tenancy.Bootstrap
	QuotasPatch      = tenancy.QuotasPatch
	QuotaUsage       = tenancy.QuotaUsage
	Demand           = tenancy.Demand
	AuditOutcome     = tenancy.AuditOutcome
	AuditRecord      = tenancy.AuditRecord
	AuditFilter      = tenancy.AuditFilter
	AuditCheck       = tenancy.AuditCheck
	Usage            = tenancy.Usage
	EncryptionPatch  = datakeys.Patch
	ProjectKey       = datakeys.ProjectKey
	Wrapper          = datakeys.Wrapper
	Garbage          = storegc.Garbage
	StoreReport      = storecheck.Report
	StoreProblem     = storecheck.Problem
	StoredObject     = model.StoredObject
	SealAttempt      = sealing.Attempt
	RetentionPolicy  = retention.TreePolicy
	Retention        = retention.Stored
	RetentionRound   = retention.Round
	SessionQuota     = sessions.Quota
	SessionView      = sessions.View
	ExecResult       = sessions.ExecResult
	Way              = sessions.Way
	ExecRequest      = guestclient.ExecRequest
	GuestSession     = guestclient.Session
	Process          = guestclient.Process
	WorkspacePatch   = settings.Patch
	Limits           = ratelimit.Limits
	Rate             = ratelimit.Rate
	RateClass        = ratelimit.Class
	RateError        = ratelimit.Error
	Allowance        = ratelimit.Allowance
	CheckpointFilter = tree.Filter
	CheckpointPatch  = tree.Patch
	TreePage         = tree.Page
	DiffPage         = tree.DiffPage
)

// The kinds of routes that share a rate.
const (
	RateRead  = ratelimit.Read
	RateWrite = ratelimit.Write
	RateExec  = ratelimit.Exec
	RateAdmin = ratelimit.Admin
	RateOpen  = ratelimit.Open
)

// MaxStoreParts is the largest number of parts into which the stored data can be divided for a check.
const MaxStoreParts = storecheck.MaxParts

// MaxWorkspacePorts bounds the forwarded ports of one workspace.
const MaxWorkspacePorts = ports.MaxPerWorkspace

// The bounds of sessions, and the state of a session that has ended.
const (
	MaxOutput          = guestclient.MaxOutput
	MaxInherited       = sessions.MaxInherited
	MaxSessionsCounted = sessions.MaxSessionsCounted
	GuestExited        = guestclient.Exited
)

// The outcomes of audited changes.
const (
	AuditAccepted  = tenancy.AuditAccepted
	AuditSucceeded = tenancy.AuditSucceeded
	AuditFailed    = tenancy.AuditFailed
)

// ErrKeyEnded ends the work that is under way for a key that was revoked or has expired.
var ErrKeyEnded = tenancy.ErrKeyEnded
