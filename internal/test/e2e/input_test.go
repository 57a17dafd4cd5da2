package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// everything is what the API shows of its state.
func everything(t *testing.T, s *stack) map[string]any {
	t.Helper()
	ctx := t.Context()
	ws, err := coppice.Collect(s.client.Workspaces(ctx, coppice.WorkspaceFilter{States: []coppice.WorkspaceState{
		coppice.WorkspaceCreating, coppice.WorkspaceRestoring, coppice.WorkspaceQuarantined, coppice.WorkspaceReady, coppice.WorkspaceCheckpointing,
		coppice.WorkspaceSuspended, coppice.WorkspaceTerminating, coppice.WorkspaceTerminated, coppice.WorkspaceFailed, coppice.WorkspaceLost,
	}}))
	if err != nil {
		t.Fatal(err)
	}
	ckpts, err := coppice.Collect(s.client.Checkpoints(ctx, coppice.CheckpointFilter{States: []coppice.CheckpointState{
		coppice.CheckpointCapturing, coppice.CheckpointCaptured, coppice.CheckpointSealed, coppice.CheckpointFailed,
	}}))
	if err != nil {
		t.Fatal(err)
	}
	return map[string]any{"workspaces": ws, "checkpoints": ckpts}
}

// TestBadInput sends what is wrong to the real server: each is refused with a problem that has a stable code, and changes nothing.
func TestBadInput(t *testing.T) {
	s := theStack(t)
	ws := forkOne(t, s, seed(t))
	ckpt := seed(t)
	const (
		absentWS   = "ws_00000000000000000000000000"
		absentCkpt = "ckpt_00000000000000000000000000"
	)
	work, node := "/v1/workspaces/"+ws, "/v1/checkpoints/"+ckpt
	tall := `{"labels":{"a":` + strings.Repeat(`[`, 2000) + strings.Repeat(`]`, 2000) + `}}`
	cases := []struct {
		method, path, body string
		status             int
		code               string
	}{
		// Unknown fields and parameters, wrong types, broken bodies.
		{"POST", "/v1/workspaces", `{"names":"x"}`, 400, "UNKNOWN_FIELD"},
		{"POST", "/v1/workspaces", `{"resources":{"cpus":1}}`, 400, "UNKNOWN_FIELD"},
		{"POST", work + "/exec", `{"command":["true"],"shell":true}`, 400, "UNKNOWN_FIELD"},
		{"POST", node + "/fork", `{"count":1,"n":1}`, 400, "UNKNOWN_FIELD"},
		{"GET", "/v1/workspaces?stat=ready", "", 400, "INVALID_FIELD"},
		{"POST", "/v1/workspaces?wiat=0", `{}`, 400, "INVALID_FIELD"},
		{"POST", "/v1/workspaces", `{"name":7}`, 400, ""},
		{"POST", "/v1/workspaces", `{"name":"x"`, 400, "MALFORMED_BODY"},
		{"POST", "/v1/workspaces", `{} {}`, 400, "MALFORMED_BODY"},
		{"POST", "/v1/workspaces", ``, 400, "MALFORMED_BODY"},
		{"POST", "/v1/workspaces", `[]`, 400, ""},
		{"POST", "/v1/workspaces", `{"name":"x","name":"y"}`, 400, ""},
		{"POST", "/v1/workspaces", tall, 400, ""},
		// Names and values.
		{"POST", "/v1/workspaces", `{"name":"Upper"}`, 400, "INVALID_NAME"},
		{"POST", "/v1/workspaces", `{"name":"-x"}`, 400, "INVALID_NAME"},
		{"POST", "/v1/workspaces", `{"name":"` + strings.Repeat("x", 64) + `"}`, 400, "INVALID_NAME"},
		{"POST", "/v1/workspaces", `{"name":"a\u0000b"}`, 400, "INVALID_FIELD"},
		{"POST", "/v1/workspaces", `{"resources":{"memory_mib":127}}`, 400, "INVALID_FIELD"},
		{"POST", "/v1/workspaces", `{"resources":{"memory_mib":1000000000}}`, 400, "INVALID_FIELD"},
		{"POST", "/v1/workspaces", `{"resources":{"vcpus":-1}}`, 400, "INVALID_FIELD"},
		{"POST", "/v1/workspaces", `{"resources":{"disk_gib":4096}}`, 400, "INVALID_FIELD"},
		{"POST", "/v1/workspaces", `{"ttl_seconds":-5}`, 400, "INVALID_FIELD"},
		{"POST", "/v1/workspaces", `{"env":{"A=B":"x"}}`, 400, "INVALID_FIELD"},
		{"POST", "/v1/workspaces", `{"labels":{"a b":"x"}}`, 400, "INVALID_FIELD"},
		{"POST", "/v1/workspaces", `{"network":{"egress_policy":"allow"}}`, 400, "INVALID_FIELD"},
		{"POST", "/v1/workspaces", `{"network":{"allow":["example.com","*"]}}`, 400, "INVALID_FIELD"},
		{"POST", node + "/fork", `{"grants":["x"]}`, 404, "GRANT_NOT_FOUND"},
		{"POST", "/v1/workspaces?wait=601", `{}`, 400, "INVALID_FIELD"},
		{"POST", "/v1/workspaces?wait=x", `{}`, 400, "INVALID_FIELD"},
		{"GET", "/v1/workspaces?limit=0", "", 400, "INVALID_FIELD"},
		{"GET", "/v1/workspaces?cursor=xyz", "", 400, "INVALID_FIELD"},
		{"GET", "/v1/workspaces?state=happy", "", 400, "INVALID_FIELD"},
		// Numbers of children.
		{"POST", node + "/fork", `{"count":0}`, 400, "INVALID_FIELD"},
		{"POST", node + "/fork", `{"count":-1}`, 400, "INVALID_FIELD"},
		{"POST", node + "/fork", `{"count":257}`, 400, "INVALID_FIELD"},
		{"POST", node + "/fork", `{"count":1.5}`, 400, ""},
		{"POST", work + "/fork", `{"count":0}`, 400, "INVALID_FIELD"},
		{"POST", node + "/fork", `{"count":256}`, 429, "CAPACITY"},
		// What is not there.
		{"POST", "/v1/workspaces", `{"image":"no-such-image"}`, 404, "IMAGE_NOT_FOUND"},
		{"POST", "/v1/workspaces", `{"image":"sha256:` + strings.Repeat("0", 64) + `"}`, 404, "IMAGE_NOT_FOUND"},
		{"GET", "/v1/workspaces/" + absentWS, "", 404, "WORKSPACE_NOT_FOUND"},
		{"DELETE", "/v1/workspaces/" + absentWS, "", 404, "WORKSPACE_NOT_FOUND"},
		{"POST", "/v1/workspaces/" + absentWS + "/exec", `{"command":["true"]}`, 404, "WORKSPACE_NOT_FOUND"},
		{"POST", "/v1/workspaces/" + absentWS + "/checkpoints", `{}`, 404, "WORKSPACE_NOT_FOUND"},
		{"POST", "/v1/workspaces/" + absentWS + "/fork", `{}`, 404, "WORKSPACE_NOT_FOUND"},
		{"POST", "/v1/checkpoints/" + absentCkpt + "/fork", `{}`, 404, "CHECKPOINT_NOT_FOUND"},
		{"POST", work + "/restore", `{"checkpoint_id":"` + absentCkpt + `"}`, 404, "CHECKPOINT_NOT_FOUND"},
		{"GET", "/v1/checkpoints/" + absentCkpt + "/tree", "", 404, "CHECKPOINT_NOT_FOUND"},
		{"GET", "/v1/operations/op_00000000000000000000000000", "", 404, "OPERATION_NOT_FOUND"},
		{"GET", "/v1/sessions/sess_00000000000000000000000000", "", 404, "SESSION_NOT_FOUND"},
		{"GET", "/v1/sessions/sess_00000000000000000000000000/output", "", 404, "SESSION_NOT_FOUND"},
		{"POST", "/v1/sessions/sess_00000000000000000000000000/attach", "", 404, "SESSION_NOT_FOUND"},
		{"DELETE", work + "/ports/port_00000000000000000000000000", "", 404, "PORT_NOT_FOUND"},
		{"GET", work + "/files?path=/absent", "", 404, "FILE_NOT_FOUND"},
		{"GET", "/v1/nothing", "", 404, "ROUTE_NOT_FOUND"},
		{"PATCH", "/v1/workspaces", `{}`, 405, ""},
		// Ids that are none.
		{"GET", "/v1/workspaces/ws_x", "", 400, "INVALID_ID"},
		{"GET", "/v1/workspaces/" + ckpt, "", 400, "INVALID_ID"},
		{"GET", "/v1/workspaces/..%2f..%2fetc", "", 400, ""},
		{"POST", work + "/restore", `{"checkpoint_id":"` + ws + `"}`, 400, "INVALID_ID"},
		{"POST", work + "/restore", `{}`, 400, ""},
		// What does not fit what is there.
		{"POST", "/v1/workspaces", `{"name":"seed","image":"base"}`, 409, "NAME_TAKEN"},
		{"POST", work + "/checkpoints", `{"name":"seed"}`, 409, "NAME_TAKEN"},
		{"PATCH", node, `{"version":99,"annotations":{"a":1}}`, 409, "VERSION_CONFLICT"},
		{"PATCH", work, `{"version":99,"labels":{"a":"b"}}`, 409, "VERSION_CONFLICT"},
		{"PATCH", node, `{"annotations":{"a":"` + strings.Repeat("x", 17<<10) + `"}}`, 400, ""},
		// Programs, files, ports.
		{"POST", work + "/exec", `{"command":[]}`, 400, "INVALID_FIELD"},
		{"POST", work + "/exec", `{"command":["true"],"cwd":"relative"}`, 400, "INVALID_FIELD"},
		{"POST", work + "/exec", `{"command":["true"],"timeout_ms":-1}`, 400, "INVALID_FIELD"},
		{"POST", work + "/exec", `{"command":["true"],"stdin":"a","stdin_base64":"YQ=="}`, 400, "INVALID_FIELD"},
		{"POST", work + "/exec", `{"command":["true"],"stdin_open":true}`, 400, "INVALID_FIELD"},
		{"POST", work + "/exec", `{"command":["true"],"cols":80}`, 400, "INVALID_FIELD"},
		{"GET", work + "/files?path=relative", "", 400, "INVALID_FIELD"},
		{"GET", work + "/files", "", 400, "INVALID_FIELD"},
		{"PUT", work + "/files?path=/tmp/x&mode=999", "x", 400, "INVALID_FIELD"},
		{"POST", work + "/ports", `{"guest_port":0}`, 400, "INVALID_FIELD"},
		{"POST", work + "/ports", `{"guest_port":80,"listen":"nowhere"}`, 400, "INVALID_FIELD"},
	}
	before := everything(t, s)
	for _, c := range cases {
		name := c.method + " " + strings.NewReplacer(ws, "WS", ckpt, "CKPT").Replace(c.path+" "+c.body)
		if len(name) > 110 {
			name = name[:110]
		}
		req := s.request(t, c.method, c.path, strings.NewReader(c.body))
		checkProblem(t, name, req, c.status, c.code)
	}
	if diff := cmp.Diff(before, everything(t, s)); diff != "" {
		t.Errorf("bad input changed something (-before +after):\n%s", diff)
	}
	if got := execute(t, s, ws, "ls", "/tmp"); got != "" {
		t.Errorf("bad input left %q in the guest", got)
	}
}

func (s *stack) request(t *testing.T, method, path string, body io.Reader) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, s.server+path, body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+s.token)
	if method == "POST" || method == "PATCH" {
		req.Header.Set("Content-Type", "application/json")
	}
	return req
}

// checkProblem wants an answer with a status and, unless it is "", a code.
func checkProblem(t *testing.T, name string, req *http.Request, status int, code string) {
	t.Helper()
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Errorf("%s: %v", name, err)
		return
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	var p coppice.Problem
	if err == nil {
		err = json.Unmarshal(body, &p)
	}
	kind, _, _ := mime.ParseMediaType(res.Header.Get("Content-Type"))
	if err != nil || res.StatusCode != status || p.Status != status || code != "" && p.Code != code || p.Code == "" || p.Detail == "" || p.RequestID == "" || kind != "application/problem+json" {
		t.Errorf("%s:\n got %d %s %s (%v)\nwant %d %s", name, res.StatusCode, kind, bytes.TrimSpace(body), err, status, code)
	}
}

// TestBadKeys wants the same answer to every wrong key.
func TestBadKeys(t *testing.T) {
	s := theStack(t)
	for name, header := range map[string]string{
		"none": "", "another": "Bearer coppice_" + strings.Repeat("0", 64), "cut": "Bearer " + s.token[:len(s.token)-1],
		"longer": "Bearer " + s.token + "0", "another scheme": "Basic " + s.token, "empty": "Bearer ",
	} {
		for _, path := range []string{"/v1/workspaces", "/v1/runners", "/v1/checkpoints/" + seed(t)} {
			req := s.request(t, "GET", path, nil)
			req.Header.Del("Authorization")
			if header != "" {
				req.Header.Set("Authorization", header)
			}
			checkProblem(t, name+" "+path, req, 401, "UNAUTHENTICATED")
		}
	}
	for _, path := range []string{"/healthz", "/readyz", "/openapi.yaml"} {
		req := s.request(t, "GET", path, nil)
		req.Header.Del("Authorization")
		res, err := http.DefaultClient.Do(req)
		if err != nil || res.StatusCode != http.StatusOK {
			t.Errorf("%s without a key: %v, %v", path, res, err)
			continue
		}
		_ = res.Body.Close()
	}
}

// TestBigBodies sends bodies that are too large, with their length and without.
func TestBigBodies(t *testing.T) {
	s := theStack(t)
	ws := forkOne(t, s, seed(t))
	for _, path := range []string{"/v1/workspaces", "/v1/workspaces/" + ws + "/checkpoints", "/v1/checkpoints/" + seed(t) + "/fork"} {
		for _, known := range []bool{true, false} {
			body := io.Reader(bytes.NewReader(append([]byte(`{"name":"`), bytes.Repeat([]byte("x"), 2<<20)...)))
			if !known {
				body = io.MultiReader(body)
			}
			checkProblem(t, fmt.Sprintf("%s, length known: %v", path, known), s.request(t, "POST", path, body), 413, "BODY_TOO_LARGE")
		}
	}
	req := s.request(t, "POST", "/v1/workspaces", strings.NewReader("{}"))
	req.Header.Set("Content-Type", "text/plain")
	checkProblem(t, "another content type", req, 415, "")
}
