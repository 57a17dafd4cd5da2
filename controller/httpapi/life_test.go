package httpapi_test

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/coder/websocket"
	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/api"
)

// TestLife walks through every operation of the contract once; do checks each answer against it.
func TestLife(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, p := range []string{"/healthz", "/readyz"} {
		if got := w.do(call{method: "GET", path: p, key: "-"}); got.status != 200 {
			t.Fatalf("%s: %d %s", p, got.status, got.body)
		}
	}
	if got := w.do(call{method: "GET", path: "/openapi.yaml", key: "-"}); got.status != 200 || string(got.body) != string(api.Specification()) {
		t.Fatal("the specification is not served as it is")
	}

	var ws api.Workspace
	w.want(201, "POST", "/v1/workspaces", map[string]any{
		"name": "main", "image": "base", "resources": map[string]any{"disk_gib": 4}, "env": map[string]any{"A": "1"}, "labels": map[string]any{"team": "x"}, "ttl_seconds": 3600,
	}, &ws)
	if ws.State != api.WorkspaceReady || ws.Resources.DiskGiB != 4 || ws.Resources.MemoryMiB != 512 || ws.Network.EgressPolicy != api.EgressDenyAll ||
		ws.Network.IP == "" || ws.Env["A"] != "1" || ws.ExpiresAt.IsZero() || len(ws.Timings) == 0 {
		t.Fatalf("created: %+v", ws)
	}
	at := "/v1/workspaces/" + ws.ID
	w.want(200, "GET", at, nil, &ws)
	var patched api.Workspace
	w.want(200, "PATCH", at, map[string]any{"version": ws.Version, "labels": map[string]any{"team": nil, "k": "v"}, "ttl_seconds": 0}, &patched)
	if patched.Version != ws.Version+1 || len(patched.Labels) != 1 || patched.Labels["k"] != "v" || !patched.ExpiresAt.IsZero() {
		t.Fatalf("patched: %+v", patched)
	}
	if p := w.do(call{method: "PATCH", path: at, body: `{"version":1,"labels":{"k":"w"}}`}).problem(t); p.Code != "VERSION_CONFLICT" || p.CurrentVersion != patched.Version {
		t.Errorf("conflict: %+v", p)
	}

	w.exec(ws)
	w.files(ws)
	w.tree(ws)

	var ports api.PortList
	var port api.Port
	w.want(201, "POST", at+"/ports", map[string]any{"guest_port": 80}, &port)
	w.want(200, "GET", at+"/ports", nil, &ports)
	if len(ports.Items) != 1 || ports.Items[0].ID != port.ID || strings.HasSuffix(port.Listen, ":0") {
		t.Errorf("ports: %+v", ports)
	}
	w.want(204, "DELETE", at+"/ports/"+port.ID, nil, nil)
	w.want(404, "DELETE", at+"/ports/"+port.ID, nil, nil)
	if got := w.want(200, "GET", at+"/console", nil, nil); !strings.HasPrefix(string(got.body), "console of sbx_") {
		t.Errorf("console: %s", got.body)
	}
	var processes api.ProcessList
	w.want(200, "GET", at+"/processes", nil, &processes)
	var images api.ImageList
	w.want(200, "GET", "/v1/images", nil, &images)
	if len(images.Items) != 1 || images.Items[0].Name != "base" || len(images.Items[0].RunnerIDs) != 1 {
		t.Errorf("images: %+v", images)
	}
	var runners api.RunnerList
	w.want(200, "GET", "/v1/runners", nil, &runners)
	if len(runners.Items) != 1 || runners.Items[0].State != api.RunnerReady {
		t.Errorf("runners: %+v", runners)
	}

	var op api.Operation
	w.want(202, "DELETE", at+"?wait=0", nil, &op)
	w.want(200, "GET", "/v1/operations/"+op.ID+"?wait=30", nil, &op)
	var gone api.Workspace
	if err := json.Unmarshal(op.Result, &gone); err != nil || op.State != api.OperationSucceeded || gone.State != api.WorkspaceTerminated {
		t.Errorf("terminated: %+v, %v", op, err)
	}
	w.want(200, "POST", at+"/terminate", nil, &gone)
	if p := w.do(call{method: "POST", path: at + "/exec", body: `{"command":["true"]}`}); p.status != 409 || p.problem(t).Code != "WORKSPACE_NOT_READY" {
		t.Errorf("exec in a terminated workspace: %d %s", p.status, p.body)
	}
}

func (w *world) exec(ws api.Workspace) {
	t, at := w.t, "/v1/workspaces/"+ws.ID
	t.Helper()
	var out api.ExecResult
	w.want(200, "POST", at+"/exec", map[string]any{"command": []string{"echo", "hällo"}}, &out)
	if out.Stdout != "hällo\n" || out.ExitCode != 0 || out.Encoding != api.EncodingUTF8 || len(out.Timings) == 0 {
		t.Errorf("echo: %+v", out)
	}
	w.want(200, "POST", at+"/exec", map[string]any{"command": []string{"fill", "2000000"}}, &out)
	raw, err := base64.StdEncoding.DecodeString(out.Stdout)
	if err != nil || len(raw) != 1<<20 || !out.StdoutTruncated || out.Encoding != api.EncodingBase64 || raw[0] != byte((2000000-1<<20)&0xff) {
		t.Errorf("fill: %d bytes, %v, %v", len(raw), out.StdoutTruncated, err)
	}
	w.want(200, "POST", at+"/exec", map[string]any{"command": []string{"exit", "7"}}, &out)
	if out.ExitCode != 7 {
		t.Errorf("exit: %+v", out)
	}
	w.want(200, "POST", at+"/exec", map[string]any{"command": []string{"sleep", "60"}, "timeout_ms": 20}, &out)
	if !out.TimedOut || out.Signal != "SIGKILL" {
		t.Errorf("timeout: %+v", out)
	}
	w.want(200, "POST", at+"/exec", map[string]any{"command": []string{"cat"}, "stdin_base64": []byte{0xff, 0, 1}}, &out)
	if out.Encoding != api.EncodingBase64 || out.Stdout != "/wAB" {
		t.Errorf("binary stdin: %+v", out)
	}
	if got := w.do(call{method: "POST", path: at + "/exec", body: `{"command":["nosuch"]}`}); got.status != 404 || got.problem(t).Code != "COMMAND_NOT_FOUND" {
		t.Errorf("no such command: %d %s", got.status, got.body)
	}

	var s api.Session
	w.want(201, "POST", at+"/exec", map[string]any{"command": []string{"cat"}, "wait": false, "stdin_open": true}, &s)
	one := "/v1/sessions/" + s.ID
	if got := w.do(call{method: "POST", path: one + "/stdin", body: "first ", header: map[string]string{"Content-Type": "application/octet-stream"}}); got.status != 204 {
		t.Errorf("stdin: %d %s", got.status, got.body)
	}
	w.want(204, "POST", one+"/resize", map[string]any{"cols": 100, "rows": 30}, nil)
	w.attach(s)
	w.want(200, "GET", one+"?wait=20", nil, &s)
	if s.State != api.SessionExited || s.ExitCode == nil || *s.ExitCode != 0 || s.StdoutBytes != int64(len("first second")) {
		t.Errorf("session: %+v", s)
	}
	got := w.want(200, "GET", one+"/output?stream=stdout&offset=6&follow=true", nil, nil)
	if string(got.body) != "second" || got.header.Get("Coppice-Offset") != "6" {
		t.Errorf("output: %q %v", got.body, got.header)
	}
	var list api.SessionList
	w.want(200, "GET", at+"/sessions?limit=2", nil, &list)
	if len(list.Items) != 2 || list.NextCursor == "" || list.Items[0].ID != s.ID {
		t.Errorf("sessions: %+v", list)
	}
	w.want(200, "GET", at+"/sessions?limit=100&cursor="+list.NextCursor, nil, &list)
	if len(list.Items) != 4 || list.NextCursor != "" {
		t.Errorf("second page of sessions: %d, %q", len(list.Items), list.NextCursor)
	}
	w.want(204, "DELETE", one, nil, nil)
	w.want(404, "GET", one, nil, nil)
	w.want(201, "POST", at+"/exec", map[string]any{"command": []string{"sleep", "60"}, "wait": false}, &s)
	w.want(204, "POST", "/v1/sessions/"+s.ID+"/signal", map[string]any{"signal": "TERM"}, nil)
	w.want(200, "GET", "/v1/sessions/"+s.ID+"?wait=20", nil, &s)
	if s.Signal != "SIGTERM" {
		t.Errorf("signal: %+v", s)
	}
}

// attach writes "second" over a WebSocket, and proves that a token works once.
func (w *world) attach(s api.Session) {
	t := w.t
	t.Helper()
	var a api.Attachment
	w.want(201, "POST", "/v1/sessions/"+s.ID+"/attach", nil, &a)
	target := strings.Replace(w.url, "http", "ws", 1) + a.URL + "?token=" + url.QueryEscape(a.Token)
	conn, res, err := websocket.Dial(t.Context(), target, nil) //nolint:bodyclose // of a 101; conn has it
	if err != nil {
		t.Fatalf("attach: %v, %+v", err, res)
	}
	defer func() { _ = conn.CloseNow() }()
	if err := conn.Write(t.Context(), websocket.MessageBinary, []byte("second")); err != nil {
		t.Fatal(err)
	}
	got := ""
	for {
		kind, b, err := conn.Read(t.Context())
		if err != nil {
			t.Fatalf("read: %v after %q", err, got)
		}
		if kind == websocket.MessageText {
			if !strings.Contains(string(b), `"exit"`) {
				t.Errorf("text message: %s", b)
			}
			break
		}
		if b[0] != 1 || binary.BigEndian.Uint64(b[1:9]) != uint64(len(got)) {
			t.Errorf("frame head: %v", b[:9])
		}
		if got += string(b[9:]); got == "first second" {
			if err := conn.Write(t.Context(), websocket.MessageText, []byte(`{"type":"close_stdin"}`)); err != nil {
				t.Fatal(err)
			}
		}
	}
	again := w.do(call{method: "GET", path: a.URL + "?token=" + url.QueryEscape(a.Token), key: "-", header: map[string]string{
		"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "x3JJHMbDL1EzLkh9GBhXDw==",
	}})
	if again.status != 401 || again.problem(t).Code != "UNAUTHENTICATED" {
		t.Errorf("a spent token: %d %s", again.status, again.body)
	}
}

func (w *world) files(ws api.Workspace) {
	t := w.t
	t.Helper()
	at := "/v1/workspaces/" + ws.ID + "/files?path=" + url.QueryEscape("/workspace/ä b")
	content := strings.Repeat("content ", 100_000)
	if got := w.do(call{method: "PUT", path: at + "&mkdirs=true", body: content, header: map[string]string{"Content-Type": "application/octet-stream"}}); got.status != 200 {
		t.Fatalf("put: %d %s", got.status, got.body)
	}
	if got := w.do(call{method: "GET", path: at}); got.status != 200 || string(got.body) != content || got.header.Get("Coppice-File") == "" {
		t.Errorf("get: %d, %d bytes, %v", got.status, len(got.body), got.header)
	}
	if got := w.do(call{method: "HEAD", path: at}); got.status != 200 || !strings.Contains(got.header.Get("Coppice-File"), `"size":800000`) {
		t.Errorf("head: %d %v", got.status, got.header)
	}
	w.want(204, "DELETE", at, nil, nil)
	if got := w.do(call{method: "GET", path: at}); got.status != 404 || got.problem(t).Code != "FILE_NOT_FOUND" {
		t.Errorf("get after delete: %d %s", got.status, got.body)
	}
	if got := w.do(call{method: "HEAD", path: at}); got.status != 404 || len(got.body) != 0 {
		t.Errorf("head after delete: %d %s", got.status, got.body)
	}
	if got := w.do(call{method: "PUT", path: at, body: "x", header: map[string]string{"Content-Type": "text/plain"}}); got.status != 415 {
		t.Errorf("put of another type: %d", got.status)
	}
}

func (w *world) tree(ws api.Workspace) {
	t, at := w.t, "/v1/workspaces/"+ws.ID
	t.Helper()
	var cp api.Checkpoint
	w.want(201, "POST", at+"/checkpoints", map[string]any{"name": "first", "annotations": map[string]any{"score": 0.5, "big": json.Number("12345678901234567890")}}, &cp)
	if cp.State != api.CheckpointCaptured || cp.ParentID != ws.CheckpointID || cp.RunnerClass == nil {
		t.Errorf("checkpoint: %+v", cp)
	}
	one := "/v1/checkpoints/" + cp.ID
	got := w.want(200, "PATCH", one, map[string]any{"version": cp.Version, "annotations": map[string]any{"visits": 3, "score": nil}}, nil)
	if !strings.Contains(string(got.body), `"annotations":{"big":12345678901234567890,"visits":3}`) {
		t.Errorf("annotations: %s", got.body)
	}
	if p := w.do(call{method: "PATCH", path: one, body: `{"version":1,"annotations":{"visits":4}}`}).problem(t); p.Status != 409 || p.CurrentVersion != 2 {
		t.Errorf("stale patch: %+v", p)
	}
	var fork api.ForkResult
	w.want(201, "POST", one+"/fork", map[string]any{"count": 3, "branch_name": "b", "labels": map[string]any{"gen": "1"}}, &fork)
	if len(fork.Children) != 3 || fork.Children[2].Workspace.Name != "b-3" || !fork.Children[0].ResealReport.Complete || fork.Checkpoint != nil || fork.CheckpointID != cp.ID {
		t.Errorf("fork: %+v", fork)
	}
	if fork.Children[0].Workspace.Env["A"] != "1" {
		t.Errorf("a fork takes the environment over: %+v", fork.Children[0].Workspace.Env)
	}
	var op api.Operation
	w.want(200, "GET", "/v1/operations/"+fork.OperationID, nil, &op)
	if len(op.WorkspaceIDs) != 3 || op.Kind != api.OperationForkCheckpoint {
		t.Errorf("operation: %+v", op)
	}
	var both api.ForkResult
	w.want(201, "POST", at+"/fork", map[string]any{"checkpoint": map[string]any{"name": "second"}}, &both)
	if both.Checkpoint == nil || both.Checkpoint.ParentID != cp.ID || len(both.Children) != 1 {
		t.Errorf("fork of a workspace: %+v", both)
	}
	var restored api.RestoreResult
	w.want(201, "POST", one+"/restore", map[string]any{"workspace_name": "again"}, &restored)
	if restored.Workspace.Name != "again" || restored.ResealReport == nil {
		t.Errorf("restore: %+v", restored)
	}
	w.want(200, "POST", at+"/restore", map[string]any{"checkpoint_id": cp.ID}, &restored)
	if restored.Workspace.ID != ws.ID || restored.Workspace.Epoch != 2 {
		t.Errorf("restore in place: %+v", restored)
	}
	var reseals api.ResealReportList
	w.want(200, "GET", at+"/reseal-reports?limit=1", nil, &reseals)
	if len(reseals.Items) != 1 || reseals.Items[0].Epoch != 2 || reseals.NextCursor == "" {
		t.Errorf("reseal reports: %+v", reseals)
	}
	w.want(200, "GET", at+"/reseal-reports?cursor="+reseals.NextCursor, nil, &reseals)
	if len(reseals.Items) != 1 || reseals.Items[0].Epoch != 1 {
		t.Errorf("reseal reports: %+v", reseals)
	}

	var list api.CheckpointList
	w.want(200, "GET", at+"/checkpoints", nil, &list)
	if len(list.Items) != 2 || list.Items[0].Name != "second" {
		t.Errorf("checkpoints of the workspace: %+v", list)
	}
	w.want(200, "GET", "/v1/checkpoints?kind=template", nil, &list)
	if len(list.Items) != 1 || list.Items[0].ChildrenCount != 1 {
		t.Errorf("templates: %+v", list)
	}
	root := list.Items[0].ID
	w.want(200, "GET", "/v1/checkpoints?name=second&state=captured&state=sealed&id_suffix="+both.CheckpointID[len(both.CheckpointID)-8:], nil, &list)
	if len(list.Items) != 1 || list.Items[0].ID != both.CheckpointID {
		t.Errorf("filtered: %+v", list)
	}
	var path api.AncestorList
	w.want(200, "GET", "/v1/checkpoints/"+both.CheckpointID+"/lineage?limit=2", nil, &path)
	if len(path.Items) != 2 || path.Items[1].ID != cp.ID || path.Items[1].Depth != 1 {
		t.Errorf("lineage: %+v", path)
	}
	for _, a := range path.Items { // of what it has, it says what the checkpoint says
		var whole api.Checkpoint
		w.want(200, "GET", "/v1/checkpoints/"+a.ID, nil, &whole)
		var annotations api.Annotations
		if err := json.Unmarshal(a.Annotations, &annotations); err != nil {
			t.Fatal(err)
		}
		a.Annotations = nil
		if got, want := (api.Ancestor{
			ID: whole.ID, Name: whole.Name, State: whole.State, Kind: whole.Kind, ParentID: whole.ParentID, WorkspaceID: whole.WorkspaceID, Depth: a.Depth,
			Pinned: whole.Pinned, CreatedAt: whole.CreatedAt, CapturedAt: whole.CapturedAt,
		}), a; !cmp.Equal(got, want) || !cmp.Equal(annotations, whole.Annotations) {
			t.Errorf("%s\n%s", cmp.Diff(want, got), cmp.Diff(annotations, whole.Annotations))
		}
	}
	w.want(200, "GET", "/v1/checkpoints/"+both.CheckpointID+"/lineage?cursor="+path.NextCursor, nil, &path)
	if len(path.Items) != 1 || path.Items[0].ID != root || path.NextCursor != "" {
		t.Errorf("rest of the lineage: %+v", path)
	}
	w.want(200, "GET", one+"/children", nil, &list)
	if len(list.Items) != 1 || list.Items[0].ID != both.CheckpointID {
		t.Errorf("children: %+v", list)
	}
	var found api.WorkspaceList
	w.want(200, "GET", "/v1/workspaces?label=gen%3D1&limit=2&parent_checkpoint_id="+cp.ID, nil, &found)
	if len(found.Items) != 2 || found.NextCursor == "" {
		t.Errorf("workspaces: %+v", found)
	}
	w.want(200, "GET", "/v1/workspaces?label=gen%3D1&parent_checkpoint_id="+cp.ID+"&cursor="+found.NextCursor, nil, &found)
	if len(found.Items) != 1 {
		t.Errorf("second page: %+v", found)
	}
	w.pages(root)
	w.want(409, "DELETE", "/v1/checkpoints/"+root, nil, nil)
	w.want(204, "DELETE", one, nil, nil)
	w.want(204, "DELETE", one, nil, nil)
	w.want(200, "GET", one, nil, &cp)
	if cp.State != api.CheckpointDeleted {
		t.Errorf("deleted, with a child: %+v", cp)
	}
	w.want(204, "DELETE", "/v1/checkpoints/"+both.CheckpointID, nil, nil)
}

// pages reads a tree whole and in pages.
func (w *world) pages(root string) {
	t := w.t
	t.Helper()
	var whole api.Tree
	w.want(200, "GET", "/v1/checkpoints/"+root+"/tree", nil, &whole)
	if len(whole.Items) != 3 || whole.Items[0].Checkpoint.ID != root || whole.Items[2].Depth != 2 || len(whole.Items[1].Workspaces) != 5 {
		t.Errorf("tree: %+v", whole)
	}
	var got []string
	for next := ""; ; {
		var page api.Tree
		w.want(200, "GET", "/v1/checkpoints/"+root+"/tree?limit=1&cursor="+next, nil, &page)
		for _, n := range page.Items {
			got = append(got, n.Checkpoint.ID)
		}
		if next = page.NextCursor; next == "" {
			break
		}
	}
	for i, n := range whole.Items {
		if i >= len(got) || got[i] != n.Checkpoint.ID {
			t.Fatalf("in pages: %v, whole: %+v", got, whole.Items)
		}
	}
	var shallow api.Tree
	w.want(200, "GET", "/v1/checkpoints/"+whole.Items[1].Checkpoint.ID+"/tree?depth=0", nil, &shallow)
	if len(shallow.Items) != 1 {
		t.Errorf("depth 0: %+v", shallow)
	}
}

// TestFollow sees output while it is written.
func TestFollow(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	var s api.Session
	w.want(201, "POST", "/v1/workspaces/"+ws.ID+"/exec", map[string]any{"command": []string{"cat"}, "wait": false, "stdin_open": true}, &s)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, w.url+"/v1/sessions/"+s.ID+"/output?follow=true", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+apiKey)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	for _, part := range []string{"one", "two"} {
		if got := w.do(call{method: "POST", path: "/v1/sessions/" + s.ID + "/stdin", body: part, header: map[string]string{"Content-Type": "application/octet-stream"}}); got.status != 204 {
			t.Fatalf("stdin: %d %s", got.status, got.body)
		}
		b := make([]byte, len(part))
		if _, err := io.ReadFull(res.Body, b); err != nil || string(b) != part {
			t.Fatalf("followed: %q, %v", b, err)
		}
	}
	w.do(call{method: "POST", path: "/v1/sessions/" + s.ID + "/stdin?close=true", header: map[string]string{"Content-Type": "application/octet-stream"}})
	if rest, err := io.ReadAll(res.Body); err != nil || len(rest) != 0 || res.Trailer.Get("Coppice-Eof") != "true" || res.Trailer.Get("Coppice-End-Offset") != "6" {
		t.Errorf("end: %q, %v, trailers %v", rest, err, res.Trailer)
	}
}
