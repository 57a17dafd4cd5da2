// Package daemon runs the servers as processes: the controller, the runner, and the parts that
// `coppice dev` shares with them. It wires parts that know nothing of each other, and adds
// listeners, certificates and the order of the shutdown.
package daemon

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/hostcheck"
	"github.com/coppice-dev/coppice/internal/undo"
	"github.com/coppice-dev/coppice/runner"
	"github.com/coppice-dev/coppice/runner/cgroup"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/hostport"
	"github.com/coppice-dev/coppice/runner/netns"
	"github.com/coppice-dev/coppice/runner/pulls"
	"github.com/coppice-dev/coppice/runner/sandboxnet"
	"github.com/coppice-dev/coppice/runner/trash"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/volume"
	"github.com/coppice-dev/coppice/snapshotstore/blob/cache"
)

// HostConfig says how sandboxes run on this host.
type HostConfig struct {
	DataDir      string // made if it is not there
	ImagesDir    string // default DataDir/images
	DiskBudget   int64  // bytes of the runner's volume where one is made
	MaxSandboxes int
	Warm         int    // see runner.Config
	PrepareMax   int    // see runner.PrepareConfig
	Binary       string // QEMU; empty finds it
	// VMM and Accelerator are what machines run on. ChooseVMM settles "auto" and says in Why what decided.
	VMM             string // qemu or cloud-hypervisor
	CloudHypervisor string // its binary; empty finds it
	Accelerator     string // tcg or kvm
	Why             string
	NoRebase        bool
	Leave           bool // see runner.Config
	// AllowWeak names the checks of package hostcheck that may find less isolation than there could be. WarnWeak only warns of what
	// is not named: it is for one user's own machine.
	AllowWeak []string
	WarnWeak  bool
	Limits    runner.VMLimits
	TapRate   netns.Rate // of what a guest sends; the zero value is the default
	Store     StoreConfig
	Egress    EgressOptions
	Forward   hostport.Allowed // see runner.Config
	Log       *slog.Logger

	// Machines replaces the VMM and the host's network, for tests.
	Machines *Machines
	Traces   trace.TracerProvider  `json:"-"` // of requests; nil: none
	Registry prometheus.Registerer `json:"-"` // of the metrics; nil: nobody sees them
}

// Machines are other virtual machines than those of a VMM on this host.
type Machines struct {
	Driver  vmm.Driver
	Network sandboxnet.Network
	Images  *images.Store
	RunDir  string
}

// Host is what a runner is made of.
type Host struct {
	Runner *runner.Runner
	Pulls  *pulls.Pulls
	Volume string      // what the runner's files are on
	Pool   *netns.Pool // nil when Machines were given
	RunDir string      // for sockets
	Weak   []string    // what keeps guests apart less well than it could, for people

	cache *cache.Cache // nil: there is none
}

// Run does the background work until ctx ends, and takes the sandboxes down or leaves them.
func (h *Host) Run(ctx context.Context) error {
	if h.cache != nil {
		var group sync.WaitGroup
		defer group.Wait()
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		group.Go(func() { h.cache.Run(ctx) })
	}
	return h.Runner.Run(ctx)
}

// RunDir is where the sockets of an installation are.
func RunDir(mark string) string {
	return filepath.Join("/run/coppice", core.DigestOf([]byte(mark)).Hex()[:8])
}

// OpenHost opens the volume, the network and the runner. mark is on everything that is made on the host, so that two
// installations never reap each other. steps learns how to end what was begun.
func OpenHost(ctx context.Context, cfg HostConfig, id core.RunnerID, mark string, steps *undo.Stack) (*Host, error) {
	h := &Host{RunDir: RunDir(mark)}
	if cfg.Machines != nil {
		h.RunDir = cfg.Machines.RunDir
	}
	rc := runner.Config{
		ID: id, ClusterID: mark, RunDir: filepath.Join(h.RunDir, vmDir), Log: cfg.Log.With("component", "runner"), Metrics: cfg.Registry, Traces: cfg.Traces,
		MaxSandboxes: cfg.MaxSandboxes, Warm: cfg.Warm, Prepare: runner.PrepareConfig{Max: cfg.PrepareMax}, Rebase: checkpoints.RebasePolicy{Off: cfg.NoRebase}, Leave: cfg.Leave, Forward: cfg.Forward,
	}
	if err := os.MkdirAll(h.RunDir, 0o700); err != nil {
		return nil, err
	}
	steps.Push("run directory", h.unlessInhabited(func() error { return os.RemoveAll(h.RunDir) }))
	if m := cfg.Machines; m != nil {
		rc.DataDir, rc.Driver, rc.Network, rc.Images = runnerDir(cfg.DataDir), m.Driver, m.Network, m.Images
		h.Volume = cfg.DataDir
	} else if err := h.openMachines(ctx, cfg, mark, &rc, steps); err != nil {
		return nil, err
	}
	var err error
	cfg.Store.CacheDir = filepath.Join(filepath.Dir(rc.DataDir), "cache")
	if rc.Store.Blobs, err = cfg.Store.Chain(ctx, cfg.Log, cfg.Registry, steps); err != nil {
		return nil, err
	}
	if kept, ok := rc.Store.Blobs.(*cache.Cache); ok {
		rc.Store.Cached, h.cache = kept.Cached, kept
	}
	rc.Store.Throttle, rc.Store.Copies = cfg.Store.throttle(), cfg.Store.copies(filepath.Dir(rc.DataDir))
	rc.Store.Whole, rc.Store.Floor = cfg.Store.Whole, cfg.Store.Floor
	if rc.Store.Blobs != nil && cfg.Machines == nil {
		if rc.Store.Pager, err = pagerOf(h.RunDir, cfg.Store); err != nil {
			return nil, err
		}
		rc.Store.Pager.Cgroup = func() (*os.File, error) { return rc.Cgroups.Beside(pagerDir) }
	}
	if cfg.Machines == nil {
		if rc.Egress, err = h.egressOf(ctx, cfg, rc.FirstUID); err != nil {
			return nil, err
		}
		if rc.Egress != nil {
			rc.Egress.Cgroup = func() (*os.File, error) { return rc.Cgroups.Beside(egressDir) }
		}
	}
	if h.Runner, err = runner.New(ctx, rc); err != nil {
		return nil, err
	}
	h.Pulls = pulls.New(pulling(rc.Images, cfg.Store.Floor, h.usedImages))
	steps.Push("pulls", func(context.Context) error { h.Pulls.Close(); return nil })
	return h, nil
}

// unlessInhabited does something at the end, but not where sandboxes live on: they were left to the next process, or this one took
// them over and failed before it ran.
func (h *Host) unlessInhabited(do func() error) func(context.Context) error {
	return func(context.Context) error {
		entries, err := os.ReadDir(filepath.Join(h.RunDir, vmDir))
		if err == nil && slices.ContainsFunc(entries, os.DirEntry.IsDir) {
			return nil
		}
		return do()
	}
}

// vmDir is where the runner has its sockets and journals, in the run directory.
const vmDir = "vm"

// TrashDir is the directory that has the trash of the runner with a data directory, for package trash.
func TrashDir(dataDir string) (string, error) {
	path, err := volume.Locate(dataDir)
	return trash.Dir(runnerDir(path)), err
}

// runnerDir is where the runner keeps its files on a volume.
func runnerDir(path string) string { return filepath.Join(path, "runner") }

func (h *Host) openMachines(ctx context.Context, cfg HostConfig, mark string, rc *runner.Config, steps *undo.Stack) error {
	if err := hostcheck.VMs(ctx); err != nil { // otherwise every fork fails
		return err
	}
	files, err := volume.Open(ctx, cfg.DataDir, cfg.DiskBudget, cfg.Log)
	if err != nil {
		return err
	}
	steps.Push("volume", h.unlessInhabited(files.Close))
	h.Volume, rc.DataDir, rc.FirstUID = files.Detail, runnerDir(files.Path), firstUID(mark)
	if rc.Images, err = images.Open(cfg.imagesDir()); err != nil {
		return err
	}
	h.Pool, err = netns.NewPool(netns.Config{ClusterID: mark, Warm: cfg.Warm + 2, Max: cfg.MaxSandboxes + cfg.Warm + 2, Rate: cfg.TapRate, Log: cfg.Log.With("component", "netns")})
	if err != nil {
		return err
	}
	steps.Push("namespaces", h.Pool.Close)
	rc.Network = sandboxnet.Of(h.Pool, !cfg.Egress.Off)
	mount, err := cgroup.Find()
	if err != nil {
		return err
	}
	groups, err := cgroup.Open(mount, "coppice-"+filepath.Base(h.RunDir))
	if err != nil {
		return err
	}
	steps.Push("cgroups", func(context.Context) error { return groups.Close() })
	rc.Cgroups = groups
	if err := h.judge(ctx, cfg, groups, rc); err != nil {
		return err
	}
	rc.Driver, rc.Others = cfg.Drivers()
	fp, err := rc.Driver.Fingerprint(ctx)
	if err != nil {
		return err
	}
	cfg.Log.InfoContext(ctx, "vmm chosen", "vmm", fp.VMM, "vmm_version", fp.Version, "accelerator", fp.Accelerator, "reason", cfg.Why)
	return nil
}

// firstUID spreads installations of one host over the ids above those that distributions hand out, so that the VMs of two do
// not run as the same user.
func firstUID(mark string) uint32 {
	const lowest, size = 700_000_000, 1 << 10
	sum := sha256.Sum256([]byte(mark))
	return lowest + uint32(binary.BigEndian.Uint16(sum[:]))*size
}
