package host

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/cli/clitest"
	"github.com/coppice-dev/coppice/runner/trash"
)

// TestRunnerTrash lists what is in the trash of a data directory, and keeps and releases it.
func TestRunnerTrash(t *testing.T) {
	t.Parallel()
	data := t.TempDir()
	in := trash.Dir(filepath.Join(data, "runner")) // as internal/daemon.TestFailover finds it, too
	id, other := core.NewID[core.CheckpointID](), core.NewID[core.CheckpointID]()
	for _, dir := range []string{trash.Path(in, id), filepath.Join(data, "runner", "checkpoints", string(other))} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	run := func(args ...string) (int, string) {
		a, stdout, _ := clitest.App(nil)
		status := a.Run(t.Context(), append(append([]string{"runner-trash"}, args...), "--data-dir", data), NewTrashCommand)
		return status, stdout.String()
	}
	if status, out := run(); status != 0 || !strings.Contains(out, string(id)) || strings.Contains(out, string(other)) || strings.Contains(out, "yes") {
		t.Errorf("status %d: %s", status, out)
	}
	if status, _ := run("keep", string(id)); status != 0 || !trash.Kept(in, id) {
		t.Errorf("keep: status %d", status)
	}
	if status, out := run(); status != 0 || !strings.Contains(out, "yes") {
		t.Errorf("status %d: %s", status, out)
	}
	if status, _ := run("release", string(id)); status != 0 || trash.Kept(in, id) {
		t.Errorf("release: status %d", status)
	}
	if status, _ := run("keep", string(other)); status == 0 {
		t.Error("what is not in the trash is kept")
	}
	if status, _ := run("release", string(other)); status == 0 {
		t.Error("what is not in the trash is released")
	}
	if status, _ := run("keep", "../x"); status == 0 {
		t.Error("another path is an id")
	}
}
