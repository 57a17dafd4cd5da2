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

// TestCopyThatCannotFit: what is larger than the whole disk of the workspace is refused before anything is sent.
func TestCopyThatCannotFit(t *testing.T) {
	t.Parallel()
	f, run := clitest.NewServer(t, NewCommand)
	ws := clitest.Workspace(1, "demo", api.WorkspaceReady)
	ws.Resources.DiskGiB = 1
	f.Workspaces = []api.Workspace{ws}
	dir := t.TempDir()
	for _, name := range []string{"one", "two"} { // together they are too large; they take no room here
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(filepath.Join(dir, name), 1<<30); err != nil {
			t.Fatal(err)
		}
	}
	status, _, stderr := run("ws", "cp", dir, "demo:/workspace")
	if status != exit.Exhausted || !strings.Contains(stderr, "so much is the whole disk of workspace demo") || !strings.Contains(stderr, "--disk") {
		t.Errorf("status %d, %q", status, stderr)
	}
}

func TestRoomAt(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	here, ok := roomAt(dir)
	below, ok2 := roomAt(filepath.Join(dir, "not", "yet"))
	if !ok || !ok2 || here <= 0 || below <= 0 {
		t.Errorf("room %d %v, below %d %v", here, ok, below, ok2)
	}
	if err := os.WriteFile(filepath.Join(dir, "f"), make([]byte, 100), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(dir, filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if n := sizeOf(filepath.Join(dir, "link"), 1<<20); n != 100 {
		t.Errorf("the size of a directory behind a link: %d", n)
	}
}
