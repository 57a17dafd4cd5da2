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
	if err := os.WriteFile(file, []byte(`{"actions":[{"command":["true"]},{"files":[{"path":"/a"}]}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	status, stdout, stderr := run("step", cp.ID, file)
	lines := strings.Split(strings.TrimSpace(stdout), "\n")
	if status != exit.OK || len(lines) != 3 || !strings.Contains(lines[1], "checkpoint  "+clitest.ID("ckpt", 1)) || !strings.Contains(lines[2], "CAPACITY") {
		t.Errorf("status %d, %q, %q", status, stdout, stderr)
	}
	if err := os.WriteFile(file, []byte(`{"action":[]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if status, _, stderr = run("step", cp.ID, file); status != exit.Usage || !strings.Contains(stderr, `unknown field "action"`) {
		t.Errorf("status %d, %q", status, stderr)
	}
}
