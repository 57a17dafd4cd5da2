package httpapi_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller/httpapi"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// TestStepInLines reads the results of a step as they come, also by a repeat of the request while it goes on, and after its end.
func TestStepInLines(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cp := w.checkpoint(w.create("main").ID)
	reached, open := make(chan struct{}), make(chan struct{})
	w.runner.Hook(func(ctx context.Context, point, _ string) error {
		if point != runnertest.PointCapture {
			return nil
		}
		close(reached)
		select {
		case <-open:
		case <-ctx.Done():
		}
		return nil
	})
	const body = `{"actions":[{"command":["inc"]},{"command":["echo","x"],"keep":"nothing"}]}`
	ask := func() *bufio.Scanner { return w.stepLines(cp.ID, body) }
	next := w.stepEvent
	first := ask()
	began := next(first)
	if began.OperationID == "" || began.Action != nil || began.State != "" {
		t.Errorf("%+v", began)
	}
	<-reached
	second := ask()
	for _, lines := range []*bufio.Scanner{first, second} { // the first action waits for its checkpoint
		if lines == second && next(lines).OperationID != began.OperationID {
			t.Error("a repeat has begun another step")
		}
		if e := next(lines); e.Action == nil || e.Action.Index != 1 || e.Action.Stdout != "x\n" || e.Action.Kept != api.KeepNothing {
			t.Errorf("%+v", e)
		}
	}
	close(open)
	third := ask()
	next(third)
	seen := 0
	for lines, left := range map[*bufio.Scanner]int{first: 1, second: 1, third: 2} {
		for range left {
			e := next(lines)
			if e.Action == nil || e.Action.Index == 0 && (e.Action.Kept != api.KeepCheckpoint || e.Action.CheckpointID == "" || e.Action.Score == nil || *e.Action.Score != 1) {
				t.Errorf("%+v", e)
			}
			seen++
		}
		if e := next(lines); e.State != api.OperationSucceeded || e.Problem != nil || e.OperationID != began.OperationID || lines.Scan() {
			t.Errorf("%+v", e)
		}
	}
	if seen != 4 {
		t.Errorf("%d results", seen)
	}
	for action, field := range map[string]string{
		`{"command":["inc"],"files":[{"path":"/a","content":"a","content_base64":"YQ=="}]}`: "actions.1.files.0.content_base64",
		`{"command":[""]}`: "actions.1.command.0",
		`{"command":["inc"],"stdin":"a","stdin_base64":"YQ=="}`: "actions.1.stdin_base64",
	} {
		got := w.do(call2("/v1/checkpoints/"+cp.ID+"/step", `{"actions":[{"command":["inc"]},`+action+`]}`, nil))
		if p := got.problem(t); got.status != 400 || p.Code != "INVALID_FIELD" || len(p.Fields) != 1 || p.Fields[0].Field != field || !strings.HasPrefix(p.Detail, field+": ") {
			t.Errorf("%s: %d %s", field, got.status, got.body)
		}
	}
}

// stepLines asks for a step whose results are streamed.
func (w *world) stepLines(checkpoint, body string) *bufio.Scanner {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.t.Context(), http.MethodPost, w.url+"/v1/checkpoints/"+checkpoint+"/step", strings.NewReader(body))
	if err != nil {
		w.t.Fatal(err)
	}
	for name, value := range map[string]string{
		"Authorization": "Bearer " + apiKey, "Content-Type": "application/json", "Idempotency-Key": "k", "Accept": "application/json;q=0.5, application/x-ndjson",
	} {
		req.Header.Set(name, value)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = res.Body.Close() })
	if res.StatusCode != http.StatusOK || res.Header.Get("Content-Type") != "application/x-ndjson" {
		w.t.Fatalf("%d %v", res.StatusCode, res.Header)
	}
	return bufio.NewScanner(res.Body)
}

// stepEvent reads a line.
func (w *world) stepEvent(lines *bufio.Scanner) (e api.StepEvent) {
	w.t.Helper()
	if !lines.Scan() {
		w.t.Fatal("the answer ended:", lines.Err())
	}
	d := json.NewDecoder(bytes.NewReader(lines.Bytes()))
	d.DisallowUnknownFields()
	if err := d.Decode(&e); err != nil {
		w.t.Fatalf("%s: %v", lines.Bytes(), err)
	}
	return e
}

// TestStepSignsOfLife: the first line comes again and again while no action ends, and nothing comes after the last one.
func TestStepSignsOfLife(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cp := w.checkpoint(w.create("main").ID)
	open := make(chan struct{})
	w.runner.Hook(func(ctx context.Context, point, _ string) error {
		if point == runnertest.PointCapture {
			select {
			case <-open:
			case <-ctx.Done():
			}
		}
		return nil
	})
	hurried := httptest.NewServer(httpapi.NewWithPace(w.control, slog.New(slog.DiscardHandler), 20*time.Millisecond, watchdog))
	t.Cleanup(hurried.Close)
	w.url = hurried.URL
	lines := w.stepLines(cp.ID, `{"actions":[{"command":["inc"]}]}`)
	first := w.stepEvent(lines)
	for range 5 {
		if e := w.stepEvent(lines); e != first || e.OperationID == "" || e.Action != nil || e.State != "" {
			t.Fatalf("%+v, want a sign of life", e)
		}
	}
	close(open)
	e := w.stepEvent(lines)
	for e == first {
		e = w.stepEvent(lines)
	}
	if e.Action == nil || e.Action.Kept != api.KeepCheckpoint {
		t.Errorf("%+v", e)
	}
	for e.State == "" {
		e = w.stepEvent(lines)
	}
	if e.State != api.OperationSucceeded || lines.Scan() {
		t.Errorf("%+v, then %s", e, lines.Bytes())
	}
}

// TestOutputOfAStepNeedsExec: a key that may not run commands sees the results of a step without what the commands wrote.
func TestOutputOfAStepNeedsExec(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cp := w.checkpoint(w.create("main").ID)
	var out api.StepResult
	w.want(200, "POST", "/v1/checkpoints/"+cp.ID+"/step", json.RawMessage(`{"actions":[{"files":[{"path":"/workspace/f","content":"x"}],"command":["sh","-c","err secret; echo 7"],"keep":"nothing"}]}`), &out)
	if a := out.Actions[0]; a.Stdout != "7\n" || a.Stderr != "secret\n" || a.Score == nil {
		t.Fatalf("%+v", a)
	}
	var log api.AuditRecordList
	w.want(200, "GET", "/v1/audit?action=putFile", nil, &log)
	if len(log.Items) != 1 || log.Items[0].ObjectID != out.Actions[0].WorkspaceID || log.Items[0].OperationID != out.OperationID || !strings.Contains(string(log.Items[0].Detail), `"/workspace/f"`) {
		t.Errorf("the write is recorded as %+v", log.Items)
	}
	for _, c := range []struct {
		name   string
		scopes []core.KeyScope
		shown  bool
	}{
		{"reader", []core.KeyScope{core.ScopeWorkspaceRead, core.ScopeWorkspaceCreate}, false},
		{"user", []core.KeyScope{core.ScopeWorkspaceRead, core.ScopeWorkspaceCreate, core.ScopeWorkspaceExec}, true},
	} {
		key := w.newKey(c.name, c.scopes...).Secret
		for _, ask := range []call{{method: "GET", path: "/v1/operations/" + out.OperationID, key: key}, {method: "POST", path: "/v1/operations/" + out.OperationID + "/cancel", key: key}} {
			got := w.do(ask)
			var op api.Operation
			var result api.StepResult
			if err := errors.Join(json.Unmarshal(got.body, &op), json.Unmarshal(op.Result, &result)); err != nil || got.status != 200 || len(result.Actions) != 1 {
				t.Fatalf("%s: %d %s, %v", c.name, got.status, got.body, err)
			}
			a := result.Actions[0]
			if (a.Stdout != "") != c.shown || (a.Stderr != "") != c.shown || (a.Score != nil) != c.shown || a.ExitCode == nil {
				t.Errorf("%s, %s: %+v", c.name, ask.method, a)
			}
		}
	}
}
