package main

import (
	"encoding/json"
	"errors"
	"flag"
	"os"
	"os/signal"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/term"

	"github.com/coppice-dev/coppice/api"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares with a file in testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s\nif it is right: go test ./cmd/coppice -update", path, diff)
	}
}

// TestHelp keeps the help of the client commands as it was reviewed.
func TestHelp(t *testing.T) {
	t.Parallel()
	var all strings.Builder
	for _, line := range []string{
		"controller", "migrate", "runner", "runner-token", "runner-token create", "runner-token ensure", "runner-token revoke", "runner-trash", "runner-trash keep", "runner-trash release",
		"ws", "ws create", "ws ls", "ws show", "ws rm", "ws exec", "ws shell", "ws cp", "ws forward", "ws logs", "ws suspend", "ws resume", "ws usage",
		"ckpt", "ckpt create", "ckpt ls", "ckpt show", "ckpt tree", "ckpt diff", "ckpt annotate", "ckpt rm", "ckpt pin", "ckpt unpin", "ckpt prune", "ckpt retain", "ckpt usage", "ckpt export", "ckpt import",
		"fork", "restore", "op", "op show", "events",
		"project", "project create", "project ls", "project show", "project quota", "project rm", "key", "key create", "key ls", "key show", "key revoke", "image", "image build", "image ls", "image rm",
	} {
		a, stdout, _ := testApp(nil)
		if status := run(t.Context(), a, append(strings.Fields(line), "--help")); status != 0 {
			t.Errorf("%s --help: status %d", line, status)
		}
		text, _, _ := strings.Cut(stdout.String(), "\nGlobal Flags:")
		all.WriteString("$ coppice " + line + " --help\n" + text + "\n")
	}
	golden(t, "help.txt", all.String())
}

// convert turns the fake's objects into the client's, as the wire does.
func convert[T any](t *testing.T, v any) T {
	t.Helper()
	var out T
	b, err := json.Marshal(v)
	if err == nil {
		err = json.Unmarshal(b, &out)
	}
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestTables(t *testing.T) {
	t.Parallel()
	now := dawn.Add(3 * time.Hour)
	var b strings.Builder
	lost := fakeWorkspace(2, "second", api.WorkspaceLost)
	lost.Failure = &api.Failure{Code: "VMM_FAILED", Message: "its VMM was killed\x1b[31m", RecoverFrom: fakeID("ckpt", 7)}
	unknown := fakeWorkspace(3, "third", api.WorkspaceReady)
	unknown.Condition, unknown.ExpiresAt = api.ConditionUnknown, now.Add(10*time.Minute)
	stalled := fakeWorkspace(4, "fourth", api.WorkspaceReady)
	stalled.Condition, stalled.Stall = api.ConditionStalled, &api.WorkspaceStall{Since: dawn, Code: "STORE_UNAVAILABLE", Message: "the store is silent"}
	workspaces := convert[[]coppice.Workspace](t, []api.Workspace{fakeWorkspace(1, "demo", api.WorkspaceReady), lost, unknown, stalled})
	b.WriteString("-- workspaces\n")
	if err := printWorkspaces(&b, now, workspaces); err != nil {
		t.Error(err)
	}
	b.WriteString("-- a lost workspace\n")
	if err := printWorkspace(&b, workspaces[1], nil); err != nil {
		t.Error(err)
	}
	b.WriteString("-- a stalled workspace\n")
	if err := printWorkspace(&b, workspaces[3], nil); err != nil {
		t.Error(err)
	}
	b.WriteString("-- no workspaces\n")
	if err := printWorkspaces(&b, now, nil); err != nil {
		t.Error(err)
	}
	b.WriteString("-- checkpoints\n")
	if err := printCheckpoints(&b, now, convert[[]coppice.Checkpoint](t, []api.Checkpoint{fakeCheckpoint(1, 0, nil), fakeCheckpoint(2, 1, nil)})); err != nil {
		t.Error(err)
	}
	sealed, failed := fakeCheckpoint(3, 2, nil), fakeCheckpoint(4, 3, nil)
	sealed.State, sealed.SealedAt, sealed.StoredBytes = api.CheckpointSealed, dawn, 700<<10
	failed.Seal = &api.Seal{State: api.SealFailed, Attempt: 3, Problem: &api.Failure{Code: "STORE_UNAVAILABLE", Message: "the store is away"}}
	for _, cp := range convert[[]coppice.Checkpoint](t, []api.Checkpoint{sealed, failed}) {
		b.WriteString("-- a checkpoint and the store: " + stored(cp) + "\n" + sealing(cp) + "\n")
	}
	f := &fake{}
	f.failChild = true
	b.WriteString("-- fork\n")
	if err := printFork(&b, convert[coppice.ForkResult](t, f.fork(fakeID("ckpt", 1), 3, "try")), 1200*time.Millisecond); err != nil {
		t.Error(err)
	}
	code := 143
	b.WriteString("-- sessions\n")
	if err := printSessions(&b, now, []coppice.Session{
		{ID: fakeID("sess", 1), State: coppice.SessionRunning, PID: 17, StdoutBytes: 2048, StartedAt: dawn, Command: []string{"sh", "-c", "make test 2>&1 | tail -n 5; echo 'all done, at long last, and then some'"}},
		{ID: fakeID("sess", 2), State: coppice.SessionExited, ExitCode: &code, TimedOut: true, StartedAt: dawn, Command: []string{"sleep", ""}},
	}); err != nil {
		t.Error(err)
	}
	b.WriteString("-- images\n")
	if err := printImages(&b, now, []imageLine{{Name: "base", Digest: "sha256:0123456789abcdef0123", Source: "debian", KernelRelease: "6.1.0-cloud", SizeBytes: 512 << 20, CreatedAt: dawn.Add(-100 * time.Hour)}}); err != nil {
		t.Error(err)
	}
	flow := coppice.Flow{At: dawn, Outcome: coppice.FlowAllowed, Protocol: coppice.FlowHTTP, Host: "api.example.com", Port: 443, Method: "POST", Path: "/v1/\x1b[2J", Status: 201, SentBytes: 2048, ReceivedBytes: 10, Rule: "*.example.com"}
	tunnel := coppice.Flow{At: dawn, Outcome: coppice.FlowDenied, Protocol: coppice.FlowTLS, Host: "evil.example", Port: 443, Opaque: true, Reason: "no rule allows it"}
	several := coppice.Flow{At: dawn, LastAt: dawn.Add(time.Minute), Count: 240_000, Outcome: coppice.FlowDenied, Protocol: coppice.FlowTCP, Opaque: true, Reason: "denied, to more hosts"}
	count := coppice.Flow{At: dawn, LastAt: dawn.Add(time.Minute), Count: 7000, Counted: true, Outcome: coppice.FlowAllowed, Protocol: coppice.FlowTLS, Host: "a.example", Port: 443, Rule: "*.example"}
	ofRule := count
	ofRule.Host, ofRule.Port, ofRule.Opaque = "*.example", 0, true
	b.WriteString("-- egress\n")
	if err := errors.Join(printFlows(&b, nil), printFlows(&b, []coppice.Flow{flow, tunnel, several, count, ofRule})); err != nil {
		t.Error(err)
	}
	b.WriteString("-- effects\n")
	if err := errors.Join(printEffects(&b, nil), printEffects(&b, []coppice.Effect{{CheckpointID: fakeID("ckpt", 2), Depth: 1, Flow: flow}, {CheckpointID: fakeID("ckpt", 2), Depth: 1, Flow: count}})); err != nil {
		t.Error(err)
	}
	b.WriteString("-- what may be reached\n")
	for _, n := range []coppice.Network{{EgressPolicy: coppice.EgressDenyAll}, {EgressPolicy: coppice.EgressDenyAll, Allow: []string{"a.example", "bundle:go"}, RulesPending: true}} {
		b.WriteString(egress(n) + "\n")
	}
	golden(t, "tables.txt", b.String())
}

func TestTree(t *testing.T) {
	t.Parallel()
	f := sampleTree()
	nodes := convert[[]coppice.TreeNode](t, f.tree(fakeID("ckpt", 1)))
	nodes[3].EffectsCount = 2
	var b strings.Builder
	if err := printTrees(&b, dawn.Add(time.Hour), [][]coppice.TreeNode{nodes, nodes[:1]}); err != nil {
		t.Error(err)
	}
	golden(t, "tree.txt", b.String())
}

// sampleTree is a template with two branches, one of them over a deleted node, and live workspaces.
func sampleTree() *fake {
	f := &fake{}
	deleted := fakeCheckpoint(3, 1, nil)
	deleted.State = api.CheckpointDeleted
	named := fakeCheckpoint(2, 1, api.Annotations{"score": 0.98765, "visits": 12, "action": "edit", "list": []int{1}})
	named.Name = "before-upgrade"
	f.checkpoints = []api.Checkpoint{
		fakeCheckpoint(1, 0, nil), named, deleted,
		fakeCheckpoint(4, 2, api.Annotations{"evil": "\x1b[2J"}), fakeCheckpoint(5, 2, nil), fakeCheckpoint(6, 3, nil),
	}
	at := func(n int, name string, head int) api.Workspace {
		ws := fakeWorkspace(n, name, api.WorkspaceReady)
		ws.CheckpointID = fakeID("ckpt", head)
		return ws
	}
	f.workspaces = []api.Workspace{at(1, "demo", 2), at(2, "second", 5), at(3, "third", 5), at(4, "fourth", 6)}
	return f
}

func TestClientCommands(t *testing.T) {
	t.Parallel()
	f, run := newFake(t)
	sample := sampleTree()
	f.workspaces, f.checkpoints = sample.workspaces, sample.checkpoints
	gone := fakeWorkspace(11, "gone", api.WorkspaceTerminated)
	f.workspaces = append(f.workspaces, gone, fakeWorkspace(10001, "alike", api.WorkspaceReady))
	for _, x := range []struct {
		line           string
		status         int
		stdout, stderr string
	}{
		{"ws ls", 0, "demo    00000001  ready", ""},
		{"ws ls -q", 0, fakeID("ws", 1) + "\n" + fakeID("ws", 2) + "\n", ""},
		{"ws ls --all", 0, "gone", ""},
		{"ws ls --json", 0, `"name": "demo"`, ""},
		{"ws show demo", 0, "machine-id   cccc", ""},
		{"ws show 00000001", 0, "name         demo", ""},
		{"ws show " + fakeID("ws", 1), 0, "name         demo", ""},
		{"ws show nobody", exitNotFound, "", `there is no workspace "nobody"; list the workspaces with coppice ws ls`},
		{"ws show 0001", exitBadInput, "", `"0001" names 2 workspaces`},
		{"ws show --json nobody", exitNotFound, "", `"code":"WORKSPACE_NOT_FOUND"`},
		{"ws create --name made --env A=1 --vcpus 2 --ttl 90s --label k=v", 0, "made is ready after", ""},
		{"ws create -q", 0, fakeID("ws", 9) + "\n", ""},
		{"ws create --env A", exitUsage, "", `--env "A" is not of the form KEY=VALUE`},
		{"ws create --ttl 1ms", exitUsage, "", "whole number of seconds"},
		{"ws forward demo", 0, "No ports are forwarded.", ""},
		{"ws forward demo 8080:80 443 8443 --detach", 0, "127.0.0.1:8080 -> demo:80\n127.0.0.1:0 -> demo:443\n127.0.0.1:8443 -> demo:8443\n", ""},
		{"ws forward demo", 0, "127.0.0.1:8080  80", ""},
		{"ws forward demo --stop 127.0.0.1:8080", 0, "", ""},
		{"ws forward demo --stop 127.0.0.1:8080", exitFailure, "", "forwards no port"},
		{"ws forward demo a:80", exitUsage, "", `"a:80" is not of the form`},
		{"ws logs demo", exitNotFound, "", "has no sessions"},
		{"ws logs --console demo", 0, "booting\x1b[2J\r\nready", ""},
		{"ws shell demo", exitUsage, "", "must both be a terminal"},
		{"ws cp a b", exitUsage, "", "one of SOURCE and DESTINATION"},
		{"ws cp demo:/a demo:/b", exitUsage, "", "one of SOURCE and DESTINATION"},
		{"ckpt ls", 0, "00000002  before-upgrade  captured  user", ""},
		{"ckpt ls -q", 0, fakeID("ckpt", 1) + "\n", ""},
		{"ckpt show before-upgrade", 0, `{"action":"edit","list":[1],"score":0.98765,"visits":12}`, ""},
		{"ckpt show nothing", exitNotFound, "", "coppice ckpt ls or coppice ckpt tree"},
		{"ckpt tree", 0, "├─● 00000002 before-upgrade", ""},
		{"ckpt tree demo", 0, "● 00000001 image base", ""},
		{"ckpt tree before-upgrade --json", 0, `"score": 0.98765`, ""},
		{"ckpt diff before-upgrade 00000001", 0, "M /etc/passwd (content, mtime)\nA \"/evil\\x1b[2J\"\nD \"/\\xff\"\n+ process 12 sleep 100\n- process 7 [kworker]\n" +
			"1 added, 1 changed, 1 removed; 1 started, 1 gone; 5.0 MiB of memory differ\n1 files are damaged", ""},
		{"ckpt diff before-upgrade 00000001 --json", 0, `"memory_changed_bytes": 5242880`, ""},
		{"ckpt diff before-upgrade nothing", exitNotFound, "", `there is no checkpoint "nothing"`},
		{"ckpt create demo --name n --annotation score=0.5 --annotation note=x", 0, "demo paused for 21.2 ms, 3.0 MiB", ""},
		{"ckpt annotate before-upgrade score=1 note=two old-", 0, `version 3: {"note":"two","old":null,"score":1}`, ""},
		{"ckpt rm before-upgrade nothing", exitNotFound, fakeID("ckpt", 2) + " is deleted", `there is no checkpoint "nothing"`},
		{"ckpt rm before-upgrade --cascade --dry-run", 0, "1 would go, 3.0 MiB; 0 stay", ""},
		{"ckpt rm before-upgrade --cascade", 0, "1 went, 3.0 MiB", ""},
		{"ckpt pin before-upgrade", 0, " is pinned", ""},
		{"ckpt unpin before-upgrade", 0, " is not pinned", ""},
		{"ckpt prune before-upgrade --keep-best 3 --score value --max-bytes 2G --dry-run", 0, "1 would go, 1.0 MiB; 4 stay, 5.0 MiB\nThe checkpoints that must stay", ""},
		{"ckpt prune before-upgrade", exitUsage, "", "say what to keep"},
		{"ckpt prune before-upgrade --max-bytes 2X", exitUsage, "", "not a size"},
		{"ckpt retain before-upgrade --keep-best 3 --keep-path --max-age 24h", 0, "3 by score", ""},
		{"ckpt retain before-upgrade --show", exitNotFound, "", "RETENTION_NOT_FOUND"},
		{"ckpt retain before-upgrade --remove", 0, "", ""},
		{"fork demo -n 2 --name try", 0, "2 of 2 from checkpoint 00000007", ""},
		{"fork before-upgrade -n 2 --name try -q", 0, fakeID("ws", 20) + "\n" + fakeID("ws", 21) + "\n", ""},
		{"fork before-upgrade -n 2 --name try -q --spread", 0, fakeID("ws", 20) + "\n" + fakeID("ws", 21) + "\n", ""},
		{"fork demo -n 2 --spread", exitUsage, "", "needs a sealed checkpoint"},
		{"fork nothing", exitNotFound, "", "no workspace and no checkpoint"},
		{"restore before-upgrade --name again", 0, "again is ready after", ""},
		{"restore before-upgrade --in demo", 0, "epoch 2", ""},
		{"restore before-upgrade --in demo --name x", exitUsage, "", "do not set any of them"},
		{"op show " + fakeID("op", 1), 0, "no runner has room (CAPACITY)", ""},
		{"ws usage demo", 0, "CPU          12.5 s", ""},
		{"ckpt usage before-upgrade", 0, "7.0 MiB", ""},
		{"ws suspend demo", 0, "demo (00000001) is suspended after", ""},
		{"ws resume demo", 0, "demo (00000001) is ready after", ""},
		{"ws suspend nosuch", exitNotFound, "", "no workspace"},
		{"ws create --on-idle terminate", exitUsage, "", "needs --idle"},
		{"ws create --idle 1500ms", exitUsage, "", "--idle 1.5s is not a whole number"},
		{"ws rm demo second", 0, "demo (00000001) is terminated\nsecond (00000002) is terminated\n", ""},
		{"ws rm", exitUsage, "", "name a workspace"},
		{"image ls --images-dir " + t.TempDir(), 0, "No images. Build one: coppice image build", ""},
		{"image build --agent /nowhere/agent", exitBadInput, "", "build it with \"make build\""},
	} {
		status, stdout, stderr := run(strings.Fields(x.line)...)
		if status != x.status || !strings.Contains(stdout, x.stdout) || !strings.Contains(stderr, x.stderr) || x.stderr == "" && stderr != "" {
			t.Errorf("%s: status %d, stdout %q, stderr %q; want %d, %q, %q", x.line, status, stdout, stderr, x.status, x.stdout, x.stderr)
		}
	}
	want := api.CreateWorkspaceRequest{Name: "made", Env: api.Env{"A": "1"}, Resources: api.ResourcesRequest{VCPUs: new(2)}, TTLSeconds: 90, Labels: api.Labels{"k": "v"}}
	if diff := cmp.Diff(want, f.requests[0]); diff != "" {
		t.Errorf("request of ws create (-want +got):\n%s", diff)
	}
}

func TestForkWithAFailedChild(t *testing.T) {
	t.Parallel()
	f, run := newFake(t)
	f.workspaces, f.failChild = []api.Workspace{fakeWorkspace(1, "demo", api.WorkspaceReady)}, true
	status, stdout, stderr := run("fork", "demo", "-n", "3", "--name", "try")
	if status != exitFailure || !strings.Contains(stdout, "2 of 3") || !strings.Contains(stderr, "child 1: step entropy failed (RESEAL_FAILED)") {
		t.Errorf("status %d, %q, %q", status, stdout, stderr)
	}
}

func TestExecPassesOutputAndStatusOn(t *testing.T) {
	t.Parallel()
	f, run := newFake(t)
	f.workspaces = []api.Workspace{fakeWorkspace(1, "demo", api.WorkspaceReady)}
	status, stdout, stderr := run("ws", "exec", "demo", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
	if status != 7 || stdout != "out\n" || stderr != "err\n" {
		t.Errorf("status %d, stdout %q, stderr %q", status, stdout, stderr)
	}
	if status, _, stderr = run("ws", "exec", "demo", "--", "no-such-program"); status != exitNoCommand || !strings.Contains(stderr, "COMMAND_NOT_FOUND") {
		t.Errorf("status %d, stderr %q", status, stderr)
	}
	// Flags after the workspace are the command's, with or without --.
	if status, stdout, stderr = run("ws", "exec", "demo", "echo", "-n", "--json"); status != 0 || stdout != "--json" {
		t.Errorf("status %d, stdout %q, stderr %q", status, stdout, stderr)
	}
	status, stdout, _ = run("ws", "exec", "--json", "demo", "--", "sh", "-c", "echo out; exit 3")
	var res coppice.ExecResult
	if err := json.Unmarshal([]byte(stdout), &res); err != nil || status != 3 || res.ExitCode != 3 || res.Stdout != "out\n" {
		t.Errorf("status %d, %v, %q", status, err, stdout)
	}
	if status, stdout, _ = run("ws", "exec", "-d", "demo", "--", "true"); status != 0 || stdout != fakeID("sess", 4)+"\n" {
		t.Errorf("detached: status %d, %q", status, stdout)
	}
	if status, stdout, _ = run("ws", "logs", "-f", "demo", "00000001"); status != 7 || stdout != "out\n" {
		t.Errorf("logs: status %d, %q", status, stdout)
	}
	if status, stdout, _ = run("ws", "logs", "demo", "--list"); status != 0 || !strings.Contains(stdout, "00000001  exited") {
		t.Errorf("sessions: status %d, %q", status, stdout)
	}
}

func TestExecPassesInputOn(t *testing.T) {
	t.Parallel()
	f, _ := newFake(t)
	f.workspaces = []api.Workspace{fakeWorkspace(1, "demo", api.WorkspaceReady)}
	a, stdout, stderr := testApp(map[string]string{"COPPICE_SERVER": f.url(), "COPPICE_TOKEN": "k"})
	a.stdin = strings.NewReader("one\ntwo\n")
	if status := run(t.Context(), a, []string{"ws", "exec", "-i", "demo", "--", "sort", "-r"}); status != 0 || stdout.String() != "two\none\n" {
		t.Errorf("status %d, stdout %q, stderr %q", status, stdout, stderr)
	}
}

// TestShell drives the command through a real terminal, against a shell on a real terminal.
func TestShell(t *testing.T) {
	// Where the tests run in a script's background, SIGINT is ignored, and so it would be by the shell. What is caught, it has as usual.
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, os.Interrupt)
	defer signal.Stop(caught)
	f, _ := newFake(t)
	f.workspaces = []api.Workspace{fakeWorkspace(1, "demo", api.WorkspaceReady)}
	ours, theirs, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ours.Close() }()
	if err := pty.Setsize(ours, &pty.Winsize{Cols: 100, Rows: 30}); err != nil {
		t.Fatal(err)
	}
	before, err := term.GetState(int(theirs.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	a, _, stderr := testApp(map[string]string{"COPPICE_SERVER": f.url(), "COPPICE_TOKEN": "k", "TERM": "vt220"})
	a.stdin, a.stdout = theirs, theirs
	status := make(chan int, 1)
	go func() {
		status <- run(t.Context(), a, []string{"ws", "shell", "--env", "PS1=ready> ", "demo", "--", "/bin/sh"})
		_, _ = theirs.WriteString("ended: " + stderr.String())
	}()
	screen := watch(t, ours)
	screen.wait("ready> ") // this terminal is raw by now
	typed := func(keys string) {
		if _, err := ours.WriteString(keys); err != nil {
			t.Fatal(err)
		}
	}
	typed("stty size; echo mark-$((1+1))\n")
	screen.wait("30 100")
	screen.wait("mark-2")
	screen.wait("ready> ")
	// The window's size follows.
	if err := pty.Setsize(ours, &pty.Winsize{Cols: 132, Rows: 43}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(os.Getpid(), syscall.SIGWINCH); err != nil {
		t.Fatal(err)
	}
	typed("until [ \"$(stty size)\" = \"43 132\" ]; do :; done; echo now-$((1+2))\n")
	screen.wait("now-3")
	screen.wait("ready> ")
	// Ctrl-C goes to the program.
	typed("sh -c 'echo sleeping-$((3+3)); exec sleep 1000'\n")
	screen.wait("sleeping-6")
	typed("\x03")
	screen.wait("ready> ") // what is typed before the interrupt is handled is dropped, as on any terminal
	typed("echo after-$((2+2))\n")
	screen.wait("after-4")
	typed("exit 5\n")
	if got := <-status; got != 5 {
		t.Errorf("exit status %d, stderr %q", got, stderr)
	}
	after, err := term.GetState(int(theirs.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(before, after) {
		t.Errorf("the terminal was not put back: %+v, was %+v", after, before)
	}
	if got := f.requests[0].(api.ExecRequest); got.Env["TERM"] != "vt220" || !got.PTY || got.Cols != 100 {
		t.Errorf("request %+v", got)
	}
}

// screen is what a terminal shows.
type screen struct {
	t    *testing.T
	come chan string
	text string
}

// watch reads a terminal until it is closed.
func watch(t *testing.T, from *os.File) *screen {
	t.Helper()
	s := &screen{t: t, come: make(chan string, 1000)}
	go func() {
		defer close(s.come)
		for buf := make([]byte, 4096); ; {
			n, err := from.Read(buf)
			if err != nil {
				return
			}
			s.come <- string(buf[:n])
		}
	}()
	return s
}

// wait waits until the text is there, and forgets what came up to it.
func (s *screen) wait(text string) {
	s.t.Helper()
	late := time.NewTimer(5 * time.Minute)
	defer late.Stop()
	for !strings.Contains(s.text, text) {
		select {
		case more := <-s.come:
			s.text += more
		case <-late.C:
			s.t.Fatalf("%q does not come; the terminal shows %q", text, s.text)
		}
	}
	_, s.text, _ = strings.Cut(s.text, text)
}
