package arrakis_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func TestCommands(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	vm := w.start("vm", "")
	var out struct{ Output, Error, SessionID string }
	w.do(ask{method: "POST", path: "/vms/vm/cmd", body: `{"cmd":"cat","blocking":false}`}).want(t, http.StatusOK, &out)
	if out.Error != "" || out.SessionID == "" {
		t.Errorf("in the background: %+v", out)
	}
	s, err := w.rest.Session(t.Context(), out.SessionID)
	if err != nil || s.WorkspaceID != vm.WorkspaceID {
		t.Fatalf("%+v, %v", s, err)
	}
	if s.User != "root" {
		t.Errorf("its user is %q: another may not write in the directory", s.User)
	}
	if last := len(s.Command) - 1; s.Command[0] != "bash" || s.Command[last] != "cat" {
		t.Errorf("%q", s.Command)
	}
	w.do(ask{method: "POST", path: "/vms/vm/cmd", body: `{"cmd":"fill 256"}`}).want(t, http.StatusOK, &out)
	if !strings.Contains(out.Output, "\ufffd") || !strings.Contains(out.Output, "ABC") {
		t.Errorf("bytes that are no text: %q", out.Output)
	}
	var long struct {
		Output          string
		OutputTruncated bool
	}
	w.do(ask{method: "POST", path: "/vms/vm/cmd", body: `{"cmd":"fill 1100000"}`}).want(t, http.StatusOK, &long)
	if !long.OutputTruncated || long.Output == "" {
		t.Errorf("%d bytes, truncated: %t", len(long.Output), long.OutputTruncated)
	}
	for body, want := range map[string]int{
		`{"cmd":""}`: 400, `{"cmd":" \n"}`: 400, `{}`: 400, ``: 400, `[]`: 400, `{"cmd":1}`: 400, `{"cmd":"true"`: 400,
		`{"cmd":"echo ` + strings.Repeat("x", 2<<20) + `"}`: 413,
	} {
		w.do(ask{method: "POST", path: "/vms/vm/cmd", body: body}).want(t, want, nil)
	}
	w.do(ask{method: "POST", path: "/vms/absent/cmd", body: `{"cmd":"true"}`}).want(t, http.StatusNotFound, nil)
}

func TestFiles(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	vm := w.start("vm", "")
	post := func(v any) reply {
		body, _ := json.Marshal(v)
		return w.do(ask{method: "POST", path: "/vms/vm/files", body: string(body)})
	}
	type file struct{ Path, Content, Error string }
	files := func(list ...file) map[string]any { return map[string]any{"files": list} }
	post(files(file{Path: "a b", Content: "relative ü"}, file{Path: "/root/x", Content: "absolute"}, file{Path: "dir/../c", Content: ""})).want(t, http.StatusOK, nil)
	if _, err := w.rest.WriteFile(t.Context(), vm.WorkspaceID, "/root/binary", strings.NewReader("\xff\xfe"), coppice.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	get := func(query string) (out []file) {
		var got struct{ Files []file }
		w.do(ask{method: "GET", path: "/vms/vm/files?paths=" + query}).want(t, http.StatusOK, &got)
		return got.Files
	}
	got := get("a%20b,/root/x%2C/tmp/server_files/c,absent,/root/binary")
	if len(got) != 5 || got[0] != (file{Path: "a b", Content: "relative ü"}) || got[1].Content != "absolute" || got[2].Error != "" || got[3].Error == "" || got[3].Content != "" {
		t.Errorf("%+v", got)
	}
	if got[4].Content != "" || !strings.Contains(got[4].Error, "not text") {
		t.Errorf("a file that is no text: %+v", got[4])
	}
	large := strings.Repeat("x", 9<<20)
	post(files(file{Path: "one", Content: large})).want(t, http.StatusOK, nil)
	post(files(file{Path: "two", Content: large})).want(t, http.StatusOK, nil)
	if got := get("one,two"); len(got[0].Content) != len(large) || !strings.Contains(got[1].Error, "more than") {
		t.Errorf("%d bytes and %q", len(got[0].Content), got[1].Error)
	}
	post(files(file{Path: "one", Content: large + large})).want(t, http.StatusRequestEntityTooLarge, nil)
	many := make([]file, 1001)
	for i := range many {
		many[i].Path = fmt.Sprint(i)
	}
	for _, bad := range []map[string]any{files(), {}, files(many...), files(file{}), files(file{Path: strings.Repeat("x", 4097)}), files(file{Path: "a\x00b"})} {
		post(bad).want(t, http.StatusBadRequest, nil)
	}
	for _, query := range []string{"", "?paths=", "?paths=,", "?paths=" + strings.Repeat("a,", 1001)} {
		w.do(ask{method: "GET", path: "/vms/vm/files" + query}).want(t, http.StatusBadRequest, nil)
	}
	if got := get(strings.Repeat("x", 4097)); got[0].Error == "" {
		t.Errorf("%+v", got)
	}
	w.do(ask{method: "GET", path: "/vms/absent/files?paths=a"}).want(t, http.StatusNotFound, nil)
}
