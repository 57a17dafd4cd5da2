package mcp_test

import (
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/mcp"
)

// TestWorkspaceTools makes, lists, shows, suspends, resumes and deletes a workspace.
func TestWorkspaceTools(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.stdio(t, mcp.Config{}, adminKey, "")
	made, text := s.ok(t, "workspace_create", args{"name": "demo", "env": args{"PASSWORD": "hunter2"}, "labels": args{"k": "v"}, "allow": []string{"api.example.com"}})
	if made["state"] != "ready" || made["name"] != "demo" || !strings.Contains(text, "api.example.com") {
		t.Errorf("created: %v\n%s", made, text)
	}
	shown, text := s.ok(t, "workspace_show", args{"workspace": "demo"})
	if shown["id"] != made["id"] || strings.Contains(text, "hunter2") || !strings.Contains(text, "PASSWORD") {
		t.Errorf("shown: %v\n%s", shown, text)
	}
	for range 2 {
		s.ok(t, "workspace_create", args{})
	}
	page, text := s.ok(t, "workspace_list", args{"limit": 2})
	if len(page["workspaces"].([]any)) != 2 || page["next_offset"] != 2.0 || !strings.Contains(text, "workspace_list with offset 2") {
		t.Errorf("first page: %v\n%s", page, text)
	}
	if page, _ = s.ok(t, "workspace_list", args{"limit": 2, "offset": 2}); len(page["workspaces"].([]any)) != 1 || page["next_offset"] != nil {
		t.Errorf("second page: %v", page)
	}
	if page, _ = s.ok(t, "workspace_list", args{"label": "k=v"}); len(page["workspaces"].([]any)) != 1 {
		t.Errorf("by label: %v", page)
	}
	for _, state := range []string{"suspended", "ready"} {
		if ws, _ := s.ok(t, "workspace_set_state", args{"workspace": "demo", "state": state}); ws["state"] != state {
			t.Errorf("set to %s: %v", state, ws)
		}
	}
	if ws, _ := s.ok(t, "workspace_delete", args{"workspace": "demo"}); ws["state"] != "terminated" {
		t.Errorf("deleted: %v", ws)
	}
	s.refused(t, "WORKSPACE_NOT_FOUND", "workspace_show", args{"workspace": "demo"})
	s.refused(t, "WORKSPACE_NOT_FOUND", "workspace_show", args{"workspace": "ws_00000000000000000000000000"})
	s.refused(t, "INVALID_ARGUMENTS", "workspace_show", args{})
	s.refused(t, "INVALID_ARGUMENTS", "workspace_show", args{"workspace": "Not A Name"})
	s.refused(t, "INVALID_ARGUMENTS", "workspace_show", args{"workspace": 7})
	s.refused(t, "INVALID_ARGUMENTS", "workspace_show", args{"workspace": "demo", "extra": 1})
	s.refused(t, "IMAGE_NOT_FOUND", "workspace_create", args{"image": "absent"})
}

// TestExec runs programs in the foreground and in the background, and reads their output by offset.
func TestExec(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.stdio(t, mcp.Config{}, adminKey, "")
	s.ok(t, "workspace_create", args{"name": "demo"})
	out, text := s.ok(t, "exec", args{"workspace": "demo", "command": []string{"echo", "hello"}})
	if stdout := out["stdout"].(map[string]any); stdout["text"] != "hello\n" || stdout["untrusted"] != true || out["exit_code"] != 0.0 {
		t.Errorf("echo: %v", out)
	}
	if !strings.Contains(text, "ended with exit code 0") || !strings.Contains(text, "<untrusted-data") {
		t.Errorf("text: %s", text)
	}
	if out, _ = s.ok(t, "exec", args{"workspace": "demo", "command": []string{"exit", "3"}}); out["exit_code"] != 3.0 {
		t.Errorf("exit: %v", out)
	}
	if out, _ = s.ok(t, "exec", args{"workspace": "demo", "command": []string{"cat"}, "stdin": "input"}); out["stdout"].(map[string]any)["text"] != "input" {
		t.Errorf("stdin: %v", out)
	}

	long := strings.Repeat("0123456789", 1000)
	out, text = s.ok(t, "exec", args{"workspace": "demo", "command": []string{"echo", long}, "max_bytes": 100})
	stdout := out["stdout"].(map[string]any)
	if stdout["offset"] != 9901.0 || stdout["next_offset"] != 10001.0 || stdout["total_bytes"] != 10001.0 || len(stdout["text"].(string)) != 100 {
		t.Errorf("the end of long output: %v", stdout)
	}
	if !strings.Contains(text, "Earlier output: exec_output with session "+out["session"].(string)+", stream stdout") {
		t.Errorf("it does not say how to get the rest: %s", text)
	}
	var all strings.Builder
	for offset := 0.0; offset < 10001; {
		piece, _ := s.ok(t, "exec_output", args{"session": out["session"], "offset": offset, "max_bytes": 4096})
		stdout := piece["stdout"].(map[string]any)
		all.WriteString(stdout["text"].(string))
		offset = stdout["next_offset"].(float64)
	}
	if all.String() != long+"\n" {
		t.Errorf("read by offset: %d bytes", all.Len())
	}
	s.refused(t, "INVALID_ARGUMENTS", "exec_output", args{"session": out["session"], "offset": 10002})

	out, _ = s.ok(t, "exec", args{"workspace": "demo", "command": []string{"sleep", "3600"}, "background": true})
	if out["state"] != "running" {
		t.Errorf("background: %v", out)
	}
	if out, _ = s.ok(t, "exec_output", args{"session": out["session"], "stream": "stderr"}); out["state"] != "running" || out["stderr"].(map[string]any)["total_bytes"] != 0.0 {
		t.Errorf("nothing yet: %v", out)
	}
	s.ok(t, "exec_kill", args{"session": out["session"], "signal": "SIGTERM"})
	if out, _ = s.ok(t, "exec_output", args{"session": out["session"], "wait_seconds": 60}); out["state"] != "exited" {
		t.Errorf("after a signal: %v", out)
	}
	s.ok(t, "exec_kill", args{"session": out["session"]})
	s.refused(t, "SESSION_NOT_FOUND", "exec_output", args{"session": out["session"]})
	if out, text = s.ok(t, "exec", args{"workspace": "demo", "command": []string{"sleep", "3600"}, "wait_seconds": 1}); out["state"] != "running" || !strings.Contains(text, "exec_output") {
		t.Errorf("longer than the wait: %v\n%s", out, text)
	}
	if out, _ = s.ok(t, "exec", args{"workspace": "demo", "command": []string{"sleep", "3600"}, "timeout_seconds": 1}); out["timed_out"] != true {
		t.Errorf("timeout: %v", out)
	}
	s.refused(t, "COMMAND_NOT_FOUND", "exec", args{"workspace": "demo", "command": []string{"absent"}})
	s.refused(t, "INVALID_ARGUMENTS", "exec", args{"workspace": "demo"})
	s.refused(t, "INVALID_ARGUMENTS", "exec", args{"workspace": "demo", "command": []string{"true"}, "shell": "true"})
}

// TestFiles writes and reads files, whole and in pieces.
func TestFiles(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.stdio(t, mcp.Config{}, adminKey, "")
	s.ok(t, "workspace_create", args{"name": "demo"})
	content := strings.Repeat("ä", 3000)
	if out, _ := s.ok(t, "file_write", args{"workspace": "demo", "path": "/a", "content": content}); out["size_bytes"] != 6000.0 {
		t.Errorf("written: %v", out)
	}
	var all strings.Builder
	for offset := any(0); offset != nil; {
		piece, _ := s.ok(t, "file_read", args{"workspace": "demo", "path": "/a", "offset": offset, "max_bytes": 1001})
		if piece["untrusted"] != true || piece["base64"] != nil {
			t.Fatalf("a piece: %v", piece)
		}
		all.WriteString(piece["text"].(string))
		offset = piece["next_offset"]
	}
	if all.String() != content {
		t.Errorf("read %d bytes", all.Len())
	}
	s.ok(t, "file_write", args{"workspace": "demo", "path": "/b", "content": "AP8=", "encoding": "base64"})
	if out, text := s.ok(t, "file_read", args{"workspace": "demo", "path": "/b"}); out["base64"] != "AP8=" || !strings.Contains(text, "2 bytes that are not text") {
		t.Errorf("bytes: %v\n%s", out, text)
	}
	s.refused(t, "FILE_NOT_FOUND", "file_read", args{"workspace": "demo", "path": "/absent"})
	s.refused(t, "INVALID_ARGUMENTS", "file_read", args{"workspace": "demo", "path": "/b", "offset": 3})
	s.refused(t, "INVALID_ARGUMENTS", "file_write", args{"workspace": "demo", "path": "/b", "content": "%", "encoding": "base64"})
}
