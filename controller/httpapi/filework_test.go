package httpapi_test

import (
	"encoding/json"
	"net/http"
	"testing"

	"github.com/coppice-dev/coppice/api"
)

func (w *world) putFile(at, query, body string) api.FileInfo {
	w.t.Helper()
	var info api.FileInfo
	got := w.do(call{method: http.MethodPut, path: at + "/files?" + query, body: body, header: map[string]string{"Content-Type": "application/octet-stream"}})
	if err := json.Unmarshal(got.body, &info); err != nil || got.status != http.StatusOK {
		w.t.Fatalf("%d %s (%v)", got.status, got.body, err)
	}
	return info
}

// TestFileWork: what is asked of files reaches the guest as it was asked, and the answer comes back.
func TestFileWork(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	at := "/v1/workspaces/" + w.create("main").ID
	var dir api.MadeDirectory
	w.want(200, "POST", at+"/files/mkdir", map[string]any{"path": "~/a/b", "user": "ann", "parents": true}, &dir)
	if !dir.Created || dir.File.Path != "/home/ann/a/b" || dir.File.Type != api.FileTypeDir || dir.File.Owner != "ann" {
		t.Errorf("%+v", dir)
	}
	if got := w.do(call{method: "POST", path: at + "/files/mkdir", body: `{"path":"/home/ann/a"}`}); got.status != 409 || got.problem(t).Code != "FILE_CONFLICT" {
		t.Errorf("it exists: %d %s", got.status, got.body)
	}
	w.putFile(at, "path=~/a/f&user=ann", "hello")
	w.putFile(at, "path=/home/ann/a/f&in_place=true&offset=1", "ELL")
	if info := w.putFile(at, "path=/home/ann/a/f&in_place=true&append=true", "!"); info.Size != 6 {
		t.Errorf("%+v", info)
	}
	if got := w.do(call{method: "GET", path: at + "/files?path=~/a/f&user=ann"}); string(got.body) != "hELLo!" {
		t.Errorf("%d %s", got.status, got.body)
	}
	var list api.FileList
	w.want(200, "GET", at+"/files?path=/home/ann&list=true&depth=2", nil, &list)
	if len(list.Entries) != 3 {
		t.Errorf("%+v", list.Entries)
	}
	var file api.FileInfo
	w.want(200, "POST", at+"/files/rename", map[string]any{"from": "~/a", "to": "~/c", "user": "ann"}, &file)
	if file.Path != "/home/ann/c" {
		t.Errorf("%+v", file)
	}
	w.want(200, "POST", at+"/files/xattrs", map[string]any{"path": "/home/ann/c/f", "set": map[string]string{"user.a": "1", "user.b": "2"}}, nil)
	w.want(200, "POST", at+"/files/xattrs", map[string]any{"path": "/home/ann/c/f", "remove": []string{"user.a"}}, &file)
	w.want(200, "GET", at+"/files?path=/home/ann/c/f&stat=true&xattrs=true", nil, &file)
	if len(file.XAttrs) != 1 || file.XAttrs["user.b"] != "2" {
		t.Errorf("%+v", file)
	}
	var log api.AuditRecordList
	w.want(200, "GET", "/v1/audit?action=renameFile", nil, &log)
	var detail struct{ Path, To string }
	if len(log.Items) != 1 || json.Unmarshal(log.Items[0].Detail, &detail) != nil || detail.Path != "~/a" || detail.To != "~/c" {
		t.Errorf("%+v", log.Items)
	}
}
