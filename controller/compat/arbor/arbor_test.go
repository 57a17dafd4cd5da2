package arbor_test

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

const fullCreate = `{
	"name": "fix-auth-bug",
	"repo": {"provider": "github", "url": "git@github.com:org/repo.git", "ref": "refs/heads/main"},
	"runtime": {"runner_class": "fc-x86_64-v1", "vcpu_count": 1, "memory_mib": 512, "disk_gb": 2},
	"image": {"base_image_id": "ubuntu-24.04-dev-v1"},
	"network": {"egress_policy": "default-deny"}
}`

// TestCurl runs the calls of Arbor's README with curl, as it writes them: with a form's content type and no key. The ids come from the answers
// before.
func TestCurl(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	script := `
ask() { curl -sS --fail-with-body "$@"; }
id() { sed -n 's/.*"'$1'":"\([^"]*\)".*/\1/p'; }
ended() { until ask $BASE/v1/operations/$1 | grep -q '"status":"succeeded"'; do sleep 0.05; done; }

made=$(ask -X POST $BASE/v1/workspaces -d '` + fullCreate + `')
ws=$(id workspace_id <<<"$made"); ended $(id operation_id <<<"$made")
session=$(ask -X POST $BASE/v1/workspaces/$ws/exec -d '{ "command": ["cat"], "pty": true }' | id session_id)
ask -X POST $BASE/v1/sessions/$session/attach | grep '"url":"ws://.*/v1/attach/'$session'?token='
made=$(ask -X POST $BASE/v1/workspaces/$ws/checkpoints -d '{ "name": "before-migration", "mode": "full_vm" }')
ckpt=$(id checkpoint_id <<<"$made"); ended $(id operation_id <<<"$made")
ask $BASE/v1/workspaces/$ws/checkpoints | grep '^\[.*before-migration'
made=$(ask -X POST $BASE/v1/checkpoints/$ckpt/fork -d '{ "branch_name": "attempt-a", "post_restore": { "quarantine": true, "identity_reseal": true } }')
ended $(id operation_id <<<"$made")
made=$(ask -X POST $BASE/v1/checkpoints/$ckpt/restore -d '{ "workspace_name": "again" }')
ended $(id operation_id <<<"$made")
ask -X PUT $BASE/v1/workspaces/$ws/secrets/grants/8c9e6c1e-3a53-4d5f-9e0f-7f4f4c2b1a00 -d '{
	"provider": "openai", "mode": "brokered_proxy", "vault_ref": "vault://prod/openai-key",
	"allowed_hosts": ["api.openai.com"], "inject": { "kind": "authorization_header" }
}' | grep '"status":"active"'
ask -X DELETE $BASE/v1/workspaces/$ws/secrets/grants/8c9e6c1e-3a53-4d5f-9e0f-7f4f4c2b1a00
timeout 60 curl -sSN -H 'Last-Event-ID: 0' $BASE/v1/workspaces/$ws/events | grep -m1 '"type":"checkpoint.captured"'
ended $(ask -X POST $BASE/v1/workspaces/$ws:terminate | id operation_id)
echo done`
	cmd := exec.CommandContext(t.Context(), "bash", "-ec", script)
	cmd.Env = append(os.Environ(), "BASE="+w.url, "no_proxy=*")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil || !strings.HasSuffix(string(out), "done\n") {
		t.Errorf("%v\n%s\n%s", err, out, stderr.String())
	}
	names := map[string]coppice.WorkspaceState{}
	for ws, err := range w.rest.Workspaces(t.Context(), coppice.WorkspaceFilter{States: []coppice.WorkspaceState{coppice.WorkspaceReady, coppice.WorkspaceTerminated}}) {
		if err != nil {
			t.Fatal(err)
		}
		names[ws.Name] = ws.State
	}
	if names["fix-auth-bug"] != coppice.WorkspaceTerminated || names["attempt-a"] != coppice.WorkspaceReady || names["again"] != coppice.WorkspaceReady {
		t.Errorf("the workspaces are %v", names)
	}
}

// An answer has Arbor's fields and Coppice's. What Coppice has no field for is kept and shown.
func TestWorkspace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	b := w.create(fullCreate)
	if b.State != "creating" || !strings.HasPrefix(b.WorkspaceID, "ws_") {
		t.Errorf("%+v", b)
	}
	var got struct {
		ID            string
		WorkspaceID   string `json:"workspace_id"`
		Name, State   string
		IdentityEpoch int64 `json:"identity_epoch"`
		Epoch         int64
		Repo          struct {
			URL, Ref string
			Cloned   *bool
		}
		Runtime struct {
			RunnerClass string `json:"runner_class"`
			VCPUs       int    `json:"vcpu_count"`
			MemoryMiB   int    `json:"memory_mib"`
			DiskGB      int    `json:"disk_gb"`
		}
		Network struct {
			EgressPolicy string `json:"egress_policy"`
		}
	}
	w.do(ask{method: "GET", path: "/v1/workspaces/" + b.WorkspaceID}).want(t, http.StatusOK, &got)
	if got.ID != b.WorkspaceID || got.WorkspaceID != got.ID || got.Name != "fix-auth-bug" || got.State != "ready" || got.IdentityEpoch != got.Epoch || got.Epoch == 0 ||
		got.Repo.URL != "git@github.com:org/repo.git" || got.Repo.Ref != "refs/heads/main" || got.Repo.Cloned == nil || *got.Repo.Cloned ||
		got.Runtime.RunnerClass != "fc-x86_64-v1" || got.Runtime.VCPUs != 1 || got.Runtime.MemoryMiB != 512 || got.Runtime.DiskGB != 2 || got.Network.EgressPolicy != "deny-all" {
		t.Errorf("%+v", got)
	}
	var op struct {
		OpType   string `json:"op_type"`
		TargetID string `json:"target_id"`
		Status   string
		Progress int `json:"progress_pct"`
	}
	w.do(ask{method: "GET", path: "/v1/operations/" + b.OperationID}).want(t, http.StatusOK, &op)
	if op.OpType != "create_workspace" || op.TargetID != b.WorkspaceID || op.Status != "succeeded" || op.Progress != 100 {
		t.Errorf("%+v", op)
	}
	var list []struct {
		ID      string
		Healthy bool
	}
	if w.do(ask{method: "GET", path: "/v1/runners"}).want(t, http.StatusOK, &list); len(list) != 1 || !list[0].Healthy {
		t.Errorf("runners: %+v", list)
	}
	w.do(ask{method: "GET", path: "/health"}).want(t, http.StatusOK, nil)
	w.do(ask{method: "GET", path: "/v1/workspaces/" + b.WorkspaceID + "/events", header: map[string]string{"Last-Event-ID": "abc"}}).want(t, http.StatusBadRequest, nil)
	for _, want := range []string{"pending", "succeeded"} {
		var end begun
		if w.do(ask{method: "POST", path: "/v1/workspaces/" + b.WorkspaceID + ":terminate"}).want(t, http.StatusAccepted, &end); end.Status != want {
			t.Errorf("terminated: %+v, want %s", end, want)
		}
		if end.OperationID != "" {
			w.ends(end)
		}
	}
}

// What Coppice does not have is refused by its name, and nothing is made.
func TestRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create(`{"name": "a"}`).WorkspaceID
	var b begun
	w.do(ask{method: "POST", path: "/v1/workspaces/" + ws + "/checkpoints", body: `{"notes": "why"}`}).want(t, http.StatusAccepted, &b)
	ckpt := w.ends(b).CheckpointID
	for name, c := range map[string]struct {
		ask    ask
		status int
		code   string
		names  string
	}{
		"another field":       {ask{method: "POST", path: "/v1/workspaces", body: `{"gpu": 1}`}, 400, "INVALID_REQUEST", "gpu"},
		"no JSON":             {ask{method: "POST", path: "/v1/workspaces", body: `name=a`}, 400, "INVALID_REQUEST", "body"},
		"two values":          {ask{method: "POST", path: "/v1/workspaces", body: `{} {}`}, 400, "INVALID_REQUEST", "more than one"},
		"a policy":            {ask{method: "POST", path: "/v1/workspaces", body: `{"network": {"egress_policy": "open"}}`}, 400, "INVALID_REQUEST", "egress_policy"},
		"open egress":         {ask{method: "POST", path: "/v1/workspaces", body: `{"network": {"egress_policy": "allow-all"}}`}, 403, "", ""},
		"a mode":              {ask{method: "POST", path: "/v1/workspaces/" + ws + "/checkpoints", body: `{"mode": "disk_only"}`}, 501, "UNSUPPORTED_OPERATION_IN_MVP", "mode"},
		"no quarantine":       {ask{method: "POST", path: "/v1/checkpoints/" + ckpt + "/fork", body: `{"post_restore": {"quarantine": false}}`}, 501, "UNSUPPORTED_OPERATION_IN_MVP", "quarantine"},
		"no reseal":           {ask{method: "POST", path: "/v1/checkpoints/" + ckpt + "/restore", body: `{"post_restore": {"identity_reseal": false}}`}, 501, "UNSUPPORTED_OPERATION_IN_MVP", "identity_reseal"},
		"in place":            {ask{method: "POST", path: "/v1/checkpoints/" + ckpt + "/restore", body: `{"target": "in_place"}`}, 501, "UNSUPPORTED_OPERATION_IN_MVP", "target"},
		"a branch to restore": {ask{method: "POST", path: "/v1/checkpoints/" + ckpt + "/restore", body: `{"branch_name": "a"}`}, 400, "INVALID_REQUEST", "branch_name"},
		"another mode":        {ask{method: "PUT", path: "/v1/workspaces/" + ws + "/secrets/grants/g", body: `{"mode": "ephemeral_env"}`}, 501, "UNSUPPORTED_OPERATION_IN_MVP", "mode"},
		"another injection":   {ask{method: "PUT", path: "/v1/workspaces/" + ws + "/secrets/grants/g", body: `{"inject": {"kind": "sigv4"}}`}, 501, "UNSUPPORTED_OPERATION_IN_MVP", "inject.kind"},
		"no command":          {ask{method: "POST", path: "/v1/workspaces/" + ws + "/exec", body: `{}`}, 400, "", ""},
		"an absent workspace": {ask{method: "GET", path: "/v1/workspaces/ws_00000000000000000000000000"}, 404, "WORKSPACE_NOT_FOUND", ""},
		"an absent list":      {ask{method: "GET", path: "/v1/workspaces/ws_00000000000000000000000000/checkpoints"}, 404, "WORKSPACE_NOT_FOUND", ""},
		"absent events":       {ask{method: "GET", path: "/v1/workspaces/ws_00000000000000000000000000/events"}, 404, "WORKSPACE_NOT_FOUND", ""},
		"an absent operation": {ask{method: "GET", path: "/v1/operations/op_00000000000000000000000000"}, 404, "OPERATION_NOT_FOUND", ""},
		"an absent session":   {ask{method: "POST", path: "/v1/sessions/sess_00000000000000000000000000/attach"}, 404, "SESSION_NOT_FOUND", ""},
		"another action":      {ask{method: "POST", path: "/v1/workspaces/" + ws + ":explode"}, 404, "NOT_FOUND", ""},
		"another route":       {ask{method: "GET", path: "/v2/workspaces"}, 404, "NOT_FOUND", ""},
		"another method":      {ask{method: "DELETE", path: "/v1/workspaces"}, 405, "METHOD_NOT_ALLOWED", ""},
		"a path with dots":    {ask{method: "GET", path: "/v1/../health"}, 404, "NOT_FOUND", ""},
		"a large body":        {ask{method: "POST", path: "/v1/workspaces", body: strings.Repeat(" ", 1<<20+1)}, 413, "BODY_TOO_LARGE", ""},
	} {
		r := w.do(c.ask).want(t, c.status, nil)
		if c.code != "" && r.code() != c.code || !strings.Contains(r.Body, c.names) {
			t.Errorf("%s: %s, want %s and %q", name, r.Body, c.code, c.names)
		}
	}
	n := 0
	for _, err := range w.rest.Workspaces(t.Context(), coppice.WorkspaceFilter{}) {
		if err != nil {
			t.Fatal(err)
		}
		n++
	}
	if n != 1 {
		t.Errorf("there are %d workspaces", n)
	}
	var kept []struct{ Notes string }
	if w.do(ask{method: "GET", path: "/v1/workspaces/" + ws + "/checkpoints"}).want(t, http.StatusOK, &kept); len(kept) != 1 || kept[0].Notes != "why" {
		t.Errorf("%+v", kept)
	}
}

// A grant opens the way to its hosts. One that is refused opens nothing.
func TestGrants(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create(`{"name": "a"}`).WorkspaceID
	at := "/v1/workspaces/" + ws + "/secrets/grants/"
	allowed := func() coppice.Allow {
		t.Helper()
		got, err := w.rest.Workspace(t.Context(), ws)
		if err != nil {
			t.Fatal(err)
		}
		return got.Network.Allow
	}
	r := w.do(ask{method: "PUT", path: at + "g", body: `{"provider": "openai", "vault_ref": "vault://prod/other", "allowed_hosts": ["api.openai.com"]}`})
	if r.Status < 400 || r.Status >= 500 || r.code() != "SECRET_POLICY_DENIED" || len(allowed()) != 0 {
		t.Errorf("a secret that is not there: %d %s; allowed %v", r.Status, r.Body, allowed())
	}
	var got struct {
		GrantID string `json:"grant_id"`
		Status  string
		Header  string
	}
	body := `{"provider": "openai", "mode": "brokered_proxy", "vault_ref": "vault://prod/openai-key", "allowed_hosts": ["api.openai.com"], "ttl_seconds": 3600}`
	for range 2 {
		w.do(ask{method: "PUT", path: at + "g", body: body}).want(t, http.StatusOK, &got)
	}
	if got.GrantID != "g" || got.Status != "active" || got.Header != "Authorization" || !slices.Equal(allowed(), coppice.Allow{"api.openai.com"}) {
		t.Errorf("%+v, allowed %v", got, allowed())
	}
	w.do(ask{method: "DELETE", path: at + "g"}).want(t, http.StatusNoContent, nil)
	if list, err := w.rest.Grants(t.Context(), ws); err != nil || len(list) != 0 {
		t.Errorf("%v: %+v", err, list)
	}
}

// A WebSocket has the bytes of a session as they are. Its token is good for one use, for this session.
func TestAttach(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create(`{"name": "a"}`).WorkspaceID
	start := func(body string) begun {
		t.Helper()
		var b begun
		w.do(ask{method: "POST", path: "/v1/workspaces/" + ws + "/exec", body: body}).want(t, http.StatusAccepted, &b)
		return b
	}
	s := start(`{"command": ["cat"], "pty": true}`)
	if s.Status != "starting" || !s.Attachable {
		t.Errorf("%+v", s)
	}
	pass := func(id string) string {
		t.Helper()
		var p struct {
			Transport, URL string
			ExpiresAt      time.Time `json:"expires_at"`
		}
		w.do(ask{method: "POST", path: "/v1/sessions/" + id + "/attach"}).want(t, http.StatusOK, &p)
		if p.Transport != "websocket" || !p.ExpiresAt.After(time.Now()) {
			t.Errorf("%+v", p)
		}
		return p.URL
	}
	at := pass(s.SessionID)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	conn, _, err := websocket.Dial(ctx, at, nil) //nolint:bodyclose // the library closes it
	if err != nil {
		t.Fatal(err)
	}
	defer conn.CloseNow() //nolint:errcheck // it may be closed already
	if err := conn.Write(ctx, websocket.MessageBinary, []byte("typed\n")); err != nil {
		t.Fatal(err)
	}
	var seen []byte
	for !bytes.Contains(seen, []byte("typed")) {
		kind, b, err := conn.Read(ctx)
		if err != nil || kind != websocket.MessageBinary {
			t.Fatalf("%v %v after %q", kind, err, seen)
		}
		seen = append(seen, b...)
	}
	if err := w.rest.DeleteSession(ctx, s.SessionID); err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, _, err = conn.Read(ctx)
	}
	if websocket.CloseStatus(err) < 0 {
		t.Errorf("the end of the session: %v", err)
	}

	// A program that takes no input is heard to its end, whatever the client sends.
	deaf := start(`{"command": ["sleep", "600"]}`)
	quiet, _, err := websocket.Dial(ctx, pass(deaf.SessionID), nil) //nolint:bodyclose // the library closes it
	if err != nil {
		t.Fatal(err)
	}
	defer quiet.CloseNow() //nolint:errcheck // it may be closed already
	if err := quiet.Write(ctx, websocket.MessageText, []byte("x")); err != nil {
		t.Fatal(err)
	}
	gone, stop := context.WithTimeout(ctx, 300*time.Millisecond)
	if _, _, err := quiet.Read(gone); gone.Err() == nil {
		t.Errorf("the connection ended: %v", err)
	}
	stop()
	// A message that is too long ends the connection, and not the session.
	again, _, err := websocket.Dial(ctx, pass(deaf.SessionID), nil) //nolint:bodyclose // the library closes it
	if err != nil {
		t.Fatal(err)
	}
	defer again.CloseNow() //nolint:errcheck // it may be closed already
	if err := again.Write(ctx, websocket.MessageBinary, make([]byte, 64<<10+1)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := again.Read(ctx); websocket.CloseStatus(err) != websocket.StatusMessageTooBig {
		t.Errorf("after a message that is too long: %v", err)
	}
	if s, err := w.rest.Session(ctx, deaf.SessionID); err != nil || s.State != coppice.SessionRunning {
		t.Errorf("the session is %+v, %v", s.State, err)
	}

	other := start(`{"command": ["cat"], "pty": true}`)
	swapped := strings.Replace(pass(other.SessionID), other.SessionID, s.SessionID, 1)
	for name, url := range map[string]string{"a token that was used": at, "no token": strings.Split(at, "?")[0], "a token of another session": swapped} {
		r := w.do(ask{method: "GET", at: strings.Replace(url, "ws://", "http://", 1), header: map[string]string{
			"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
		}})
		if r.Status != http.StatusUnauthorized {
			t.Errorf("%s: %d %s", name, r.Status, r.Body)
		}
	}
}

// A listener that needs no key answers nothing but this host, and no browser.
func TestOnlyThisHostWithoutKey(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for name, c := range map[string]struct {
		change func(*ask)
		want   int
	}{
		"a page":                    {func(a *ask) { a.header = map[string]string{"Origin": "https://evil.example"} }, 403},
		"a page without an origin":  {func(a *ask) { a.header = map[string]string{"Sec-Fetch-Site": "cross-site"} }, 403},
		"a form of an old browser":  {func(a *ask) { a.header = map[string]string{"Accept-Language": "en"} }, 403},
		"a link":                    {func(a *ask) { a.header = map[string]string{"Referer": "https://evil.example/"} }, 403},
		"a cookie":                  {func(a *ask) { a.header = map[string]string{"Cookie": "a=b"} }, 403},
		"a name bound to this host": {func(a *ask) { a.host = "evil.example" }, 421},
		"a proxy":                   {func(a *ask) { a.header = map[string]string{"X-Forwarded-For": "192.0.2.1"} }, 403},
		"a wrong key":               {func(a *ask) { a.header = map[string]string{"Authorization": "Bearer wrong"} }, 401},
		"no key where one is due":   {func(a *ask) { a.at = w.keyed }, 401},
		"a key":                     {func(a *ask) { a.at, a.header = w.keyed, map[string]string{"Authorization": "Bearer " + firstKey} }, 202},
		"curl":                      {func(*ask) {}, 202},
	} {
		a := ask{method: "POST", path: "/v1/workspaces", body: `{}`}
		c.change(&a)
		if r := w.do(a); r.Status != c.want || r.Header.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("%s: %d %s", name, r.Status, r.Body)
		}
	}
}

// A foreign key learns nothing: what is another project's is answered as what is not there.
func TestForeignKey(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create(`{"name": "a"}`)
	var b begun
	w.do(ask{method: "POST", path: "/v1/workspaces/" + ws.WorkspaceID + "/checkpoints", body: `{}`}).want(t, http.StatusAccepted, &b)
	ckpt := w.ends(b).CheckpointID
	w.do(ask{method: "POST", path: "/v1/workspaces/" + ws.WorkspaceID + "/exec", body: `{"command": ["cat"]}`}).want(t, http.StatusAccepted, &b)
	foreign := map[string]string{"Authorization": "Bearer " + w.cell.Tenant(t, "blue")}
	absent := func(id string) string { return id[:strings.Index(id, "_")+1] + strings.Repeat("0", 26) }
	for _, route := range []struct{ method, path, body, id string }{
		{"GET", "/v1/workspaces/ID", "", ws.WorkspaceID},
		{"POST", "/v1/workspaces/ID:terminate", "", ws.WorkspaceID},
		{"POST", "/v1/workspaces/ID/terminate", "", ws.WorkspaceID},
		{"POST", "/v1/workspaces/ID/exec", `{"command": ["true"]}`, ws.WorkspaceID},
		{"POST", "/v1/workspaces/ID/checkpoints", `{}`, ws.WorkspaceID},
		{"GET", "/v1/workspaces/ID/checkpoints", "", ws.WorkspaceID},
		{"GET", "/v1/workspaces/ID/events", "", ws.WorkspaceID},
		{"PUT", "/v1/workspaces/ID/secrets/grants/g", `{"vault_ref": "vault://prod/openai-key", "allowed_hosts": ["a.example"]}`, ws.WorkspaceID},
		{"DELETE", "/v1/workspaces/ID/secrets/grants/g", "", ws.WorkspaceID},
		{"POST", "/v1/checkpoints/ID/fork", `{}`, ckpt},
		{"POST", "/v1/checkpoints/ID/restore", `{}`, ckpt},
		{"GET", "/v1/operations/ID", "", ws.OperationID},
		{"POST", "/v1/sessions/ID/attach", "", b.SessionID},
	} {
		get := func(id string) (status int, text string) {
			r := w.do(ask{method: route.method, path: strings.Replace(route.path, "ID", id, 1), body: route.body, at: w.keyed, header: foreign})
			var e map[string]map[string]any
			if err := json.Unmarshal([]byte(r.Body), &e); err != nil {
				t.Fatalf("%s %s: %v: %s", route.method, route.path, err, r.Body)
			}
			if d, ok := e["error"]["details"].(map[string]any); ok {
				delete(d, "request_id")
			}
			b, _ := json.Marshal(e)
			return r.Status, strings.ReplaceAll(string(b), id, "ID")
		}
		s1, t1 := get(route.id)
		s2, t2 := get(absent(route.id))
		if s1 != http.StatusNotFound || s1 != s2 || t1 != t2 {
			t.Errorf("%s %s: %d %s, and for an absent one %d %s", route.method, route.path, s1, t1, s2, t2)
		}
	}
}
