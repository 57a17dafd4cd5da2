package workspace

import (
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/internal/cli/clitest"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func TestTables(t *testing.T) {
	t.Parallel()
	now := clitest.Dawn.Add(3 * time.Hour)
	var b strings.Builder
	lost := clitest.Workspace(2, "second", api.WorkspaceLost)
	lost.Failure = &api.Failure{Code: "VMM_FAILED", Message: "its VMM was killed\x1b[31m\nconsole: one\ntwo\x1b[31m", RecoverFrom: clitest.ID("ckpt", 7)}
	unknown := clitest.Workspace(3, "third", api.WorkspaceReady)
	unknown.Condition, unknown.ExpiresAt = api.ConditionUnknown, now.Add(10*time.Minute)
	stalled := clitest.Workspace(4, "fourth", api.WorkspaceReady)
	stalled.Condition, stalled.Stall = api.ConditionStalled, &api.WorkspaceStall{Since: clitest.Dawn, Code: "STORE_UNAVAILABLE", Message: "the store is silent"}
	workspaces := clitest.Convert[[]coppice.Workspace](t, []api.Workspace{clitest.Workspace(1, "demo", api.WorkspaceReady), lost, unknown, stalled})
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
	f := &clitest.Server{}
	f.FailChild = true
	b.WriteString("-- fork\n")
	if err := printFork(&b, clitest.Convert[coppice.ForkResult](t, f.Fork(clitest.ID("ckpt", 1), 3, "try")), 1200*time.Millisecond); err != nil {
		t.Error(err)
	}
	clitest.Golden(t, "tables.txt", b.String())
}

// TestForkPrepares: machines are asked for before the fork of a checkpoint, and in the request that forks a workspace.
func TestForkPrepares(t *testing.T) {
	t.Parallel()
	f, run := clitest.NewServer(t, NewForkCommand)
	cp := clitest.Checkpoint(1, 0, nil)
	f.Workspaces, f.Checkpoints = []api.Workspace{clitest.Workspace(1, "demo", api.WorkspaceReady)}, []api.Checkpoint{cp}
	for _, node := range []string{"demo", cp.ID} {
		if status, _, stderr := run("fork", node, "-n", "2", "--prepare", "3"); status != exit.OK {
			t.Errorf("%s: status %d, %q", node, status, stderr)
		}
	}
	if len(f.Requests) != 3 {
		t.Fatalf("%+v", f.Requests)
	}
	fork, isFork := f.Requests[0].(api.ForkWorkspaceRequest)
	ask, isAsk := f.Requests[1].(api.PrepareRequest)
	if !isFork || !isAsk || fork.Checkpoint.Prepare != 3 || ask.Count != 3 {
		t.Errorf("%+v", f.Requests)
	}
}

func TestForkWithAFailedChild(t *testing.T) {
	t.Parallel()
	f, run := clitest.NewServer(t, NewForkCommand)
	f.Workspaces, f.FailChild = []api.Workspace{clitest.Workspace(1, "demo", api.WorkspaceReady)}, true
	status, stdout, stderr := run("fork", "demo", "-n", "3", "--name", "try")
	if status != exit.Failure || !strings.Contains(stdout, "2 of 3") || !strings.Contains(stderr, "child 1: step entropy failed (RESEAL_FAILED)") {
		t.Errorf("status %d, %q, %q", status, stdout, stderr)
	}
}
