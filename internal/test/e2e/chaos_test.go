package e2e

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/test/testaddr"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

var (
	chaosFor    = flag.Duration("chaos", 30*time.Second, "how long the nemeses of TestChaos work, on all deployments together")
	chaosSeed   = flag.Uint64("chaos-seed", 1, "of what TestChaos does, and when; the order in which the system answers is its own")
	chaosDeploy = flag.String("chaos-deployment", "dev", "what TestChaos torments: dev (one process), split (two controllers, two runners, PostgreSQL), or all, one after the other")
)

const (
	chaosTrees    = 3  // searches at once, each over a tree of its own
	chaosBranches = 4  // living workspaces of a search
	chaosNodes    = 10 // checkpoints of a search
	convergence   = 15 * time.Second
	finaleStream  = 100 // of random numbers
)

// deployment is what a run torments.
type deployment struct {
	clients []*coppice.Client           // of each controller; they outlive every server
	hosts   []*stack                    // what each runner has on this machine
	nemeses [][]mischief                // each list is worked on by a nemesis of its own
	alive   func() error                // says which server ended although nobody killed it
	finale  func(rng *rand.Rand) string // the worst, at last; it returns when every server has been started again
}

// mischief is something bad that a nemesis does, and undoes before it returns. It says what it did.
type mischief struct {
	name   string
	weight int
	do     func(ctx context.Context, rng *rand.Rand) string
}

// runChaos torments one deployment; TestChaos says how.
func runChaos(t *testing.T, name string, duration time.Duration, deploy func(*testing.T, *chaos) *deployment) {
	t.Helper()
	t.Logf("%s, seed %d; again: make chaos DEPLOY=%s FOR=%s SEED=%d", name, *chaosSeed, name, duration, *chaosSeed)
	x := &chaos{t: t, seed: *chaosSeed, duration: duration, history: history{name: name, begun: time.Now()}, unique: map[string]string{}, results: map[string]string{}, acked: map[coppice.CheckpointID]bool{}}
	t.Cleanup(x.summary) // after the deployment has ended
	x.deployment = deploy(t, x)
	x.record()
	from := x.plant()

	ctx, end := context.WithTimeout(t.Context(), duration)
	defer end()
	x.watch(ctx)
	registers := x.register(ctx, from)
	var searches, nemeses sync.WaitGroup
	x.trees = make([]*tree, chaosTrees)
	for i := range x.trees {
		root := from[i%len(from)]
		x.trees[i] = &tree{x: x, name: fmt.Sprintf("t%d", i), rng: rand.New(rand.NewPCG(x.seed, uint64(i))), root: root.id, first: root.first, nodes: []*node{{id: root.id}}}
		x.searching.Add(1)
		searches.Go(func() {
			defer x.searching.Add(-1)
			x.trees[i].grow(ctx)
		})
	}
	for i, faults := range x.nemeses {
		nemeses.Go(func() { x.torment(ctx, rand.New(rand.NewPCG(x.seed, uint64(chaosTrees+i))), faults) })
	}
	nemeses.Wait()
	x.heal()
	x.converge()
	searches.Wait()
	x.checkRegisters(registers())
	for _, tr := range x.trees {
		tr.verify()
	}
	x.checkMachines()
	x.clear()
	x.checkRecord()
}

// chaos is one run.
type chaos struct {
	t        *testing.T
	seed     uint64
	duration time.Duration
	*deployment
	history
	trees     []*tree
	searching atomic.Int32 // searches that are at work
	healed    time.Time
	took      time.Duration // from then on, until all was at rest

	mu       sync.Mutex // guards what follows
	unique   map[string]string
	results  map[string]string // what a request with an idempotency key came to
	acked    map[coppice.CheckpointID]bool
	doomed   []coppice.WorkspaceID // whose machines were killed
	silences []silence             // of whole runners
}

// silence is a time in which a runner was cut off for longer than its lease, so that its machines end.
type silence struct {
	runner   coppice.RunnerID
	from, to time.Time
}

// any returns one of the controllers' clients.
func (x *chaos) any(rng *rand.Rand) *coppice.Client { return x.clients[rng.IntN(len(x.clients))] }

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp4", testaddr.New())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// seedling is a checkpoint that trees grow from.
type seedling struct {
	id    coppice.CheckpointID
	first sight
}

// plant makes, on each runner, a checkpoint with a witness in it.
func (x *chaos) plant() []seedling {
	x.t.Helper()
	ctx := x.t.Context()
	made := map[coppice.RunnerID]coppice.Workspace{}
	for i := 0; len(made) < len(x.hosts); i++ {
		ws, err := x.clients[0].CreateWorkspace(ctx, coppice.CreateWorkspaceRequest{Name: fmt.Sprintf("seed-%d", i), Image: string(baseImage(x.t)), Resources: small()})
		if err != nil {
			x.t.Fatal(err)
		}
		if _, there := made[ws.RunnerID]; there && i > 8 {
			x.t.Fatalf("of %d workspaces none is on the other runner", i)
		}
		made[ws.RunnerID] = ws
	}
	all, err := coppice.Collect(x.clients[0].Workspaces(ctx, coppice.WorkspaceFilter{}))
	if err != nil {
		x.t.Fatal(err)
	}
	var out []seedling
	for _, ws := range made {
		s := x.hosts[0] // any has a client
		upload(x.t, s, ws.ID)
		first := startWitness(x.t, s, ws.ID)
		ckpt, err := x.clients[0].CreateCheckpoint(ctx, ws.ID, coppice.CreateCheckpointRequest{Name: ws.Name})
		if err != nil {
			x.t.Fatal(err)
		}
		out = append(out, seedling{ckpt.ID, first})
		x.acknowledge(ckpt.ID)
	}
	for _, ws := range all {
		terminate(x.t, x.hosts[0], ws.ID)
	}
	slices.SortFunc(out, func(a, b seedling) int { return strings.Compare(a.id, b.id) })
	return out
}

func (x *chaos) acknowledge(id coppice.CheckpointID) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.acked[id] = true
}

// forget is called before a checkpoint is deleted.
func (x *chaos) forget(id coppice.CheckpointID) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.acked[id] = false
}

// torment does something bad every few seconds until ctx ends.
func (x *chaos) torment(ctx context.Context, rng *rand.Rand, faults []mischief) {
	sum := 0
	for _, f := range faults {
		sum += f.weight
	}
	for {
		wait := time.NewTimer(2*time.Second + time.Duration(rng.Int64N(int64(4*time.Second))))
		select {
		case <-ctx.Done():
			wait.Stop()
			return
		case <-wait.C:
		}
		n := rng.IntN(sum)
		for _, f := range faults {
			if n -= f.weight; n < 0 {
				x.note(event{Who: nemesis, What: "about to " + f.name})
				x.note(event{Who: nemesis, What: f.name, Outcome: f.do(ctx, rng)})
				break
			}
		}
	}
}

// hold lets time pass in which nothing can be awaited: that nothing answers is the point.
func hold(d time.Duration) { <-time.After(d) }

// between picks a time.
func between(rng *rand.Rand, low, high time.Duration) time.Duration {
	return low + time.Duration(rng.Int64N(int64(high-low)))
}

// victim is a workspace's VMM, picked among those that are ready.
func (x *chaos) victim(rng *rand.Rand) (coppice.Workspace, machine, error) {
	ctx, cancel := context.WithTimeout(x.t.Context(), 5*time.Second)
	defer cancel()
	ready, err := coppice.Collect(x.any(rng).Workspaces(ctx, coppice.WorkspaceFilter{States: []coppice.WorkspaceState{coppice.WorkspaceReady}}))
	if err != nil || len(ready) == 0 {
		return coppice.Workspace{}, machine{}, fmt.Errorf("%d are ready: %w", len(ready), err)
	}
	w := ready[rng.IntN(len(ready))]
	m, err := x.machineOf(w.Network.MAC)
	return w, m, err
}

func (x *chaos) machineOf(mac string) (machine, error) {
	var errs []error
	for _, host := range x.hosts {
		m, err := host.machineOf(mac)
		if err == nil {
			return m, nil
		}
		errs = append(errs, err)
	}
	return machine{}, errors.Join(errs...)
}

func (x *chaos) doom(id coppice.WorkspaceID) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.doomed = append(x.doomed, id)
}

func said(errs ...error) string {
	for _, err := range errs {
		if err != nil {
			return err.Error()
		}
	}
	return "done"
}

// heal is the end of all faults, after the worst of them: every server runs.
func (x *chaos) heal() {
	x.t.Helper()
	if err := x.alive(); err != nil {
		x.t.Errorf("a server ended by itself: %v", err)
	}
	if x.duration >= time.Minute { // the short run of every test is for what is found soon
		x.note(event{Who: nemesis, What: "kill everything at once", Outcome: x.finale(rand.New(rand.NewPCG(x.seed, finaleStream)))})
	}
	x.healed = time.Now()
	x.note(event{Who: nemesis, What: healed})
}

// converge wants the system to be at rest soon: it answers, no workspace and no checkpoint is on its way, and every workspace's
// runner is heard. The searches end what they were at meanwhile.
func (x *chaos) converge() {
	x.t.Helper()
	again := time.NewTicker(50 * time.Millisecond)
	defer again.Stop()
	why, idle := "", time.Time{}
	for ; time.Since(x.healed) < patience; <-again.C {
		if why = x.restless(); why != "" {
			x.took, idle = time.Since(x.healed), time.Time{}
			continue
		}
		if idle.IsZero() {
			idle = time.Now()
		}
		if x.searching.Load() == 0 {
			break
		}
	}
	if why != "" || x.took > convergence {
		x.t.Errorf("at rest %.1f s after the heal, want at most %s; at last %s", x.took.Seconds(), convergence, why)
	}
	x.t.Logf("at rest %.1f s after the heal; the last request that was under way was answered after %.1f s", x.took.Seconds(), time.Since(x.healed).Seconds())
}

// restless says what is not at rest.
func (x *chaos) restless() string {
	for i, client := range x.clients {
		ctx, cancel := context.WithTimeout(x.t.Context(), convergence)
		defer cancel()
		list, err := coppice.Collect(client.Workspaces(ctx, coppice.WorkspaceFilter{}))
		if err != nil {
			return fmt.Sprintf("controller %d: %v", i, err)
		}
		for _, w := range list {
			if moving(w) || w.State == coppice.WorkspaceReady && w.Condition != "" {
				return fmt.Sprintf("%s is %s %s", w.Name, w.State, w.Condition)
			}
		}
	}
	ctx, cancel := context.WithTimeout(x.t.Context(), convergence)
	defer cancel()
	capturing, err := coppice.Collect(x.clients[0].Checkpoints(ctx, coppice.CheckpointFilter{States: []coppice.CheckpointState{coppice.CheckpointCapturing}}))
	if err != nil || len(capturing) > 0 {
		return fmt.Sprintf("%d checkpoints are being captured, %v", len(capturing), err)
	}
	return ""
}

// claim wants a value to be seen for the first time.
func (x *chaos) claim(kind, value, owner string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	key := kind + " " + value
	if other, taken := x.unique[key]; taken && other != owner {
		x.t.Errorf("%s and %s have the same %s", other, owner, key)
	}
	x.unique[key] = owner
}

// checkMachines wants as many machines on the hosts as the searches have workspaces, each with a name of its own.
func (x *chaos) checkMachines() {
	x.t.Helper()
	ready, err := coppice.Collect(x.clients[0].Workspaces(x.t.Context(), coppice.WorkspaceFilter{States: []coppice.WorkspaceState{coppice.WorkspaceReady}}))
	if err != nil {
		x.t.Fatal(err)
	}
	known := map[coppice.WorkspaceID]bool{}
	for _, tr := range x.trees {
		for _, b := range tr.branches {
			known[b.id] = true
		}
	}
	for _, w := range ready {
		if !known[w.ID] && !strings.HasPrefix(w.Name, lambName) {
			x.t.Errorf("%s (%s) is ready, and no search has it", w.Name, w.ID)
		}
		homes := 0
		for _, host := range x.hosts {
			if _, err := host.machineOf(w.Network.MAC); err == nil {
				homes++
			}
		}
		if homes != 1 {
			x.t.Errorf("%s is ready, and runs on %d runners", w.Name, homes)
		}
	}
	x.checkUnique(ready)
}

// checkUnique wants no two workspaces that are ready at the same time to share a name on the network. Addresses are unique on a runner.
func (x *chaos) checkUnique(ready []coppice.Workspace) {
	seen := map[string]string{}
	for _, w := range ready {
		for _, v := range []string{"ip " + w.Network.IP + " on " + w.RunnerID, "mac " + w.Network.MAC, "hostname " + w.Network.Hostname} {
			if other, taken := seen[v]; taken {
				x.t.Errorf("%s and %s both have %s", other, w.Name, v)
			}
			seen[v] = w.Name
		}
	}
}

// clear ends everything through the API.
func (x *chaos) clear() {
	x.t.Helper()
	for w, err := range x.clients[0].Workspaces(x.t.Context(), coppice.WorkspaceFilter{States: []coppice.WorkspaceState{coppice.WorkspaceReady}}) {
		if err != nil {
			x.t.Fatal(err)
		}
		if _, err := x.clients[0].TerminateWorkspace(x.t.Context(), w.ID); err != nil {
			x.t.Errorf("terminate %s: %v", w.Name, err)
		}
	}
}
