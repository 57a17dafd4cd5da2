package httpapi_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// harmless are the POSTs that make nothing which a repeat could make twice, with the reason.
var harmless = map[string]string{
	"terminateWorkspace": "a second termination finds the first",
	"cancelOperation":    "a second one finds the end",
	"suspendWorkspace":   "a second suspension finds the first",
	"resumeWorkspace":    "a second resume finds the first",
	"pruneCheckpoints":   "deletes; a second one finds what is left",
	"signalSession":      "a signal is sent as often as it is asked for",
	"resizeSession":      "sets a size",
	"setSessionDeadline": "sets a time",
	"writeSessionStdin":  "a stream",
	"attachSession":      "a token that is not used dies within a minute",
	"createWatch":        "a watch that nobody reads makes room for others after ten minutes",
	"makeDirectory":      "a second one finds the directory",
	"renameFile":         "a second one finds nothing at the old path",
	"setFileAttributes":  "sets values",
	"createFilesPass":    "a pass that is not used dies within minutes",
	"collectStore":       "deletes; a second one finds what is left",
	"createRunnerToken":  "a token that is not used dies soon, and a secret is shown once",
}

// creating says how to call each POST that makes something: its path, a body, and another body.
var creating = map[string]func(ws api.Workspace, cp api.Checkpoint) (path, body, other string){
	"createWorkspace": func(api.Workspace, api.Checkpoint) (string, string, string) {
		return "/v1/workspaces", `{"name":"made","labels":{"a":"1","b":"2"}}`, `{"name":"other"}`
	},
	"forkWorkspace": func(ws api.Workspace, _ api.Checkpoint) (string, string, string) {
		return "/v1/workspaces/" + ws.ID + "/fork", `{"count":2}`, `{"count":3}`
	},
	"restoreWorkspace": func(ws api.Workspace, cp api.Checkpoint) (string, string, string) {
		return "/v1/workspaces/" + ws.ID + "/restore", `{"checkpoint_id":"` + cp.ID + `"}`, `{"checkpoint_id":"` + absent["checkpoint_id"] + `"}`
	},
	"createCheckpoint": func(ws api.Workspace, _ api.Checkpoint) (string, string, string) {
		return "/v1/workspaces/" + ws.ID + "/checkpoints", `{"annotations":{"score":1}}`, `{}`
	},
	"forkCheckpoint": func(_ api.Workspace, cp api.Checkpoint) (string, string, string) {
		return "/v1/checkpoints/" + cp.ID + "/fork", `{"count":3}`, `{"count":1}`
	},
	"stepCheckpoint": func(_ api.Workspace, cp api.Checkpoint) (string, string, string) {
		return "/v1/checkpoints/" + cp.ID + "/step", `{"actions":[{"files":[{"path":"/workspace/in","content":"x"}],"command":["inc"]}]}`, `{"actions":[{"command":["inc"]}]}`
	},
	"stepWorkspace": func(ws api.Workspace, _ api.Checkpoint) (string, string, string) {
		return "/v1/workspaces/" + ws.ID + "/step", `{"files":[{"path":"/workspace/in","content":"x"}],"command":["inc"],"when":"on_success"}`, `{"command":["inc"]}`
	},
	"buildImage": func(api.Workspace, api.Checkpoint) (string, string, string) {
		return "/v1/images", `{"name":"app","from":"base","steps":[{"run":"inc"}]}`, `{"name":"app","from":"base"}`
	},
	"restoreCheckpoint": func(_ api.Workspace, cp api.Checkpoint) (string, string, string) {
		return "/v1/checkpoints/" + cp.ID + "/restore", `{"workspace_name":"again"}`, `{}`
	},
	"importCheckpoint": func(api.Workspace, api.Checkpoint) (string, string, string) {
		return "/v1/checkpoints", string(exportedFile('a')), string(exportedFile('b'))
	},
	"createPort": func(ws api.Workspace, _ api.Checkpoint) (string, string, string) {
		return "/v1/workspaces/" + ws.ID + "/ports", `{"guest_port":80}`, `{"guest_port":81}`
	},
	"createProject": func(api.Workspace, api.Checkpoint) (string, string, string) {
		return "/v1/projects", `{"name":"made"}`, `{"name":"other"}`
	},
	"createKey": func(api.Workspace, api.Checkpoint) (string, string, string) {
		return "/v1/projects/{project_id}/keys", `{"name":"made","ttl_seconds":60}`, `{"name":"other"}`
	},
	"exec": func(ws api.Workspace, _ api.Checkpoint) (string, string, string) {
		return "/v1/workspaces/" + ws.ID + "/exec", `{"command":["echo","once"]}`, `{"command":["echo","twice"]}`
	},
}

// TestCreatingPosts goes through the contract: every POST takes a key and makes one thing under it, or has a reason not to.
func TestCreatingPosts(t *testing.T) {
	t.Parallel()
	doc, err := openapi3.NewLoader().LoadFromData(api.Specification())
	if err != nil {
		t.Fatal(err)
	}
	for path, item := range doc.Paths.Map() {
		op := item.Post
		if op == nil {
			continue
		}
		keyed := false
		for _, p := range op.Parameters {
			keyed = keyed || p.Value.In == "header" && p.Value.Name == "Idempotency-Key"
		}
		call, tested := creating[op.OperationID]
		_, free := harmless[op.OperationID]
		if keyed != tested || keyed == free {
			t.Errorf("POST %s (%s): it takes a key: %v, is tested here: %v, needs none: %v; a POST that makes something takes an Idempotency-Key and is tested here", path, op.OperationID, keyed, tested, free)
			continue
		}
		if free {
			continue
		}
		t.Run(op.OperationID, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			ws := w.create("main")
			cp := w.checkpoint(ws.ID)
			path, body, other := call(ws, cp)
			path = strings.ReplaceAll(path, "{project_id}", w.project())
			keyed := map[string]string{"Idempotency-Key": "key of " + op.OperationID}
			inOtherWords := body
			if op.RequestBody.Value.Content.Get("application/json") == nil {
				keyed["Content-Type"] = "application/octet-stream"
			} else {
				inOtherWords = reorder(t, body)
			}
			first := w.do(call2(path, body, keyed))
			if first.status/100 != 2 || first.header.Get("Idempotency-Replayed") != "" {
				t.Fatalf("%d %s %v", first.status, first.body, first.header)
			}
			made := w.rows()
			again := w.do(call2(path+"?"+waitOf(op.OperationID), inOtherWords, keyed))
			if op.OperationID == "createKey" {
				if p := again.problem(t); again.status != 409 || p.Code != string(core.CodeIdempotencySecretShown) {
					t.Errorf("a repeat: %d %s", again.status, again.body)
				}
			} else if again.status != first.status || again.header.Get("Idempotency-Replayed") != "true" || ident(t, again) != ident(t, first) {
				t.Errorf("a repeat: %d %s %v, first %d %s", again.status, again.body, again.header, first.status, first.body)
			}
			mismatch := w.do(call2(path, other, keyed))
			if p := mismatch.problem(t); mismatch.status != 422 || p.Code != string(core.CodeIdempotencyMismatch) {
				t.Errorf("another body: %d %s", mismatch.status, mismatch.body)
			}
			if now := w.rows(); now != made {
				t.Errorf("a repeat made something: %s, then %s", made, now)
			}
			w.sql(`UPDATE idempotency_keys SET expires_at = now()`)
			if op.OperationID == "createWorkspace" || op.OperationID == "restoreCheckpoint" {
				w.sql(`UPDATE workspaces SET name = replace(lower(id), '_', '-') WHERE name IN ('made', 'again')`)
			}
			w.sql(`UPDATE projects SET name = 'was-made' WHERE name = 'made'`)
			late := w.do(call2(path, body, keyed))
			if late.status != first.status || late.header.Get("Idempotency-Replayed") != "" || w.rows() == made {
				t.Errorf("after a day the key is free again: %d %s", late.status, late.body)
			}
		})
	}
}

// project is the one that the world's key is of.
func (w *world) project() (id string) {
	w.t.Helper()
	if err := w.conn().QueryRow(w.t.Context(), `SELECT project_id FROM workspaces LIMIT 1`).Scan(&id); err != nil {
		w.t.Fatal(err)
	}
	return id
}

func call2(path, body string, header map[string]string) call {
	return call{method: http.MethodPost, path: strings.TrimSuffix(path, "?"), body: body, header: header}
}

// waitOf is another query string that means the same request.
func waitOf(operation string) string {
	switch operation {
	case "exec", "createPort", "createProject", "createKey", "importCheckpoint":
		return ""
	}
	return "wait=7"
}

// reorder writes the same JSON value in other words.
func reorder(t *testing.T, body string) string {
	t.Helper()
	var v any
	if err := json.Unmarshal([]byte(body), &v); err != nil {
		t.Fatal(err)
	}
	b, err := json.MarshalIndent(v, " ", "\t")
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// ident is what names the object of an answer.
func ident(t *testing.T, r reply) string {
	t.Helper()
	var v struct {
		ID          string `json:"id"`
		OperationID string `json:"operation_id"`
		Stdout      string `json:"stdout"`
		Key         struct {
			ID string `json:"id"`
		} `json:"key"`
		Session struct {
			ID string `json:"id"`
		} `json:"session"`
	}
	if err := json.Unmarshal(r.body, &v); err != nil {
		t.Fatal(err)
	}
	if v.ID+v.OperationID+v.Session.ID+v.Key.ID == "" {
		t.Fatalf("nothing names it: %s", r.body)
	}
	return fmt.Sprint(v)
}

// sql runs a statement as the owner, past all policies.
func (w *world) sql(statement string, args ...any) {
	w.t.Helper()
	conn := w.conn()
	if _, err := conn.Exec(w.t.Context(), statement, args...); err != nil {
		w.t.Fatalf("%s: %v", statement, err)
	}
}

func (w *world) conn() *pgx.Conn {
	w.t.Helper()
	conn, err := pgx.Connect(w.t.Context(), w.dsn)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(w.t.Context())) })
	return conn
}

// rows counts everything that requests make.
func (w *world) rows() string {
	w.t.Helper()
	var s string
	if err := w.conn().QueryRow(w.t.Context(), `
		SELECT format('%s operations, %s workspaces, %s sandboxes, %s checkpoints, %s sessions, %s ports, %s projects, %s keys', (SELECT count(*) FROM operations),
			(SELECT count(*) FROM workspaces), (SELECT count(*) FROM sandboxes), (SELECT count(*) FROM checkpoints), (SELECT count(*) FROM sessions), (SELECT count(*) FROM ports),
			(SELECT count(*) FROM projects), (SELECT count(*) FROM api_keys))`).Scan(&s); err != nil {
		w.t.Fatal(err)
	}
	return s
}

// TestRepeatsAtOnce sends one request fifty times at once: one execution; the others get its answer or are told that it runs.
func TestRepeatsAtOnce(t *testing.T) {
	t.Parallel()
	for _, id := range []string{"forkCheckpoint", "createWorkspace", "createCheckpoint", "exec", "createPort", "createProject"} {
		t.Run(id, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			ws := w.create("main")
			cp := w.checkpoint(ws.ID)
			path, body, _ := creating[id](ws, cp)
			keyed := map[string]string{"Idempotency-Key": "k"}
			var mu sync.Mutex
			made, told := map[string]int{}, 0
			var group sync.WaitGroup
			for range 50 {
				group.Go(func() {
					got := w.do(call2(path, body, keyed))
					mu.Lock()
					defer mu.Unlock()
					switch {
					case got.status/100 == 2:
						made[ident(t, got)]++
					case got.status == 409 && got.problem(t).Code == string(core.CodeIdempotencyInProgress) && got.header.Get("Retry-After") != "":
						told++
					default:
						t.Errorf("%d %s", got.status, got.body)
					}
				})
			}
			group.Wait()
			if len(made) != 1 {
				t.Errorf("it was done %d times: %v", len(made), made)
			}
			t.Logf("one execution, %d told that it runs", told)
			again := w.do(call2(path, body, keyed))
			if again.header.Get("Idempotency-Replayed") != "true" || made[ident(t, again)] == 0 {
				t.Errorf("afterwards: %d %s", again.status, again.body)
			}
		})
	}
}

// TestInFlight repeats a request whose operation has not ended.
func TestInFlight(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cp := w.checkpoint(w.create("main").ID)
	reached, open := make(chan struct{}), make(chan struct{})
	var once sync.Once
	w.runner.Hook(func(_ context.Context, at, _ string) error {
		if at == runnertest.PointFork {
			once.Do(func() { close(reached) })
			<-open
		}
		return nil
	})
	fork := call2("/v1/checkpoints/"+cp.ID+"/fork", `{}`, map[string]string{"Idempotency-Key": "k"})
	first := make(chan reply, 1)
	go func() { first <- w.do(fork) }()
	<-reached
	got := w.do(fork)
	p := got.problem(t)
	if got.status != 409 || p.Code != string(core.CodeIdempotencyInProgress) || p.OperationID == "" || got.header.Get("Idempotency-Replayed") != "" {
		t.Errorf("%d %s", got.status, got.body)
	}
	found := func(key string, c call) {
		t.Helper()
		c.method, c.path = "GET", "/v1/operations?idempotency_key="+key
		var list api.OperationList
		if err := json.Unmarshal(w.do(c).body, &list); err != nil {
			t.Fatal(err)
		}
		if want := key == "k" && c.key == ""; want != (len(list.Items) == 1) || want && list.Items[0].ID != p.OperationID {
			t.Errorf("key %s of API key %q: %+v", key, c.key, list.Items)
		}
	}
	found("k", call{})
	found("other", call{})
	found("k", call{key: w.secondProject()})
	close(open)
	var op api.Operation
	w.want(200, "GET", "/v1/operations/"+p.OperationID+"?wait=30", nil, &op)
	if again := w.do(fork); again.status != 201 || again.header.Get("Idempotency-Replayed") != "true" || ident(t, again) != ident(t, <-first) {
		t.Errorf("%d %s", again.status, again.body)
	}
}

// TestRefusedLeavesTheKey refuses a request before it begins anything: the key may still be used, for another one too.
func TestRefusedLeavesTheKey(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	keyed := map[string]string{"Idempotency-Key": "k"}
	if got := w.do(call2("/v1/workspaces", `{"image":"absent"}`, keyed)); got.status != 404 {
		t.Errorf("%d %s", got.status, got.body)
	}
	ws := w.create("taken")
	if got := w.do(call2("/v1/workspaces", `{"name":"taken"}`, keyed)); got.status != 409 {
		t.Errorf("%d %s", got.status, got.body)
	}
	if got := w.do(call2("/v1/workspaces/"+ws.ID+"/exec", `{"command":["no such program"]}`, keyed)); got.status != 404 {
		t.Errorf("%d %s", got.status, got.body)
	}
	if got := w.do(call2("/v1/workspaces", `{"name":"free"}`, keyed)); got.status != 201 || got.header.Get("Idempotency-Replayed") != "" {
		t.Errorf("%d %s", got.status, got.body)
	}
	// What it did is done, whatever stands in the way now.
	w.runner.Stop()
	if got := w.do(call2("/v1/workspaces", `{"name":"free"}`, keyed)); got.status != 201 || got.header.Get("Idempotency-Replayed") != "true" {
		t.Errorf("%d %s", got.status, got.body)
	}
}

// TestFailureIsReplayed repeats a request whose operation failed: it has failed.
func TestFailureIsReplayed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cp := w.checkpoint(w.create("main").ID)
	w.runner.Hook(func(_ context.Context, at, _ string) error {
		if at == runnertest.PointChild {
			return core.Errorf(core.Unavailable, core.CodeVMMFailed, "qemu ended with status 1")
		}
		return nil
	})
	fork := call2("/v1/checkpoints/"+cp.ID+"/fork", `{}`, map[string]string{"Idempotency-Key": "k"})
	first := w.do(fork)
	w.runner.Hook(nil)
	again := w.do(fork)
	a, b := first.problem(t), again.problem(t)
	if first.status != 503 || again.status != 503 || a.OperationID != b.OperationID || a.Detail != b.Detail || again.header.Get("Idempotency-Replayed") != "true" {
		t.Errorf("%d %s\n%d %s", first.status, first.body, again.status, again.body)
	}
}

func TestKeysAreChecked(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, key := range []string{strings.Repeat("x", 256), "not\tprintable", "ümlaut"} {
		if got := w.do(call2("/v1/workspaces", `{}`, map[string]string{"Idempotency-Key": key})); got.status != 400 || got.problem(t).Code != string(core.CodeInvalidField) {
			t.Errorf("%q: %d %s", key, got.status, got.body)
		}
	}
	ws := w.create("main")
	for _, c := range []call{{method: "GET", path: "/v1/workspaces"}, {method: "POST", path: "/v1/workspaces/" + ws.ID + "/terminate"}, {method: "DELETE", path: "/v1/workspaces/" + ws.ID}} {
		c.header = map[string]string{"Idempotency-Key": "k"}
		if got := w.do(c); got.status != 400 || !strings.Contains(got.problem(t).Detail, "Idempotency-Key") {
			t.Errorf("%s %s: %d %s", c.method, c.path, got.status, got.body)
		}
	}
}
