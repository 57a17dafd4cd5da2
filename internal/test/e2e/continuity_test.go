package e2e

import (
	"bufio"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// sight is what guestprobe's witness says of itself: a process with state in memory, in an open file without a name, and on the
// disk past the page cache, asked over a socket that it has listened on since before the first checkpoint.
type sight struct {
	Nonce   string   `json:"nonce"`
	PID     int      `json:"pid"`
	Counter uint64   `json:"counter"`
	Path    []string `json:"path"`
	Deleted string   `json:"deleted"`
	Direct  uint64   `json:"direct"`
	Held    []string `json:"held"`
	Broken  []string `json:"broken"`
}

const (
	witnessPort = "7000"
	directFile  = "/root/direct"
)

// startWitness starts one and returns what it is at first.
func startWitness(t *testing.T, s *stack, ws coppice.WorkspaceID) sight {
	t.Helper()
	begin(t, s, ws, "witness", witnessPort, directFile)
	return look(t, s, ws)
}

func look(t *testing.T, s *stack, ws coppice.WorkspaceID) sight {
	t.Helper()
	return ask[sight](t, s, ws, "ask", witnessPort, "look")
}

func step(t *testing.T, s *stack, ws coppice.WorkspaceID, label string) sight {
	t.Helper()
	return ask[sight](t, s, ws, "ask", witnessPort, "step", label)
}

// after is the witness first, having made the steps of a path.
func after(first sight, path ...string) sight {
	first.Counter, first.Direct, first.Path = uint64(len(path)), uint64(len(path)), path
	first.Deleted = strings.Join(append(slices.Clone(path), ""), "\n")
	return first
}

// compare does not look at connections.
func compare(t *testing.T, where string, want, got sight) {
	t.Helper()
	if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(sight{}, "Held", "Broken"), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("%s (-want +got):\n%s", where, diff)
	}
}

// TestProcessContinuity follows one process through three levels of forks of forks. In each it has the state that it had at the
// checkpoint and sees nothing of what happened in another branch; the parents go on.
func TestProcessContinuity(t *testing.T) {
	s := theStack(t)
	root := forkOne(t, s, seed(t))
	first := startWitness(t, s, root)
	compare(t, "at first", after(first), first)
	step(t, s, root, "root")

	level := []struct {
		ws   coppice.WorkspaceID
		path []string
	}{{root, []string{"root"}}}
	const depth, width = 3, 2
	for d := range depth {
		parent := level[len(level)-1]
		from := checkpoint(t, s, parent.ws)
		children := fork(t, s, from.ID, coppiceFork{count: width})
		for i, c := range children {
			where := fmt.Sprintf("level %d, child %d", d+1, i)
			compare(t, where+" as forked", after(first, parent.path...), look(t, s, c.Workspace.ID))
			own := append(slices.Clone(parent.path), fmt.Sprintf("%d.%d", d+1, i))
			compare(t, where+" after a step", after(first, own...), step(t, s, c.Workspace.ID, own[len(own)-1]))
			level = append(level, struct {
				ws   coppice.WorkspaceID
				path []string
			}{c.Workspace.ID, own})
		}
	}
	// Everybody at once, the parents too, one step further: nobody has seen the others'.
	var wg sync.WaitGroup
	for _, n := range level {
		wg.Go(func() {
			var got sight
			if err := query(t.Context(), s, n.ws, &got, "ask", witnessPort, "step", "last"); err != nil {
				t.Error(err)
				return
			}
			compare(t, "at last "+strings.Join(n.path, " "), after(first, append(slices.Clone(n.path), "last")...), got)
		})
	}
	wg.Wait()
}

// TestForkWorkspaceAndRestore forks a running workspace in one call, and rolls it back in place.
func TestForkWorkspaceAndRestore(t *testing.T) {
	s := theStack(t)
	ws := forkOne(t, s, seed(t))
	first := startWitness(t, s, ws)
	step(t, s, ws, "a")
	res, err := s.client.ForkWorkspace(t.Context(), ws, coppice.ForkWorkspaceRequest{Count: new(2)})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range res.Children {
		if c.Workspace == nil {
			t.Fatal(c.Problem.Err())
		}
		endWithTest(t, s, c.Workspace.ID)
		compare(t, "a child", after(first, "a"), look(t, s, c.Workspace.ID))
	}
	before := ask[map[string]string](t, s, ws, "identity")
	compare(t, "the parent goes on", after(first, "a", "b"), step(t, s, ws, "b"))
	back, err := s.client.RestoreWorkspace(t.Context(), ws, res.CheckpointID)
	if err != nil {
		t.Fatal(err)
	}
	if back.Workspace.ID != ws || back.Workspace.Epoch != 2 || back.Workspace.CheckpointID != res.CheckpointID {
		t.Errorf("restored: %+v", back.Workspace)
	}
	compare(t, "rolled back", after(first, "a"), look(t, s, ws))
	compare(t, "another way from here", after(first, "a", "c"), step(t, s, ws, "c"))
	now := ask[map[string]string](t, s, ws, "identity")
	for _, key := range []string{"machine_id", "boot_id", "generation", "token", "ip", "mac"} {
		if before[key] == now[key] || now[key] == "" {
			t.Errorf("the restored workspace has the same %s, %q", key, now[key])
		}
	}
	c := checkpoint(t, s, ws)
	if c.ParentID != res.CheckpointID {
		t.Errorf("the tree grows from %s, want %s", c.ParentID, res.CheckpointID)
	}
}

// TestConnections holds connections through a fork: those inside the guest go on in both, those to the outside go on in the parent
// and are broken in the fork.
func TestConnections(t *testing.T) {
	s := theStack(t)
	parent := forkOne(t, s, seed(t))
	startWitness(t, s, parent)
	port, err := s.client.CreatePort(t.Context(), parent, coppice.CreatePortRequest{GuestPort: 7000})
	if err != nil {
		t.Fatal(err)
	}
	outside, err := net.Dial("tcp", port.Listen)
	if err != nil {
		t.Fatal(err)
	}
	defer outside.Close()
	echo := bufio.NewReadWriter(bufio.NewReader(outside), bufio.NewWriter(outside))
	exchange := func(line, want string) {
		t.Helper()
		if err := outside.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if _, err := echo.WriteString(line + "\n"); err != nil {
			t.Fatal(err)
		}
		if err := echo.Flush(); err != nil {
			t.Fatal(err)
		}
		if got, err := echo.ReadString('\n'); err != nil || got != want+"\n" {
			t.Fatalf("%q, %v; want %q", got, err, want)
		}
	}
	exchange("hold", "held")
	begin(t, s, parent, "cling", witnessPort, "/root/clung")
	execute(t, s, parent, probePath, "await", "/root/clung.held")
	if got := look(t, s, parent); len(got.Held) != 2 || len(got.Broken) != 0 {
		t.Fatalf("%d connections are held and %d broken, want 2 and 0", len(got.Held), len(got.Broken))
	}

	child := forkOne(t, s, checkpoint(t, s, parent).ID)
	exchange("still there?", "still there?")
	if got := look(t, s, parent); len(got.Held) != 2 || len(got.Broken) != 0 {
		t.Errorf("in the parent %d connections are held and %d broken, want 2 and 0", len(got.Held), len(got.Broken))
	}
	got := look(t, s, child)
	if len(got.Held) != 1 || !strings.HasPrefix(got.Held[0], "127.0.0.1:") || len(got.Broken) != 1 {
		t.Errorf("in the fork %q are held and %q broken, want the inner one held and the outer one broken", got.Held, got.Broken)
	}
	ports, err := s.client.Ports(t.Context(), child)
	if err != nil || len(ports) != 0 {
		t.Errorf("the fork has the ports %+v, %v; want none", ports, err)
	}
}

// TestForwardedPorts reaches the service of each fork, and no other, through a port of its own.
func TestForwardedPorts(t *testing.T) {
	s := theStack(t)
	ws := forkOne(t, s, seed(t))
	shell(t, s, ws, "mkdir -p /srv/www && echo parent > /srv/www/who")
	launch(t, s, ws, "python3", "-m", "http.server", "--directory", "/srv/www", "8000")
	first := forward(t, s, ws)
	awaitHTTP(t, first, "parent\n")
	children := fork(t, s, checkpoint(t, s, ws).ID, coppiceFork{count: 2})
	for i, c := range children {
		shell(t, s, c.Workspace.ID, fmt.Sprintf("echo child %d > /srv/www/who", i))
	}
	for i, c := range children {
		awaitHTTP(t, forward(t, s, c.Workspace.ID), fmt.Sprintf("child %d\n", i))
	}
	awaitHTTP(t, first, "parent\n")
	ports, err := s.client.Ports(t.Context(), ws)
	if err != nil || len(ports) != 1 {
		t.Fatalf("%+v, %v", ports, err)
	}
	if err := s.client.DeletePort(t.Context(), ws, ports[0].ID); err != nil {
		t.Fatal(err)
	}
	if c, err := net.Dial("tcp", first); err == nil {
		_ = c.Close()
		t.Error("a port that was closed takes connections")
	}
}

func forward(t *testing.T, s *stack, ws coppice.WorkspaceID) string {
	t.Helper()
	p, err := s.client.CreatePort(t.Context(), ws, coppice.CreatePortRequest{GuestPort: 8000})
	if err != nil {
		t.Fatal(err)
	}
	return p.Listen
}

// awaitHTTP asks until the service has started. It may be refused until then; anything else is wrong.
func awaitHTTP(t *testing.T, address, want string) {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	again := time.NewTicker(50 * time.Millisecond)
	defer again.Stop()
	for begun := time.Now(); ; <-again.C {
		res, err := client.Get("http://" + address + "/who")
		if err != nil {
			if time.Since(begun) > time.Minute {
				t.Fatal(err)
			}
			continue
		}
		body, err := io.ReadAll(res.Body)
		_ = res.Body.Close()
		if err != nil || string(body) != want {
			t.Errorf("%s answers %q, %v; want %q", address, body, err, want)
		}
		return
	}
}

// TestGenerations grows a line of forks of forks, with a side branch here and there, in each of which the same process makes one
// step. Then any ten nodes, forked at once, have what they should, in memory and on the disk. 64 generations with -long.
func TestGenerations(t *testing.T) {
	s := theStack(t)
	generations, every := 12, 4
	if *long {
		generations = 64
	}
	ws := forkOne(t, s, seed(t))
	first := startWitness(t, s, ws)
	type node struct {
		id   coppice.CheckpointID
		path []string
	}
	var nodes []node
	began := time.Now()
	grow := func(parent node, ws coppice.WorkspaceID, label string) node {
		t.Helper()
		n := node{path: append(slices.Clone(parent.path), label)}
		compare(t, "generation "+label, after(first, n.path...), step(t, s, ws, label))
		n.id = checkpoint(t, s, ws).ID
		nodes = append(nodes, n)
		return n
	}
	trunk := grow(node{}, ws, "0")
	var pauses []float64
	for g := 1; g < generations; g++ {
		count := 1
		if g%every == 0 {
			count = 2
		}
		children := fork(t, s, trunk.id, coppiceFork{count: count})
		parent := trunk
		for i, c := range children {
			n := grow(parent, c.Workspace.ID, fmt.Sprintf("%d.%d", g, i))
			if i == 0 {
				trunk = n
			}
			terminate(t, s, c.Workspace.ID)
		}
		last, err := s.client.Checkpoint(t.Context(), trunk.id)
		if err != nil {
			t.Fatal(err)
		}
		pauses = append(pauses, last.PauseMS)
	}
	t.Logf("%d generations, %d nodes in %.1f s; pause %.0f ms at first, %.0f ms at last",
		generations, len(nodes), time.Since(began).Seconds(), pauses[0], pauses[len(pauses)-1])

	random := rand.New(rand.NewPCG(64, 10))
	picked := random.Perm(len(nodes))[:min(10, len(nodes))]
	var wg sync.WaitGroup
	for _, i := range picked {
		wg.Go(func() {
			res, err := s.client.ForkCheckpoint(t.Context(), nodes[i].id, coppice.ForkCheckpointRequest{})
			if err != nil || res.Children[0].Workspace == nil {
				t.Errorf("fork node %d: %v", i, err)
				return
			}
			child := res.Children[0].Workspace.ID
			endWithTest(t, s, child)
			var got sight
			if err := query(t.Context(), s, child, &got, "ask", witnessPort, "look"); err != nil {
				t.Error(err)
				return
			}
			compare(t, "node "+strings.Join(nodes[i].path, " "), after(first, nodes[i].path...), got)
		})
	}
	wg.Wait()
	lineage, err := coppice.Collect(s.client.Lineage(t.Context(), trunk.id))
	if err != nil || len(lineage) != generations+2 { // the nodes of the trunk, the seed, the template
		t.Errorf("the lineage has %d checkpoints, %v; want %d", len(lineage), err, generations+2)
	}
}

func terminate(t *testing.T, s *stack, ws coppice.WorkspaceID) {
	t.Helper()
	if _, err := s.client.TerminateWorkspace(t.Context(), ws); err != nil {
		t.Fatal(err)
	}
}
