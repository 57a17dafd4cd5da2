package e2e

import (
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// faultVariable tells doctoredagent what to do wrong at a reseal.
const faultVariable = "COPPICE_FAULT"

var doctoredOnce struct {
	mu sync.Mutex // guards ws
	ws coppice.WorkspaceID
}

// doctored is a workspace whose image has doctoredagent for its agent. It is made once, and grows old.
func doctored(t *testing.T, s *stack) coppice.WorkspaceID {
	t.Helper()
	doctoredOnce.mu.Lock()
	defer doctoredOnce.mu.Unlock()
	if doctoredOnce.ws == "" {
		digest := image(t, "e2e-doctored", "internal/test/e2e/doctoredagent")
		ws, err := s.client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{Name: "doctored", Image: string(digest), Resources: small()})
		if err != nil {
			t.Fatal(err)
		}
		upload(t, s, ws.ID)
		doctoredOnce.ws = ws.ID
	}
	return doctoredOnce.ws
}

// TestFailClosed has an agent, or a kernel below it, that fails in every way there is in the middle of a reseal. Whatever it is, the
// fork is destroyed, its problem names the step, and nothing is left; it is never ready, not for a moment.
func TestFailClosed(t *testing.T) {
	s := theStack(t)
	ws := doctored(t, s)
	from := checkpoint(t, s, ws)
	fork(t, s, from.ID, coppiceFork{}) // without a fault the agent is as good as any
	quiet := s.machines(t)

	faults := []struct {
		fault string
		code  coppice.Code
		says  string // in the problem's message
		slow  bool   // only with -long
	}{
		{"no-reseed", coppice.CodeResealFailed, "entropy", false},
		{"deaf-hostname", coppice.CodeResealFailed, "hostname", false},
		{"same-draws", coppice.CodeResealFailed, "entropy", false},
		{"other-generation", coppice.CodeResealFailed, "generation", false},
		{"killed", coppice.CodeGuestUnreachable, "", false},
		{"exit", coppice.CodeGuestUnreachable, "", false},
		{"replay", "ALREADY_SEALED", "generation", false},
		{"error", "", "", false},
		{"flood", "", "", false},
		{"no-release", "", "", false},
		{"hang", "", "", true}, // for as long as a reseal may take
	}
	for _, kind := range []string{"silent", "missing", "skipped"} {
		for _, step := range []string{"entropy", "clock", "boot_id", "machine_id", "hostname", "network", "sockets", "tfo_key", "agent_state", "generation"} {
			often := step == "entropy" || step == "network" || step == "sockets"
			faults = append(faults, struct {
				fault string
				code  coppice.Code
				says  string
				slow  bool
			}{kind + ":" + step, coppice.CodeResealFailed, step, !often})
		}
	}
	limit := make(chan struct{}, 4)
	var wg sync.WaitGroup
	for _, f := range faults {
		if f.slow && !*long {
			continue
		}
		wg.Go(func() {
			limit <- struct{}{}
			defer func() { <-limit }()
			began := time.Now()
			name := strings.NewReplacer(":", "-", "_", "-").Replace(f.fault)
			res, err := s.client.ForkCheckpoint(t.Context(), from.ID, coppice.ForkCheckpointRequest{BranchName: name, Env: coppice.Env{faultVariable: f.fault}})
			var e *coppice.Error
			if !errors.As(err, &e) || e.Code != coppice.CodeForkFailed {
				t.Errorf("%s: got %+v, %v; want FORK_FAILED", f.fault, res, err)
				return
			}
			failed, err := coppice.Collect(s.client.Workspaces(t.Context(), coppice.WorkspaceFilter{
				Name: name, ParentCheckpointID: from.ID, States: []coppice.WorkspaceState{coppice.WorkspaceFailed},
			}))
			if err != nil || len(failed) != 1 || failed[0].Failure == nil {
				t.Errorf("%s: the failed workspaces are %+v, %v", f.fault, failed, err)
				return
			}
			got := failed[0].Failure
			t.Logf("%s: %s: %s (%.1f s)", f.fault, got.Code, got.Message, time.Since(began).Seconds())
			if f.code != "" && got.Code != string(f.code) || !strings.Contains(got.Message, f.says) || strings.ContainsRune(got.Message, '\x1b') {
				t.Errorf("%s: the problem is %s %q, want %s and %q in it", f.fault, got.Code, got.Message, f.code, f.says)
			}
			if failed[0].ReadyAt != (time.Time{}) {
				t.Errorf("%s: it was ready at %s", f.fault, failed[0].ReadyAt)
			}
		})
	}
	wg.Wait()
	if diff := cmp.Diff(quiet, s.machines(t)); diff != "" {
		t.Errorf("after all the failures (-before +after):\n%s", diff)
	}
	fork(t, s, from.ID, coppiceFork{}) // and the checkpoint is none the worse for it
}

// machines says which workspaces the API calls alive.
func (s *stack) machines(t *testing.T) map[string]coppice.WorkspaceState {
	t.Helper()
	list, err := coppice.Collect(s.client.Workspaces(t.Context(), coppice.WorkspaceFilter{States: []coppice.WorkspaceState{
		coppice.WorkspaceCreating, coppice.WorkspaceRestoring, coppice.WorkspaceQuarantined, coppice.WorkspaceReady,
		coppice.WorkspaceCheckpointing, coppice.WorkspaceTerminating,
	}}))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]coppice.WorkspaceState{}
	for _, ws := range list {
		out[ws.Name] = ws.State
	}
	return out
}

// TestHooksThatFail has an image whose own part of the reseal fails, hangs, or takes the machine down.
func TestHooksThatFail(t *testing.T) { //nolint:tparallel // its cases run beside one another, not beside tests that count machines
	s := theStack(t)
	for _, c := range []struct {
		name, script string
		code         coppice.Code
		says         string
	}{
		{"fails", "echo it is broken; exit 3", coppice.CodeResealFailed, "it is broken"},
		{"hangs", "sleep 86400", coppice.CodeResealFailed, "10-hangs"},
		{"panics", "echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger; sleep 86400", "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			ws := forkOne(t, s, seed(t))
			hook(t, s, ws, "10-"+c.name, c.script)
			from := checkpoint(t, s, ws)
			began := time.Now()
			_, err := s.client.ForkCheckpoint(t.Context(), from.ID, coppice.ForkCheckpointRequest{})
			_ = wantCode(t, err, coppice.CodeForkFailed)
			failed, err := failures(t.Context(), s, from.ID)
			if err != nil || len(failed) != 1 || failed[0].Failure == nil {
				t.Fatalf("%+v, %v", failed, err)
			}
			got := failed[0].Failure
			t.Logf("%s: %s (%.1f s)", got.Code, got.Message, time.Since(began).Seconds())
			if c.code != "" && got.Code != string(c.code) || !strings.Contains(got.Message, c.says) {
				t.Errorf("the problem is %s %q, want %s and %q in it", got.Code, got.Message, c.code, c.says)
			}
			compareAlive(t, s, ws) // the parent never noticed
		})
	}
}

// TestKilledInQuarantine kills the VMM of a fork in the middle of its reseal, from outside.
func TestKilledInQuarantine(t *testing.T) {
	s := theStack(t)
	ws := forkOne(t, s, seed(t))
	hook(t, s, ws, "10-slow", "sleep 4")
	from := checkpoint(t, s, ws)
	name := "doomed-" + from.ID[len(from.ID)-8:]
	type outcome struct {
		res coppice.ForkResult
		err error
	}
	done := make(chan outcome, 1)
	go func() {
		res, err := s.client.ForkCheckpoint(t.Context(), from.ID, coppice.ForkCheckpointRequest{BranchName: name})
		done <- outcome{res, err}
	}()
	victim := s.awaitQuarantined(t, name)
	s.killVMM(t, victim)
	got := <-done
	if got.err == nil {
		t.Fatalf("the fork succeeded: %+v", got.res)
	}
	_ = wantCode(t, got.err, coppice.CodeForkFailed)
	failed, err := failures(t.Context(), s, from.ID)
	if err != nil || len(failed) != 1 || failed[0].Failure == nil {
		t.Fatalf("%+v, %v", failed, err)
	}
	t.Logf("%s: %s", failed[0].Failure.Code, failed[0].Failure.Message)
	compareAlive(t, s, ws)
}

// compareAlive wants a workspace to be ready and to run what it is told.
func compareAlive(t *testing.T, s *stack, id coppice.WorkspaceID) {
	t.Helper()
	ws, err := s.client.Workspace(t.Context(), id)
	if err != nil || ws.State != coppice.WorkspaceReady {
		t.Errorf("%s is %s, %v; want ready", id, ws.State, err)
	}
	if got := execute(t, s, id, "echo", "alive"); got != "alive\n" {
		t.Errorf("%s says %q", id, got)
	}
}

// until polls a state that has no event of its own, for a minute.
func until(t *testing.T, what string, done func() (bool, error)) {
	t.Helper()
	within(t, 5*time.Minute, what, done) // longer than anything takes on a machine that is not broken
}

func within(t *testing.T, patience time.Duration, what string, done func() (bool, error)) {
	t.Helper()
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	for begun := time.Now(); ; <-again.C {
		ok, err := done()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if ok {
			return
		}
		if time.Since(begun) > patience {
			t.Fatalf("not within %s: %s", patience, what)
		}
	}
}
