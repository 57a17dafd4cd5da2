package e2e

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// What two forks of a process get from one of its generators.
const (
	same   = "same"
	differ = "differ"
)

// worker is a process that was started before the checkpoint and answers each line on a port with numbers of all its generators.
type worker struct {
	name    string // as the platform names its runtime
	port    string
	file    string // in testdata, copied to /srv
	command []string
	want    map[string]string
}

var python = worker{
	name: "python", port: "7201", file: "worker.py", command: []string{"python3", "/srv/worker.py", "7201"},
	want: map[string]string{
		"random": same, "ssl.RAND_bytes": same, "tempfile": same, "hash of a string": same,
		"os.urandom": differ, "secrets": differ, "uuid.uuid4": differ,
	},
}

// TestRuntimes asserts, both ways, which generators of processes that were running stay cloned. What the platform cannot reseed it
// lists. With -long a hook asks the process to reseed, and that works.
func TestRuntimes(t *testing.T) {
	s := theStack(t)
	ws := forkOne(t, s, seed(t))
	startWorkers(t, s, ws, python)
	startWitness(t, s, ws)
	launch(t, s, ws, "curl", "-s", "telnet://127.0.0.1:"+witnessPort) // maps libcrypto, and is no interpreter
	until(t, "curl is connected", func() (bool, error) {
		out := execute(t, s, ws, "/bin/sh", "-c", "grep -l libcrypto /proc/[0-9]*/maps 2>/dev/null | wc -l")
		return strings.TrimSpace(out) == "2", nil
	})
	ckpt := checkpoint(t, s, ws)
	want := map[string]string{"python3": "python", "curl": "openssl", "guestprobe": "go"}
	if diff := cmp.Diff(want, runtimesOf(ckpt.StalePRNGProcesses)); diff != "" {
		t.Errorf("the checkpoint's list of processes (-want +got):\n%s", diff)
	}
	children := fork(t, s, ckpt.ID, coppiceFork{count: 2})
	for _, c := range children {
		if diff := cmp.Diff(want, runtimesOf(c.ResealReport.StalePRNGProcesses)); diff != "" {
			t.Errorf("a fork's list of processes (-want +got):\n%s", diff)
		}
	}
	checkMatrix(t, s, children, python)

	if !*long {
		return // two more forks with Python, and TestHooks shows that hooks run: make test-long
	}
	hook(t, s, ws, "10-workers", "pkill -USR1 -f /srv/worker.py")
	hooked := fork(t, s, checkpoint(t, s, ws).ID, coppiceFork{count: 2})
	cooperative := python
	cooperative.want = map[string]string{
		"random": differ, "ssl.RAND_bytes": differ, "tempfile": differ, "hash of a string": same, // for ever: it is in every dictionary
		"os.urandom": differ, "secrets": differ, "uuid.uuid4": differ,
	}
	checkMatrix(t, s, hooked, cooperative)
}

// TestEveryRuntime is the same for Node, Java and Go, in an image of their own.
func TestEveryRuntime(t *testing.T) {
	if !*long {
		return // building and booting that image takes minutes: make test-long
	}
	s := theStack(t)
	workers := []worker{python, {
		name: "node", port: "7202", file: "worker.js", command: []string{"node", "/srv/worker.js", "7202"},
		want: map[string]string{"Math.random": same, "crypto.randomBytes": same, "crypto.randomUUID": same, "crypto.randomUUID without its cache": same},
	}, {
		name: "java", port: "7203", file: "Worker.java", command: []string{"java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "/srv/Worker.java", "7203"},
		want: map[string]string{
			"Random": same, "Math.random": same, "ThreadLocalRandom": same, "SecureRandom DRBG": same, "SecureRandom SHA1PRNG": same,
			"SecureRandom NativePRNG": differ, "UUID.randomUUID": differ,
		},
	}, {
		name: "go", port: "7204", command: []string{probePath, "generators", "7204"},
		want: map[string]string{"crypto/rand": differ, "math/rand/v2 seeded": same, "maphash": same},
	}}
	digest := image(t, "e2e-runtimes", guestAgent, "default-jdk-headless", "nodejs")
	ws, err := s.client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{Image: string(digest), Resources: coppice.ResourcesRequest{MemoryMiB: new(1024)}})
	if err != nil {
		t.Fatal(err)
	}
	endWithTest(t, s, ws.ID)
	upload(t, s, ws.ID)
	startWorkers(t, s, ws.ID, workers...)
	ckpt := checkpoint(t, s, ws.ID)
	listed := map[string]bool{}
	for _, p := range ckpt.StalePRNGProcesses {
		listed[p.Runtime] = true
	}
	children := fork(t, s, ckpt.ID, coppiceFork{count: 2})
	for _, w := range workers {
		if !listed[w.name] {
			t.Errorf("no process of %s is among %+v", w.name, ckpt.StalePRNGProcesses)
		}
		checkMatrix(t, s, children, w)
	}
}

// startWorkers starts them and waits until each has answered.
func startWorkers(t *testing.T, s *stack, ws coppice.WorkspaceID, workers ...worker) {
	t.Helper()
	for _, w := range workers {
		if w.file != "" {
			b, err := os.ReadFile(filepath.Join("testdata", w.file))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := s.client.WriteFile(t.Context(), ws, "/srv/"+w.file, strings.NewReader(string(b)), coppice.WriteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		launch(t, s, ws, w.command...)
	}
	for _, w := range workers {
		within(t, 5*time.Minute, w.name+" answers", func() (bool, error) { // emulated, Java takes one to compile itself
			res, err := s.client.Exec(t.Context(), ws, coppice.ExecRequest{Command: []string{probePath, "ask", w.port, "draw"}})
			return err == nil && res.ExitCode == 0, err
		})
	}
}

func runtimesOf(list []coppice.StaleProcess) map[string]string {
	out := map[string]string{}
	for _, p := range list {
		out[p.Command] = p.Runtime
	}
	return out
}

func checkMatrix(t *testing.T, s *stack, children []coppice.ForkChild, w worker) {
	t.Helper()
	drawn := gather[map[string]json.RawMessage](t, s, children, "ask", w.port, "draw")
	got := map[string]string{}
	for name, a := range drawn[0] {
		got[name] = differ
		if string(a) == string(drawn[1][name]) {
			got[name] = same
		}
	}
	if diff := cmp.Diff(w.want, got); diff != "" {
		t.Errorf("two forks of a process of %s draw (-want +got):\n%s", w.name, diff)
	}
}
