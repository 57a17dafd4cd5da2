package httpapi_test

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/core"
)

// dump is every row of every table, so that "nothing changed" can be said exactly. Heartbeats and tokens do not count.
func (w *world) dump() string {
	w.t.Helper()
	conn, err := pgx.Connect(w.t.Context(), w.dsn)
	if err != nil {
		w.t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(w.t.Context())) }()
	var b strings.Builder
	for _, table := range []string{"projects", "quotas", "api_keys", "images", "image_locations", "operations", "workspaces", "sandboxes", "checkpoints", "reseal_reports", "sessions", "attach_tokens", "ports"} {
		rows, err := conn.Query(w.t.Context(), `SELECT (to_jsonb(t) - 'last_used_at')::text FROM `+table+` t ORDER BY 1`)
		if err != nil {
			w.t.Fatal(err)
		}
		list, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			w.t.Fatal(err)
		}
		fmt.Fprintln(&b, table, strings.Join(list, "\n"))
	}
	return b.String()
}

// route is an operation of the contract with a request that is good but for what a case changes.
type route struct {
	id, method, path string
	body             bool
	raw              bool // the body is bytes
	open             bool // without a key
}

// routes reads every operation out of the contract.
func routes(t *testing.T) []route {
	t.Helper()
	doc, err := openapi3.NewLoader().LoadFromData(api.Specification())
	if err != nil {
		t.Fatal(err)
	}
	var list []route
	for path, item := range doc.Paths.Map() {
		for method, op := range item.Operations() {
			r := route{id: op.OperationID, method: method, path: path, open: op.Security != nil && len(*op.Security) == 0}
			if op.RequestBody != nil {
				r.body = op.RequestBody.Value.Content.Get("application/json") != nil
				r.raw = !r.body
			}
			list = append(list, r)
		}
	}
	slices.SortFunc(list, func(a, b route) int { return strings.Compare(a.id, b.id) })
	return list
}

// at fills the ids of a path.
func (r route) at(ids map[string]string) string {
	p := r.path
	for name, id := range ids {
		p = strings.ReplaceAll(p, "{"+name+"}", id)
	}
	if strings.HasSuffix(p, "/files") {
		p += "?path=/x"
	}
	if r.id == "attach" {
		p += "?token=x"
	}
	if r.id == "diffCheckpoints" {
		p += "?to=" + ids["checkpoint_id"]
	}
	return p
}

var absent = map[string]string{
	"workspace_id": string(core.NewID[core.WorkspaceID]()), "checkpoint_id": string(core.NewID[core.CheckpointID]()), "session_id": string(core.NewID[core.SessionID]()),
	"operation_id": string(core.NewID[core.OperationID]()), "port_id": string(core.NewID[core.PortID]()), "watch_id": string(core.NewID[core.WatchID]()),
	"runner_id":  string(core.NewID[core.RunnerID]()),
	"project_id": string(core.NewID[core.ProjectID]()), "key_id": string(core.NewID[core.KeyID]()), "grant_id": "absent", "image_name": "absent", "upload_id": "absent",
}

// bodies are good ones, where one is needed.
var bodies = map[string]string{
	"putGrant":         `{"allowed_hosts":["a.example"],"secret":"0123456789"}`,
	"pruneCheckpoints": `{"max_bytes":1}`, "putRetention": `{"max_bytes":1}`, "putPrepared": `{"count":1}`,
	"createWorkspace": `{}`, "patchWorkspace": `{}`, "forkWorkspace": `{}`, "restoreWorkspace": `{"checkpoint_id":"` + absent["checkpoint_id"] + `"}`,
	"createPort": `{"guest_port":80}`, "exec": `{"command":["true"]}`, "signalSession": `{"signal":"TERM"}`, "resizeSession": `{"cols":80,"rows":24}`,
	"createCheckpoint": `{}`, "patchCheckpoint": `{}`, "forkCheckpoint": `{}`, "stepWorkspace": `{"command":["true"]}`, "stepCheckpoint": `{"actions":[{"command":["true"]}]}`, "restoreCheckpoint": `{}`,
	"setSessionDeadline": `{"timeout_ms":0}`, "createWatch": `{"path":"/d"}`, "makeDirectory": `{"path":"/d"}`, "renameFile": `{"from":"/d","to":"/e"}`, "setFileAttributes": `{"path":"/d"}`,
	"createRunnerToken": `{}`,
	"buildImage":        `{"name":"app","from":"base"}`,
	"createProject":     `{"name":"new"}`, "patchProject": `{"quotas":{}}`, "patchRunner": `{"draining":false}`, "createKey": `{"name":"new"}`,
}

// TestEveryRoute asks each operation of the contract for what must be refused everywhere: the wrong key, none, ids that are
// absent or malformed, unknown parameters, and bodies that are broken in every way.
func TestEveryRoute(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.create("main")
	before := w.dump()
	for _, r := range routes(t) {
		good := call{method: r.method, path: r.at(absent), body: bodies[r.id]}
		if r.raw {
			good.header = map[string]string{"Content-Type": "application/octet-stream"}
		}
		check := func(what string, change func(*call), status int, code core.Code) {
			t.Helper()
			c := good
			c.header = maps.Clone(good.header)
			change(&c)
			got := w.do(c)
			if r.method == http.MethodHead {
				if got.status != status || len(got.body) != 0 {
					t.Errorf("%s, %s: %d %s, want %d", r.id, what, got.status, got.body, status)
				}
				return
			}
			if p := got.problem(t); got.status != status || p.Code != string(code) {
				t.Errorf("%s, %s: %d %s (%s), want %d %s", r.id, what, got.status, p.Code, p.Detail, status, code)
			}
		}
		if !r.open {
			check("no key", func(c *call) { c.key = "-" }, 401, core.CodeUnauthenticated)
			check("wrong key", func(c *call) { c.key = "wrong" }, 401, core.CodeUnauthenticated)
			check("other scheme", func(c *call) { c.key = "-"; c.header = map[string]string{"Authorization": "Basic " + apiKey} }, 401, core.CodeUnauthenticated)
		}
		separator := "?"
		if strings.Contains(good.path, "?") {
			separator = "&"
		}
		check("unknown parameter", func(c *call) { c.path += separator + "frobnicate=1" }, 400, core.CodeInvalidField)
		if strings.Contains(r.path, "{") && r.id != "attach" {
			kind := core.CodeWorkspaceNotFound
			switch {
			case strings.Contains(r.path, "{checkpoint_id}"):
				kind = core.CodeCheckpointNotFound
			case strings.Contains(r.path, "{session_id}"):
				kind = core.CodeSessionNotFound
			case strings.Contains(r.path, "{operation_id}"):
				kind = core.CodeOperationNotFound
			case strings.Contains(r.path, "{runner_id}"):
				kind = core.CodeRunnerNotFound
			case strings.Contains(r.path, "{project_id}"):
				kind = core.CodeProjectNotFound
			case strings.Contains(r.path, "{key_id}"):
				kind = core.CodeKeyNotFound
			case strings.Contains(r.path, "{image_name}"):
				kind = core.CodeImageNotFound
			case strings.Contains(r.path, "{upload_id}"):
				kind = core.CodeUploadNotFound
			}
			if r.id != "putUpload" { // which makes it
				check("absent id", func(*call) {}, 404, kind)
			}
			if name := strings.Contains(r.path, "{image_name}"); name || strings.Contains(r.path, "{upload_id}") { // the client chooses it
				code := core.CodeInvalidField
				if name {
					code = core.CodeInvalidName
				}
				check("malformed name", func(c *call) { c.path = strings.Replace(good.path, "absent", "ABSENT", 1) }, 400, code)
				continue
			}
			bad := map[string]string{}
			for name := range absent {
				bad[name] = "nonsense"
			}
			check("malformed id", func(c *call) { c.path = r.at(bad) }, 400, core.CodeInvalidID)
			for name, id := range absent {
				bad[name] = strings.ToUpper(id)
			}
			check("id in capitals", func(c *call) { c.path = r.at(bad) }, 400, core.CodeInvalidID)
		}
		if !r.body {
			if !r.raw && r.method != http.MethodHead && r.id != "attach" && !strings.Contains(r.path, "files") && !strings.HasSuffix(r.path, "/events") && !strings.HasSuffix(r.path, "/log") && !strings.Contains(r.path, "export") && !strings.Contains(r.path, "output") && !strings.Contains(r.path, "console") && r.id != "getSpecification" {
				check("a body where none belongs", func(c *call) { c.body = `{"x":1}` }, 400, core.CodeMalformedBody)
			}
			continue
		}
		check("unknown field", func(c *call) {
			c.body = strings.Replace(good.body, "{", `{"frobnicate":1,`, 1)
			c.body = strings.Replace(c.body, ",}", "}", 1)
		}, 400, core.CodeUnknownField)
		check("another spelling", func(c *call) { c.body = `{"COUNT":1,"Name":"x","Command":["x"],"LABELS":{}}` }, 400, core.CodeUnknownField)
		check("no body", func(c *call) { c.body = ""; c.header = map[string]string{"Content-Type": "application/json"} }, 400, core.CodeMalformedBody)
		check("broken", func(c *call) { c.body = `{"a":` }, 400, core.CodeMalformedBody)
		check("trailing garbage", func(c *call) { c.body = good.body + `{}` }, 400, core.CodeMalformedBody)
		check("a field twice", func(c *call) { c.body = `{"labels":{},"labels":{}}` }, 400, core.CodeMalformedBody)
		check("not UTF-8", func(c *call) { c.body = "{\"x\":\"\xff\"}" }, 400, core.CodeMalformedBody)
		check("deep", func(c *call) { c.body = strings.Repeat(`{"a":`, 40) + "1" + strings.Repeat("}", 40) }, 400, core.CodeMalformedBody)
		check("an array", func(c *call) { c.body = `[]` }, 400, core.CodeInvalidField)
		check("null", func(c *call) { c.body = `null` }, 400, core.CodeInvalidField)
		check("too large", func(c *call) { c.body = `{"x":"` + strings.Repeat("x", 1<<20) + `"}` }, 413, core.CodeBodyTooLarge)
		check("another type", func(c *call) { c.header = map[string]string{"Content-Type": "text/plain"} }, 415, core.CodeUnsupportedMedia)
		check("no type", func(c *call) { c.header = map[string]string{"Content-Type": ""} }, 415, core.CodeUnsupportedMedia)
	}
	for _, c := range []struct {
		call   call
		status int
		code   core.Code
	}{
		{call{method: "GET", path: "/v1/nosuch"}, 404, core.CodeRouteNotFound},
		{call{method: "GET", path: "/"}, 404, core.CodeRouteNotFound},
		{call{method: "GET", path: "/v1/workspaces/"}, 404, core.CodeRouteNotFound},
		{call{method: "PUT", path: "/v1/workspaces"}, 405, core.CodeMethodNotAllowed},
		{call{method: "DELETE", path: "/healthz"}, 405, core.CodeMethodNotAllowed},
	} {
		got := w.do(c.call)
		if p := got.problem(t); got.status != c.status || p.Code != string(c.code) || c.status == 405 && got.header.Get("Allow") == "" {
			t.Errorf("%s %s: %d %+v %v", c.call.method, c.call.path, got.status, p, got.header)
		}
	}
	if after := w.dump(); after != before {
		t.Errorf("refused requests have changed rows:\n--- before\n%s\n--- after\n%s", before, after)
	}
}

// TestFields breaks one field at a time and wants it named.
func TestFields(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	create, at, node := "/v1/workspaces", "/v1/workspaces/"+ws.ID, "/v1/checkpoints/"+cp.ID
	before := w.dump()
	for _, c := range []struct {
		method, path, body, field string
		code                      core.Code
	}{
		{"POST", create, `{"name":"Bad_Name"}`, "name", core.CodeInvalidName},
		{"POST", create, `{"name":"-x"}`, "name", core.CodeInvalidName},
		{"POST", create, `{"name":"` + strings.Repeat("a", 64) + `"}`, "name", core.CodeInvalidName},
		{"POST", create, `{"name":7}`, "name", core.CodeInvalidField},
		{"POST", create, `{"resources":{"vcpus":0}}`, "resources.vcpus", core.CodeInvalidField},
		{"POST", create, `{"resources":{"vcpus":1.5}}`, "resources.vcpus", core.CodeInvalidField},
		{"POST", create, `{"resources":{"vcpus":1e30}}`, "resources.vcpus", core.CodeInvalidField},
		{"POST", create, `{"resources":{"memory_mib":513}}`, "resources.memory_mib", core.CodeInvalidField},
		{"POST", create, `{"resources":{"memory_mib":64}}`, "resources.memory_mib", core.CodeInvalidField},
		{"POST", create, `{"resources":{"disk_gib":100000}}`, "resources.disk_gib", core.CodeInvalidField},
		{"POST", create, `{"resources":{"gpus":1}}`, "resources.gpus", core.CodeUnknownField},
		{"POST", create, `{"network":{"egress_policy":"some"}}`, "network.egress_policy", core.CodeInvalidField},
		{"POST", create, `{"network":{"allow":["pypi.org","a b"]}}`, "network.allow", core.CodeInvalidField},
		{"POST", create, `{"env":{"1A":"x"}}`, "env", core.CodeInvalidField},
		{"POST", create, `{"env":{"A":1}}`, "env.A", core.CodeInvalidField},
		{"POST", create, `{"env":{"A":"x\u0000y"}}`, "env.A", core.CodeInvalidField},
		{"POST", create, `{"labels":{"bad key":"x"}}`, "labels", core.CodeInvalidField},
		{"POST", at + "/checkpoints", `{"labels":{"coppice.build/key":"x"}}`, "labels", core.CodeInvalidField},
		{"PATCH", node, `{"labels":{"coppice.build/key":"x"}}`, "labels", core.CodeInvalidField},
		{"POST", create, `{"labels":{"k":"` + strings.Repeat("x", 257) + `"}}`, "labels.k", core.CodeInvalidField},
		{"POST", create, `{"ttl_seconds":-1}`, "ttl_seconds", core.CodeInvalidField},
		{"POST", create, `{"ttl_seconds":9999999999}`, "ttl_seconds", core.CodeInvalidField},
		{"POST", create + "?wait=601", `{}`, "wait", core.CodeInvalidField},
		{"POST", create + "?wait=-1", `{}`, "wait", core.CodeInvalidField},
		{"POST", create + "?wait=abc", `{}`, "wait", core.CodeInvalidField},
		{"POST", create + "?wait=1&wait=2", `{}`, "wait", core.CodeInvalidField},
		{"GET", create + "?limit=0", "", "limit", core.CodeInvalidField},
		{"GET", create + "?limit=1001", "", "limit", core.CodeInvalidField},
		{"GET", create + "?cursor=x", "", "cursor", core.CodeInvalidField},
		{"GET", create + "?cursor=MTon", "", "cursor", core.CodeInvalidField},
		{"GET", create + "?state=odd", "", "state.0", core.CodeInvalidField},
		{"GET", create + "?label=%3D1", "", "label.0", core.CodeInvalidField},
		{"GET", create + "?label=a%3D%00", "", "label", core.CodeInvalidField},
		{"GET", create + "?id_suffix=ab", "", "id_suffix", core.CodeInvalidField},
		{"GET", create + "?name=%00", "", "name", core.CodeInvalidField},
		{"PATCH", at, `{"version":0}`, "version", core.CodeInvalidField},
		{"PATCH", at, `{"labels":{"k":7}}`, "labels.k", core.CodeInvalidField},
		{"POST", at + "/exec", `{}`, "command", core.CodeInvalidField},
		{"POST", at + "/exec", `{"command":[]}`, "command", core.CodeInvalidField},
		{"POST", at + "/exec", `{"command":[""]}`, "command.0", core.CodeInvalidField},
		{"POST", at + "/exec", `{"command":"ls"}`, "command", core.CodeInvalidField},
		{"POST", at + "/exec", `{"command":["a\u0000b"]}`, "command.0", core.CodeInvalidField},
		{"POST", at + "/exec", `{"command":["x"],"cwd":"rel"}`, "cwd", core.CodeInvalidField},
		{"POST", at + "/exec", `{"command":["x"],"stdin":"a","stdin_base64":"YQ=="}`, "stdin_base64", core.CodeInvalidField},
		{"POST", at + "/exec", `{"command":["x"],"stdin_open":true}`, "stdin_open", core.CodeInvalidField},
		{"POST", at + "/exec", `{"command":["x"],"cols":80}`, "cols", core.CodeInvalidField},
		{"POST", at + "/exec", `{"command":["x"],"pty":true,"wait":true}`, "wait", core.CodeInvalidField},
		{"POST", at + "/exec", `{"command":["x"],"pty":true,"cols":1001}`, "cols", core.CodeInvalidField},
		{"POST", at + "/exec", `{"command":["x"],"timeout_ms":-1}`, "timeout_ms", core.CodeInvalidField},
		{"POST", at + "/ports", `{"guest_port":0}`, "guest_port", core.CodeInvalidField},
		{"POST", at + "/ports", `{"guest_port":65536}`, "guest_port", core.CodeInvalidField},
		{"POST", at + "/ports", `{"guest_port":80,"listen":"localhost"}`, "listen", core.CodeInvalidField},
		{"POST", at + "/restore", `{}`, "checkpoint_id", core.CodeInvalidField},
		{"POST", at + "/restore", `{"checkpoint_id":"ws_x"}`, "checkpoint_id", core.CodeInvalidID},
		{"POST", at + "/fork", `{"checkpoint":{"name":"No"}}`, "checkpoint.name", core.CodeInvalidName},
		{"POST", at + "/checkpoints", `{"annotations":[1]}`, "annotations", core.CodeInvalidField},
		{"POST", at + "/checkpoints", `{"annotations":{"a":"` + strings.Repeat("x", 17000) + `"}}`, "annotations", core.CodeInvalidField},
		{"POST", node + "/fork", `{"count":0}`, "count", core.CodeInvalidField},
		{"POST", node + "/fork", `{"count":257}`, "count", core.CodeInvalidField},
		{"POST", node + "/fork", `{"count":2,"branch_name":"` + strings.Repeat("a", 63) + `"}`, "", core.CodeInvalidName},
		{"POST", node + "/fork", `{"grants":"all"}`, "grants", core.CodeInvalidField},
		{"POST", node + "/fork", `{"grants":[1]}`, "grants", core.CodeInvalidField},
		{"POST", node + "/fork", `{"grants":["NO"]}`, "grants", core.CodeInvalidField},
		{"POST", node + "/fork", `{"grants":{}}`, "grants", core.CodeInvalidField},
		{"POST", node + "/restore", `{"workspace_name":"UPPER"}`, "workspace_name", core.CodeInvalidName},
		{"PATCH", node, `{"name":"No!"}`, "name", core.CodeInvalidName},
		{"PATCH", node, `{"annotations":{"a":{"b\u0000":1}}}`, "annotations.a.b?", core.CodeInvalidField},
		{"GET", node + "/tree?depth=-1", "", "depth", core.CodeInvalidField},
		{"GET", node + "/tree?cursor=MTphYmM", "", "cursor", core.CodeInvalidField},
		{"GET", at + "/files?path=rel", "", "path", core.CodeInvalidField},
		{"GET", at + "/files", "", "path", core.CodeInvalidField},
		{"GET", at + "/files?path=/x&list=maybe", "", "list", core.CodeInvalidField},
		{"GET", at + "/files?path=/x&list=1&tar=1", "", "list", core.CodeInvalidField},
		{"GET", at + "/files?path=/x&tar=1&max_bytes=-1", "", "max_bytes", core.CodeInvalidField},
		{"PUT", at + "/files?path=/x&mode=9", "", "mode", core.CodeInvalidField},
		{"PUT", at + "/files?path=/x&in_place=1&offset=-1", "", "offset", core.CodeInvalidField},
		{"GET", at + "/files?path=~/x", "", "path", core.CodeInvalidField},
		{"GET", at + "/files?path=~x&user=a", "", "path", core.CodeInvalidField},
		{"GET", at + "/files?path=/x&list=1&depth=65", "", "depth", core.CodeInvalidField},
		{"POST", at + "/watches", `{"path":"rel"}`, "path", core.CodeInvalidField},
		{"POST", at + "/watches", `{"path":"~"}`, "path", core.CodeInvalidField},
		{"POST", at + "/files/mkdir", `{"path":"rel"}`, "path", core.CodeInvalidField},
		{"POST", at + "/files/mkdir", `{"path":"~"}`, "path", core.CodeInvalidField},
		{"POST", at + "/files/rename", `{"from":"/a","to":"~/b"}`, "to", core.CodeInvalidField},
		{"POST", at + "/files/xattrs", `{"path":"/a","set":{"user.a":"` + strings.Repeat("x", 4097) + `"}}`, "set.user.a", core.CodeInvalidField},
	} {
		got := w.do(call{method: c.method, path: c.path, body: c.body})
		p := got.problem(t)
		field := ""
		if len(p.Fields) > 0 {
			field = p.Fields[0].Field
		}
		if got.status != 400 || p.Code != string(c.code) || field != c.field {
			t.Errorf("%s %s %.80s: %d %s, field %q (%s); want %s, field %q", c.method, c.path, c.body, got.status, p.Code, field, p.Detail, c.code, c.field)
		}
	}
	// Several faults are named at once, and values never shown.
	got := w.do(call{method: "POST", path: create, body: `{"name":"SECRET","zzz":1,"resources":{"vcpus":0,"memory_mib":1}}`})
	p := got.problem(t)
	var fields []string
	for _, f := range p.Fields {
		fields = append(fields, f.Field)
	}
	if p.Code != string(core.CodeUnknownField) || !slices.Contains(fields, "zzz") || !slices.Contains(fields, "resources.vcpus") || strings.Contains(string(got.body), "SECRET") {
		t.Errorf("%+v", p)
	}
	if after := w.dump(); after != before {
		t.Errorf("refused requests have changed rows:\n--- before\n%s\n--- after\n%s", before, after)
	}
}

// TestConflicts are refused with what is in the way.
func TestConflicts(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	var cp api.Checkpoint
	w.want(201, "POST", "/v1/workspaces/"+ws.ID+"/checkpoints", map[string]any{"name": "first"}, &cp)
	before := w.dump()
	for _, c := range []struct {
		method, path, body string
		status             int
		code               core.Code
	}{
		{"POST", "/v1/workspaces", `{"name":"main"}`, 409, core.CodeNameTaken},
		{"POST", "/v1/workspaces", `{"image":"nosuch"}`, 404, core.CodeImageNotFound},
		{"POST", "/v1/workspaces/" + ws.ID + "/checkpoints", `{"name":"first"}`, 409, core.CodeNameTaken},
		{"POST", "/v1/checkpoints/" + cp.ID + "/fork", `{"branch_name":"main"}`, 409, core.CodeNameTaken},
		{"PATCH", "/v1/checkpoints/" + ws.CheckpointID, `{"labels":{}}`, 403, core.CodePermissionDenied},
		{"DELETE", "/v1/checkpoints/" + ws.CheckpointID, ``, 409, core.CodeCheckpointInUse},
		{"PATCH", "/v1/checkpoints/" + cp.ID, `{"version":9}`, 409, core.CodeVersionConflict},
		{"POST", "/v1/workspaces/" + ws.ID + "/restore", `{"checkpoint_id":"` + absent["checkpoint_id"] + `"}`, 404, core.CodeCheckpointNotFound},
	} {
		got := w.do(call{method: c.method, path: c.path, body: c.body})
		if p := got.problem(t); got.status != c.status || p.Code != string(c.code) {
			t.Errorf("%s %s %s: %d %+v", c.method, c.path, c.body, got.status, p)
		}
	}
	if after := w.dump(); after != before {
		t.Errorf("refused requests have changed rows:\n--- before\n%s\n--- after\n%s", before, after)
	}
}
