package runner

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/runner/cgroup"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/egress"
	"github.com/coppice-dev/coppice/runner/hostport"
	"github.com/coppice-dev/coppice/runner/pager"
	"github.com/coppice-dev/coppice/runner/sandboxnet"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

// Config describes a runner. Fields without a note are required.
type Config struct {
	ID        core.RunnerID
	ClusterID string // part of every name that the runner uses on the host: one runner per host and ClusterID
	DataDir   string // checkpoints, bases and sandboxes; on a file system with reflink if there is one
	RunDir    string // sockets and journals; short, see vmm.Spec. It need not outlive a power cut: best on a tmpfs such as /run
	Driver    vmm.Driver
	Others    map[string]vmm.Driver // drivers of other VMMs, by the name in their handles: machines that an earlier runner started on them continue, new ones are not started
	Images    *images.Store
	Network   sandboxnet.Network
	Cgroups   *cgroup.Tree // nil on a host without cgroup v2
	Log       *slog.Logger
	Traces    trace.TracerProvider  // of requests; nil: none
	Metrics   prometheus.Registerer // where metrics are registered; nil: nobody sees them

	MaxSandboxes int           // default 64
	FirstUID     uint32        // VMMs run as FirstUID+1, FirstUID+2, ...; 0 runs them as the runner's own user
	Warm         int           // shells kept ready per recently forked base; 0 for none
	Prepare      PrepareConfig // machines that are prepared for forks; the zero value: none
	WarmFor      time.Duration // how long after the last fork of a base; default one minute
	Parallel     int           // children that are started at the same time; default twice the CPUs

	// Limits bound a VM's use of the host, if the host has the controllers.
	Limits VMLimits
	// Weak names the weaknesses in the isolation of guests on this host that the operator has accepted.
	Weak []string

	// Leave keeps the sandboxes when Run ends, so that the runner's successor takes them over; otherwise Run takes them down.
	Leave bool
	// Lease is how long the sandboxes live without an answer of the controller, unless the controller gives another time; default 10 minutes.
	Lease time.Duration

	Egress *egress.Process // proxies the traffic that the rules of sandboxes under deny-all allow; nil: no traffic leaves them

	Forward hostport.Allowed // addresses and ports that tenants may have forwarded; the zero value is hostport.Default

	// Recheck is how often the network rules of each sandbox are compared with what they should be; default 30 seconds.
	Recheck time.Duration

	Rebase checkpoints.RebasePolicy // the zero value is the measured default
	Store  StoreConfig              // the store of checkpoints; the zero value: checkpoints stay on this host only

	BootTimeout   time.Duration // cold boot to a ready agent; default 2 minutes
	GuestTimeout  time.Duration // a resumed guest's first answer; default 30 seconds
	FreezeTimeout time.Duration // for the workload to freeze; default 5 seconds
	StallAfter    time.Duration // how long a machine may wait for a page from the store before it is stopped and reported; default 10 seconds
	FlushTimeout  time.Duration // for a guest to flush its disk before a capture; default 1 second. It gets a quarter of this time again in the freeze
}

// PrepareConfig says how many machines are prepared for forks that were not asked for yet.
type PrepareConfig struct {
	Max int // at the same time; 0: none
}

// StoreConfig says where checkpoints are made durable.
type StoreConfig struct {
	Blobs blob.Blobs // nil: nowhere
	// Copies is how many bytes fetched checkpoints may take, not counting those that were captured here; 0: no bound.
	Copies int64
	// Floor is how many bytes of the disk no fetch may take; 0: a sixteenth of it, at most 4 GiB.
	Floor int64
	// Cached has the objects of the store that the host keeps, for other runners; nil: none.
	Cached func(key string, off, n int64) ([]byte, bool)
	// Throttle is asked before n bytes are sent; nil: never.
	Throttle func(ctx context.Context, n int) error
	// Pager serves images that are not complete, so that machines need not wait for them; nil: there is none. With Whole, checkpoints are
	// fetched whole although there is a pager.
	Pager *pager.Process
	Whole bool
}

// VMLimits bound a VM's use of the host besides its memory. A zero field bounds nothing. VMs share by weight in any case.
type VMLimits struct {
	CPUPercent int   // of a processor, per vCPU
	IOBytes    int64 // a second, read and written each
	IOPS       int   // operations a second, likewise
}

func (c Config) withDefaults() Config {
	setDefault(&c.MaxSandboxes, 64)
	setDefault(&c.WarmFor, time.Minute)
	setDefault(&c.Parallel, 2*runtime.NumCPU())
	setDefault(&c.BootTimeout, 2*time.Minute)
	setDefault(&c.GuestTimeout, 30*time.Second)
	setDefault(&c.FreezeTimeout, 5*time.Second)
	setDefault(&c.FlushTimeout, time.Second)
	setDefault(&c.StallAfter, 10*time.Second)
	setDefault(&c.Lease, 10*time.Minute)
	setDefault(&c.Recheck, 30*time.Second)
	if c.Metrics == nil {
		c.Metrics = prometheus.NewRegistry()
	}
	return c
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

func (c Config) validate() error {
	var errs []error
	check := func(ok bool, format string, a ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, a...))
		}
	}
	check(c.ID != "", "runner id is empty")
	check(c.ClusterID != "", "cluster id is empty")
	check(c.DataDir != "", "data directory is empty")
	// dir, a slash, an id of 30 characters, a slash and the longest socket name must fit in sun_path.
	check(c.RunDir != "" && len(c.RunDir) <= 107-1-30-1-12, "run directory %q is empty or too long for the paths of unix sockets", c.RunDir)
	check(c.Driver != nil && c.Images != nil && c.Network != nil && c.Log != nil, "driver, images, network and log are required")
	check(c.Warm >= 0 && c.Prepare.Max >= 0 && c.MaxSandboxes > 0 && c.Parallel > 0, "warm, prepared machines, sandboxes and parallel must not be negative")
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("runner config: %w", err)
	}
	return nil
}

func classOf(fp vmm.Fingerprint) runnerapi.RunnerClass {
	return runnerapi.RunnerClass{
		Arch: runtime.GOARCH, Accelerator: fp.Accelerator, CPUModel: fp.CPUModel,
		VMM: fp.VMM, VMMVersion: fp.Version, MachineType: fp.MachineType,
	}
}
