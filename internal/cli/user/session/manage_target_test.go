package session

import (
	"testing"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/internal/cli/clitest"
)

// TestSignalTarget sends a signal to the processes of a session that --target names.
func TestSignalTarget(t *testing.T) {
	t.Parallel()
	f, run := clitest.NewServer(t, groupWS, NewCommand)
	f.Workspaces = append(f.Workspaces, clitest.Workspace(1, "demo", api.WorkspaceReady))
	if status, stdout, stderr := run("ws", "exec", "-d", "demo", "--", "sleep", "600"); status != 0 {
		t.Fatalf("exec: status %d, %s %s", status, stdout, stderr)
	}
	if status, _, stderr := run("session", "kill", "demo", "00000001", "-s", "KILL", "--target", "process"); status != 0 {
		t.Fatalf("status %d, %s", status, stderr)
	}
	if r, ok := f.Requests[len(f.Requests)-1].(api.SignalRequest); !ok || r.Signal != "SIGKILL" || r.Target != api.SignalProcess {
		t.Errorf("%+v", f.Requests)
	}
	if status, _, stderr := run("session", "kill", "demo", "nosuchsession"); status != 66 {
		t.Errorf("a session that is not there: status %d, %s", status, stderr)
	}
}
