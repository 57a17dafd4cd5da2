package httpapi_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/api/runnerapi"
)

// TestCheckpointFiles reads what was in a workspace when it was captured, whatever became of it since.
func TestCheckpointFiles(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	large := strings.Repeat("0123456789abcdef", runnerapi.MaxFileData/16) + "the end" // of two parts
	w.put(ws.ID, "/d/large", large)
	w.put(ws.ID, "/d/small", "before")
	cp := w.checkpoint(ws.ID)
	w.put(ws.ID, "/d/small", "after")
	at := "/v1/checkpoints/" + cp.ID + "/files?path="
	for path, want := range map[string]string{"/d/small": "before", "/d/../d/large": large} {
		got := w.do(call{method: "GET", path: at + path})
		var info api.FileInfo
		if err := json.Unmarshal([]byte(got.header.Get("Coppice-File")), &info); err != nil || got.status != 200 || string(got.body) != want || info.Size != int64(len(want)) {
			t.Errorf("%s: %d, %d bytes, %+v, %v", path, got.status, len(got.body), info, err)
		}
	}
	var list api.FileList
	w.want(200, "GET", at+"/d&list=true", nil, &list)
	if len(list.Entries) != 2 || list.Entries[0].Path != "/d/large" || list.Entries[1].Name != "small" || list.Entries[1].Size != 6 || list.Truncated {
		t.Errorf("%+v", list)
	}
	var info api.FileInfo
	w.want(200, "GET", at+"/d&stat=true", nil, &info)
	if info.Type != api.FileTypeDir || info.Path != "/d" {
		t.Errorf("%+v", info)
	}
	for query, code := range map[string]string{
		"/absent": "FILE_NOT_FOUND", "/d": "INVALID_FIELD", "/d/small&list=true": "INVALID_FIELD", "/d&list=true&stat=true": "INVALID_FIELD", "relative": "INVALID_FIELD", "~/x": "INVALID_FIELD",
	} {
		if got := w.do(call{method: "GET", path: at + query}); got.status/100 != 4 || got.problem(t).Code != code {
			t.Errorf("%s: %d %s, want %s", query, got.status, got.body, code)
		}
	}
}
