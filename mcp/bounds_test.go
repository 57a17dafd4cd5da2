package mcp_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/mcp"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestCallsAreBounded runs as many calls as one key may, and one more. When a client gives up on a call, its program ends
// and the next call is served.
func TestCallsAreBounded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.stdio(t, mcp.Config{}, adminKey, "")
	ws, _ := s.ok(t, "workspace_create", args{"name": "demo"})
	const most = 16
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var calls sync.WaitGroup
	for range most {
		calls.Go(func() {
			_, _ = s.CallTool(ctx, &sdk.CallToolParams{Name: "exec", Arguments: args{"workspace": "demo", "command": []string{"sleep", "3600"}, "wait_seconds": 600}})
		})
	}
	running := func() int {
		sessions, err := coppice.Collect(w.admin.Sessions(t.Context(), ws["id"].(string)))
		if err != nil {
			t.Fatal(err)
		}
		return len(slices.DeleteFunc(sessions, func(s coppice.Session) bool { return s.State == coppice.SessionExited }))
	}
	eventually.True(t, "every call runs its program", func() bool { return running() == most })
	s.refused(t, "TOO_MANY_CALLS", "workspace_list", args{})
	if _, err := s.ListTools(t.Context(), nil); err != nil {
		t.Errorf("the list of tools takes no slot, but: %v", err)
	}
	cancel()
	calls.Wait()
	eventually.True(t, "cancelled programs end", func() bool { return running() == 0 })
	eventually.True(t, "a call is served again", func() bool { return !s.call(t, "workspace_list", args{}).IsError })
}

// TestAnswersAreClipped gives the server texts that are longer than what it passes on.
func TestAnswersAreClipped(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.stdio(t, mcp.Config{}, adminKey, "")
	s.ok(t, "workspace_create", args{"name": "demo"})
	text := s.refused(t, "INVALID_ARGUMENTS", "exec_kill", args{"session": strings.Repeat("x", 1<<20)})
	if len(text) > 8<<10 {
		t.Errorf("an error has %d bytes", len(text))
	}
	out, text := s.ok(t, "exec", args{"workspace": "demo", "command": []string{"fill", fmt.Sprint(1 << 19)}, "max_bytes": 65536})
	if stdout := out["stdout"].(map[string]any); stdout["total_bytes"] != float64(1<<19) || len(stdout["base64"].(string)) > 88<<10 || len(text) > 1024 {
		t.Errorf("%v bytes of output: %d in the answer, %d of text", stdout["total_bytes"], len(stdout["base64"].(string)), len(text))
	}
	s.refused(t, "INVALID_ARGUMENTS", "exec", args{"workspace": "demo", "command": []string{"true"}, "max_bytes": 65537})
}

// TestLongMessages: a message that is too long ends the connection, not the process.
func TestLongMessages(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.stdioThatEnds(t, mcp.Config{}, adminKey, "", "exceeded the configured maximum")
	s.ok(t, "workspace_create", args{"name": "demo"})
	s.ok(t, "file_write", args{"workspace": "demo", "path": "/a", "content": strings.Repeat("x", 3<<20)})
	if _, err := s.CallTool(t.Context(), &sdk.CallToolParams{Name: "file_write", Arguments: args{"workspace": "demo", "path": "/a", "content": strings.Repeat("x", 5<<20)}}); err == nil {
		t.Error("a message of 5 MiB was taken")
	}
	if out, _ := w.stdio(t, mcp.Config{}, adminKey, "").ok(t, "file_read", args{"workspace": "demo", "path": "/a"}); out["size_bytes"] != float64(3<<20) {
		t.Errorf("the file: %v bytes", out["size_bytes"])
	}
}

// TestListings lists a directory in pieces, with names that a guest chose.
func TestListings(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.stdio(t, mcp.Config{}, adminKey, "")
	ws, _ := s.ok(t, "workspace_create", args{"name": "demo"})
	for i := range 5 {
		if _, err := w.admin.WriteFile(t.Context(), ws["id"].(string), fmt.Sprintf("/dir/%d\x1b[2J", i), strings.NewReader("x"), coppice.WriteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.admin.WriteFile(t.Context(), ws["id"].(string), "/dir/z"+strings.Repeat("y", 2000), strings.NewReader("x"), coppice.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	page, text := s.ok(t, "file_list", args{"workspace": "demo", "path": "/dir", "limit": 4})
	if entries := page["entries"].([]any); len(entries) != 4 || page["next_offset"] != 4.0 || page["untrusted"] != true {
		t.Errorf("first page: %v", page)
	}
	if strings.Contains(text, "\x1b") || !strings.Contains(text, `0\x1b[2J`) || !strings.Contains(text, "file_list with offset 4") {
		t.Errorf("first page: %s", text)
	}
	page, _ = s.ok(t, "file_list", args{"workspace": "demo", "path": "/dir", "offset": 4})
	entries := page["entries"].([]any)
	if len(entries) != 2 || page["next_offset"] != nil {
		t.Fatalf("second page: %v", page)
	}
	if name := entries[1].(map[string]any)["name"].(string); len(name) > 1100 || !strings.Contains(name, "more bytes") {
		t.Errorf("a long name has %d bytes", len(name))
	}
}
