package httpapi_test

import (
	"encoding/base64"
	"net/http"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/core"
)

func (w *world) put(ws, path, content string) {
	w.t.Helper()
	got := w.do(call{
		method: "PUT", path: "/v1/workspaces/" + ws + "/files?path=" + path, body: content,
		header: map[string]string{"Content-Type": "application/octet-stream"},
	})
	if got.status/100 != 2 {
		w.t.Fatalf("put %s: %d %s", path, got.status, got.body)
	}
}

func TestDiff(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	at := "/v1/workspaces/" + ws.ID
	w.put(ws.ID, "/keep", "1")
	w.put(ws.ID, "/goes", "12")
	w.put(ws.ID, "/grows", "1")
	a := w.checkpoint(ws.ID)
	w.put(ws.ID, "/new", "123")
	w.put(ws.ID, "/grows", "12345")
	if got := w.do(call{method: "DELETE", path: at + "/files?path=/goes"}); got.status != http.StatusNoContent {
		t.Fatalf("%d %s", got.status, got.body)
	}
	var s api.Session
	w.want(201, "POST", at+"/exec", map[string]any{"command": []string{"sleep", "1000"}, "wait": false}, &s)
	b := w.checkpoint(ws.ID)
	diff := func(from, to, query string) (out api.CheckpointDiff) {
		t.Helper()
		w.want(200, "GET", "/v1/checkpoints/"+from+"/diff?to="+to+query, nil, &out)
		return out
	}
	want := api.CheckpointDiff{
		FromID: a.ID, ToID: b.ID, FilesComplete: true, MemoryChangedBytes: new(int64),
		Items: []api.FileChange{
			{Path: "/goes", Change: api.FileRemoved, Type: api.ChangedFile, SizeBeforeBytes: 2},
			{Path: "/grows", Change: api.FileChanged, Type: api.ChangedFile, What: []api.FileChangeWhat{api.FileContent}, SizeBytes: 5, SizeBeforeBytes: 1},
			{Path: "/new", Change: api.FileAdded, Type: api.ChangedFile, SizeBytes: 3},
		},
		Processes: &api.ProcessChanges{Complete: true, Started: []api.WorkloadProcess{{PID: 42, Command: "sleep"}}, Gone: []api.WorkloadProcess{}},
	}
	if d := cmp.Diff(want, diff(a.ID, b.ID, "")); d != "" {
		t.Error(d)
	}
	var paths []string
	page := diff(a.ID, b.ID, "&limit=1")
	for {
		for _, f := range page.Items {
			paths = append(paths, f.Path)
		}
		if page.NextCursor == "" {
			break
		}
		if page = diff(a.ID, b.ID, "&limit=1&cursor="+page.NextCursor); page.Processes != nil || page.MemoryChangedBytes != nil {
			t.Error("processes or memory are on a later page")
		}
	}
	if d := cmp.Diff([]string{"/goes", "/grows", "/new"}, paths); d != "" {
		t.Error(d)
	}
	back := diff(b.ID, a.ID, "")
	if len(back.Items) != 3 || back.Items[0].Change != api.FileAdded || len(back.Processes.Gone) != 1 {
		t.Errorf("back: %+v", back)
	}
	if root := diff(ws.CheckpointID, a.ID, ""); len(root.Items) != 3 { // the template belongs to nobody and is the root of the tree
		t.Errorf("from the root: %+v", root)
	}
	w.refusedDiffs(a, b)
}

func (w *world) refusedDiffs(a, b api.Checkpoint) {
	t := w.t
	t.Helper()
	var other api.Workspace
	w.want(201, "POST", "/v1/workspaces", map[string]any{"name": "other", "image": "base", "resources": map[string]any{"memory_mib": 1024}}, &other)
	elsewhere := w.checkpoint(other.ID)
	for _, c := range []struct {
		query  string
		status int
		code   core.Code
	}{
		{"", 400, core.CodeInvalidField},
		{"?to=nonsense", 400, core.CodeInvalidID},
		{"?to=" + elsewhere.ID, 400, core.CodeInvalidField},
		{"?to=" + string(core.NewID[core.CheckpointID]()), 404, core.CodeCheckpointNotFound},
		{"?to=" + b.ID + "&limit=0", 400, core.CodeInvalidField},
		{"?to=" + b.ID + "&limit=1001", 400, core.CodeInvalidField},
		{"?to=" + b.ID + "&cursor=nonsense", 400, core.CodeInvalidField},
		{"?to=" + b.ID + "&cursor=" + base64.RawURLEncoding.EncodeToString([]byte("1:relative")), 400, core.CodeInvalidField},
		{"?to=" + b.ID + "&cursor=" + base64.RawURLEncoding.EncodeToString([]byte("1:/a\x00")), 400, core.CodeInvalidField},
	} {
		got := w.do(call{method: "GET", path: "/v1/checkpoints/" + a.ID + "/diff" + c.query})
		if p := got.problem(t); got.status != c.status || p.Code != string(c.code) {
			t.Errorf("%s: %d %s (%s), want %d %s", c.query, got.status, p.Code, p.Detail, c.status, c.code)
		}
	}
	w.want(204, "DELETE", "/v1/checkpoints/"+b.ID, nil, nil)
	if p := w.do(call{method: "GET", path: "/v1/checkpoints/" + a.ID + "/diff?to=" + b.ID}).problem(t); p.Status != 404 && p.Code != string(core.CodeCheckpointNotReady) {
		t.Errorf("a deleted checkpoint: %+v", p)
	}
}
