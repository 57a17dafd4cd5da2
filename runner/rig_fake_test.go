package runner

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/failpoint"
	"github.com/coppice-dev/coppice/internal/test/testegress"
	"github.com/coppice-dev/coppice/internal/test/testvm"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/netns"
	"github.com/coppice-dev/coppice/runner/sandboxnet"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/fakevmm"
)

// fakeRig is a runner with fake machines.
type fakeRig struct {
	*Runner
	t      *testing.T
	cfg    Config
	driver *fakevmm.Driver
	net    *fakeNetwork
	image  images.Image
	next   int
	cancel func() // ends Run
	ended  chan error
}

const fakeMiB = 8

// newFakeRig starts a runner on fake machines, which ends with the test.
func newFakeRig(t *testing.T, change func(*Config)) *fakeRig {
	t.Helper()
	store, image := testvm.FakeImage(t)
	runDir, err := os.MkdirTemp("", "run") //nolint:usetesting // t.TempDir is too long for the path of a unix socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(runDir) })
	driver, network := fakevmm.New(fakevmm.Config{}), &fakeNetwork{spaces: map[string]*fakeNamespace{}}
	cfg := Config{
		ID: core.NewID[core.RunnerID](), ClusterID: "test", DataDir: filepath.Join(t.TempDir(), "data"), RunDir: runDir, Driver: driver, Images: store,
		Network: network, Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Parallel: 8,
	}
	change(&cfg)
	r := &fakeRig{t: t, cfg: cfg, driver: driver, net: network, image: image}
	r.start()
	t.Cleanup(r.stop)
	return r
}

func (r *fakeRig) start() {
	r.t.Helper()
	var err error
	if r.Runner, err = New(r.t.Context(), r.cfg); err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(r.t.Context()))
	r.cancel, r.ended = cancel, make(chan error, 1)
	go func(r *Runner, ended chan<- error) { ended <- r.Run(ctx) }(r.Runner, r.ended)
}

// stop ends the runner that runs now, as configured.
func (r *fakeRig) stop() {
	r.t.Helper()
	r.cancel()
	if err := <-r.ended; err != nil {
		r.t.Error(err)
	}
	r.ended <- nil // for another call
}

// crash forgets the runner as if its process had been killed: nothing of it is taken down, its connections end, and what is under way
// hangs where a failpoint holds it. It lets go of that with the returned function, when what it works on is long gone.
func (r *fakeRig) crash(held ...*failpoint.Armed) (cleanup func()) {
	r.t.Helper()
	dead, cancel, ended := r.Runner, r.cancel, r.ended
	dead.leave.Store(true) // not dead.cfg, which its goroutines read
	dead.stop()
	if err := unix.Flock(int(dead.lock.Fd()), unix.LOCK_UN); err != nil { // Run closes the file
		r.t.Fatal(err)
	}
	for _, s := range dead.all() {
		s.mu.Lock()
		if s.guest != nil {
			_ = s.guest.Close()
		}
		s.mu.Unlock()
	}
	return sync.OnceFunc(func() {
		for _, a := range held {
			a.Disarm()
		}
		cancel()
		<-ended //nolint:errcheck // it has its say about things that are gone
	})
}

// use makes the next start use another VMM, and know that of before.
func (r *fakeRig) use(d *fakevmm.Driver) {
	r.t.Helper()
	before, err := r.driver.Fingerprint(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	r.cfg.Others = map[string]vmm.Driver{before.VMM: r.driver}
	r.cfg.Driver, r.driver = d, d
}

func (r *fakeRig) boot() core.CheckpointID {
	r.t.Helper()
	c, err := r.Template(r.t.Context(), runnerapi.Template{
		CheckpointID: core.NewID[core.CheckpointID](), Image: r.image.Digest, Resources: core.Resources{VCPUs: 1, MemoryMiB: fakeMiB},
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return c.ID
}

func (r *fakeRig) child() runnerapi.Child {
	r.next++
	return fakeChild(r.next)
}

func (r *fakeRig) fork(id core.CheckpointID) core.SandboxID {
	r.t.Helper()
	f, err := r.Fork(r.t.Context(), runnerapi.Fork{CheckpointID: id, Children: []runnerapi.Child{r.child()}})
	if err != nil {
		r.t.Fatal(err)
	}
	if p := f.Children[0].Problem; p != nil {
		r.t.Fatalf("fork: %+v", p)
	}
	return f.Children[0].SandboxID
}

func fakeChild(i int) runnerapi.Child {
	return runnerapi.Child{
		SandboxID: core.NewID[core.SandboxID](), WorkspaceID: core.NewID[core.WorkspaceID](), Epoch: 1, Egress: core.EgressDenyAll,
		Identity: core.Identity{
			Generation: string(core.NewID[core.OperationID]()), Hostname: fmt.Sprintf("child-%d", i), MachineID: fmt.Sprintf("%032x", i+1),
			MAC: fmt.Sprintf("02:00:00:00:%02x:%02x", i>>8&255, i&255), IP: netip.AddrFrom4([4]byte{10, 83, byte(i >> 8), byte(i)}),
		},
	}
}

func (r *fakeRig) capture(id core.SandboxID) core.CheckpointID {
	r.t.Helper()
	c, err := r.Capture(r.t.Context(), id, runnerapi.Capture{CheckpointID: core.NewID[core.CheckpointID]()})
	if err != nil {
		r.t.Fatal(err)
	}
	return c.ID
}

// wantOnly fails the test if there is anything on the host but what these sandboxes need.
func (r *fakeRig) wantOnly(ids ...core.SandboxID) {
	r.t.Helper()
	n := r.driver.Machines()
	for _, other := range r.cfg.Others {
		n += other.(*fakevmm.Driver).Machines()
	}
	if n != len(ids) {
		r.t.Errorf("there are %d machines for %d sandboxes", n, len(ids))
	}
	if n := r.net.count(); n != len(ids) {
		r.t.Errorf("there are %d namespaces for %d sandboxes", n, len(ids))
	}
	shells := map[string]bool{}
	for _, id := range ids {
		s, err := r.find(id)
		if err != nil {
			r.t.Error(err)
			continue
		}
		shells[string(s.ID)] = true
		if running, err := s.machine.Running(r.t.Context()); err != nil || !running {
			r.t.Errorf("sandbox %s runs: %v, %v", id, running, err)
		}
		agent, err := s.agent(r.t.Context())
		if err != nil {
			r.t.Error(err)
			continue
		}
		h, err := agent.Health(r.t.Context())
		if err != nil || h.State != guestapi.StateReleased || h.Generation != s.info.Identity.Generation {
			r.t.Errorf("the guest of sandbox %s is %+v, %v", id, h, err)
		}
	}
	for _, dir := range []string{r.shellsDir(), r.cfg.RunDir} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			r.t.Error(err)
		}
		for _, e := range entries {
			if e.IsDir() && !shells[e.Name()] {
				r.t.Errorf("left behind: %s in %s", e.Name(), dir)
			}
		}
	}
	parts, err := filepath.Glob(filepath.Join(r.cfg.DataDir, "*", checkpoints.PartPrefix+"*"))
	if err != nil || len(parts) > 0 {
		r.t.Errorf("left behind: %q, %v", parts, err)
	}
	if free, all := r.slots.Free(); all-free != len(ids) {
		r.t.Errorf("%d places are taken by %d sandboxes", all-free, len(ids))
	}
}

// fakeNetwork has namespaces that are names: they stay when their runner is forgotten.
type fakeNetwork struct {
	mu     sync.Mutex // guards what follows
	next   int
	spaces map[string]*fakeNamespace
}

type fakeNamespace struct {
	net  *fakeNetwork
	name string
	id   core.Identity
	open core.EgressPolicy

	spoiled bool // another program has changed its rules
	sockets testegress.Sockets
}

func (n *fakeNetwork) count() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.spaces)
}

func (n *fakeNetwork) Acquire(context.Context) (sandboxnet.Namespace, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.next++
	s := &fakeNamespace{net: n, name: fmt.Sprintf("space-%d", n.next)}
	n.spaces[s.name] = s
	return s, nil
}

func (n *fakeNetwork) Adopt(_ context.Context, name string, id core.Identity, policy core.EgressPolicy) (sandboxnet.Namespace, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	s := n.spaces[name]
	if s == nil || s.id != id || s.open != policy {
		return nil, fmt.Errorf("namespace %s is not as it should be: %+v", name, s)
	}
	return s, nil
}

func (n *fakeNetwork) Reconcile(_ context.Context, keep map[string]bool) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	maps.DeleteFunc(n.spaces, func(name string, _ *fakeNamespace) bool { return !keep[name] })
	return nil
}

func (*fakeNetwork) Gateway() (netip.Addr, string)            { return netip.Addr{}, "" }
func (*fakeNetwork) Resolvers(core.EgressPolicy) []netip.Addr { return nil }

func (s *fakeNamespace) Name() string                   { return s.name }
func (s *fakeNamespace) NetNS() (*os.File, error)       { return nil, nil } //nolint:nilnil // that of the process
func (s *fakeNamespace) TapFile(bool) (*os.File, error) { return nil, nil } //nolint:nilnil // there is no tap
func (s *fakeNamespace) change(fn func()) error {
	s.net.mu.Lock()
	defer s.net.mu.Unlock()
	fn()
	return nil
}

func (s *fakeNamespace) Assign(_ context.Context, id core.Identity) error {
	return s.change(func() { s.id = id })
}

func (s *fakeNamespace) Open(_ context.Context, p core.EgressPolicy) error {
	return s.change(func() { s.open = p })
}

func (s *fakeNamespace) EgressSockets(ctx context.Context) (netns.EgressSockets, error) {
	return s.sockets.Open(ctx)
}

func (s *fakeNamespace) Check(context.Context) error {
	s.net.mu.Lock()
	defer s.net.mu.Unlock()
	if !s.spoiled {
		return nil
	}
	s.spoiled, s.open = false, ""
	return netns.ErrRulesDiffer
}

func (s *fakeNamespace) Release(context.Context) error {
	return s.change(func() { delete(s.net.spaces, s.name) })
}

func (s *fakeNamespace) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, network, address)
}
