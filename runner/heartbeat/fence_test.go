package heartbeat_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testvm"
	"github.com/coppice-dev/coppice/runner"
	"github.com/coppice-dev/coppice/runner/fakenet"
	"github.com/coppice-dev/coppice/runner/heartbeat"
	"github.com/coppice-dev/coppice/runner/trash"
	"github.com/coppice-dev/coppice/runner/vmm/fakevmm"
)

// controller answers as a test says, and remembers what it was told.
type controller struct {
	mu       sync.Mutex // guards what follows
	fenced   bool       // heartbeats are answered with RUNNER_LOST
	silent   bool       // nothing is answered
	revoked  bool       // heartbeats are answered with RUNNER_REVOKED
	epoch    int64
	named    []int64 // last epochs that registrations have named
	beats    []runnerapi.Heartbeat
	fenceFor time.Duration
	stray    []core.CheckpointID // that heartbeats are answered to drop, by a controller that knows no numbers
	strays   []core.CheckpointID // that heartbeats are answered to drop, by a controller that knows numbers
	drops    []core.CheckpointID // that were deleted, likewise
	numbers  bool                // heartbeats are answered with their numbers, and differences are taken; else it is of an older version
	unfit    bool                // the next heartbeat with differences that has a sandbox is answered as not applied
	beaten   int                 // heartbeats with differences that were taken
	slow     func()              // runs at the next heartbeat, which is then not answered
	drains   bool                // answers say that the runner is drained
}

func (c *controller) set(change func(*controller)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(c)
}

func (c *controller) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.silent {
		panic(http.ErrAbortHandler)
	}
	answer := func(status int, v any) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(v)
	}
	if strings.HasSuffix(r.URL.Path, "/register") {
		var reg runnerapi.Register
		if err := json.NewDecoder(r.Body).Decode(&reg); err != nil {
			answer(http.StatusBadRequest, err.Error())
			return
		}
		c.epoch++
		c.named = append(c.named, reg.LeaseEpoch)
		answer(http.StatusOK, runnerapi.Registered{ClusterID: "test", LeaseEpoch: c.epoch, TTLSeconds: 0.03, FenceSeconds: c.fenceFor.Seconds()})
		return
	}
	if strings.HasSuffix(r.URL.Path, "/beats") {
		var b runnerapi.Beat
		if err := json.NewDecoder(r.Body).Decode(&b); err != nil || !c.numbers {
			http.NotFound(w, r)
			return
		}
		c.beaten++
		if c.unfit && len(b.Sandboxes) > 0 {
			c.unfit = false
			answer(http.StatusOK, runnerapi.Heartbeated{Number: b.Number, AllSandboxes: true, AllCheckpoints: true, TTLSeconds: 0.03, FenceSeconds: c.fenceFor.Seconds()})
			return
		}
		answer(http.StatusOK, runnerapi.Heartbeated{
			Number: b.Number, StrayCheckpoints: c.strays, DropCheckpoints: c.drops, TTLSeconds: 0.03, FenceSeconds: c.fenceFor.Seconds(),
		})
		return
	}
	var h runnerapi.Heartbeat
	if err := json.NewDecoder(r.Body).Decode(&h); err != nil {
		answer(http.StatusBadRequest, err.Error())
		return
	}
	c.beats = append(c.beats, h)
	if slow := c.slow; slow != nil {
		c.slow = nil
		c.mu.Unlock()
		slow()
		c.mu.Lock()
		answer(http.StatusServiceUnavailable, runnerapi.ProblemOf(core.Errorf(core.Unavailable, core.CodeControllerStopping, "slow")))
		return
	}
	if c.revoked {
		answer(http.StatusForbidden, runnerapi.ProblemOf(core.Errorf(core.PermissionDenied, core.CodeRunnerRevoked, "the runner was removed")))
		return
	}
	if c.fenced {
		c.fenced = false
		answer(http.StatusServiceUnavailable, runnerapi.ProblemOf(core.Errorf(core.Unavailable, core.CodeRunnerLost, "the lease was given up")))
		return
	}
	var number int64
	if c.numbers {
		number = h.Number
	}
	answer(http.StatusOK, runnerapi.Heartbeated{
		Number: number, DropCheckpoints: c.stray, Draining: c.drains, TTLSeconds: 0.03, FenceSeconds: c.fenceFor.Seconds(), DataTaken: min(writesTaken, len(h.DataWrites)),
	})
}

// dead returns the sandboxes that were reported dead with an exit that has the text.
func (c *controller) dead(text string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	ids := map[core.SandboxID]bool{}
	for _, b := range c.beats {
		for _, s := range b.Sandboxes {
			if s.State == runnerapi.SandboxDead && strings.Contains(s.Exit, text) {
				ids[s.ID] = true
			}
		}
	}
	return len(ids)
}

// rig is a runner on machines of the process, with a link to a controller of the test.
type rig struct {
	*controller
	t        *testing.T
	runner   *runner.Runner
	driver   *fakevmm.Driver
	template runnerapi.Checkpoint
	ended    chan error // what the link ended with
	cfg      runner.Config
	link     heartbeat.Config
	stop     func() // ends runner and link
}

func newRig(t *testing.T) *rig {
	t.Helper()
	return newRigWith(t, nil, 0)
}

// newRigWith is newRig for a runner with a data plane, and with machines that are prepared for forks.
func newRigWith(t *testing.T, plane heartbeat.Plane, prepared int) *rig {
	t.Helper()
	store, image := testvm.FakeImage(t)
	x := &rig{t: t, controller: &controller{fenceFor: time.Minute}, driver: fakevmm.New(fakevmm.Config{})}
	runDir, err := os.MkdirTemp("", "run") //nolint:usetesting // t.TempDir is too long for the path of a unix socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(runDir) })
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	x.cfg = runner.Config{
		ID: core.NewID[core.RunnerID](), ClusterID: "test", DataDir: filepath.Join(t.TempDir(), "data"), RunDir: runDir, Driver: x.driver,
		Images: store, Network: fakenet.Network{}, Log: log, Prepare: runner.PrepareConfig{Max: prepared},
	}
	server := httptest.NewServer(x.controller)
	t.Cleanup(server.Close)
	x.link = heartbeat.Config{Controllers: []string{server.URL, server.URL}, Secret: "secret", Endpoint: "unix:/nowhere", Plane: plane, Log: log}
	x.start()
	x.template, err = x.runner.Template(t.Context(), runnerapi.Template{
		CheckpointID: core.NewID[core.CheckpointID](), Image: image.Digest, Resources: core.Resources{VCPUs: 1, MemoryMiB: 8},
	})
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// start begins a process of the runner, which ends with the test or by stop.
func (x *rig) start() {
	x.t.Helper()
	var err error
	if x.runner, err = runner.New(x.t.Context(), x.cfg); err != nil {
		x.t.Fatal(err)
	}
	link, err := heartbeat.New(x.runner, x.link)
	if err != nil {
		x.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(x.t.Context())
	var wg sync.WaitGroup
	x.stop = func() {
		cancel()
		wg.Wait()
	}
	x.t.Cleanup(x.stop)
	r, ended := x.runner, make(chan error, 1)
	x.ended = ended
	wg.Go(func() {
		if err := r.Run(ctx); err != nil {
			x.t.Error(err)
		}
	})
	wg.Go(func() { ended <- link.Run(ctx) })
}

// fork makes two sandboxes.
func (x *rig) fork() {
	x.t.Helper()
	out, err := x.runner.Fork(x.t.Context(), runnerapi.Fork{CheckpointID: x.template.ID, Children: []runnerapi.Child{child(1), child(2)}})
	if err != nil || out.Children[0].Problem != nil || out.Children[1].Problem != nil {
		x.t.Fatalf("%+v, %v", out, err)
	}
}

// TestFence: a runner kills its sandboxes when its lease was given up, and when its controller has been silent for as long as that
// said; each time it reports them dead once it is heard again.
func TestFence(t *testing.T) {
	t.Parallel()
	x := newRig(t)
	x.fork()
	x.set(func(c *controller) { c.fenced = true })
	eventually.True(t, "the sandboxes of a given up lease are reported dead", func() bool { return x.dead("given up") == 2 })
	if n := x.driver.Machines(); n != 0 {
		t.Errorf("%d machines live on", n)
	}

	x.fork()
	x.set(func(c *controller) { c.fenceFor, c.beats = 300*time.Millisecond, nil })
	more := func() bool {
		x.mu.Lock()
		defer x.mu.Unlock()
		return len(x.beats) > 3
	}
	eventually.True(t, "the new lease is known", more)
	x.set(func(c *controller) { c.silent = true })
	eventually.True(t, "the machines of a silent controller have ended", func() bool { return x.driver.Machines() == 0 })
	x.set(func(c *controller) { c.silent = false })
	eventually.True(t, "they are reported dead", func() bool { return x.dead("no word from the controller") == 2 })
	x.set(func(c *controller) { c.fenceFor, c.beats = time.Minute, nil })
	eventually.True(t, "the new lease is known", more)
	x.fork()
}

// TestRegistrationsNameTheLastEpoch: also that of an earlier process. An epoch that cannot be written down is not used.
func TestRegistrationsNameTheLastEpoch(t *testing.T) {
	t.Parallel()
	x := newRig(t)
	registered := func(n int) func() bool {
		return func() bool {
			x.mu.Lock()
			defer x.mu.Unlock()
			return len(x.named) >= n
		}
	}
	x.set(func(c *controller) { c.epoch, c.fenced = 7, true })
	eventually.True(t, "the runner registers again", registered(2))
	eventually.True(t, "the epoch is kept", func() bool { return x.runner.Lease().LastEpoch() == 8 })
	x.stop()
	x.start()
	eventually.True(t, "the next process registers", registered(3))
	x.set(func(c *controller) {
		if want := []int64{0, 1, 8}; !slices.Equal(c.named, want) {
			t.Errorf("registrations have named the epochs %d, want %d", c.named, want)
		}
	})
	beaten := func() bool {
		x.mu.Lock()
		defer x.mu.Unlock()
		return len(x.beats) > 0 && x.beats[len(x.beats)-1].LeaseEpoch > 8
	}
	eventually.True(t, "its epoch is in use", beaten)
	path := filepath.Join(x.cfg.DataDir, "epoch.json")
	if err := errors.Join(os.Remove(path), os.MkdirAll(filepath.Join(path, "x"), 0o700)); err != nil {
		t.Fatal(err)
	}
	x.set(func(c *controller) { c.fenced = true })
	eventually.True(t, "it registers again and again", registered(5))
	x.set(func(c *controller) {
		if last := c.beats[len(c.beats)-1].LeaseEpoch; last != 9 {
			t.Errorf("epoch %d is in use, and the disk does not have it", last)
		}
	})
	_, err := x.runner.Fork(t.Context(), runnerapi.Fork{CheckpointID: x.template.ID, Children: []runnerapi.Child{child(1)}})
	if core.CodeOf(err) != core.CodeRunnerUnreachable {
		t.Errorf("the runner forks, and has no lease: %v", err)
	}
	x.stop()
	if _, err := runner.New(t.Context(), x.cfg); core.CategoryOf(err) != core.DataLoss {
		t.Errorf("a runner that cannot read its last epoch starts: %v", err)
	}
}

// TestAttemptsAreCollectedAgain: what the next controller is told after the first was slow has what began meanwhile.
func TestAttemptsAreCollectedAgain(t *testing.T) {
	t.Parallel()
	x := newRig(t)
	slow := make(chan int, 1)
	x.set(func(c *controller) {
		c.slow = func() {
			x.mu.Lock()
			n := len(x.beats)
			x.mu.Unlock()
			x.fork()
			slow <- n
		}
	})
	n := <-slow
	eventually.True(t, "the next attempt has come", func() bool {
		x.mu.Lock()
		defer x.mu.Unlock()
		return len(x.beats) > n
	})
	x.mu.Lock()
	defer x.mu.Unlock()
	if first, next := x.beats[n-1], x.beats[n]; len(first.Sandboxes) != 0 || len(next.Sandboxes) != 2 {
		t.Errorf("the slow controller was told of %d sandboxes, the next of %d; 2 have begun in between", len(first.Sandboxes), len(next.Sandboxes))
	}
}

// TestOlderController: a runner sends differences to a controller that answers with numbers, and everything to one of an older version.
func TestOlderController(t *testing.T) {
	t.Parallel()
	x := newRig(t)
	x.fork()
	x.set(func(c *controller) { c.numbers = true })
	eventually.True(t, "differences are sent", func() bool {
		x.mu.Lock()
		defer x.mu.Unlock()
		return x.beaten > 3
	})
	x.set(func(c *controller) { c.numbers, c.beats = false, nil })
	eventually.True(t, "an older controller is told of everything", func() bool {
		x.mu.Lock()
		defer x.mu.Unlock()
		return len(x.beats) > 3
	})
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, b := range x.beats {
		if len(b.Sandboxes) != 2 || len(b.Checkpoints) != 1 {
			t.Errorf("it was told of %d sandboxes and %d checkpoints", len(b.Sandboxes), len(b.Checkpoints))
		}
	}
	if x.epoch != 1 {
		t.Errorf("the runner has registered %d times", x.epoch)
	}
}

// TestDeadAreReportedAgain: what ended is reported again when the differences that had it were not applied.
func TestDeadAreReportedAgain(t *testing.T) {
	t.Parallel()
	x := newRig(t)
	x.fork()
	x.set(func(c *controller) { c.numbers = true })
	eventually.True(t, "differences are sent", func() bool {
		x.mu.Lock()
		defer x.mu.Unlock()
		return x.beaten > 3
	})
	x.set(func(c *controller) { c.beats, c.unfit = nil, true })
	if err := x.runner.Fence(t.Context(), "by the test"); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "a whole heartbeat has them", func() bool { return x.dead("by the test") > 0 })
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.unfit {
		t.Error("no differences had them")
	}
}

// TestUnknownCheckpoint: what the database does not know any more is not reported, and can be forked once it is known again.
func TestUnknownCheckpoint(t *testing.T) {
	t.Parallel()
	x := newRig(t)
	x.set(func(c *controller) { c.stray = []core.CheckpointID{x.template.ID} })
	eventually.True(t, "it is not reported any more", func() bool {
		x.mu.Lock()
		defer x.mu.Unlock()
		return len(x.beats) > 0 && len(x.beats[len(x.beats)-1].Checkpoints) == 0
	})
	x.set(func(c *controller) { c.stray = nil })
	x.fork()
}

// TestDistinguishedCheckpoints: a controller that knows numbers tells a checkpoint without a row from one that was deleted.
func TestDistinguishedCheckpoints(t *testing.T) {
	t.Parallel()
	x := newRig(t)
	x.set(func(c *controller) { c.numbers, c.strays = true, []core.CheckpointID{x.template.ID} })
	eventually.True(t, "one without a row is not listed any more", func() bool { return len(x.runner.Checkpoints()) == 0 })
	if _, err := x.runner.Checkpoint(x.template.ID); err != nil {
		t.Errorf("one without a row cannot be taken back: %v", err)
	}
	x.set(func(c *controller) { c.strays, c.drops = nil, []core.CheckpointID{x.template.ID} })
	eventually.True(t, "one that was deleted is gone", func() bool {
		list, err := trash.List(trash.Dir(x.cfg.DataDir))
		if err != nil {
			t.Error(err)
		}
		return len(list)+len(x.runner.Checkpoints()) == 0
	})
	if _, err := x.runner.Checkpoint(x.template.ID); core.CategoryOf(err) != core.NotFound {
		t.Errorf("one that was deleted: %v", err)
	}
}

// TestRevoked: a runner that was removed from its cluster kills its sandboxes at once, stops speaking to the cluster, and takes no work
// while it ends.
func TestRevoked(t *testing.T) {
	t.Parallel()
	x := newRig(t)
	x.fork()
	x.set(func(c *controller) { c.revoked = true })
	select {
	case err := <-x.ended:
		if core.CodeOf(err) != core.CodeRunnerRevoked {
			t.Errorf("the link ended with %v", err)
		}
	case <-time.After(time.Minute):
		t.Fatal("the link goes on")
	}
	if n := x.driver.Machines(); n != 0 {
		t.Errorf("%d machines live on", n)
	}
	out, err := x.runner.Fork(t.Context(), runnerapi.Fork{CheckpointID: x.template.ID, Children: []runnerapi.Child{child(3)}})
	if core.CodeOf(err) != core.CodeRunnerUnreachable {
		t.Errorf("a removed runner forks: %+v, %v", out, err)
	}
}

func child(i int) runnerapi.Child {
	return runnerapi.Child{
		SandboxID: core.NewID[core.SandboxID](), WorkspaceID: core.NewID[core.WorkspaceID](), Epoch: 1, Egress: core.EgressDenyAll,
		Identity: core.Identity{
			Generation: string(core.NewID[core.OperationID]()), Hostname: "h", MachineID: strings.Repeat("a", 31) + string(rune('0'+i)),
			MAC: "02:00:00:00:00:0" + string(rune('0'+i)), IP: netip.AddrFrom4([4]byte{10, 1, 0, byte(i)}),
		},
	}
}
