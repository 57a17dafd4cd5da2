package workspace

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/internal/cli/clitest"
	"github.com/coppice-dev/coppice/internal/cli/exit"
)

func TestStep(t *testing.T) {
	t.Parallel()
	f, run := clitest.NewServer(t, NewStepCommand)
	cp := clitest.Checkpoint(1, 0, nil)
	f.Checkpoints = []api.Checkpoint{cp}
	file := filepath.Join(t.TempDir(), "actions.json")
	if err := os.WriteFile(file, []byte(`{"actions":[{"command":["true"]},{"files":[{"path":"/a"}]},
		{"command":["true"],"checkpoint":{"prepare":3}},{"command":["true"],"keep":"nothing"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	status, stdout, stderr := run("step", cp.ID, file, "--prepare", "2")
	for i, one := range f.Requests[0].(api.StepRequest).Actions {
		if want := []int{2, 2, 3, 0}[i]; one.Checkpoint.Prepare != want {
			t.Errorf("%d machines of action %d are asked for, want %d", one.Checkpoint.Prepare, i, want)
		}
	}
	lines := strings.Split(strings.TrimSpace(stdout), "\n")
	if status != exit.OK || len(lines) != 5 || !strings.Contains(lines[1], "checkpoint  "+clitest.ID("ckpt", 1)) || !strings.Contains(lines[2], "CAPACITY") {
		t.Errorf("status %d, %q, %q", status, stdout, stderr)
	}
	for request, says := range map[string]string{
		`{"action":[]}`: file + `: json: unknown field "action"`, `{"actions":[]} {"actions":[]}`: file + ": more follows after the request",
	} {
		if err := os.WriteFile(file, []byte(request), 0o600); err != nil {
			t.Fatal(err)
		}
		if status, _, stderr = run("step", cp.ID, file); status != exit.Usage || !strings.Contains(stderr, says) {
			t.Errorf("%s: status %d, %q", request, status, stderr)
		}
	}
	absent := filepath.Join(t.TempDir(), "absent")
	if status, _, stderr = run("step", cp.ID, absent); status != exit.Usage || strings.Count(stderr, absent) != 1 {
		t.Errorf("status %d, %q", status, stderr)
	}
}
