package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// amnesiac is a database that knows every key and is gone for everything else, so that a request ends where its decoding does.
type amnesiac struct{ knowingStore }

func (a amnesiac) InTx(ctx context.Context, scope controller.Scope, fn func(controller.AllTx) error) (err error) {
	defer func() {
		if recover() != nil { // a method that knowingTx does not have
			err = core.Errorf(core.Unavailable, core.CodeDatabaseUnavailable, "there is no database")
		}
	}()
	return a.knowingStore.InTx(ctx, scope, fn)
}

var examples = map[string]string{
	"createWorkspace":    `{"name":"a","image":"base","resources":{"vcpus":1,"memory_mib":512,"disk_gib":1},"env":{"A":"b"},"labels":{"a":"b"},"network":{"egress_policy":"deny-all","allow":[]},"ttl_seconds":60,"grants":[]}`,
	"forkWorkspace":      `{"count":2,"branch_name":"x","all_or_nothing":true,"checkpoint":{"name":"c","annotations":{"score":1.5e3}}}`,
	"forkCheckpoint":     `{"count":256,"env":{},"labels":{},"network":{},"ttl_seconds":0}`,
	"stepWorkspace":      `{"command":["true"],"files":[{"path":"/a","content":"x"}],"when":"always","checkpoint":{"name":"n"},"env":{}}`,
	"stepCheckpoint":     `{"actions":[{"command":["true"],"files":[{"path":"/a","content":"x"}],"keep":"nothing"}],"parallel":2,"env":{},"labels":{}}`,
	"restoreWorkspace":   `{"checkpoint_id":"ckpt_06e5bqv7z0f3m8k2h1t9r4w6xc"}`,
	"restoreCheckpoint":  `{"workspace_name":"again"}`,
	"createCheckpoint":   `{"name":"c","labels":{"a":"b"},"annotations":{"a":[null,{"b":true}]}}`,
	"patchCheckpoint":    `{"version":1,"name":"","labels":{"a":null},"annotations":{"a":null}}`,
	"patchWorkspace":     `{"version":3,"labels":{"a":null},"ttl_seconds":0}`,
	"exec":               `{"command":["sh","-c","true"],"cwd":"/","env":{"A":"b"},"stdin_base64":"AAEC","timeout_ms":1000,"user":"root","wait":false,"pty":true,"cols":80,"rows":24}`,
	"buildImage":         `{"name":"a","dockerfile":"FROM base\nRUN a","context":"c","build_args":{"A":"b"},"steps":[{"copy":{"upload":"u","dest":"/a","mode":"644"}},{"env":{"A":"b"}}],"start":{"command":"a","ready":{"port":80}},"no_cache":true}`,
	"createPort":         `{"guest_port":80,"listen":"127.0.0.1:0"}`,
	"createWatch":        `{"path":"~/a","user":"a","recursive":true}`,
	"makeDirectory":      `{"path":"~/a","user":"a:b","mode":"0700","parents":true}`,
	"renameFile":         `{"from":"/a","to":"/b","mkdirs":true,"no_replace":true}`,
	"setFileAttributes":  `{"path":"/a","set":{"user.a":"b"},"remove":["user.c"]}`,
	"signalSession":      `{"signal":"SIGTERM"}`,
	"setSessionDeadline": `{"timeout_ms":1}`,
	"resizeSession":      `{"cols":80,"rows":24}`,
	"createProject":      `{"name":"a","quotas":{"workspaces":1}}`,
	"patchProject":       `{"version":1,"quotas":{"children":0}}`,
	"createKey":          `{"name":"k","scopes":["workspace:read"],"expires_in_seconds":60}`,
	"pruneCheckpoints":   `{"keep_best":{"k":1,"annotation":"score"},"keep_path_to_root":true,"max_age_seconds":1,"max_bytes":2,"dry_run":true}`,
	"putPrepared":        `{"count":1,"ttl_seconds":1}`,
	"putRetention":       `{"max_age_seconds":1}`,
}

// FuzzRequests sends requests of every operation of the contract through the whole of the server that stands before the
// database: parameters, headers, body, and the conversion into what use cases take. None may end as a fault of the server.
func FuzzRequests(f *testing.F) {
	rules := loadContract()
	names := make([]string, 0, len(rules))
	for name := range rules {
		names = append(names, name)
	}
	slices.Sort(names)
	for i, name := range names {
		body := examples[rules[name].id]
		if body == "" {
			body = "{}"
		}
		f.Add(uint16(i), "", "", "", []byte(body))
		f.Add(uint16(i), "wait=1&limit=2&cursor=MTpjaHB0.AAAAAAAAAAAA&label=a%3Db", "key", "", []byte(body))
		f.Add(uint16(i), "path=%2Fx&list=1&offset=-1", "", "../%00", []byte(`{"a":`))
	}
	for _, body := range examples { // examples are of real operations
		var v any
		if err := json.Unmarshal([]byte(body), &v); err != nil {
			f.Fatalf("%s: %v", body, err)
		}
	}
	lots := controller.Rate{PerSecond: 1e9, Burst: 1e9}
	log := slog.New(slog.DiscardHandler)
	control := controller.New(controller.Config{Limits: controller.Limits{Open: lots, FailureDelay: 1}}, amnesiac{}, nil, log)
	server := New(control, log)
	f.Fuzz(func(t *testing.T, which uint16, query, key, param string, body []byte) {
		name := names[int(which)%len(names)]
		method, path, _ := strings.Cut(name, " ")
		op := rules[name]
		for _, p := range op.params {
			if p.In == "path" {
				value := param
				if value == "" {
					value = strings.SplitN(strings.TrimPrefix(p.Schema.Value.Pattern, "^"), "[", 2)[0] + "06e5bqv7z0f3m8k2h1t9r4w6xc"
				}
				path = strings.Replace(path, ":"+p.Name, url.PathEscape(value), 1)
			}
		}
		target, err := url.Parse(path)
		if err != nil {
			return
		}
		target.RawQuery = query
		req := &http.Request{
			Method: method, URL: target, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Host: "x", RemoteAddr: "192.0.2.1:1", RequestURI: path,
			Header: http.Header{"Authorization": {"Bearer key"}}, Body: http.NoBody,
		}
		if len(body) > 0 && op.body != nil {
			req.Header.Set("Content-Type", contentJSON)
			req.Body = http.MaxBytesReader(nil, readCloser{bytes.NewReader(body)}, maxBody)
			req.ContentLength = int64(len(body))
		}
		if key != "" {
			req.Header.Set(headerKey, key)
		}
		rec := httptest.NewRecorder()
		server.ServeHTTP(rec, req.WithContext(t.Context()))
		if rec.Code == http.StatusInternalServerError {
			t.Fatalf("%s %s key %q %q: %s", method, target, key, body, rec.Body)
		}
		if rec.Code >= http.StatusBadRequest && method != http.MethodHead {
			var p api.Problem
			if err := json.Unmarshal(rec.Body.Bytes(), &p); err != nil || p.Code == "" || p.Status != rec.Code {
				t.Fatalf("%s %s: %d is no problem: %s", method, target, rec.Code, rec.Body)
			}
		}
	})
}

type readCloser struct{ *bytes.Reader }

func (readCloser) Close() error { return nil }

// FuzzBoundCursor wants a cursor to be good for the list that it was made for, and for no other.
func FuzzBoundCursor(f *testing.F) {
	f.Add("MTpjaHB0", "prj_a listWorkspaces /v1/workspaces?", "prj_b listWorkspaces /v1/workspaces?")
	f.Add("", "", "x")
	f.Add("a.b", "x", "x ")
	f.Fuzz(func(t *testing.T, inner, list, other string) {
		bound := bindCursor(inner, list)
		got, err := unbindCursor(bound, list)
		if strings.Contains(inner, ".") { // no cursor of ours has one
			if err == nil && got != inner {
				t.Fatalf("%q came back as %q", inner, got)
			}
			return
		}
		if err != nil || got != inner {
			t.Fatalf("%q: %q, %v", inner, got, err)
		}
		if _, err := unbindCursor(bound, other); err == nil && list != other {
			t.Fatalf("%q of %q is taken by %q", bound, list, other)
		}
		if _, err := unbindCursor(inner, list); err == nil {
			t.Fatalf("%q without its check is taken", inner)
		}
	})
}
