package httpapi_test

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/masterkey"
	"github.com/coppice-dev/coppice/internal/mtls"
	"github.com/coppice-dev/coppice/internal/pass"
)

// oneOfEach is a project with one object of each kind that has an id. as is its key.
func (w *world) oneOfEach(as string) map[string]string {
	w.t.Helper()
	send := func(method, path, body string, out any) {
		w.t.Helper()
		got := w.do(call{method: method, path: path, body: body, key: as})
		if got.status/100 != 2 {
			w.t.Fatalf("%s %s: %d %s", method, path, got.status, got.body)
		}
		if err := json.Unmarshal(got.body, out); err != nil {
			w.t.Fatal(err)
		}
	}
	var ws api.Workspace
	var cp api.Checkpoint
	var fork api.ForkResult
	var s api.Session
	var port api.Port
	var watch api.Watch
	var key api.APIKey
	send("POST", "/v1/workspaces", `{}`, &ws)
	send("POST", "/v1/workspaces/"+ws.ID+"/checkpoints", `{}`, &cp)
	send("POST", "/v1/checkpoints/"+cp.ID+"/fork", `{}`, &fork)
	send("POST", "/v1/workspaces/"+ws.ID+"/exec", `{"command":["true"],"wait":false}`, &s)
	send("POST", "/v1/workspaces/"+ws.ID+"/ports", `{"guest_port":1}`, &port)
	send("POST", "/v1/workspaces/"+ws.ID+"/watches", `{"path":"/"}`, &watch)
	send("GET", "/v1/self", "", &key)
	return map[string]string{
		"ws": ws.ID, "ckpt": cp.ID, "sess": s.ID, "op": fork.OperationID, "port": port.ID, "watch": watch.ID, "prj": key.ProjectID, "key": key.ID,
		"rnr": string(w.runner.ID()), // which belongs to nobody
	}
}

// nobodys are well-formed ids of nothing.
func nobodys() map[string]string {
	return map[string]string{
		"ws": string(core.NewID[core.WorkspaceID]()), "ckpt": string(core.NewID[core.CheckpointID]()), "sess": string(core.NewID[core.SessionID]()),
		"op": string(core.NewID[core.OperationID]()), "port": string(core.NewID[core.PortID]()), "watch": string(core.NewID[core.WatchID]()), "prj": string(core.NewID[core.ProjectID]()),
		"key": string(core.NewID[core.KeyID]()), "rnr": string(core.NewID[core.RunnerID]()),
	}
}

// kindOf is the prefix of the ids that a schema takes; "" when it takes something else.
func kindOf(s *openapi3.SchemaRef) string {
	for s != nil && s.Value != nil && s.Value.Pattern == "" && len(s.Value.AllOf) == 1 {
		s = s.Value.AllOf[0]
	}
	if s == nil || s.Value == nil {
		return ""
	}
	kind, isID := strings.CutSuffix(s.Value.Pattern, "_[0-9a-hjkmnp-tv-z]{26}$")
	if !isID {
		return ""
	}
	return strings.TrimPrefix(kind, "^")
}

// place is one id in one request of the contract: in its path, its query or its body.
type place struct {
	op, method, path, in, name, kind string
	body                             bool
	raw                              bool
	params                           openapi3.Parameters
}

// places finds every id that a request with a key can carry.
func places(t *testing.T) []place {
	t.Helper()
	doc, err := openapi3.NewLoader().LoadFromData(api.Specification())
	if err != nil {
		t.Fatal(err)
	}
	var list []place
	for path, item := range doc.Paths.Map() {
		for method, op := range item.Operations() {
			if op.Security != nil && len(*op.Security) == 0 {
				continue
			}
			at := place{op: op.OperationID, method: method, path: path, params: slices.Concat(item.Parameters, op.Parameters)}
			var schema *openapi3.Schema
			if op.RequestBody != nil {
				media := op.RequestBody.Value.Content.Get("application/json")
				at.body, at.raw = media != nil, media == nil
				if media != nil {
					schema = media.Schema.Value
				}
			}
			for _, p := range at.params {
				if kind := kindOf(p.Value.Schema); kind != "" {
					one := at
					one.in, one.name, one.kind = p.Value.In, p.Value.Name, kind
					list = append(list, one)
				}
			}
			if schema == nil {
				continue
			}
			for name, field := range schema.Properties {
				if kind := kindOf(field); kind != "" {
					one := at
					one.in, one.name, one.kind = "body", name, kind
					list = append(list, one)
				}
			}
		}
	}
	slices.SortFunc(list, func(a, b place) int { return cmp.Or(strings.Compare(a.op, b.op), strings.Compare(a.name, b.name)) })
	return list
}

// with is the request with id in this place and the asker's own ids in all others.
func (p place) with(t *testing.T, id string, own map[string]string, key string) call {
	t.Helper()
	c := call{method: p.method, path: p.path, body: bodies[p.op], key: key}
	if p.body && c.body == "" {
		t.Fatalf("%s: bodies needs a good one for it", p.op)
	}
	query := url.Values{}
	for _, param := range p.params {
		v := param.Value
		value := own[kindOf(v.Schema)]
		if v.Name == "grant_id" { // a name within its workspace
			value = absent[v.Name]
		}
		if v.In == p.in && v.Name == p.name {
			value = id
		}
		switch {
		case v.In == "path":
			c.path = strings.ReplaceAll(c.path, "{"+v.Name+"}", value)
		case v.In == "query" && v.Name == "path":
			query.Set("path", "/x")
		case v.In == "query" && (v.Required || v.Name == p.name && p.in == "query"):
			query.Set(v.Name, value)
		}
	}
	if len(query) > 0 {
		c.path += "?" + query.Encode()
	}
	if p.in == "body" {
		fields := map[string]any{}
		if err := json.Unmarshal([]byte(c.body), &fields); err != nil {
			t.Fatal(err)
		}
		fields[p.name] = id
		b, err := json.Marshal(fields)
		if err != nil {
			t.Fatal(err)
		}
		c.body = string(b)
	}
	if p.raw {
		c.header = map[string]string{"Content-Type": "application/octet-stream"}
	}
	return c
}

// forAdmins are the operations that only an admin's key may use: any other is refused before the id is looked at.
var forAdmins = []string{"patchProject", "deleteProject", "deleteRunner", "createRunnerToken", "collectStore", "checkStore", "checkStoreData", "patchRunner"}

// TestForeign crosses every id that a request of the contract can carry with another project's objects: the answers are, but
// for the ids themselves, those for what does not exist.
func TestForeign(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	theirs := w.oneOfEach("")
	key := w.secondProject()
	own := w.oneOfEach(key)
	none := nobodys()
	before := w.dump()
	for _, p := range places(t) {
		if theirs[p.kind] == "" {
			t.Errorf("%s: %s is an id of a kind (%s) that this test does not know; give oneOfEach one", p.op, p.name, p.kind)
			continue
		}
		foreign, missing := w.do(p.with(t, theirs[p.kind], own, key)), w.do(p.with(t, none[p.kind], own, key))
		if foreign.status != missing.status || plain(foreign.body, theirs[p.kind]) != plain(missing.body, none[p.kind]) {
			t.Errorf("%s, %s in the %s: foreign %d %s, absent %d %s", p.op, p.name, p.in, foreign.status, foreign.body, missing.status, missing.body)
		}
		want := http.StatusNotFound
		if slices.Contains(forAdmins, p.op) {
			want = http.StatusForbidden
		}
		if foreign.status != want && p.in != "query" { // a filter by what is not there gives an empty list
			t.Errorf("%s, %s in the %s: %d %s, want %d", p.op, p.name, p.in, foreign.status, foreign.body, want)
		}
		for _, h := range []string{"Content-Type", "Content-Length", "Retry-After", "Allow"} {
			if foreign.header.Get(h) != missing.header.Get(h) {
				t.Errorf("%s, %s in the %s: %s is %q for what is foreign and %q for what is absent", p.op, p.name, p.in, h, foreign.header.Get(h), missing.header.Get(h))
			}
		}
	}
	for _, list := range []string{"/v1/workspaces", "/v1/checkpoints", "/v1/projects", "/v1/projects/" + own["prj"] + "/keys"} {
		answer := w.do(call{method: "GET", path: list, key: key})
		for kind, id := range theirs {
			if answer.status != 200 || kind != "rnr" && strings.Contains(string(answer.body), id) {
				t.Errorf("%s: the other project's %s is in it: %s", list, kind, answer.body)
			}
		}
	}
	if after := w.dump(); after != before {
		t.Errorf("somebody has changed rows:\n--- before\n%s\n--- after\n%s", before, after)
	}
}

// plain is a problem without what differs between two requests.
func plain(body []byte, id string) string {
	var p api.Problem
	if json.Unmarshal(body, &p) == nil {
		return strings.ReplaceAll(strings.ReplaceAll(string(body), p.RequestID, "req"), id, "id")
	}
	return strings.ReplaceAll(string(body), id, "id")
}

func (w *world) secondProject() string {
	w.t.Helper()
	const key = "other-key"
	w.sql(`
		WITH p AS (INSERT INTO projects (id, name) VALUES ($1, 'other') RETURNING id)
		INSERT INTO api_keys (id, project_id, name, prefix, hash, scopes) SELECT $2, id, 'k', 'o', sha256($3::text::bytea), $4::text[] FROM p`,
		core.NewID[core.ProjectID](), core.NewID[core.KeyID](), key, core.ProjectScopes)
	return key
}

// newKey makes a key in the first project.
func (w *world) newKey(name string, scopes ...core.KeyScope) api.CreatedKey {
	w.t.Helper()
	var self api.APIKey
	w.want(200, "GET", "/v1/self", nil, &self)
	var made api.CreatedKey
	w.want(201, "POST", "/v1/projects/"+self.ProjectID+"/keys", map[string]any{"name": name, "scopes": append([]core.KeyScope{}, scopes...)}, &made)
	return made
}

// TestEveryTokenKind shows every kind of credential there is to every route that wants a key, and the keys to the listener of
// the runners: each opens its own door only, and the answers do not tell why.
func TestEveryTokenKind(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ids := w.oneOfEach("")
	revoked, expired := w.newKey("revoked", core.ScopeAdmin), w.newKey("expired", core.ScopeAdmin)
	if got := w.do(call{method: "DELETE", path: "/v1/keys/" + revoked.Key.ID}); got.status != 204 {
		t.Fatalf("%d %s", got.status, got.body)
	}
	w.sql(`UPDATE api_keys SET expires_at = now() WHERE id = $1`, expired.Key.ID)
	var a api.Attachment
	w.want(201, "POST", "/v1/sessions/"+ids["sess"]+"/attach", nil, &a)
	var ws api.Workspace
	w.want(200, "GET", "/v1/workspaces/"+ids["ws"], nil, &ws)
	good := w.newKey("good").Secret
	kinds := map[string]string{
		"revoked": revoked.Secret, "expired": expired.Secret, "unknown": "cpk_" + strings.Repeat("0", 26) + "_" + strings.Repeat("0", 52),
		"cut short": good[:len(good)-1], "longer": good + "0", "in capitals": strings.ToUpper(good), "only its name": good[:30],
		"runner's secret": runnerSecret, "attach token": a.Token, "what a guest knows of itself": ws.Network.Generation + ws.Network.MachineID,
		"key's id": ids["key"], "a quote": `' OR '1'='1`, "very long": strings.Repeat("k", 4096), "nothing": " ",
	}
	w.moreKinds(ids, ws, kinds)
	answer := ""
	for _, r := range routes(t) {
		for kind, secret := range kinds {
			c := call{method: r.method, path: r.at(absent), body: bodies[r.id], key: secret}
			if r.open {
				continue
			}
			got := w.do(c)
			if got.status != http.StatusUnauthorized || got.header.Get("WWW-Authenticate") == "" {
				t.Errorf("%s with %s: %d %s", r.id, kind, got.status, got.body)
			}
			if kind == "nothing" || r.method == http.MethodHead {
				continue
			}
			if text := plain(got.body, "id"); answer == "" {
				answer = text
			} else if text != answer {
				t.Errorf("%s with %s: the answer differs: %s, others %s", r.id, kind, text, answer)
			}
		}
	}
	upgrade := map[string]string{"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "x3JJHMbDL1EzLkh9GBhXDw=="}
	for kind, secret := range kinds {
		if kind == "attach token" || len(secret) > 256 { // a longer one is refused by its length
			continue
		}
		if got := w.do(call{method: "GET", path: "/v1/attach/" + ids["sess"] + "?token=" + url.QueryEscape(secret), key: good, header: upgrade}); got.status != http.StatusUnauthorized {
			t.Errorf("attach with %s as its token: %d %s", kind, got.status, got.body)
		}
	}
	if got := w.do(call{method: "GET", path: "/v1/attach/" + ids["sess"] + "?token=" + url.QueryEscape(good), key: good, header: upgrade}); got.status != http.StatusUnauthorized {
		t.Errorf("attach with a key as its token: %d %s", got.status, got.body)
	}
	pair, err := mtls.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	request, err := mtls.Request(pair)
	if err != nil {
		t.Fatal(err)
	}
	for kind, secret := range kinds { // the key for joining is no token for joining
		if strings.HasPrefix(kind, "join token") { // the pin is for the runner: the controller does not look at it
			continue
		}
		if _, err := w.control.Fleet().Join(t.Context(), runnerapi.Join{Token: secret, CertificateRequest: request}); core.CodeOf(err) != core.CodeJoinTokenRefused {
			t.Errorf("join with %s as its token: %v", kind, err)
		}
	}
	inner := &world{t: t, url: w.inner, router: w.router}
	for _, path := range []string{runnerapi.PathRegister, strings.Replace(runnerapi.PathHeartbeat, "{id}", string(w.runner.ID()), 1)} {
		for kind, secret := range kinds {
			if kind == "runner's secret" {
				continue
			}
			if got := inner.ask(call{method: "POST", path: path, body: "{}", key: secret}); got.status != http.StatusUnauthorized {
				t.Errorf("%s with %s: %d %s", path, kind, got.status, got.body)
			}
		}
		if got := inner.ask(call{method: "POST", path: path, body: "{}", key: apiKey}); got.status != http.StatusUnauthorized {
			t.Errorf("%s with a key: %d %s", path, got.status, got.body)
		}
	}
}

// moreKinds adds what is signed by the cluster, or made for runners and egress processes.
func (w *world) moreKinds(ids map[string]string, ws api.Workspace, kinds map[string]string) {
	w.t.Helper()
	var token api.RunnerToken
	w.want(201, "POST", "/v1/runner-tokens", map[string]any{}, &token)
	kinds["join token"] = token.Token
	kinds["join token without the pin"], _, _ = strings.Cut(token.Token, ".")
	master, err := masterkey.New(make([]byte, 32))
	if err != nil {
		w.t.Fatal(err)
	}
	store, err := postgres.Open(w.t.Context(), postgres.Config{DSN: w.dsn})
	if err != nil {
		w.t.Fatal(err)
	}
	defer store.Close()
	trust, err := controller.OpenTrust(w.t.Context(), store, master, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, scope := range []pass.Scope{pass.Attach, pass.Files} {
		if kinds["pass "+string(scope)], _, err = trust.Passes.Sign(pass.Claims{
			Runner: w.runner.ID(), Workspace: core.WorkspaceID(ws.ID), Sandbox: w.sandboxOf(ws.ID), Epoch: ws.Epoch, Scope: scope, Session: core.SessionID(ids["sess"]),
		}, time.Minute); err != nil {
			w.t.Fatal(err)
		}
	}
	kinds["the authority's certificate"] = base64.StdEncoding.EncodeToString(trust.Authority.Certificate())
	kinds["placeholder of a grant"] = "coppice-brokered-" + strings.Repeat("0", 32)
}

// TestEveryScope tries a key of each single scope on every route, and one of all but one: nothing works but what the table
// says. A parameter that no route knows shows how far a request came.
func TestEveryScope(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	all := append(slices.Clone(core.ProjectScopes), core.ScopeRunnerJoin, core.ScopeAdmin)
	keys := map[core.KeyScope]string{}
	for _, s := range all {
		keys[s] = w.newKey(strings.ReplaceAll(string(s), ":", "-"), s).Secret
	}
	whole := w.newKey("whole").Secret
	granted := map[core.KeyScope]int{}
	for _, r := range routes(t) {
		if r.open {
			continue
		}
		path := r.at(absent) + "?"
		path = strings.Replace(path, "/x?", "/x&", 1) + "frobnicate=1"
		passes := func(key string) bool {
			got := w.do(call{method: r.method, path: path, body: bodies[r.id], key: key})
			if got.status != http.StatusBadRequest && got.status != http.StatusForbidden {
				t.Errorf("%s: %d %s", r.id, got.status, got.body)
			}
			return got.status == http.StatusBadRequest
		}
		alone := 0
		for _, s := range all {
			if passes(keys[s]) {
				granted[s]++
				alone++
			}
		}
		switch {
		case !passes(keys[core.ScopeAdmin]):
			t.Errorf("%s: an admin may not", r.id)
		case r.id == "getSelf" && alone != len(all), r.id == "forkWorkspace" && alone != 1, alone > 2 && r.id != "getSelf":
			t.Errorf("%s: %d of the single scopes suffice", r.id, alone)
		}
		adminOnly := slices.Contains(append(forAdmins, "createProject", "importCheckpoint"), r.id)
		if passes(whole) == adminOnly {
			t.Errorf("%s: a key made without naming scopes: %v", r.id, !adminOnly)
		}
	}
	for _, s := range all {
		if s == core.ScopeSecretReference { // it is for a field of putGrant: TestKeptSecret
			continue
		}
		if granted[s] < 2 && s != core.ScopeAuditRead {
			t.Errorf("the scope %s gives nothing", s)
		}
	}
}

func (w *world) ask(c call) reply {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.t.Context(), c.method, w.url+c.path, strings.NewReader(c.body))
	if err != nil {
		w.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+c.key)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	_ = res.Body.Close()
	return reply{status: res.StatusCode, header: res.Header, body: fmt.Append(nil, res.Status)}
}
