package runner

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/attestor"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/compare"
	"github.com/coppice-dev/coppice/runner/draws"
	"github.com/coppice-dev/coppice/runner/egresslink"
	"github.com/coppice-dev/coppice/runner/fetch"
	"github.com/coppice-dev/coppice/runner/hostport"
	"github.com/coppice-dev/coppice/runner/lazy"
	"github.com/coppice-dev/coppice/runner/lease"
	"github.com/coppice-dev/coppice/runner/leftovers"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/portforward"
	"github.com/coppice-dev/coppice/runner/prepared"
	"github.com/coppice-dev/coppice/runner/room"
	"github.com/coppice-dev/coppice/runner/roots"
	"github.com/coppice-dev/coppice/runner/sealing"
	"github.com/coppice-dev/coppice/runner/slots"
	"github.com/coppice-dev/coppice/runner/usage"
	"github.com/coppice-dev/coppice/runner/warm"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/envelope"
)

// Runner owns the sandboxes of one host. Its methods are safe for concurrent use once New has returned.
type Runner struct {
	cfg         Config
	class       runnerapi.RunnerClass
	kvm         string
	clusterHash string         // the mark of this cluster on everything that it has on the host
	leftovers   leftovers.Host // of earlier runners
	bases       *memory.BaseStore
	room        *room.Room   // the disk space that fetches may take
	lazy        *lazy.Images // memory and root file systems that are used before they are complete
	egress      *egresslink.Link
	keys        envelope.Ring // keys of objects in the store, from the controller
	blobs       blob.Blobs    // the store with these keys; nil: there is none
	roots       *roots.Store
	checkpoints *checkpoints.Store
	rebases     *checkpoints.Rebaser
	seals       *sealing.Sealer
	fetches     *fetch.Fetcher
	compare     *compare.Comparer
	slots       *slots.Slots
	warm        *warm.Pool[shape, *shell]
	prepared    *prepared.Pool[*preparedMachine]
	metrics     *metrics
	starting    chan struct{} // a place per child that is being started
	draws       draws.Draws   // of all guests
	attestor    *attestor.Attestor
	lease       *lease.Lease
	objects     chan struct{} // a place per read of another runner
	started     time.Time

	hostPorts *hostport.Host
	loopback  portforward.RunnerPlaces

	runCtx context.Context // the lifetime of the runner: cancelled when Run ends
	stop   context.CancelFunc
	wg     sync.WaitGroup // goroutines of sandboxes and background work
	wakeup chan struct{}  // of size 1: something changed that a heartbeat should report at once
	lock   *os.File       // held while this runner uses its data, so that no second runner does
	leave  atomic.Bool    // Config.Leave; cfg itself never changes after New

	mu        sync.Mutex // guards what follows
	sandboxes map[core.SandboxID]*sandbox
	dead      map[core.SandboxID]runnerapi.Sandbox
	adopted   []*sandbox // of an earlier runner; Run begins to watch them

	directories leftovers.Directories // of shells

	usages usage.Usages
}

// New opens the runner's data. It adopts the sandboxes that an earlier process left running, and takes down everything else that this
// process left. It fails if the VMM cannot be used, or if another runner uses the data.
func New(ctx context.Context, cfg Config) (_ *Runner, err error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	fp, err := cfg.Driver.Fingerprint(ctx)
	if err != nil {
		return nil, err
	}
	hash := sha256.Sum256([]byte(cfg.ClusterID))
	r := &Runner{
		cfg: cfg, class: classOf(fp), kvm: fp.Detail, clusterHash: hex.EncodeToString(hash[:4]),
		slots: slots.New(cfg.MaxSandboxes), starting: make(chan struct{}, cfg.Parallel), objects: make(chan struct{}, maxObjects), loopback: portforward.NewRunnerPlaces(), started: time.Now(),
		wakeup: make(chan struct{}, 1), sandboxes: make(map[core.SandboxID]*sandbox),
		dead: make(map[core.SandboxID]runnerapi.Sandbox),
	}
	r.leave.Store(cfg.Leave)
	r.room = room.New(cfg.DataDir, cfg.Store.Floor)
	r.blobs = envelope.With(cfg.Store.Blobs, &r.keys)
	for _, dir := range []string{cfg.DataDir, r.shellsDir(), cfg.RunDir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("make the runner's directory: %w", err)
		}
	}
	if r.lock, err = lockDir(cfg.DataDir); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, unlockDir(r.lock))
		}
	}()
	if r.attestor, err = attestor.Open(filepath.Join(cfg.DataDir, attestationFile), cfg.ID); err != nil {
		return nil, fmt.Errorf("open the runner's attestation key: %w", err)
	}
	r.leftovers = leftovers.Host{
		RunDir: cfg.RunDir, ShellsDir: r.shellsDir(), ClusterID: cfg.ClusterID, Mark: r.clusterHash, Cgroups: cfg.Cgroups, Network: cfg.Network, Log: cfg.Log,
		Drivers: leftovers.Drivers{Own: cfg.Driver, Name: r.class.VMM, Others: cfg.Others},
	}
	left, err := r.leftovers.Scan()
	if err != nil {
		return nil, fmt.Errorf("look for what an earlier runner left: %w", err)
	}
	if r.lease, err = lease.Open(lease.Config{DataDir: cfg.DataDir, RunDir: cfg.RunDir, Default: cfg.Lease}); err != nil {
		return nil, err
	}
	r.hostPorts = hostport.New(cfg.Forward)
	if warning := cfg.Forward.Warning(); warning != "" {
		cfg.Log.WarnContext(ctx, "forwarded ports and outgoing connections share ports", "problem", warning)
	}
	r.runCtx, r.stop = context.WithCancel(context.Background())
	r.egress = newEgressLink(r)
	if r.lazy, err = openLazy(r); err != nil {
		return nil, err
	}
	if r.roots, err = openRoots(r); err != nil {
		return nil, err
	}
	if r.bases, err = memory.NewBaseStore(filepath.Join(cfg.DataDir, "bases"), !cfg.Driver.Capabilities().ReadOnlyBase); err != nil {
		return nil, err
	}
	r.bases.Await(r.lazy.Bases())
	r.lazy.FindPager(ctx, slices.ContainsFunc(left, leftovers.Leftover.UsesPager))
	var retained []core.BaseID
	for _, l := range left {
		if l.Adoptable() {
			retained = append(retained, l.Journal.Shape.Base)
		}
	}
	if r.checkpoints, err = openCheckpoints(r, retained); err != nil {
		return nil, err
	}
	r.rebases = newRebaser(r)
	r.readCheckpoints(ctx)
	r.seals = newSealer(r)
	r.fetches = newFetcher(r)
	r.compare = newComparer(r)
	r.warm = newWarmPool(r)
	r.prepared = newPreparedPool(r)
	r.metrics = newMetrics(r, cfg.Metrics)
	if err := r.takeOver(ctx, left); err != nil {
		return nil, fmt.Errorf("take over from an earlier runner: %w", err)
	}
	if err := r.roots.Collect(); err != nil {
		return nil, fmt.Errorf("remove root file systems that nothing needs: %w", err)
	}
	return r, nil
}

// readCheckpoints learns what reseals drew before, and warns of checkpoints that cannot be forked here.
func (r *Runner) readCheckpoints(ctx context.Context) {
	strange := map[string]int{} // checkpoints of another class, by the difference
	for _, rec := range r.checkpoints.List() {
		_ = r.draws.Add(rec.ParentReseal) // they were checked at the capture
		if field := rec.Class.Difference(r.class); field != "" {
			strange[field]++
		}
	}
	for _, field := range slices.Sorted(maps.Keys(strange)) {
		r.cfg.Log.WarnContext(ctx, "checkpoints of another class are kept and cannot be forked until this runner has that class again", "count", strange[field], "difference", field)
	}
}

// lockDir makes sure that only one runner uses the data. The kernel releases the lock when the process dies.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(core.Wrapf(err, core.Conflict, core.CodeStateConflict, "another runner has the data in %s; stop it first", dir), f.Close())
	}
	return f, nil
}

// unlockDir releases the lock. It unlocks before it closes: a child process between fork and exec has a copy of the file, and would keep the
// lock until exec.
func unlockDir(lock *os.File) error {
	return errors.Join(unix.Flock(int(lock.Fd()), unix.LOCK_UN), lock.Close())
}

func (r *Runner) shellsDir() string { return filepath.Join(r.cfg.DataDir, "shells") }

// Run does the background work until ctx ends, and then takes every sandbox down, or leaves them (Config.Leave). Checkpoints stay.
func (r *Runner) Run(ctx context.Context) error {
	r.wg.Go(func() { r.warm.Run(r.runCtx) })
	r.wg.Go(func() { r.prepared.Run(r.runCtx) })
	r.wg.Go(func() { r.lease.Guard(r.runCtx, r.fenceExpired) })
	r.wg.Go(func() { r.tidy(r.runCtx) })
	r.wg.Go(func() { r.lazy.Run(r.runCtx) })
	r.wg.Go(func() { r.egress.Run(r.runCtx) })
	r.wg.Go(func() { r.lazy.WatchStalls(r.runCtx, r.updateStalls) })
	r.wg.Go(func() { r.egress.Recheck(r.runCtx, r.cfg.Recheck, r.egresses) })
	for _, s := range r.adopted {
		noted, _ := s.notes.Read()
		s.ports.Reopen(noted.Ports)
		r.wg.Add(1)
		go r.watch(s)
	}
	<-ctx.Done()
	r.mu.Lock() // no operation begins from here on; see enter
	r.stop()
	r.mu.Unlock()
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	err := r.close(clean)
	r.wg.Wait()
	return errors.Join(err, unlockDir(r.lock))
}

// enter counts an operation: Run does not end before leave is called, so that nothing of the operation is left behind.
func (r *Runner) enter() (leave func(), err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.runCtx.Err() != nil {
		return nil, errStopping
	}
	if r.lease.Fenced() {
		return nil, lease.ErrFenced
	}
	r.wg.Add(1)
	return r.wg.Done, nil
}

var errStopping = core.Errorf(core.Unavailable, core.CodeRunnerUnreachable, "this runner is stopping")

// Wake is readable after an event that the controller should learn of at once.
func (r *Runner) Wake() <-chan struct{} { return r.wakeup }

// Hurry makes Wake readable.
func (r *Runner) Hurry() { r.wake() }

func (r *Runner) wake() {
	select {
	case r.wakeup <- struct{}{}:
	default:
	}
}

// How much more a runner offers than it has. Forks share their base and keep only the pages that they wrote: an idle fork of 512 MiB
// has some 20 MiB of its own. MaxSandboxes bounds the use of the host, and the host reports when it has reached a limit.
const (
	memoryOvercommit = 8
	vcpuOvercommit   = 4
)

// ID names the runner.
func (r *Runner) ID() core.RunnerID { return r.cfg.ID }

// Info describes the runner.
func (r *Runner) Info() (runnerapi.Info, error) {
	host, err := os.Hostname()
	if err != nil {
		return runnerapi.Info{}, err
	}
	free, err := r.fetches.Freeable()
	if err != nil {
		return runnerapi.Info{}, err
	}
	var mem unix.Sysinfo_t
	if err := unix.Sysinfo(&mem); err != nil {
		return runnerapi.Info{}, err
	}
	info := runnerapi.Info{
		RunnerID: r.cfg.ID, Version: runnerapi.Version, Hostname: host, Class: r.class, KVM: r.kvm, StartedAt: r.started,
		Capacity: runnerapi.Capacity{
			Sandboxes: r.cfg.MaxSandboxes, VCPUs: r.cfg.MaxSandboxes * vcpuOvercommit,
			MemoryMiB: int(mem.Totalram*uint64(mem.Unit)>>20) * memoryOvercommit,
		},
		DiskFreeMB: free / 1e6, Weak: r.cfg.Weak,
	}
	info.EgressKey, info.EgressURL = r.egress.Reach()
	if list, err := r.Images(); err == nil { // otherwise the controller keeps the list that it has
		info.Images = runnerapi.SumImages(list)
	}
	for _, s := range r.Sandboxes() {
		if s.State != runnerapi.SandboxDead {
			info.Allocated.Sandboxes++
			info.Allocated.VCPUs += s.Resources.VCPUs
			info.Allocated.MemoryMiB += s.Resources.MemoryMiB
		}
	}
	return info, nil
}

// Images lists the images of this host.
func (r *Runner) Images() ([]runnerapi.Image, error) {
	list, err := r.cfg.Images.List()
	if err != nil {
		return nil, err
	}
	out := make([]runnerapi.Image, 0, len(list))
	for _, i := range list {
		out = append(out, runnerapi.Image{Name: i.Name, Digest: i.Digest, SizeBytes: i.SizeBytes, CreatedAt: i.CreatedAt, References: i.References, Unlisted: i.Pulled && i.Name == ""})
	}
	return out, nil
}

// Checkpoint describes a checkpoint of this host.
func (r *Runner) Checkpoint(id core.CheckpointID) (runnerapi.Checkpoint, error) {
	rec, err := r.checkpoints.Find(id)
	if err != nil {
		return runnerapi.Checkpoint{}, err
	}
	return rec.Checkpoint, nil
}

// Checkpoints lists the checkpoints of this host.
func (r *Runner) Checkpoints() []runnerapi.Checkpoint {
	list := r.checkpoints.List()
	out := make([]runnerapi.Checkpoint, 0, len(list))
	for _, rec := range list {
		out = append(out, rec.Checkpoint)
	}
	return out
}

// DeleteCheckpoint removes a checkpoint's bytes from this host. Sandboxes that were forked from it continue. It is no error if there is
// no such checkpoint. The controller learns at once how much of the disk is free.
func (r *Runner) DeleteCheckpoint(id core.CheckpointID) error {
	if _, err := r.checkpoints.Get(id); err == nil { // wakes for an absent checkpoint might never end
		defer r.wake()
	}
	return r.checkpoints.Delete(id)
}

// Discard moves a checkpoint that the database does not know to the trash. A request that names it takes it back.
func (r *Runner) Discard(id core.CheckpointID) error { return r.checkpoints.Discard(id) }

// ReadFile reads a file or lists a directory of a checkpoint.
func (r *Runner) ReadFile(ctx context.Context, id core.CheckpointID, req runnerapi.ReadFile) (runnerapi.FilePart, error) {
	return r.compare.File(ctx, id, req)
}

// Diff says what differs between two checkpoints of one image: files, and on the first page processes and memory.
func (r *Runner) Diff(ctx context.Context, from core.CheckpointID, req runnerapi.Diff) (runnerapi.DiffPage, error) {
	return r.compare.Diff(ctx, from, req)
}

// Export writes a checkpoint as one file to what begin returns, see sealing.Sealer.Export.
func (r *Runner) Export(ctx context.Context, id core.CheckpointID, in runnerapi.ExportCheckpoint, begin func(size int64) io.Writer) error {
	return r.seals.Export(ctx, id, in, begin)
}

// Rebase replaces a checkpoint's base and delta by a new base with the same bytes. Sandboxes on the old base continue to use it. A
// checkpoint without a delta does not change.
func (r *Runner) Rebase(id core.CheckpointID) error { return r.rebases.Rebase(id) }

// counted counts a capture in the metrics.
func (r *Runner) counted(capture func() (*checkpoints.Record, error)) func() (*checkpoints.Record, error) {
	return func() (*checkpoints.Record, error) {
		rec, err := capture()
		r.metrics.captured(rec, err)
		return rec, err
	}
}
