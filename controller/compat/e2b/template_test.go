package e2b_test

import (
	"archive/tar"
	"bytes"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/coppice-dev/coppice/controller/compat/e2b/envd/process"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

type buildStatus struct {
	Status     string
	Reason     *struct{ Message string }
	LogEntries []struct{ Message, Level string }
}

func tarOf(t *testing.T, name, text string) string {
	t.Helper()
	out := new(bytes.Buffer)
	w := tar.NewWriter(out)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(text))}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// A template is built as E2B's clients do it, and a sandbox of it has what the build made.
func TestTemplateBuild(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const name = "my_env__ABC"
	hash := strings.Repeat("a1", 32)
	w.do(ask{method: "GET", path: "/templates/aliases/" + name}).want(t, http.StatusNotFound, nil)
	var ids struct{ TemplateID, BuildID string }
	w.do(ask{method: "POST", path: "/v3/templates", body: `{"name":"` + name + `:default","cpuCount":1,"memoryMB":512}`}).want(t, http.StatusAccepted, &ids)
	var link struct {
		Present bool
		URL     string
	}
	w.do(ask{method: "GET", path: "/templates/" + ids.TemplateID + "/files/" + hash}).want(t, http.StatusCreated, &link)
	at, ok := strings.CutPrefix(link.URL, w.url)
	if link.Present || !ok {
		t.Fatalf("%+v", link)
	}
	w.do(ask{method: "PUT", path: strings.Replace(at, "a1a1", "b1b1", 1), key: "-", body: "x"}).want(t, http.StatusForbidden, nil)
	w.do(ask{method: "PUT", path: at, key: "-", body: tarOf(t, "src/a.txt", "one")}).want(t, http.StatusOK, nil)
	w.do(ask{method: "GET", path: "/templates/" + ids.TemplateID + "/files/" + hash}).want(t, http.StatusCreated, &link)
	if !link.Present {
		t.Error("the files were sent")
	}
	base := "/templates/" + ids.TemplateID + "/builds/" + ids.BuildID
	steps := `{"type":"COPY","args":["src","/srv/","",""],"filesHash":"` + hash + `","force":false},{"type":"ENV","args":["A","b"],"force":false},{"type":"WORKDIR","args":["/srv"],"force":false},
		{"type":"RUN","args":["echo first","root"],"force":false}`
	body := `{"fromTemplate":"base","force":false,"steps":[` + steps + `]}`
	w.do(ask{method: "POST", path: "/v2" + base, body: body}).want(t, http.StatusAccepted, nil)
	w.do(ask{method: "POST", path: "/v2" + base, body: body}).want(t, http.StatusAccepted, nil) // a repeat starts nothing
	var s buildStatus
	var log []string
	eventually.True(t, "the build ends", func() bool {
		w.do(ask{method: "GET", path: base + "/status?logsOffset=" + strconv.Itoa(len(log))}).want(t, http.StatusOK, &s)
		for _, e := range s.LogEntries {
			log = append(log, e.Message)
		}
		return s.Status == "ready" || s.Status == "error"
	})
	if s.Status != "ready" {
		t.Fatalf("%+v %+v\n%s", s, s.Reason, strings.Join(log, "\n"))
	}
	w.do(ask{method: "GET", path: base + "/status?logsOffset=0"}).want(t, http.StatusOK, &s)
	if text := strings.Join(log, "\n"); !strings.Contains(text, "COPY") || len(s.LogEntries) < 2 || s.LogEntries[0].Message != log[0] {
		t.Errorf("the log: %q", text)
	}
	again := w.newLayer()
	again.do(ask{method: "GET", path: base + "/status?logsOffset=1"}).want(t, http.StatusOK, &s)
	if s.Status != "ready" || len(s.LogEntries) != min(len(log)-1, 100) || s.LogEntries[0].Message != log[1] {
		t.Errorf("another controller says %+v", s)
	}
	again.do(ask{method: "GET", path: strings.Replace(base, name, "other", 1) + "/status"}).want(t, http.StatusNotFound, nil)
	if n := builds(t, w); n != 1 {
		t.Errorf("%d builds", n)
	}
	w.do(ask{method: "GET", path: "/templates/aliases/" + name + ":default"}).want(t, http.StatusOK, nil)
	sb := w.create("", `{"templateID":"`+name+`","timeout":600}`)
	got := w.envd(sb, ask{method: "GET", path: "/files?path=/srv/a.txt"})
	if got.Status != http.StatusOK || got.Body != "one" {
		t.Errorf("the sandbox has %d %q", got.Status, got.Body)
	}
	if dir := w.dirOf(sb); dir != "/srv" {
		t.Errorf("processes are in %q", dir)
	}
	if dir := w.dirOf(w.create("", `{"templateID":"base"}`)); dir != "/root" {
		t.Errorf("processes of a sandbox without a template are in %q", dir)
	}
	other, _ := w.tenant("other", coppice.ScopeWorkspaceRead, coppice.ScopeCheckpointRead, coppice.ScopeFleetRead)
	foreign := w.do(ask{method: "GET", path: base + "/status", key: other})
	absent := w.do(ask{method: "GET", path: strings.Replace(base, ids.BuildID[:4], "01ff", 1) + "/status", key: other})
	if foreign.Status != http.StatusNotFound || strings.ReplaceAll(absent.Body, "01ff", ids.BuildID[:4]) != foreign.Body {
		t.Errorf("a foreign key gets %+v, and %+v of what is absent", foreign, absent)
	}
	w.do(ask{method: "DELETE", path: "/templates/" + name}).want(t, http.StatusNoContent, nil)
	w.do(ask{method: "DELETE", path: "/templates/" + name}).want(t, http.StatusNotFound, nil)
}

// What a client asks of a build may be as large as the page of limits says, and a build that fails says why on every controller.
func TestTemplateBounds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.do(ask{method: "POST", path: "/v3/templates", body: `{"name":"t","memoryMB":16777216}`}).want(t, http.StatusBadRequest, nil)
	w.do(ask{method: "POST", path: "/v3/templates", body: `{"name":"t","cpuCount":256}`}).want(t, http.StatusBadRequest, nil)
	w.do(ask{method: "POST", path: "/v3/templates", body: `{"name":"` + strings.Repeat("x", 129) + `"}`}).want(t, http.StatusBadRequest, nil)
	w.do(ask{method: "PUT", path: "/templates/files/" + strings.Repeat("a", 64) + "?token=" + strings.Repeat("x", 3000), key: "-"}).want(t, http.StatusForbidden, nil)
	var ids struct{ TemplateID, BuildID string }
	w.do(ask{method: "POST", path: "/v3/templates", body: `{"name":"t"}`}).want(t, http.StatusAccepted, &ids)
	at := "/templates/t/builds/" + ids.BuildID
	w.do(ask{method: "GET", path: at + "/status"}).want(t, http.StatusNotFound, nil)
	env := strings.Repeat(`{"type":"ENV","args":["A","b"],"force":false,"gzip":null,"resolveSymlinks":null},`, 80)
	w.do(ask{method: "POST", path: "/v2" + at, body: `{"fromTemplate":"base","steps":[` + env + `{"type":"RUN","args":["exit 3"]}]}`}).want(t, http.StatusAccepted, nil)
	var s buildStatus
	second := w.newLayer()
	eventually.True(t, "the build ends", func() bool {
		second.do(ask{method: "GET", path: at + "/status"}).want(t, http.StatusOK, &s)
		return s.Status == "ready" || s.Status == "error"
	})
	if s.Status != "error" || s.Reason == nil || !strings.Contains(s.Reason.Message, "BUILD_FAILED") || len(s.LogEntries) != 100 {
		t.Errorf("%d entries, %+v, %+v", len(s.LogEntries), s, s.Reason)
	}
	w.do(ask{method: "POST", path: "/v2/sandboxes", body: `{"templateID":"t"}`}).want(t, http.StatusNotFound, nil)
}

// dirOf is where a process is whose client says nothing about it.
func (w *world) dirOf(s sandbox) string {
	w.t.Helper()
	stream, err := w.processes(s).Start(w.t.Context(), connect.NewRequest(&process.StartRequest{Process: &process.ProcessConfig{Cmd: "cat"}}))
	if err != nil {
		w.t.Fatal(err)
	}
	defer stream.Close()
	if !stream.Receive() {
		w.t.Fatal(stream.Err())
	}
	list, err := w.processes(s).List(w.t.Context(), connect.NewRequest(&process.ListRequest{}))
	if err != nil || len(list.Msg.GetProcesses()) != 1 {
		w.t.Fatalf("%v, %v", list, err)
	}
	return list.Msg.GetProcesses()[0].GetConfig().GetCwd()
}

func builds(t *testing.T, w *world) (n int) {
	t.Helper()
	for _, err := range w.rest.Operations(t.Context(), coppice.OperationFilter{Kinds: []coppice.OperationKind{coppice.OperationBuildImage}}) {
		if err != nil {
			t.Fatal(err)
		}
		n++
	}
	return n
}
