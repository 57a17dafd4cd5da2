package mcp_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/mcp"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestStep tries actions from a checkpoint, and reads their results again, with more of the output.
func TestStep(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.stdio(t, mcp.Config{}, adminKey, "")
	s.ok(t, "workspace_create", args{"name": "demo"})
	node, _ := s.ok(t, "checkpoint", args{"workspace": "demo", "name": "before"})
	long := strings.Repeat("ü", 3000)
	out, text := s.ok(t, "step", args{"of": "before", "parallel": 2, "max_bytes": 101, "actions": []args{
		{"shell": "echo 7", "if_min_score": 5, "name": "best"},
		{"shell": "echo 3", "if_min_score": 5},
		{"command": []string{"cat", "/in"}, "files": args{"/in": long}, "keep": "workspace"},
		{"command": []string{"err", injection}, "if_exit_code": 1},
		{"command": []string{"absent"}},
	}})
	actions := out["actions"].([]any)
	if out["state"] != "succeeded" || len(actions) != 5 {
		t.Fatalf("%v\n%s", out, text)
	}
	at := func(i int) args { return actions[i].(args) }
	if a := at(0); a["kept"] != "checkpoint" || a["score"] != 7.0 || a["exit_code"] != 0.0 || a["stdout"].(args)["text"] != "7\n" || a["stdout"].(args)["untrusted"] != true {
		t.Errorf("kept: %v", a)
	}
	if cp, err := w.admin.Checkpoint(t.Context(), at(0)["checkpoint"].(string)); err != nil || cp.Name != "best" || cp.ParentID != node["id"] {
		t.Errorf("the checkpoint: %+v, %v", cp, err)
	}
	if a := at(1); a["kept"] != "nothing" || a["checkpoint"] != nil || a["workspace"] != nil {
		t.Errorf("below the score: %v", a)
	}
	if stdout := at(2)["stdout"].(args); stdout["text"] != strings.Repeat("ü", 50) || stdout["cut_bytes"] != 5900.0 {
		t.Errorf("cut: %v", stdout)
	}
	if ws, err := w.admin.Workspace(t.Context(), at(2)["workspace"].(string)); err != nil || ws.State != coppice.WorkspaceReady {
		t.Errorf("the workspace: %+v, %v", ws, err)
	}
	if a := at(4); a["failure"].(args)["code"] != "COMMAND_NOT_FOUND" || !strings.Contains(text, "action 4: failed: COMMAND_NOT_FOUND") {
		t.Errorf("failed: %v\n%s", a, text)
	}
	more := fmt.Sprintf("step_results with operation %s, action 2 and max_bytes 65536", out["operation"])
	if !strings.Contains(text, more) || !strings.Contains(text, "score 7, kept checkpoint "+at(0)["checkpoint"].(string)) {
		t.Errorf("text: %s", text)
	}
	again, text := s.ok(t, "step_results", args{"operation": out["operation"], "action": 2, "max_bytes": 65536})
	if only := again["actions"].([]any); len(only) != 1 || only[0].(args)["stdout"].(args)["text"] != long || strings.Contains(text, "Earlier output") {
		t.Errorf("the rest: %s", text)
	}
	if again, _ = s.ok(t, "step_results", args{"operation": out["operation"]}); len(again["actions"].([]any)) != 5 {
		t.Errorf("all again: %v", again)
	}
	checkMarked(t, "step_results", s.call(t, "step_results", args{"operation": out["operation"], "max_bytes": 65536}))

	run := []args{{"command": []string{"true"}}}
	s.refused(t, "CHECKPOINT_NOT_FOUND", "step", args{"of": "absent", "actions": run})
	s.refused(t, "INVALID_ARGUMENTS", "step", args{"of": "before", "actions": []args{}})
	s.refused(t, "INVALID_ARGUMENTS", "step", args{"of": "before", "actions": []args{{"command": []string{"true"}, "shell": "true"}}})
	s.refused(t, "INVALID_ARGUMENTS", "step", args{"of": "before", "actions": []args{{"shell": "true", "keep": "all"}}})
	s.refused(t, "INVALID_ARGUMENTS", "step", args{"of": "before", "actions": []args{{"shell": "true", "timeout_seconds": 3601}}})
	s.refused(t, "INVALID_FIELD", "step", args{"of": "before", "actions": []args{{}}})
	s.refused(t, "INVALID_ARGUMENTS", "step_results", args{"operation": out["operation"], "action": 5})
	s.refused(t, "OPERATION_NOT_FOUND", "step_results", args{"operation": "op_00000000000000000000000000"})
}

// TestStepOutputIsBounded: the actions of an answer share what it has of their output.
func TestStepOutputIsBounded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.stdio(t, mcp.Config{}, adminKey, "")
	s.ok(t, "workspace_create", args{"name": "demo"})
	s.ok(t, "checkpoint", args{"workspace": "demo", "name": "before"})
	actions := make([]args, 8)
	for i := range actions {
		actions[i] = args{"command": []string{"echo", strings.Repeat("x", 50<<10)}, "keep": "nothing"}
	}
	out, _ := s.ok(t, "step", args{"of": "before", "actions": actions, "max_bytes": 65536})
	for _, a := range out["actions"].([]any) {
		if stdout := a.(args)["stdout"].(args); len(stdout["text"].(string)) != 16<<10 {
			t.Errorf("%d bytes", len(stdout["text"].(string)))
		}
	}
}

// TestStepThatTakesLong: after wait_seconds the step goes on. If the client gives up on the call, the step is canceled.
func TestStepThatTakesLong(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.stdio(t, mcp.Config{}, adminKey, "")
	s.ok(t, "workspace_create", args{"name": "demo"})
	s.ok(t, "checkpoint", args{"workspace": "demo", "name": "before"})
	slow := []args{{"shell": "echo 1"}, {"command": []string{"sleep", "3600"}, "timeout_seconds": 3600}}
	out, text := s.ok(t, "step", args{"of": "before", "actions": slow, "wait_seconds": 1})
	if out["state"] != "running" || !strings.Contains(text, "step_results with this operation") {
		t.Errorf("%v\n%s", out, text)
	}
	if again, _ := s.ok(t, "step_results", args{"operation": out["operation"], "wait_seconds": 1}); again["state"] != "running" {
		t.Errorf("%v", again)
	}
	if _, err := w.admin.CancelOperation(t.Context(), out["operation"].(string)); err != nil {
		t.Fatal(err)
	}
	if again, text := s.ok(t, "step_results", args{"operation": out["operation"], "wait_seconds": 60}); again["state"] != "failed" || !strings.Contains(text, "failed: OPERATION_CANCELED") {
		t.Errorf("%v\n%s", again, text)
	}

	ctx, cancel := context.WithCancel(t.Context())
	given := make(chan struct{})
	go func() {
		defer close(given)
		_, _ = s.CallTool(ctx, &sdk.CallToolParams{Name: "step", Arguments: args{"of": "before", "actions": slow[1:], "wait_seconds": 600}})
	}()
	eventually.True(t, "the step runs", func() bool { return len(w.steps(t, coppice.OperationRunning)) == 1 })
	cancel()
	<-given
	eventually.True(t, "the step is canceled", func() bool { return len(w.steps(t, coppice.OperationFailed)) == 2 })
}

// steps lists the steps in a state.
func (w *world) steps(t *testing.T, state coppice.OperationState) []coppice.Operation {
	t.Helper()
	ops, err := coppice.Collect(w.admin.Operations(t.Context(), coppice.OperationFilter{
		States: []coppice.OperationState{state}, Kinds: []coppice.OperationKind{coppice.OperationStepCheckpoint},
	}))
	if err != nil {
		t.Fatal(err)
	}
	return ops
}

// TestStepWithoutAnAnswer: the answer to a step does not arrive, or breaks off. The step is canceled if the client gives up on the call, and
// otherwise the model is told its operation.
func TestStepWithoutAnAnswer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	direct := w.stdio(t, mcp.Config{}, adminKey, "")
	direct.ok(t, "workspace_create", args{"name": "demo"})
	direct.ok(t, "checkpoint", args{"workspace": "demo", "name": "before"})
	step := func(wait int) args {
		return args{"of": "before", "wait_seconds": wait, "actions": []args{{"command": []string{"sleep", "3600"}, "timeout_seconds": 3600}}}
	}
	only := func(state coppice.OperationState) coppice.Operation {
		t.Helper()
		ops := w.steps(t, state)
		if len(ops) != 1 {
			t.Fatalf("%d steps are %s", len(ops), state)
		}
		return ops[0]
	}
	end := func(id coppice.OperationID) {
		t.Helper()
		if _, err := w.admin.CancelOperation(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		eventually.True(t, "the step has ended", func() bool { return len(w.steps(t, coppice.OperationRunning)) == 0 })
	}

	begun := make(chan struct{}, 1)
	withhold := func(n int64, res *http.Response) error { // the first answer
		if n == 1 {
			begun <- struct{}{}
			<-res.Request.Context().Done()
			return context.Cause(res.Request.Context())
		}
		return nil
	}
	s := w.stdio(t, mcp.Config{Server: w.between(t, withhold)}, adminKey, "")
	ctx, cancel := context.WithCancel(t.Context())
	given := make(chan struct{})
	go func() {
		defer close(given)
		_, _ = s.CallTool(ctx, &sdk.CallToolParams{Name: "step", Arguments: step(600)})
	}()
	<-begun
	canceled := only(coppice.OperationRunning)
	cancel()
	<-given
	eventually.True(t, "the step is canceled", func() bool { return len(w.steps(t, coppice.OperationFailed)) == 1 })
	if got := only(coppice.OperationFailed); got.ID != canceled.ID {
		t.Errorf("%s was canceled instead of %s", got.ID, canceled.ID)
	}

	s = w.stdio(t, mcp.Config{Server: w.between(t, withhold)}, adminKey, "")
	out, _ := s.ok(t, "step", step(1))
	if id := only(coppice.OperationRunning).ID; out["state"] != "running" || out["operation"] != id {
		t.Errorf("%v, want %s", out, id)
	}
	end(out["operation"].(string))

	s = w.stdio(t, mcp.Config{Server: w.between(t, func(n int64, res *http.Response) error {
		body := res.Body
		if n == 1 { // it breaks off after its first line
			line, err := bufio.NewReader(body).ReadString('\n')
			res.Body = struct {
				io.Reader
				io.Closer
			}{io.MultiReader(strings.NewReader(line), iotest.ErrReader(io.ErrUnexpectedEOF)), body}
			return err
		}
		_ = body.Close()
		res.StatusCode, res.Header = http.StatusForbidden, http.Header{"Content-Type": {"application/problem+json"}}
		res.Body = io.NopCloser(strings.NewReader(`{"type":"x","title":"x","status":403,"detail":"no","code":"PERMISSION_DENIED","request_id":"x"}`))
		return nil
	})}, adminKey, "")
	text := s.refused(t, "PERMISSION_DENIED", "step", step(600))
	id := only(coppice.OperationRunning).ID
	if !strings.Contains(text, "step_results with operation "+id) || !strings.Contains(text, "step "+id+": ") {
		t.Error(text)
	}
	end(id)
}

// between serves a proxy before the API that changes the answers to streamed steps. It counts them from 1.
func (w *world) between(t *testing.T, change func(n int64, res *http.Response) error) (address string) {
	t.Helper()
	target, err := url.Parse(w.url)
	if err != nil {
		t.Fatal(err)
	}
	var asked atomic.Int64
	proxy := httputil.NewSingleHostReverseProxy(target)
	proxy.ErrorLog = log.New(io.Discard, "", 0)
	proxy.ModifyResponse = func(res *http.Response) error {
		if !strings.HasSuffix(res.Request.URL.Path, "/step") {
			return nil
		}
		return change(asked.Add(1), res)
	}
	s := httptest.NewServer(proxy)
	t.Cleanup(s.Close)
	return s.URL
}
