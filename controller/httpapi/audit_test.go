package httpapi_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
)

// things are what changes are tried on: one of each.
type things struct {
	w       *world
	ws      api.Workspace
	cp      api.Checkpoint
	session string
	port    string
}

func (x things) project() string {
	var p api.Project
	x.w.want(201, "POST", "/v1/projects", map[string]any{"name": "another"}, &p)
	return p.ID
}

const grantBody = `{"allowed_hosts":["api.example.com"],"secret":"a secret of a test"}`

func (x things) grant() string { return "/v1/workspaces/" + x.ws.ID + "/secrets/grants/example" }

// allow lets the workspace reach what grantBody is for.
func (x things) allow() {
	x.w.want(200, "PATCH", "/v1/workspaces/"+x.ws.ID, map[string]any{"network": map[string]any{"allow": []string{"api.example.com"}}}, nil)
}

// changing says how to call each operation that changes something and is no creating POST.
var changing = map[string]func(x things) call{
	"patchWorkspace": func(x things) call {
		return call{method: "PATCH", path: "/v1/workspaces/" + x.ws.ID, body: `{"labels":{"a":"b"}}`}
	},
	"cancelOperation": func(x things) call {
		begun := x.w.holdForks()
		var op api.Operation
		x.w.want(202, "POST", "/v1/checkpoints/"+x.cp.ID+"/fork?wait=0", map[string]any{}, &op)
		<-begun
		return call{method: "POST", path: "/v1/operations/" + op.ID + "/cancel"}
	},
	"putUpload": func(x things) call {
		return call{method: "PUT", path: "/v1/uploads/mine", body: "a tar", header: map[string]string{"Content-Type": "application/octet-stream"}}
	},
	"deleteUpload": func(x things) call {
		x.upload("mine")
		return call{method: "DELETE", path: "/v1/uploads/mine"}
	},
	"deleteImage": func(x things) call {
		x.w.want(200, "POST", "/v1/images", map[string]any{"name": "mine", "from": x.cp.ID}, nil)
		return call{method: "DELETE", path: "/v1/images/mine"}
	},
	"deleteWorkspace":    func(x things) call { return call{method: "DELETE", path: "/v1/workspaces/" + x.ws.ID} },
	"terminateWorkspace": func(x things) call { return call{method: "POST", path: "/v1/workspaces/" + x.ws.ID + "/terminate"} },
	"putGrant": func(x things) call {
		x.allow()
		return call{method: "PUT", path: x.grant(), body: grantBody}
	},
	"deleteGrant": func(x things) call {
		x.allow()
		x.w.want(200, "PUT", x.grant(), json.RawMessage(grantBody), nil)
		return call{method: "DELETE", path: x.grant()}
	},
	"deletePort": func(x things) call {
		return call{method: "DELETE", path: "/v1/workspaces/" + x.ws.ID + "/ports/" + x.port}
	},
	"deleteSession": func(x things) call { return call{method: "DELETE", path: "/v1/sessions/" + x.session} },
	"signalSession": func(x things) call {
		return call{method: "POST", path: "/v1/sessions/" + x.session + "/signal", body: `{"signal":"TERM"}`}
	},
	"setSessionDeadline": func(x things) call {
		return call{method: "POST", path: "/v1/sessions/" + x.session + "/deadline", body: `{"timeout_ms":60000}`}
	},
	"resizeSession": func(x things) call {
		return call{method: "POST", path: "/v1/sessions/" + x.session + "/resize", body: `{"cols":80,"rows":24}`}
	},
	"writeSessionStdin": func(x things) call {
		return call{method: "POST", path: "/v1/sessions/" + x.session + "/stdin", body: "input", header: map[string]string{"Content-Type": "application/octet-stream"}}
	},
	"attachSession": func(x things) call { return call{method: "POST", path: "/v1/sessions/" + x.session + "/attach"} },
	"putFile": func(x things) call {
		return call{method: "PUT", path: "/v1/workspaces/" + x.ws.ID + "/files?path=/tmp/file", body: "content", header: map[string]string{"Content-Type": "application/octet-stream"}}
	},
	"deleteFile": func(x things) call {
		return call{method: "DELETE", path: "/v1/workspaces/" + x.ws.ID + "/files?path=/tmp/absent"}
	},
	"createWatch": func(x things) call {
		return call{method: "POST", path: "/v1/workspaces/" + x.ws.ID + "/watches", body: `{"path":"/"}`}
	},
	"deleteWatch": func(x things) call {
		return call{method: "DELETE", path: "/v1/workspaces/" + x.ws.ID + "/watches/" + absent["watch_id"]}
	},
	"makeDirectory": func(x things) call {
		return call{method: "POST", path: "/v1/workspaces/" + x.ws.ID + "/files/mkdir", body: `{"path":"/d"}`}
	},
	"renameFile": func(x things) call {
		return call{method: "POST", path: "/v1/workspaces/" + x.ws.ID + "/files/rename", body: `{"from":"/absent","to":"/d"}`}
	},
	"setFileAttributes": func(x things) call {
		return call{method: "POST", path: "/v1/workspaces/" + x.ws.ID + "/files/xattrs", body: `{"path":"/absent","set":{"user.a":"b"}}`}
	},
	"suspendWorkspace": func(x things) call { return call{method: "POST", path: "/v1/workspaces/" + x.ws.ID + "/suspend"} },
	"resumeWorkspace": func(x things) call {
		x.w.want(200, "POST", "/v1/workspaces/"+x.ws.ID+"/suspend", nil, nil)
		return call{method: "POST", path: "/v1/workspaces/" + x.ws.ID + "/resume"}
	},
	"createFilesPass":   func(x things) call { return call{method: "POST", path: "/v1/workspaces/" + x.ws.ID + "/files/pass"} },
	"createRunnerToken": func(things) call { return call{method: "POST", path: "/v1/runner-tokens", body: `{}`} },
	"patchRunner": func(x things) call {
		return call{method: "PATCH", path: "/v1/runners/" + string(x.w.runner.ID()), body: `{"draining":true}`}
	},
	"collectStore": func(things) call { return call{method: "POST", path: "/v1/store/gc"} },
	"deleteRunner": func(x things) call {
		return call{method: "DELETE", path: "/v1/runners/" + string(x.w.runner.ID()) + "?force=true"}
	},
	"patchProject": func(x things) call {
		return call{method: "PATCH", path: "/v1/projects/" + x.project(), body: `{"quotas":{"workspaces":7}}`}
	},
	"deleteProject": func(x things) call { return call{method: "DELETE", path: "/v1/projects/" + x.project()} },
	"revokeKey": func(x things) call {
		var key api.CreatedKey
		x.w.want(201, "POST", "/v1/projects/"+x.project()+"/keys", map[string]any{"name": "k", "scopes": []string{"workspace:read"}}, &key)
		return call{method: "DELETE", path: "/v1/keys/" + key.Key.ID}
	},
	"pruneCheckpoints": func(x things) call {
		return call{method: "POST", path: "/v1/checkpoints/" + x.cp.ID + "/prune", body: `{"max_bytes":1}`}
	},
	"putRetention": func(x things) call {
		return call{method: "PUT", path: "/v1/checkpoints/" + x.cp.ID + "/retention", body: `{"max_age_seconds":86400}`}
	},
	"putPrepared": func(x things) call {
		return call{method: "PUT", path: "/v1/checkpoints/" + x.cp.ID + "/prepared", body: `{"count":2}`}
	},
	"deleteRetention": func(x things) call {
		x.w.want(200, "PUT", "/v1/checkpoints/"+x.cp.ID+"/retention", map[string]any{"max_age_seconds": 86400}, nil)
		return call{method: "DELETE", path: "/v1/checkpoints/" + x.cp.ID + "/retention"}
	},
	"patchCheckpoint": func(x things) call {
		return call{method: "PATCH", path: "/v1/checkpoints/" + x.cp.ID, body: `{"annotations":{"score":1}}`}
	},
	"deleteCheckpoint": func(x things) call { return call{method: "DELETE", path: "/v1/checkpoints/" + x.cp.ID} },
}

// TestEveryChangeIsRecorded goes through the contract: every operation that may change something leaves a record of who did
// what, from where, in the request's own transaction.
func TestEveryChangeIsRecorded(t *testing.T) {
	t.Parallel()
	doc, err := openapi3.NewLoader().LoadFromData(api.Specification())
	if err != nil {
		t.Fatal(err)
	}
	for path, item := range doc.Paths.Map() {
		for method, op := range item.Operations() {
			if method == http.MethodGet || method == http.MethodHead {
				continue
			}
			change, ok := changing[op.OperationID]
			if create, creates := creating[op.OperationID]; creates {
				ok, change = true, func(x things) call {
					path, body, _ := create(x.ws, x.cp)
					return call{method: "POST", path: strings.ReplaceAll(path, "{project_id}", x.w.project()), body: body}
				}
			}
			if !ok {
				t.Errorf("%s %s (%s) changes something and is not tried here", method, path, op.OperationID)
				continue
			}
			t.Run(op.OperationID, func(t *testing.T) {
				t.Parallel()
				x := newThings(t)
				x.w.t = t
				c := change(x)
				if op.OperationID == "importCheckpoint" {
					c.header = map[string]string{"Content-Type": "application/octet-stream"}
				}
				got := x.w.do(c)
				if got.status >= 500 {
					t.Fatalf("%d %s", got.status, got.body)
				}
				// As the owner: what changes the fleet is the system project's. That a secret went to a host has an action of its own.
				var all, good int
				if err := x.w.conn().QueryRow(t.Context(), `
					SELECT count(*), count(*) FILTER (WHERE action IN ($2, 'unsealGrants', 'putFile') AND actor LIKE 'key_%' AND source = '127.0.0.1' AND object_id <> '' AND project_id LIKE 'prj_%')
					FROM audit_records WHERE request_id = $1`, got.header.Get("X-Request-Id"), op.OperationID).Scan(&all, &good); err != nil {
					t.Fatal(err)
				}
				if all == 0 || all != good {
					t.Errorf("%s %s leaves %d records, %d of them in order: %d %s", method, path, all, good, got.status, got.body)
				}
			})
		}
	}
}

func (x things) upload(id string) {
	x.w.t.Helper()
	if got := x.w.do(call{method: "PUT", path: "/v1/uploads/" + id, body: "a tar", header: map[string]string{"Content-Type": "application/octet-stream"}}); got.status != 200 {
		x.w.t.Fatalf("%d %s", got.status, got.body)
	}
}

func newThings(t *testing.T) things {
	t.Helper()
	w := newWorld(t)
	x := things{w: w, ws: w.create("main")}
	x.cp = w.checkpoint(x.ws.ID)
	var session api.Session
	w.want(201, "POST", "/v1/workspaces/"+x.ws.ID+"/exec", map[string]any{"command": []string{"cat"}, "wait": false, "pty": true, "stdin_open": true}, &session)
	var port api.Port
	w.want(201, "POST", "/v1/workspaces/"+x.ws.ID+"/ports", map[string]any{"guest_port": 80}, &port)
	x.session, x.port = session.ID, port.ID
	return x
}

// TestAuditOfAFork reads the whole story of one request, and finds it by every filter.
func TestAuditOfAFork(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cp := w.checkpoint(w.create("main").ID)
	got := w.do(call2("/v1/checkpoints/"+cp.ID+"/fork", `{"count":2}`, nil))
	var list api.AuditRecordList
	w.want(200, "GET", "/v1/audit?request_id="+got.header.Get("X-Request-Id"), nil, &list)
	var story []string
	for _, r := range slices.Backward(list.Items) {
		kind, _, _ := strings.Cut(r.ObjectID, "_")
		story = append(story, fmt.Sprintf("%s: %s -> %s %s", kind, r.Before, r.After, r.Outcome))
	}
	slices.Sort(story)
	want := []string{
		"ckpt:  -> running accepted", "ckpt: running -> succeeded succeeded",
		"ws:  ->  succeeded", "ws:  ->  succeeded", // their attestations
		"ws:  -> restoring succeeded", "ws:  -> restoring succeeded", "ws: restoring -> ready succeeded", "ws: restoring -> ready succeeded",
	}
	if !slices.Equal(story, want) {
		t.Errorf("got %q\nwant %q", story, want)
	}
	var first api.AuditRecord
	for _, r := range list.Items {
		if r.Outcome == api.AuditAccepted {
			first = r
		}
	}
	for filter, n := range map[string]int{
		"object_id=" + cp.ID + "&action=forkCheckpoint": 2, "operation_id=" + first.OperationID: 6, "outcome=accepted&action=forkCheckpoint": 1, "actor=nobody": 0,
		"since=2999-01-01T00:00:00Z": 0, "until=2000-01-01T00:00:00Z": 0, "action=forkCheckpoint&actor=" + first.Actor: 8,
	} {
		var found api.AuditRecordList
		w.want(200, "GET", "/v1/audit?"+filter, nil, &found)
		if len(found.Items) != n {
			t.Errorf("%s: %d, want %d", filter, len(found.Items), n)
		}
	}
	// Pages.
	var paged []string
	for next := ""; ; {
		var page api.AuditRecordList
		w.want(200, "GET", "/v1/audit?action=forkCheckpoint&limit=4&cursor="+next, nil, &page)
		for _, r := range page.Items {
			paged = append(paged, r.ID)
		}
		if next = page.NextCursor; next == "" {
			break
		}
		if got := w.do(call{method: "GET", path: "/v1/audit?limit=4&cursor=" + next}); got.status != 400 {
			t.Errorf("the cursor of another list is taken: %d", got.status)
		}
	}
	if len(paged) != 8 {
		t.Errorf("%d on pages", len(paged))
	}
}

// TestRefusedGuestChangeIsRecorded records an attempt that the guest refused.
func TestRefusedGuestChangeIsRecorded(t *testing.T) {
	t.Parallel()
	x := newThings(t)
	got := x.w.do(call{method: "DELETE", path: "/v1/workspaces/" + x.ws.ID + "/files?path=/tmp/absent"})
	if got.status != 404 {
		t.Fatalf("%d %s", got.status, got.body)
	}
	var list api.AuditRecordList
	x.w.want(200, "GET", "/v1/audit?request_id="+got.header.Get("X-Request-Id"), nil, &list)
	if len(list.Items) != 2 || list.Items[0].Outcome != api.AuditFailed || !strings.Contains(string(list.Items[0].Detail), "FILE_NOT_FOUND") ||
		list.Items[1].Outcome != api.AuditAccepted || !strings.Contains(string(list.Items[1].Detail), "/tmp/absent") {
		t.Errorf("%+v", list.Items)
	}
}

// TestAuditOfOthers has an operator read what operators did to runners and what another project did.
func TestAuditOfOthers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	other := w.secondProject()
	w.oneOfEach(other)
	var self api.APIKey
	w.want(200, "GET", "/v1/self", nil, &self)
	var theirs api.APIKey
	if got := w.do(call{method: "GET", path: "/v1/self", key: other}); json.Unmarshal(got.body, &theirs) != nil || theirs.ProjectID == self.ProjectID {
		t.Fatalf("%d %s", got.status, got.body)
	}
	token := w.do(call{method: "POST", path: "/v1/runner-tokens", body: `{}`})
	if token.status != 201 {
		t.Fatalf("%d %s", token.status, token.body)
	}
	for _, c := range []struct{ project, query string }{
		{string(controller.SystemProject), "&request_id=" + token.header.Get("X-Request-Id")},
		{theirs.ProjectID, "&action=createCheckpoint"},
	} {
		var list api.AuditRecordList
		w.want(200, "GET", "/v1/audit?project_id="+c.project+c.query, nil, &list)
		if len(list.Items) == 0 {
			t.Errorf("nothing is recorded in %s", c.project)
		}
		var own api.AuditRecordList
		w.want(200, "GET", "/v1/audit?project_id="+self.ProjectID+c.query, nil, &own)
		for _, r := range own.Items {
			if slices.ContainsFunc(list.Items, func(v api.AuditRecord) bool { return v.ID == r.ID }) {
				t.Errorf("record %s is in both projects", r.ID)
			}
		}
		var check api.AuditCheck
		w.want(200, "GET", "/v1/audit/check?project_id="+c.project, nil, &check)
		if !check.Intact || check.Records+check.Unsealed == 0 {
			t.Errorf("check of %s: %+v", c.project, check)
		}
	}
	for _, path := range []string{"/v1/audit", "/v1/audit/check"} { // anybody else's way to them
		for _, project := range []string{string(controller.SystemProject), self.ProjectID} {
			if got := w.do(call{method: "GET", path: path + "?project_id=" + project, key: other}); got.status != 404 {
				t.Errorf("%s of %s: %d %s", path, project, got.status, got.body)
			}
		}
	}
}

// TestNoSecretsInTheAudit looks for secrets in every record that the tests' requests leave.
func TestNoSecretsInTheAudit(t *testing.T) {
	t.Parallel()
	x := newThings(t)
	var grant api.Attachment
	x.w.want(201, "POST", "/v1/sessions/"+x.session+"/attach", nil, &grant)
	var n int
	if err := x.w.conn().QueryRow(t.Context(), `
		SELECT count(*) FROM audit_records a WHERE a::text LIKE '%' || $1 || '%' OR a::text LIKE '%' || $2 || '%'
			OR EXISTS (SELECT 1 FROM api_keys k WHERE a::text LIKE '%' || encode(k.hash, 'hex') || '%') OR EXISTS (SELECT 1 FROM attach_tokens k WHERE a::text LIKE '%' || encode(k.hash, 'hex') || '%')`,
		apiKey, grant.Token).Scan(&n); err != nil || n != 0 {
		t.Errorf("%d records hold secrets, %v", n, err)
	}
}
