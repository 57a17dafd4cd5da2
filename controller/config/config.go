// Package config has the configuration of a controller, with its defaults.
package config

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"

	"github.com/coppice-dev/coppice/controller/attestations"
	"github.com/coppice-dev/coppice/controller/cluster"
	"github.com/coppice-dev/coppice/controller/datakeys"
	"github.com/coppice-dev/coppice/controller/flows"
	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/controller/ratelimit"
	"github.com/coppice-dev/coppice/controller/sessions"
	"github.com/coppice-dev/coppice/controller/tenancy"
	"github.com/coppice-dev/coppice/internal/bootclock"
	"github.com/coppice-dev/coppice/internal/imageref"
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
	Limits         ratelimit.Limits      // of requests
	Traces         trace.TracerProvider  // of requests; nil: none
	Metrics        prometheus.Registerer // where metrics are registered; nil: nobody sees them
	AdmissionWait  time.Duration         // how long a request waits for room on a runner; default 10 s, negative: not at all
	AdmissionQueue int                   // how many requests may wait for that; default 256
	UsageInterval  time.Duration         // how often the usage of a sandbox is written; default 1 min
	Bootstrap      tenancy.Bootstrap

	// Clock is that of leases; nil: bootclock.Now. Tests put a host to sleep with it.
	Clock bootclock.Clock `json:"-"`

	GuestCall    time.Duration  // how long one call of a guest's agent may take; default 60 s
	ExecGrace    time.Duration  // how long the controller waits for a program after its timeout; default 15 s
	SessionQuota sessions.Quota // how many rows of sessions are kept
	SessionsKept time.Duration  // how long the rows of an ended machine's sessions are kept; default 1 h
	// AllowAllEgress allows the egress policy allow-all to projects without a setting of their own.
	AllowAllEgress bool

	// ImageRegistries are those from which projects may pull images; the zero value is none.
	ImageRegistries imageref.Registries

	// Store is the store in which runners keep checkpoints for each other; nil: there is none. The controller only removes garbage from it.
	Store      blob.Blobs
	StoreGrace time.Duration    // how long an object that is no longer needed stays; default 1 h
	Wrapper    datakeys.Wrapper // of the keys of projects; nil: none of them can be used

	Secrets grants.SecretSource // the source of secrets of grants that are not in the database; nil: there is none

	Trust           *cluster.Trust // nil if controller and runner share a secret, as in coppice dev; then no runner can join
	CertificateLife time.Duration  // of runners' certificates; default 24 h
	// Authority certifies the keys that sign attestations. If Trust is set, its authority does this. Without an authority no fork is accepted.
	Authority        *mtls.Authority
	AttestationsKept time.Duration // how long attestations are kept; by whole months, so up to one longer; default 400 days
}

// WithDefaults fills in what is not set.
func (c Config) WithDefaults() Config {
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
