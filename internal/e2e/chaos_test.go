package e2e

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/testaddr"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

var (
	chaosFor  = flag.Duration("chaos", 30*time.Second, "how long the nemesis of TestChaos works")
	chaosSeed = flag.Uint64("chaos-seed", 1, "of what TestChaos does, and when; the order in which the system answers is its own")
)

const (
	chaosTrees    = 3  // searches at once, each over a tree of its own
	chaosBranches = 4  // living workspaces of a search
	chaosNodes    = 10 // checkpoints of a search
	convergence   = 15 * time.Second
)

// TestChaos lets searches grow trees while a nemesis kills and stops the server, its database and virtual machines. Each search knows
// what it was told and what it was not. In the end all heals, and every acknowledged checkpoint and every machine is looked into: it
// has the state that its history says, in process memory, in an unnamed file and on the disk. Then everything is taken down and
// nothing is left on the host.
func TestChaos(t *testing.T) {
	t.Logf("seed %d; again: go test ./internal/e2e -run TestChaos -chaos %s -chaos-seed %d", *chaosSeed, *chaosFor, *chaosSeed)
	s := newStack(t, "--listen", freeAddress(t), "--max-sandboxes", "32", "--warm", "1")
	x := &chaos{t: t, s: s, history: history{begun: time.Now()}, unique: map[string]string{}}
	var err error
	if x.client, err = coppice.New(coppice.Config{Server: s.server, Token: s.token}); err != nil {
		t.Fatal(err)
	}
	defer x.client.Close()
	from, first := x.plant()
	x.first = first

	ctx, end := context.WithTimeout(t.Context(), *chaosFor)
	defer end()
	var searches sync.WaitGroup
	trees := make([]*tree, chaosTrees)
	for i := range trees {
		trees[i] = &tree{x: x, name: fmt.Sprintf("t%d", i), rng: rand.New(rand.NewPCG(*chaosSeed, uint64(i))), nodes: []*node{{id: from}}}
		searches.Go(func() { trees[i].grow(ctx) })
	}
	t.Cleanup(func() { x.summary(trees) })
	x.torment(ctx, rand.New(rand.NewPCG(*chaosSeed, chaosTrees)))
	x.heal()
	searches.Wait()
	x.converge()
	for _, tr := range trees {
		tr.verify()
	}
	x.checkMachines(trees)
	x.clear()
}

// chaos is one run.
type chaos struct {
	t      *testing.T
	s      *stack
	client *coppice.Client // outlives every server
	first  sight
	history

	mu     sync.Mutex // guards what follows
	unique map[string]string
	doomed []coppice.WorkspaceID // whose machines were killed
}

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp4", testaddr.New())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// plant makes the checkpoint that all trees grow from: a machine with a witness in it.
func (x *chaos) plant() (coppice.CheckpointID, sight) {
	x.t.Helper()
	ctx := x.t.Context()
	ws, err := x.client.CreateWorkspace(ctx, coppice.CreateWorkspaceRequest{Name: "seed", Image: string(image(x.t, "e2e", guestAgent)), Resources: small()})
	if err != nil {
		x.t.Fatal(err)
	}
	upload(x.t, x.s, ws.ID)
	first := startWitness(x.t, x.s, ws.ID)
	ckpt, err := x.client.CreateCheckpoint(ctx, ws.ID, coppice.CreateCheckpointRequest{Name: "seed"})
	if err != nil {
		x.t.Fatal(err)
	}
	terminate(x.t, x.s, ws.ID)
	return ckpt.ID, first
}

// torment does something bad every few seconds until ctx ends.
func (x *chaos) torment(ctx context.Context, rng *rand.Rand) {
	bad := []struct {
		name   string
		weight int
		do     func(rng *rand.Rand) string
	}{
		{"kill the server", 3, x.killServer},
		{"kill the database", 2, x.killDatabase},
		{"kill a machine", 2, x.killMachine},
		{"stop the server for a while", 2, x.stopServer},
		{"stop a machine for a while", 2, x.stopMachine},
	}
	sum := 0
	for _, b := range bad {
		sum += b.weight
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
		for _, b := range bad {
			if n -= b.weight; n < 0 {
				x.note("nemesis", b.name, "", b.do(rng))
				break
			}
		}
	}
}

func (x *chaos) killServer(rng *rand.Rand) string {
	x.s.kill(x.t)
	hold(time.Duration(rng.Int64N(int64(2 * time.Second))))
	x.s.start(x.t)
	return ""
}

// hold lets time pass in which nothing can be awaited: that nothing answers is the point.
func hold(d time.Duration) { <-time.After(d) }

func (x *chaos) postmaster() (int, error) {
	b, err := os.ReadFile(filepath.Join(x.s.data, "postgres/data/postmaster.pid"))
	if err != nil {
		return 0, err
	}
	line, _, _ := strings.Cut(string(b), "\n")
	return strconv.Atoi(line)
}

func (x *chaos) killDatabase(*rand.Rand) string {
	pid, err := x.postmaster()
	if err != nil {
		return "not there: " + err.Error()
	}
	return said(syscall.Kill(pid, syscall.SIGKILL))
}

// victim is a workspace's VMM, picked among those that are ready.
func (x *chaos) victim(rng *rand.Rand) (coppice.Workspace, machine, error) {
	ctx, cancel := context.WithTimeout(x.t.Context(), 5*time.Second)
	defer cancel()
	ready, err := coppice.Collect(x.client.Workspaces(ctx, coppice.WorkspaceFilter{States: []coppice.WorkspaceState{coppice.WorkspaceReady}}))
	if err != nil || len(ready) == 0 {
		return coppice.Workspace{}, machine{}, fmt.Errorf("%d are ready: %w", len(ready), err)
	}
	w := ready[rng.IntN(len(ready))]
	m, err := x.s.machineOf(w.Network.IP)
	return w, m, err
}

func (x *chaos) killMachine(rng *rand.Rand) string {
	w, m, err := x.victim(rng)
	if err != nil {
		return "none: " + err.Error()
	}
	x.mu.Lock()
	x.doomed = append(x.doomed, w.ID)
	x.mu.Unlock()
	return w.Name + " " + said(syscall.Kill(m.pid, syscall.SIGKILL))
}

func (x *chaos) stopServer(rng *rand.Rand) string {
	pid := x.s.cmd.Process.Pid
	err := syscall.Kill(pid, syscall.SIGSTOP)
	hold(time.Second + time.Duration(rng.Int64N(int64(3*time.Second))))
	return said(err, syscall.Kill(pid, syscall.SIGCONT))
}

func (x *chaos) stopMachine(rng *rand.Rand) string {
	w, m, err := x.victim(rng)
	if err != nil {
		return "none: " + err.Error()
	}
	err = syscall.Kill(m.pid, syscall.SIGSTOP)
	hold(time.Second + time.Duration(rng.Int64N(int64(2*time.Second))))
	return w.Name + " " + said(err, syscall.Kill(m.pid, syscall.SIGCONT))
}

func said(errs ...error) string {
	for _, err := range errs {
		if err != nil {
			return err.Error()
		}
	}
	return "done"
}

// heal is the end of all faults: the server runs.
func (x *chaos) heal() {
	select {
	case <-x.s.ended:
		x.t.Fatalf("the server ended by itself: %v", x.s.state)
	default:
	}
	x.note("nemesis", "heal", "", "")
}

// converge wants the system to be at rest soon: no workspace and no checkpoint is on its way.
func (x *chaos) converge() {
	x.t.Helper()
	began := time.Now()
	within(x.t, convergence, "at rest after the faults", func() (bool, error) {
		ctx, cancel := context.WithTimeout(x.t.Context(), convergence)
		defer cancel()
		moving, err := coppice.Collect(x.client.Workspaces(ctx, coppice.WorkspaceFilter{States: []coppice.WorkspaceState{
			coppice.WorkspaceCreating, coppice.WorkspaceRestoring, coppice.WorkspaceQuarantined, coppice.WorkspaceCheckpointing, coppice.WorkspaceTerminating,
		}}))
		if err != nil || len(moving) > 0 {
			return false, nil
		}
		all, err := coppice.Collect(x.client.Checkpoints(ctx, coppice.CheckpointFilter{}))
		return err == nil && !slices.ContainsFunc(all, func(c coppice.Checkpoint) bool { return c.State == coppice.CheckpointCapturing }), nil
	})
	x.t.Logf("at rest %.1f s after the last request", time.Since(began).Seconds())
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

// checkMachines wants as many machines on the host as the searches have workspaces, each with a name of its own.
func (x *chaos) checkMachines(trees []*tree) {
	x.t.Helper()
	ready, err := coppice.Collect(x.client.Workspaces(x.t.Context(), coppice.WorkspaceFilter{States: []coppice.WorkspaceState{coppice.WorkspaceReady}}))
	if err != nil {
		x.t.Fatal(err)
	}
	known := map[coppice.WorkspaceID]bool{}
	for _, tr := range trees {
		for _, b := range tr.branches {
			known[b.id] = true
		}
	}
	seen := map[string]string{}
	for _, w := range ready {
		if !known[w.ID] {
			x.t.Errorf("%s (%s) is ready, and no search has it", w.Name, w.ID)
		}
		for _, v := range []string{"ip " + w.Network.IP, "mac " + w.Network.MAC, "hostname " + w.Network.Hostname} {
			if other, taken := seen[v]; taken {
				x.t.Errorf("%s and %s both have %s", other, w.Name, v)
			}
			seen[v] = w.Name
		}
		if _, err := x.s.machineOf(w.Network.IP); err != nil {
			x.t.Errorf("%s is ready: %v", w.Name, err)
		}
	}
}

// clear ends everything through the API.
func (x *chaos) clear() {
	x.t.Helper()
	for w, err := range x.client.Workspaces(x.t.Context(), coppice.WorkspaceFilter{States: []coppice.WorkspaceState{coppice.WorkspaceReady}}) {
		if err != nil {
			x.t.Fatal(err)
		}
		if _, err := x.client.TerminateWorkspace(x.t.Context(), w.ID); err != nil {
			x.t.Errorf("terminate %s: %v", w.Name, err)
		}
	}
}
