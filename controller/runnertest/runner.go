package runnertest

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/api/runnerapi/beats"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/guestagent/fakeguest"
	"github.com/coppice-dev/coppice/internal/attest"
	"github.com/coppice-dev/coppice/internal/test/testaddr"
	"github.com/coppice-dev/coppice/runner/pulls"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

// Config says what the fake pretends to be. Zero fields take the defaults of New.
type Config struct {
	ID       core.RunnerID
	Class    runnerapi.RunnerClass
	Capacity runnerapi.Capacity
	Images   []runnerapi.Image
	Secret   string
	Client   *http.Client  // to its controllers; nil: http.DefaultClient
	Fork     time.Duration // latency of each child; children of a fork start together
	Capture  time.Duration
	Template time.Duration
	Prepare  int // machines that are prepared at the same time; 0: none
	// Output is how many bytes of each output of a program its guests keep. 0: as many as a real one. Its programs do not wait for their
	// readers, as those of a real one do: a reader of more than that loses the beginning.
	Output int
	Store  blob.Blobs // where it takes sealed checkpoints from that it does not hold; nil: nowhere
	// Fetch reads what a test has stored in a form of its own; nil: the fake's is read from Store.
	Fetch func(ctx context.Context, runner core.RunnerID, at runnerapi.Stored) (runnerapi.Checkpoint, error)
}

// The points at which Hook is called.
const (
	PointFork             = "fork"  // once per call
	PointChild            = "child" // once per child; id is the sandbox
	PointCapture          = "capture"
	PointTemplate         = "template"
	PointDeleteSandbox    = "delete_sandbox"
	PointDeleteCheckpoint = "delete_checkpoint"
	PointGuest            = "guest"
	PointPort             = "port"
	PointConnect          = "connect" // id is the sandbox
	PointDiff             = "diff"
	PointReadFile         = "read_file"
	PointExport           = "export"
	PointRules            = "rules"
	PointFetch            = "fetch" // before a checkpoint is taken from the store
)

// Done is the suffix with which the same hook is called again after a point, once the work is done and not answered yet.
const Done = ".done"

// ErrVanish makes the fake cut the connection without an answer, as a runner that is killed does. What it did stays done.
var ErrVanish = errors.New("the runner vanishes")

// Runner is the fake.
type Runner struct {
	cfg     Config
	started time.Time

	attestation attestation

	// mu guards the fields below.
	mu          sync.Mutex
	server      *httptest.Server
	address     string
	hook        func(ctx context.Context, point, id string) error
	tamper      func(*runnerapi.ChildResult)
	sandboxes   map[core.SandboxID]*sandbox
	listening   map[core.SandboxID]map[int]string // addresses on this host, by the port of the guest
	checkpoints map[core.CheckpointID]*checkpoint
	calls       map[string]int
	lease       *runnerapi.Registered
	sender      beats.Sender
	epoch       int64       // of its heartbeats
	keys        *grant.Keys // of the egress process
	refuse      map[core.SandboxID]func(runnerapi.EgressRules) bool
	interim     http.Header // see Interim
	interims    int
	diskFreeMB  int64
	old         bool              // see SetOld
	pulls       *pulls.Pulls      // nil: none; see SetPull
	preparing   *preparing        // nil: nobody has asked for machines
	claims      []int64           // prepared machines that children took
	ended       []runnerapi.Usage // of sandboxes that were removed, until a heartbeat by differences has reported it
}

type sandbox struct {
	runnerapi.Sandbox
	guest *fakeguest.Guest
	evil  http.Handler // answers instead of guest, where there is one
	image core.Digest
	ports map[core.PortID]runnerapi.Port

	streams []func() // end its connections to ports of the guest
	rules   runnerapi.EgressRules
	ca      string
}

type checkpoint struct {
	runnerapi.Checkpoint
	guest    *fakeguest.State // nothing changes it
	manifest core.Digest      // that it was fetched by
}

// DefaultImage is what New offers when the configuration has no images.
var DefaultImage = runnerapi.Image{
	Name: "base", Digest: core.DigestOf([]byte("base")), SizeBytes: 300 << 20, CreatedAt: time.Date(2026, 11, 21, 0, 0, 0, 0, time.UTC),
}

// New makes a fake that does not listen yet.
func New(cfg Config) *Runner {
	if cfg.ID == "" {
		cfg.ID = core.NewID[core.RunnerID]()
	}
	if cfg.Class == (runnerapi.RunnerClass{}) {
		cfg.Class = runnerapi.RunnerClass{Arch: "amd64", Accelerator: "tcg", CPUModel: "max", VMM: "fake", VMMVersion: "1", MachineType: "fake-1"}
	}
	if cfg.Capacity == (runnerapi.Capacity{}) {
		cfg.Capacity = runnerapi.Capacity{Sandboxes: 4096, VCPUs: 8192, MemoryMiB: 8 << 20}
	}
	if cfg.Images == nil {
		cfg.Images = []runnerapi.Image{DefaultImage}
	}
	if cfg.Secret == "" {
		cfg.Secret = "runner-secret"
	}
	key, err := attest.NewKey()
	if err != nil {
		panic(err) // there is no randomness
	}
	r := &Runner{diskFreeMB: 100_000, cfg: cfg, attestation: attestation{key: key}, started: time.Now().UTC(), sandboxes: map[core.SandboxID]*sandbox{}, checkpoints: map[core.CheckpointID]*checkpoint{}, calls: map[string]int{}}
	r.RestartEgress()
	return r
}

// Start makes a fake that listens on loopback until the test ends.
func Start(tb testing.TB, cfg Config) *Runner {
	tb.Helper()
	r := New(cfg)
	if err := r.Listen(); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(r.Close)
	return r
}

// Close stops the fake for good and ends the programs in its guests.
func (r *Runner) Close() {
	r.Stop()
	r.mu.Lock()
	defer r.mu.Unlock()
	for id := range r.sandboxes {
		r.remove(id)
	}
}

// endedKept bounds what is remembered of sandboxes that have ended.
const endedKept = 4096

// remove takes a sandbox down with its programs. r.mu is held.
func (r *Runner) remove(id core.SandboxID) {
	if s, ok := r.sandboxes[id]; ok {
		s.guest.End()
		for _, end := range s.streams {
			end()
		}
		delete(r.sandboxes, id)
		if len(r.ended) < endedKept {
			r.ended = append(r.ended, r.usage(s, true))
		}
	}
}

// Listen begins to serve, at the address that it had before a Stop.
func (r *Runner) Listen() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	address := r.address
	if address == "" {
		address = testaddr.New()
	}
	listener, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", address)
	if err != nil {
		return err
	}
	r.address = listener.Addr().String()
	r.server = &httptest.Server{Listener: listener, Config: &http.Server{Handler: r.Handler(), ReadHeaderTimeout: time.Minute}}
	r.server.Start()
	return nil
}

// Stop cuts every connection and stops listening, as a killed runner does. Its sandboxes and checkpoints stay.
func (r *Runner) Stop() {
	r.mu.Lock()
	server := r.server
	r.server = nil
	r.mu.Unlock()
	if server != nil {
		server.CloseClientConnections()
		server.Close()
	}
	r.endPreparing()
}

// ID returns the fake's id, and Endpoint where it listens.
func (r *Runner) ID() core.RunnerID { return r.cfg.ID }

// Endpoint returns the address in the form that runners register with.
func (r *Runner) Endpoint() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return "http://" + r.address
}

// Hook sets what is called at each point; nil removes it. It may block; an error is answered, ErrVanish cuts the connection.
// It is called without locks held.
func (r *Runner) Hook(hook func(ctx context.Context, point, id string) error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hook = hook
}

// Tamper changes what is answered about each child of a fork; nil removes it.
func (r *Runner) Tamper(tamper func(*runnerapi.ChildResult)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tamper = tamper
}

// Calls returns how often a point was passed.
func (r *Runner) Calls(point string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.calls[point]
}

// Sandboxes returns what the fake holds, by id.
func (r *Runner) Sandboxes() []runnerapi.Sandbox {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := []runnerapi.Sandbox{}
	for _, id := range slices.Sorted(maps.Keys(r.sandboxes)) {
		list = append(list, r.sandboxes[id].Sandbox)
	}
	return list
}

// Checkpoints returns the ids of what the fake holds.
func (r *Runner) Checkpoints() []core.CheckpointID {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Sorted(maps.Keys(r.checkpoints))
}

// SetImages changes what the fake offers.
func (r *Runner) SetImages(images ...runnerapi.Image) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cfg.Images = images
}

// SetClass changes what the fake is, as an upgrade of its VMM does; it counts from the next registration.
func (r *Runner) SetClass(class runnerapi.RunnerClass) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cfg.Class = class
}

// Crash lets a sandbox's VMM end by itself: it is reported dead until a heartbeat with it was answered.
func (r *Runner) Crash(id core.SandboxID, exit string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s, ok := r.sandboxes[id]; ok {
		s.State, s.Exit = runnerapi.SandboxDead, exit
	}
}

// Vanish forgets a sandbox as if it had never been.
func (r *Runner) Vanish(id core.SandboxID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.remove(id)
}

// LoseCheckpoints forgets every checkpoint, as a new data directory does.
func (r *Runner) LoseCheckpoints() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.checkpoints)
}

func (r *Runner) pass(ctx context.Context, point, id string) error {
	r.mu.Lock()
	r.calls[point]++
	hook := r.hook
	r.mu.Unlock()
	if hook == nil {
		return nil
	}
	return hook(ctx, point, id)
}

// Info returns what the fake says of itself.
func (r *Runner) Info() runnerapi.Info {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.info()
}

func (r *Runner) info() runnerapi.Info {
	info := runnerapi.Info{
		RunnerID: r.cfg.ID, Version: runnerapi.Version, Hostname: "fake", Class: r.cfg.Class, Capacity: r.cfg.Capacity,
		StartedAt: r.started, KVM: "not used: this runner is a fake", DiskFreeMB: r.diskFreeMB,
		EgressKey: r.keys.Public(), EgressURL: EgressURL, Images: runnerapi.SumImages(r.cfg.Images),
	}
	for _, s := range r.sandboxes {
		info.Allocated.Sandboxes++
		info.Allocated.VCPUs += s.Resources.VCPUs
		info.Allocated.MemoryMiB += s.Resources.MemoryMiB
	}
	return info
}

// template boots nothing and captures it.
func (r *Runner) template(ctx context.Context, in runnerapi.Template) (runnerapi.Checkpoint, error) {
	if cp, ok := r.held(in.CheckpointID); ok {
		return cp, nil
	}
	if err := r.pass(ctx, PointTemplate, string(in.CheckpointID)); err != nil {
		return runnerapi.Checkpoint{}, err
	}
	if err := sleep(ctx, r.cfg.Template); err != nil {
		return runnerapi.Checkpoint{}, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !slices.ContainsFunc(r.cfg.Images, func(i runnerapi.Image) bool { return i.Digest == in.Image }) {
		return runnerapi.Checkpoint{}, core.Errorf(core.NotFound, core.CodeImageNotFound, "this runner has no image %s", in.Image.Short())
	}
	if cp, ok := r.checkpoints[in.CheckpointID]; ok {
		return cp.Checkpoint, nil
	}
	cp := &checkpoint{Checkpoint: r.describe(in.CheckpointID, in.Image, in.Resources), guest: fakeguest.NewState()}
	if r.cfg.Output > 0 {
		cp.guest.OutputBytes = r.cfg.Output
	}
	cp.PauseMS = 0
	r.checkpoints[in.CheckpointID] = cp
	return cp.Checkpoint, nil
}

func (r *Runner) held(id core.CheckpointID) (runnerapi.Checkpoint, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	cp, ok := r.checkpoints[id]
	if !ok {
		return runnerapi.Checkpoint{}, false
	}
	return cp.Checkpoint, true
}

func (r *Runner) describe(id core.CheckpointID, image core.Digest, res core.Resources) runnerapi.Checkpoint {
	return runnerapi.Checkpoint{
		ID: id, Image: image, Class: r.cfg.Class, Resources: res, Base: core.NewID[core.BaseID](), DeltaBytes: 4 << 20, DeviceStateBytes: 180_000,
		DiskBytes: 1 << 20, PauseMS: 12.5, Timings: []core.Timing{{Stage: "pause", DurationMS: 12.5}, {Stage: "write", DurationMS: 3}},
		ParentReseal: []core.ResealStep{{Name: "entropy", Status: core.ResealOK, DurationMS: 0.2}},
		Processes:    []core.StaleProcess{{PID: 7, Command: "python3", Runtime: "python"}}, CreatedAt: time.Now().UTC(),
	}
}

// capture makes a checkpoint of a sandbox.
func (r *Runner) capture(ctx context.Context, id core.SandboxID, in runnerapi.Capture) (runnerapi.Checkpoint, error) {
	if cp, ok := r.held(in.CheckpointID); ok {
		return cp, nil
	}
	if err := r.pass(ctx, PointCapture, string(in.CheckpointID)); err != nil {
		return runnerapi.Checkpoint{}, err
	}
	if err := sleep(ctx, r.cfg.Capture); err != nil {
		return runnerapi.Checkpoint{}, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s, ok := r.sandboxes[id]
	if !ok || s.State == runnerapi.SandboxDead {
		return runnerapi.Checkpoint{}, core.Errorf(core.NotFound, core.CodeSandboxNotFound, "this runner has no sandbox %s", id)
	}
	cp := &checkpoint{Checkpoint: r.describe(in.CheckpointID, s.image, s.Resources), guest: s.guest.State()}
	cp.Parent, s.Checkpoint = cmp.Or(in.Parent, s.Checkpoint), in.CheckpointID
	r.checkpoints[in.CheckpointID] = cp
	if in.Stop {
		r.remove(id)
	}
	return cp.Checkpoint, nil
}

// fork grows children, all at once.
func (r *Runner) fork(ctx context.Context, in runnerapi.Fork) (runnerapi.ForkResult, error) {
	if err := r.pass(ctx, PointFork, string(in.CheckpointID)); err != nil {
		return runnerapi.ForkResult{}, err
	}
	if err := r.take(ctx, in); err != nil {
		return runnerapi.ForkResult{}, err
	}
	out := runnerapi.ForkResult{Children: make([]runnerapi.ChildResult, len(in.Children))}
	var group sync.WaitGroup
	for i, child := range in.Children {
		group.Go(func() { out.Children[i] = r.grow(ctx, in.CheckpointID, child) })
	}
	group.Wait()
	return out, nil
}

func (r *Runner) grow(ctx context.Context, from core.CheckpointID, child runnerapi.Child) runnerapi.ChildResult {
	out := runnerapi.ChildResult{SandboxID: child.SandboxID}
	err := r.pass(ctx, PointChild, string(child.SandboxID))
	if err == nil {
		err = sleep(ctx, r.cfg.Fork)
	}
	if err != nil {
		out.Problem = runnerapi.ProblemOf(err)
		return out
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	cp, ok := r.checkpoints[from]
	switch {
	case !ok:
		err = core.Errorf(core.NotFound, core.CodeCheckpointNotFound, "this runner has no checkpoint %s", from)
	case r.sandboxes[child.SandboxID] == nil && len(r.sandboxes) >= r.cfg.Capacity.Sandboxes:
		err = core.Errorf(core.Exhausted, core.CodeCapacity, "this runner holds %d sandboxes, its limit", len(r.sandboxes))
	}
	if err != nil {
		out.Problem = runnerapi.ProblemOf(err)
		return out
	}
	s, ok := r.sandboxes[child.SandboxID]
	if !ok {
		res := cp.Resources
		res.DiskGiB = max(res.DiskGiB, child.DiskGiB)
		s = &sandbox{guest: fakeguest.New(fakeguest.InProcess(cp.guest.Clone()), nil), image: cp.Image, ports: map[core.PortID]runnerapi.Port{}, rules: child.Rules, ca: child.CA, Sandbox: runnerapi.Sandbox{
			ID: child.SandboxID, WorkspaceID: child.WorkspaceID, Epoch: child.Epoch, State: runnerapi.SandboxReady, Checkpoint: from,
			Identity: child.Identity, Resources: res, StartedAt: time.Now().UTC(),
		}}
		r.sandboxes[child.SandboxID] = s
		r.claim(from, child)
	}
	held := s.Sandbox
	out.Sandbox, out.Reseal = &held, reseal(child.Identity)
	if out.Attestation, err = r.attest(cp, child, out.Reseal); err != nil {
		out.Problem = runnerapi.ProblemOf(err)
	}
	out.Timings = []core.Timing{{Stage: "net", DurationMS: 0.4}, {Stage: "vmm", DurationMS: 30}, {Stage: "reseal", DurationMS: 5}}
	if r.tamper != nil {
		r.tamper(&out)
	}
	return out
}

func reseal(id core.Identity) *core.ResealReport {
	sum := sha256.Sum256([]byte(id.Generation))
	step := func(name string, evidence ...string) core.ResealStep {
		e := map[string]string{}
		for i := 0; i+1 < len(evidence); i += 2 {
			e[evidence[i]] = evidence[i+1]
		}
		return core.ResealStep{Name: name, Status: core.ResealOK, DurationMS: 0.3, Evidence: e}
	}
	return &core.ResealReport{
		Generation: id.Generation, Complete: true, DurationMS: 4.2,
		Steps: []core.ResealStep{
			step("entropy", "draw_00", hex.EncodeToString(sum[:16])), step("machine_id", "value", id.MachineID), step("hostname", "value", id.Hostname),
			step("network", "mac", id.MAC, "addresses", id.IP.String()),
		},
		StaleProcesses: []core.StaleProcess{},
	}
}

func (r *Runner) deleteSandbox(ctx context.Context, id core.SandboxID) error {
	if err := r.pass(ctx, PointDeleteSandbox, string(id)); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.remove(id)
	return nil
}

func (r *Runner) deleteCheckpoint(ctx context.Context, id core.CheckpointID) error {
	if err := r.pass(ctx, PointDeleteCheckpoint, string(id)); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.checkpoints, id)
	return nil
}

// sleep is the latency of something that would take that long.
func sleep(ctx context.Context, d time.Duration) error {
	if d == 0 {
		return nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timer.C:
		return nil
	}
}

// Stall has a sandbox stand still for a reason; nil: it goes on.
func (r *Runner) Stall(id core.SandboxID, why *runnerapi.Stall) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sandboxes[id].Stalled = why
}

// Corrupt lets a hostile agent answer for a sandbox. The agent gets the honest one, which it may call.
func (r *Runner) Corrupt(id core.SandboxID, evil func(honest http.Handler) http.Handler) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s, ok := r.sandboxes[id]; ok {
		s.evil = evil(s.guest)
	}
}

// SetDiskFree says how much may be written on the fake's disk, as its next heartbeat says.
func (r *Runner) SetDiskFree(mb int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.diskFreeMB = mb
}

// Rejoin makes the host of the fake another runner, which still holds what the one of before captured. Nothing else may use the
// fake meanwhile.
func (r *Runner) Rejoin() core.RunnerID {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cfg.ID, r.started, r.epoch = core.NewID[core.RunnerID](), time.Now().UTC(), 0
	for id := range r.sandboxes {
		r.remove(id)
	}
	return r.cfg.ID
}
