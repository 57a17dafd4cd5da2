package e2e

import (
	"context"
	"crypto/rand"
	"flag"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/test/testoutside"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// assault is a stack under attack. Mallory is a tenant with root in a guest, a server outside and write access to the bucket. Alice is
// another tenant of the same host. Whatever Mallory does, Alice must not notice.
type assault struct {
	t     *testing.T
	s     *stack
	world *testoutside.Network
	store string // the bucket's directory

	mallory *coppice.Client
	token   string // Mallory's key
	weak    string // a key of Mallory's project that may only look
	project coppice.ProjectID
	ws      coppice.WorkspaceID // Mallory's
	proxy   string              // the egress proxy, as Mallory's guest knows it
	secret  string              // that Mallory's workspaces may use and must never see

	alice *bystander

	mu     sync.Mutex // guards what follows
	tried  map[string]int
	broken []string
	loot   [][]byte // everything Mallory was told
	stored int64    // bytes of the checkpoints that the store was given
	keys   []string // of Alice and the administrator: nobody may learn them
}

// The hosts outside. Mallory runs the server behind each of them but the first.
const (
	aliceHost   = "alice.example.com"
	malloryHost = "mallory.example.com"
	echoHost    = "echo.example.com"
)

var attackPhases = flag.String("attack-phases", "", "the phases of TestAttack that run, with commas between them; none: all")

// minAttacks is how many a whole run has at least.
const minAttacks = 200

// TestAttack starts a stack and attacks it as a malicious guest with root, a malicious tenant, a malicious upstream and a malicious
// bucket. Every attack must fail. Meanwhile another tenant's workspace is used all the time: it is never refused and never slow, no
// process restarts, and memory and disk stay within bounds. At the end the test breaks each of these things on purpose, and wants each of
// its checks to see that. It runs with -long only (make attack): each defence has a test of its own beside its code.
func TestAttack(t *testing.T) {
	if !*long {
		return
	}
	x := newAssault(t)
	x.alice.begin()
	some := strings.FieldsFunc(*attackPhases, func(r rune) bool { return r == ',' })
	for _, phase := range []struct {
		name string
		run  func()
	}{
		{"tenant", x.tenant},
		{"guest", x.guest},
		{"upstream", x.upstream},
		{"import", x.imports},
		{"bucket", x.bucket},
	} {
		if len(some) > 0 && !slices.Contains(some, phase.name) {
			continue
		}
		x.alice.settle()
		began := time.Now()
		phase.run()
		said := x.alice.String()
		x.check(phase.name)
		t.Logf("%s: %d attacks in %.0f s; %s; load %s", phase.name, x.tried[phase.name], time.Since(began).Seconds(), said, load())
		t.Logf("%s: %s", phase.name, x.alice.watch)
	}
	x.held("leaks", "secrets", x.leaked())
	x.alice.settle()
	x.proveChecks()
	x.alice.end()
	x.summary(len(some) > 0)
}

func newAssault(t *testing.T) *assault {
	t.Helper()
	x := &assault{t: t, world: testoutside.New(t), store: t.TempDir(), tried: map[string]int{}, secret: "sk-canary/9+" + rand.Text() + "=="}
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, []byte(x.world.CA), 0o600); err != nil {
		t.Fatal(err)
	}
	x.s = newStack(t, "--egress-allow-private", testoutside.Prefix, "--egress-resolver", x.world.Names, "--egress-ca-file", ca,
		"--store", "dir:"+x.store, "--fetch", "whole", "--cache-size", "0", "--copies-size", fmt.Sprint(copiesSize), "--log-level", "info")
	x.keys = []string{x.s.token}
	x.alice = newBystander(x)
	x.token, x.project = x.tenantKey("mallory")
	x.mallory = x.clientOf(x.token)
	weak, err := x.mallory.CreateKey(t.Context(), x.project, coppice.CreateKeyRequest{Name: "weak", Scopes: []coppice.KeyScope{"workspace:read"}})
	if err != nil {
		t.Fatal(err)
	}
	x.weak = weak.Secret
	ws, err := x.mallory.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{
		Image: string(baseImage(t)), Resources: small(),
		Network: coppice.NetworkRequest{Allow: &[]string{malloryHost, echoHost, "*.points.example.com"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	x.ws = ws.ID
	x.uploadProbe(x.mallory, x.ws)
	x.proxy = strings.TrimPrefix(strings.TrimSpace(x.sh(`printf %s "$HTTPS_PROXY"`)), "http://")
	return x
}

// tenantKey makes a project and a key of it with every scope of a tenant.
func (x *assault) tenantKey(name string) (token string, project coppice.ProjectID) {
	x.t.Helper()
	p, err := x.s.client.CreateProject(x.t.Context(), coppice.CreateProjectRequest{Name: name})
	if err != nil {
		x.t.Fatal(err)
	}
	key, err := x.s.client.CreateKey(x.t.Context(), p.ID, coppice.CreateKeyRequest{Name: name, Scopes: []coppice.KeyScope{
		"workspace:read", "workspace:create", "workspace:delete", "workspace:exec", "checkpoint:read", "checkpoint:create", "checkpoint:delete",
		"checkpoint:import", "grant:read", "grant:write", "fleet:read", "project:read", "key:read", "key:write", "audit:read",
	}})
	if err != nil {
		x.t.Fatal(err)
	}
	return key.Secret, p.ID
}

func (x *assault) clientOf(token string) *coppice.Client {
	x.t.Helper()
	c, err := coppice.New(coppice.Config{Server: x.s.server, Token: token})
	if err != nil {
		x.t.Fatal(err)
	}
	x.t.Cleanup(c.Close)
	return c
}

func (x *assault) uploadProbe(c *coppice.Client, ws coppice.WorkspaceID) {
	x.t.Helper()
	f, err := os.Open(program(x.t, probe))
	if err != nil {
		x.t.Fatal(err)
	}
	defer f.Close()
	if _, err := c.WriteFile(x.t.Context(), ws, probePath, f, coppice.WriteOptions{Mode: "0755"}); err != nil {
		x.t.Fatal(err)
	}
}

// sh runs a script in Mallory's guest. What it printed is loot.
func (x *assault) sh(script string) string {
	x.t.Helper()
	ctx, cancel := context.WithTimeout(x.t.Context(), 5*time.Minute)
	defer cancel()
	res, err := x.mallory.Exec(ctx, x.ws, coppice.ExecRequest{Command: []string{"/bin/sh", "-c", script}})
	if err != nil {
		x.t.Fatalf("exec in the attacker's guest: %v", err)
	}
	stdout, stderr, err := res.Output()
	if err != nil {
		x.t.Fatal(err)
	}
	x.take(stdout)
	x.take(stderr)
	return string(stdout)
}

// take keeps what Mallory was told.
func (x *assault) take(b []byte) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.loot = append(x.loot, slices.Clone(b))
}

// held counts an attack. An error says how it got through.
func (x *assault) held(by, name string, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.tried[by]++
	if err != nil {
		x.broken = append(x.broken, fmt.Sprintf("%s: %s: %v", by, name, err))
		x.t.Errorf("%s: %s: %v", by, name, err)
	}
}

// check looks at the stack after a phase: Alice is served, her flows reach the journal, and every process is the same as before.
func (x *assault) check(phase string) {
	x.t.Helper()
	x.held(phase, "the other tenant was served", x.alice.fault())
	x.held(phase, "the other tenant's flows reach the journal", x.alice.journal())
	x.held(phase, "processes live and stay within their memory", x.alice.watch.fault())
	x.held(phase, "the other tenant's program runs on", x.alice.lives())
	x.held(phase, "no process keeps files or threads", x.alice.watch.leaks(30*time.Second))
	x.held(phase, "the disk stays within its bounds", x.alice.watch.disk())
	req, err := http.NewRequestWithContext(x.t.Context(), http.MethodGet, x.s.server+"/readyz", nil)
	if err != nil {
		x.t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err == nil {
		_ = res.Body.Close()
		if res.StatusCode != http.StatusOK {
			err = fmt.Errorf("it answers %d", res.StatusCode)
		}
	}
	x.held(phase, "the API is ready", err)
}

// capture makes a checkpoint of Mallory's workspace that is in the store.
func (x *assault) capture(name string) coppice.Checkpoint {
	x.t.Helper()
	cp, err := x.mallory.CreateCheckpoint(x.t.Context(), x.ws, coppice.CreateCheckpointRequest{Name: name})
	if err != nil {
		x.t.Fatal(err)
	}
	if cp, err = x.mallory.WaitSealed(x.t.Context(), cp.ID); err != nil {
		x.t.Fatal(err)
	}
	x.give(cp)
	return cp
}

// give notes that the store has a checkpoint, which stays there for the grace of the store even if it is deleted.
func (x *assault) give(cp coppice.Checkpoint) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.stored += cp.StoredBytes
}

// given is what the store was given.
func (x *assault) given() int64 {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.stored
}

// leaked looks for secrets in everything that Mallory was told, and in the logs.
func (x *assault) leaked() error {
	s := newSearch(append(x.keys, x.secret, x.alice.secret)...)
	checkSearch(x.t, s, x.secret)
	for f, err := range x.mallory.Egress(x.t.Context(), x.ws, coppice.EgressFilter{}) {
		if err != nil {
			x.t.Fatal(err)
		}
		x.take(fmt.Appendf(nil, "%+v", f))
	}
	b, err := os.ReadFile(x.s.logFile())
	if err != nil {
		x.t.Fatal(err)
	}
	found := s.in(b)
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, b := range x.loot {
		found = append(found, s.in(b)...)
	}
	slices.Sort(found)
	if found = slices.Compact(found); len(found) > 0 {
		return fmt.Errorf("the attacker or the log has %q", found)
	}
	return nil
}

// summary prints the one line that a reader looks for.
func (x *assault) summary(part bool) {
	n := 0
	for _, c := range x.tried {
		n += c
	}
	if n < minAttacks && !part {
		x.t.Errorf("%d attacks were tried, want %d at least", n, minAttacks)
	}
	for _, b := range x.broken {
		x.t.Log("broken:", b)
	}
	fmt.Printf("attacks %d, held %d, broken %d\n", n, n-len(x.broken), len(x.broken))
}
