package e2e

import (
	"crypto/rand"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testoutside"
	"github.com/coppice-dev/coppice/runner/egress"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// granted is a stack beside a network outside, with two secrets: one is granted for a host that is reached over TLS, one by a base URL.
type granted struct {
	t   *testing.T
	s   *stack
	o   *testoutside.Network
	cli cli

	store          string
	metrics        string   // host:port
	answers        []string // all that programs in guests have got
	header, base   string   // the secrets
	root           coppice.WorkspaceID
	before         coppice.CheckpointID // from when nothing was granted
	started        time.Time
	headerN, baseN int // how often they were used
}

func newGranted(t *testing.T) *granted {
	t.Helper()
	g := &granted{t: t, o: testoutside.New(t), started: time.Now()}
	files := t.TempDir()
	ca := filepath.Join(files, "ca.pem")
	if err := os.WriteFile(ca, []byte(g.o.CA), 0o600); err != nil {
		t.Fatal(err)
	}
	g.store, g.metrics = t.TempDir(), freeAddress(t)
	g.s = newStack(t, "--egress-allow-private", testoutside.Prefix, "--egress-resolver", g.o.Names, "--egress-ca-file", ca, "--store", "dir:"+g.store, "--metrics-listen", g.metrics)
	g.cli = cli{t: t, s: g.s, dir: files}
	g.header, g.base = "sk-canary/1+"+rand.Text()+"==", "sk-canary/2+"+rand.Text()+"=="
	ws, err := g.s.client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{
		Image: string(baseImage(t)), Resources: small(), Network: coppice.NetworkRequest{Allow: &[]string{"a.example.com", "b.example.com"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	g.root, g.before = ws.ID, checkpoint(t, g.s, ws.ID).ID
	for name, put := range map[string]struct{ host, mode, secret string }{"one": {"a.example.com", "header", g.header}, "two": {"b.example.com", "base_url", g.base}} {
		if status, out, errs := g.cli.run(put.secret+"\n", "grant", "put", g.root, name, "--host", put.host, "--mode", put.mode, "--secret-file", "-"); status != 0 {
			t.Fatalf("grant %s: status %d, %s%s", name, status, out, errs)
		}
	}
	return g
}

// say runs a script and returns what it said, with the status that is not 0.
func (g *granted) say(ws coppice.WorkspaceID, script string) string {
	g.t.Helper()
	got := shell(g.t, g.s, ws, "("+script+") 2>&1 || echo failed $?")
	g.answers = append(g.answers, got)
	return got
}

// What programs send: the placeholders that they find in their environment.
const (
	useHeader = `curl -sS -m 20 -H "Authorization: Bearer $ONE" https://a.example.com/used`
	useBase   = `curl -sS -m 20 -H "Authorization: Bearer $TWO" "$TWO_BASE_URL/used"`
	usePython = `python3 -c '
import os, urllib.request
r = urllib.request.Request("https://a.example.com/python", headers={"Authorization": "Bearer " + os.environ["ONE"]})
print(urllib.request.urlopen(r, timeout=20).read().decode())'`
)

// use has both secrets used in a workspace, in three ways.
func (g *granted) use(ws coppice.WorkspaceID) {
	g.t.Helper()
	g.useCurl(ws)
	g.used(ws, usePython, "GET a.example.com/python")
	g.headerN++
}

// useCurl has both secrets used in a workspace, in the two ways of use that start no Python, which takes seconds in an emulated machine.
func (g *granted) useCurl(ws coppice.WorkspaceID) {
	g.t.Helper()
	g.used(ws, useHeader, "GET a.example.com/used")
	g.used(ws, useBase, "GET b.example.com/used")
	g.headerN, g.baseN = g.headerN+1, g.baseN+1
}

func (g *granted) used(ws coppice.WorkspaceID, script, want string) {
	g.t.Helper()
	if got := g.say(ws, script); !strings.Contains(got, want) {
		g.t.Errorf("%s in %s: %s", script, ws, got)
	}
}

// refused has uses of secrets fail in a workspace.
func (g *granted) refused(ws coppice.WorkspaceID, scripts ...string) {
	g.t.Helper()
	before := len(g.o.Shown())
	for _, script := range scripts {
		if got := g.say(ws, script); strings.Contains(got, "GET ") {
			g.t.Errorf("%s in %s was answered: %s", script, ws, got)
		}
	}
	if shown := g.o.Shown(); len(shown) != before {
		g.t.Errorf("the outside was shown %q", shown[before:])
	}
}

// TestGrants has secrets used by real programs in a workspace and three forks, or eight with -long, over TLS and by base URLs, while the egress process is killed, and
// revoked. Afterwards they are nowhere.
func TestGrants(t *testing.T) {
	g := newGranted(t)
	g.use(g.root)
	if got := g.say(g.root, `curl -sS -m 20 -H "Authorization: Bearer $ONE" https://a.example.com/echo`); strings.Contains(got, "canary") || !strings.Contains(got, "failed") && !strings.Contains(got, "coppice egress") {
		t.Errorf("an upstream that echoes: %s", got)
	}
	g.headerN++
	count := 3
	if *long {
		count = 8
	}
	children := fork(t, g.s, g.before, coppiceFork{count: count})
	placeholder := shell(t, g.s, g.root, "printf %s \"$ONE\"")
	seen := map[string]bool{placeholder: true}
	for i, child := range children {
		ws := child.Workspace.ID
		if i == 0 || *long {
			g.use(ws)
		} else {
			g.useCurl(ws)
		}
		if own := shell(t, g.s, ws, "printf %s \"$ONE\""); seen[own] || !strings.HasPrefix(own, "coppice-brokered-") {
			t.Errorf("%s has the placeholder %s", child.Workspace.Name, own)
		} else {
			seen[own] = true
		}
	}
	fork := children[0].Workspace.ID
	g.refused(fork, "ONE="+placeholder+"; "+useHeader, `curl -sS -m 20 "https://a.example.com/?key=$ONE"`, `curl -sS -m 20 -H "Authorization: $ONE" http://a.example.com/`)
	g.refused(g.root, "ONE="+shell(t, g.s, fork, "printf %s \"$ONE\"")+"; "+useHeader)

	g.killEgress()
	began := time.Now()
	eventually.True(t, "grants are with another egress process", func() bool { return strings.Contains(g.say(fork, useHeader), "GET a.example.com") })
	g.headerN++
	t.Logf("grants are in use %s after the egress process was killed; load %s", time.Since(began).Round(time.Millisecond), load())

	// What is under way when a grant is revoked, in a fork, ends.
	launch(t, g.s, fork, "sh", "-c", `exec curl -sS -o /dev/null -H "Authorization: Bearer $ONE" https://a.example.com/stream`)
	eventually.True(t, "a request is under way", func() bool { return g.o.Streams.Load() == 1 })
	g.headerN++
	began = time.Now()
	if err := g.s.client.RevokeGrant(t.Context(), g.root, "one"); err != nil {
		t.Fatal(err)
	}
	answered := time.Now()
	eventually.True(t, "what was under way has ended", func() bool { return g.o.Streams.Load() == 0 })
	t.Logf("what a fork had under way had ended %s after the answer that its root's grant is revoked, which took %s; load %s",
		time.Since(answered).Round(time.Millisecond), answered.Sub(began).Round(time.Millisecond), load())
	g.cli.ok("grant", "revoke", g.root, "two")
	eventually.True(t, "nothing of grants is pending", func() bool {
		w, err := g.s.client.Workspace(t.Context(), fork)
		return err == nil && !w.Network.RulesPending
	})
	g.refused(fork, "ONE="+shell(t, g.s, fork, "printf %s \"$ONE\"")+"; "+useHeader)
	g.refused(g.root, "ONE="+placeholder+"; "+useHeader)
	if out := g.cli.ok("grant", "ls", fork); strings.Contains(out, "one") || strings.Contains(out, "two") {
		t.Errorf("after they were revoked: %s", out)
	}
	g.checkShown()
	g.sweep(children)
}

func load() string {
	b, _ := os.ReadFile("/proc/loadavg")
	return strings.TrimSpace(string(b))
}

// checkShown: the outside was shown the secrets as often as they were used, and nothing else.
func (g *granted) checkShown() {
	g.t.Helper()
	var header, base int
	for _, shown := range g.o.Shown() {
		switch shown {
		case "a.example.com Bearer " + g.header:
			header++
		case "b.example.com Bearer " + g.base:
			base++
		default:
			g.t.Errorf("the outside was shown %q", shown)
		}
	}
	if header != g.headerN || base != g.baseN {
		g.t.Errorf("the secrets were used %d and %d times, and shown %d and %d times", g.headerN, g.baseN, header, base)
	}
}

// killEgress kills the egress process of the stack.
func (g *granted) killEgress() {
	g.t.Helper()
	mark, err := os.ReadFile(filepath.Join(g.s.data, "cluster-id"))
	if err != nil {
		g.t.Fatal(err)
	}
	socket := egress.SocketPath(filepath.Join(daemon.RunDir(strings.TrimSpace(string(mark))), "egress"))
	hello, err := egress.NewClient(socket).Hello(g.t.Context())
	if err != nil {
		g.t.Fatal(err)
	}
	if err := syscall.Kill(hello.PID, syscall.SIGKILL); err != nil {
		g.t.Fatal(err)
	}
}
