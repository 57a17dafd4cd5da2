package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestMCP has an agent's host start the built program and use a real machine: a program, a file, a checkpoint, a fork that goes on
// from it, what differs between the two, and the end.
func TestMCP(t *testing.T) {
	s := theStack(t)
	cmd := exec.Command(s.binary, "mcp")
	cmd.Env = append(os.Environ(), "COPPICE_SERVER="+s.server, "COPPICE_TOKEN="+s.token, "COPPICE_CONNECTION="+filepath.Join(t.TempDir(), "none"))
	var log strings.Builder
	cmd.Stderr = &log
	client := mcp.NewClient(&mcp.Implementation{Name: "e2e", Version: "1"}, nil)
	session, err := client.Connect(t.Context(), &mcp.CommandTransport{Command: cmd, TerminateDuration: stopPatience}, nil)
	if err != nil {
		t.Fatalf("%v: %s", err, log.String())
	}
	defer func() {
		began := time.Now()
		if err := session.Close(); err != nil || cmd.ProcessState.ExitCode() != 0 {
			t.Errorf("the server ended with %v after %s: %v: %s", cmd.ProcessState, time.Since(began), err, log.String())
		}
	}()
	call := func(tool string, in map[string]any) map[string]any {
		t.Helper()
		began := time.Now()
		res, err := session.CallTool(t.Context(), &mcp.CallToolParams{Name: tool, Arguments: in})
		if err != nil {
			t.Fatalf("%s: %v: %s", tool, err, log.String())
		}
		text := res.Content[0].(*mcp.TextContent).Text
		if res.IsError {
			t.Fatalf("%s: %s", tool, text)
		}
		t.Logf("%s: %.1f s: %s", tool, time.Since(began).Seconds(), strings.SplitN(text, "\n", 2)[0])
		out, _ := res.StructuredContent.(map[string]any)
		return out
	}

	made := call("workspace_create", map[string]any{"image": string(baseImage(t)), "memory_mib": 256}) // its template has been booted
	id := made["id"].(string)
	endWithTest(t, s, id)
	call("file_write", map[string]any{"workspace": id, "path": "/tmp/mcp/input", "content": "41\n"})
	out := call("exec", map[string]any{"workspace": id, "shell": "read n < /tmp/mcp/input; echo $((n + 1)) > /tmp/mcp/output; cat /tmp/mcp/output; echo done >&2; exit 7"})
	if out["exit_code"] != 7.0 || out["stdout"].(map[string]any)["text"] != "42\n" || out["stderr"].(map[string]any)["text"] != "done\n" {
		t.Errorf("exec: %v", out)
	}
	node := call("checkpoint", map[string]any{"workspace": id, "annotations": map[string]any{"score": 0.5}})
	child := call("fork", map[string]any{"of": node["id"]})["children"].([]any)[0].(map[string]any)["workspace"].(map[string]any)["id"].(string)
	endWithTest(t, s, child)
	if out = call("exec", map[string]any{"workspace": child, "command": []string{"cat", "/tmp/mcp/output"}}); out["stdout"].(map[string]any)["text"] != "42\n" {
		t.Errorf("exec in the fork: %v", out)
	}
	if list := call("file_list", map[string]any{"workspace": child, "path": "/tmp/mcp"}); len(list["entries"].([]any)) != 2 {
		t.Errorf("files of the fork: %v", list)
	}
	if drawn := call("tree", map[string]any{"of": node["id"]}); len(drawn["nodes"].([]any)) != 1 {
		t.Errorf("tree: %v", drawn)
	}
	if ws := call("workspace_delete", map[string]any{"workspace": child}); ws["state"] != string(coppice.WorkspaceTerminated) {
		t.Errorf("deleted: %v", ws)
	}
}
