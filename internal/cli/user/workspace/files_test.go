package workspace

import (
	"reflect"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/internal/cli/clitest"
)

// TestFileCommands: the commands ask for what the flags say, and what the workspace says is harmless to a terminal.
func TestFileCommands(t *testing.T) {
	t.Parallel()
	f, run := clitest.NewServer(t, NewCommand)
	f.Workspaces = append(f.Workspaces, clitest.Workspace(1, "demo", api.WorkspaceReady))
	for line, want := range map[string]struct {
		text     string
		requests []any
	}{
		"ws mkdir -p -m 0700 -u ann demo:/d":     {"", []any{api.MakeDirectoryRequest{Path: "/d", Parents: true, Mode: "0700", User: "ann"}}},
		"ws mv -n demo:/a /b":                    {"", []any{api.RenameFileRequest{From: "/a", To: "/b", NoReplace: true}}},
		"ws stat -u ann demo:/f":                 {"1000 (ann\\x1b)", []any{"ann"}},
		"ws watch -r demo:/d":                    {"create   /d/\\x1bx\nwrite    /d/\\x1bx\n", []any{api.CreateWatchRequest{Path: "/d", Recursive: true}, clitest.ID("watch", 1)}},
		"ws create --ttl 1h --on-ttl suspend -q": {clitest.ID("ws", 9), nil},
	} {
		f.Requests = nil
		status, stdout, stderr := run(strings.Fields(line)...)
		if status != 0 || !strings.Contains(stdout, want.text) || strings.Contains(stdout, "\x1b") {
			t.Errorf("%s: status %d, %q %s", line, status, stdout, stderr)
		}
		if want.requests != nil && !reflect.DeepEqual(f.Requests, want.requests) {
			t.Errorf("%s: %+v", line, f.Requests)
		}
		if r, ok := f.Requests[0].(api.CreateWorkspaceRequest); ok && (r.OnTTL != api.TTLSuspend || r.TTLSeconds != 3600) {
			t.Errorf("%s: %+v", line, r)
		}
	}
	for _, line := range []string{"ws mkdir demo", "ws mkdir demo:rel", "ws create --on-ttl suspend"} {
		if status, _, stderr := run(strings.Fields(line)...); status != 2 {
			t.Errorf("%s: status %d, %s", line, status, stderr)
		}
	}
}
