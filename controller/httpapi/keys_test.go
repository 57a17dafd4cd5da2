package httpapi_test

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/httpapi"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/controller/runnerclient"
	"github.com/coppice-dev/coppice/core"
)

// revocation is how long a request may be taken with a key that was revoked. What is under way ends as soon as a controller looks,
// which is each second (controller.TestRevocationTimes): how long that takes is the machine's affair.
const revocation = 5 * time.Second

// second serves the API of another controller over the same database, as it runs by default but for its rates.
func (w *world) second(limits controller.Limits) *world {
	t := w.t
	t.Helper()
	store, err := postgres.Open(t.Context(), postgres.Config{DSN: w.dsn})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	client := runnerclient.New(runnerSecret)
	t.Cleanup(client.Close)
	log := slog.New(slog.NewTextHandler(testLog{t}, nil))
	control := controller.New(controller.Config{ClusterID: "test", ShutdownGrace: time.Second, Limits: limits}, store, client, log)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- control.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
	})
	server := httptest.NewServer(httpapi.New(control, log))
	t.Cleanup(server.Close)
	return &world{t: t, dsn: w.dsn, url: server.URL, runner: w.runner, router: w.router}
}

// streams opens everything long that a key can open, and says which of them go on.
func (w *world) streams(ws, key string) (ended map[string]chan struct{}) {
	t := w.t
	t.Helper()
	var s api.Session
	got := w.do(call{method: "POST", path: "/v1/workspaces/" + ws + "/exec", body: `{"command":["cat"],"wait":false,"stdin_open":true}`, key: key})
	if err := json.Unmarshal(got.body, &s); err != nil || got.status != 201 {
		t.Fatalf("%d %s", got.status, got.body)
	}
	var a api.Attachment
	got = w.do(call{method: "POST", path: "/v1/sessions/" + s.ID + "/attach", key: key})
	if err := json.Unmarshal(got.body, &a); err != nil || got.status != 201 {
		t.Fatalf("%d %s", got.status, got.body)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	t.Cleanup(cancel)
	conn, res, err := websocket.Dial(ctx, strings.Replace(w.url, "http", "ws", 1)+a.URL+"?token="+url.QueryEscape(a.Token), nil) //nolint:bodyclose // of a 101; conn has it
	if err != nil {
		t.Fatalf("attach: %v, %+v", err, res)
	}
	t.Cleanup(func() { _ = conn.CloseNow() })
	ended = map[string]chan struct{}{"attachment": make(chan struct{}), "followed output": make(chan struct{}), "wait for a session": make(chan struct{})}
	go func() {
		defer close(ended["attachment"])
		for {
			if _, _, err := conn.Read(ctx); err != nil {
				return
			}
		}
	}()
	follow := func(what, path string) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, w.url+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+key)
		started := make(chan struct{})
		go func() {
			defer close(ended[what])
			close(started)
			res, err := http.DefaultClient.Do(req)
			if err != nil {
				return
			}
			defer res.Body.Close()
			_, _ = io.Copy(io.Discard, res.Body)
		}()
		<-started
	}
	follow("followed output", "/v1/sessions/"+s.ID+"/output?follow=true")
	follow("wait for a session", "/v1/sessions/"+s.ID+"?wait=600")
	return ended
}

// over waits for everything to end. The controllers look each second; a busy machine does not need thirty.
func over(t *testing.T, ended map[string]chan struct{}) {
	t.Helper()
	late := time.NewTimer(30 * time.Second)
	defer late.Stop()
	for what, ch := range ended {
		select {
		case <-ch:
		case <-late.C:
			t.Errorf("%s goes on", what)
			return
		}
	}
}

// refusedWithin asks until the key is refused. What counts is when a request was sent, not how long its answer takes.
func (w *world) refusedWithin(began time.Time, key string) {
	w.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		sent := time.Now()
		if w.do(call{method: "GET", path: "/v1/self", key: key}).status == http.StatusUnauthorized {
			return
		}
		if sent.Sub(began) > revocation {
			w.t.Errorf("the key works for more than %v", revocation)
			return
		}
		<-tick.C
	}
}

// TestRevocation revokes keys at one controller while another streams for them: what was made with the key ends too, other
// keys go on.
func TestRevocation(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	other := w.second(controller.Limits{})
	ws := w.create("main")
	parent, bystander := w.newKey("parent"), w.newKey("bystander")
	got := other.do(call{method: "POST", path: "/v1/projects/" + parent.Key.ProjectID + "/keys", body: `{"name":"child","ttl_seconds":157680000}`, key: parent.Secret})
	var child api.CreatedKey
	if err := json.Unmarshal(got.body, &child); err != nil || got.status != 201 {
		t.Fatalf("%d %s", got.status, got.body)
	}
	if child.Key.ParentID != parent.Key.ID || child.Key.ExpiresAt.After(parent.Key.ExpiresAt) {
		t.Errorf("the child is %+v, its parent %+v", child.Key, parent.Key)
	}
	here, there, stays := other.streams(ws.ID, parent.Secret), other.streams(ws.ID, child.Secret), other.streams(ws.ID, bystander.Secret)
	for range 2 { // idempotent
		if got := w.do(call{method: "DELETE", path: "/v1/keys/" + parent.Key.ID}); got.status != 204 {
			t.Fatalf("%d %s", got.status, got.body)
		}
	}
	began := time.Now()
	over(t, here)
	over(t, there)
	other.refusedWithin(began, parent.Secret)
	other.refusedWithin(began, child.Secret)
	w.refusedWithin(began, child.Secret)
	for what, ch := range stays {
		select {
		case <-ch:
			t.Errorf("%s of another key has ended", what)
		default:
		}
	}
	// Whoever removes the row's validity without telling anybody is found by looking.
	w.sql(`UPDATE api_keys SET revoked_at = now() WHERE id = $1`, bystander.Key.ID)
	began = time.Now()
	over(t, stays)
	other.refusedWithin(began, bystander.Secret)
}

// TestExpiry lets a key run out while it streams, and looks at a token that it had asked for.
func TestExpiry(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	other := w.second(controller.Limits{})
	ws := w.create("main")
	var self api.APIKey
	w.want(200, "GET", "/v1/self", nil, &self)
	var made api.CreatedKey
	w.want(201, "POST", "/v1/projects/"+self.ProjectID+"/keys", map[string]any{"name": "short", "ttl_seconds": 20}, &made)
	streams := other.streams(ws.ID, made.Secret)
	var s api.Session
	w.want(201, "POST", "/v1/workspaces/"+ws.ID+"/exec", map[string]any{"command": []string{"cat"}, "wait": false, "stdin_open": true}, &s)
	got := other.do(call{method: "POST", path: "/v1/sessions/" + s.ID + "/attach", key: made.Secret})
	var a api.Attachment
	if err := json.Unmarshal(got.body, &a); err != nil || got.status != 201 {
		t.Fatalf("%d %s", got.status, got.body)
	}
	over(t, streams)
	other.refusedWithin(made.Key.ExpiresAt, made.Secret)
	_, res, err := websocket.Dial(t.Context(), strings.Replace(w.url, "http", "ws", 1)+a.URL+"?token="+url.QueryEscape(a.Token), nil)
	if err == nil || res == nil || res.StatusCode != http.StatusUnauthorized {
		t.Errorf("a token of an expired key: %v, %+v", err, res)
	}
	if res != nil {
		_ = res.Body.Close()
	}
}

// TestKeyLife goes through what can be done with keys: a secret is seen once, a key gives away no more than it has.
func TestKeyLife(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	made := w.newKey("reader", core.ScopeWorkspaceRead, core.ScopeKeyWrite, core.ScopeKeyRead, core.ScopeWorkspaceRead)
	keys := "/v1/projects/" + made.Key.ProjectID + "/keys"
	if !strings.HasPrefix(made.Secret, made.Key.Prefix+"_") || !strings.HasPrefix(made.Key.Prefix, "cpk_") || len(made.Secret) != 4+26+1+52 {
		t.Errorf("secret %q of %+v", made.Secret, made.Key)
	}
	if got := time.Until(made.Key.ExpiresAt); got < 89*24*time.Hour || got > 90*24*time.Hour {
		t.Errorf("it lives for %v", got)
	}
	var list api.APIKeyList
	answer := w.want(200, "GET", keys, nil, &list)
	if len(list.Items) != 2 || list.Items[0].ID != made.Key.ID || len(list.Items[0].Scopes) != 3 || strings.Contains(string(answer.body), made.Secret[31:]) {
		t.Errorf("list: %s", answer.body)
	}
	var page api.APIKeyList
	w.want(200, "GET", keys+"?limit=1", nil, &page)
	first := page.Items[0].ID
	w.want(200, "GET", keys+"?limit=1&cursor="+url.QueryEscape(page.NextCursor), nil, &page)
	if first == page.Items[0].ID || page.NextCursor != "" {
		t.Errorf("second page: %+v", page)
	}
	for _, c := range []struct {
		what, method, path, body string
		status                   int
	}{
		{"more than it has", "POST", keys, `{"name":"x","scopes":["workspace:delete"]}`, 403},
		{"an admin", "POST", keys, `{"name":"x","scopes":["admin"]}`, 403},
		{"a child", "POST", keys, `{"name":"x","scopes":["workspace:read"],"ttl_seconds":60}`, 201},
		{"a key that can do more", "DELETE", "/v1/keys/" + list.Items[1].ID, "", 403},
		{"in a project that it does not see", "POST", "/v1/projects/" + absent["project_id"] + "/keys", `{"name":"x"}`, 404},
		{"an unknown scope", "POST", keys, `{"name":"x","scopes":["root"]}`, 400},
		{"too long a life", "POST", keys, `{"name":"x","ttl_seconds":157680001}`, 400},
		{"no name", "POST", keys, `{}`, 400},
		{"itself", "GET", "/v1/keys/" + made.Key.ID, "", 200},
		{"another project", "POST", "/v1/projects", `{"name":"x"}`, 403},
	} {
		if got := w.do(call{method: c.method, path: c.path, body: c.body, key: made.Secret}); got.status != c.status {
			t.Errorf("%s: %d %s, want %d", c.what, got.status, got.body, c.status)
		}
	}
	// Without scopes a child gets what its parent has.
	got := w.do(call{method: "POST", path: keys, body: `{"name":"same"}`, key: made.Secret})
	var same api.CreatedKey
	if err := json.Unmarshal(got.body, &same); err != nil || !slices.Equal(same.Key.Scopes, made.Key.Scopes) {
		t.Errorf("%s", got.body)
	}
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for began := time.Now(); ; <-tick.C {
		var now api.APIKey
		w.want(200, "GET", "/v1/keys/"+made.Key.ID, nil, &now)
		if !now.LastUsedAt.IsZero() {
			break
		}
		if time.Since(began) > watchdog {
			t.Fatal("its use is not recorded")
		}
	}
	// What is at rest is no key.
	if dump := w.dump(); strings.Contains(dump, made.Secret) || strings.Contains(dump, made.Secret[31:]) {
		t.Error("the database has the secret")
	}
}

// TestProjectLife makes a project with quotas and a key, works in it, and deletes it when it is empty.
func TestProjectLife(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var p api.Project
	w.want(201, "POST", "/v1/projects", map[string]any{"name": "blue", "quotas": map[string]any{"workspaces": 1, "depth": 3}}, &p)
	if p.Quotas.Workspaces != 1 || p.Quotas.Depth != 3 || p.Quotas.Checkpoints != 1000000 {
		t.Errorf("%+v", p)
	}
	if got := w.do(call{method: "POST", path: "/v1/projects", body: `{"name":"blue"}`}); got.status != 409 || got.problem(t).Code != "NAME_TAKEN" {
		t.Errorf("%d %s", got.status, got.body)
	}
	var made api.CreatedKey
	w.want(201, "POST", "/v1/projects/"+p.ID+"/keys", map[string]any{"name": "blue-key"}, &made)
	var ws api.Workspace
	got := w.do(call{method: "POST", path: "/v1/workspaces", body: `{"name":"theirs"}`, key: made.Secret})
	if err := json.Unmarshal(got.body, &ws); err != nil || got.status != 201 {
		t.Fatalf("%d %s", got.status, got.body)
	}
	full := w.do(call{method: "POST", path: "/v1/workspaces", body: `{}`, key: made.Secret})
	if problem := full.problem(t); full.status != 429 || problem.Code != "QUOTA_EXCEEDED" || full.header.Get("Retry-After") == "" ||
		!strings.Contains(problem.Detail, "workspaces") || !strings.Contains(problem.Detail, "1 of 1") {
		t.Errorf("%d %s", full.status, full.body)
	}
	w.want(200, "GET", "/v1/projects/"+p.ID, nil, &p)
	if p.Usage == nil || p.Usage.Workspaces != 1 || p.Usage.Keys != 1 {
		t.Errorf("%+v", p.Usage)
	}
	version := p.Version
	w.want(200, "PATCH", "/v1/projects/"+p.ID, map[string]any{"version": version, "quotas": map[string]any{"workspaces": 2}}, &p)
	stale := w.do(call{method: "PATCH", path: "/v1/projects/" + p.ID, body: `{"version":` + strconv.FormatInt(version, 10) + `,"quotas":{"workspaces":3}}`})
	if problem := stale.problem(t); stale.status != 409 || problem.Code != "VERSION_CONFLICT" || problem.CurrentVersion != p.Version {
		t.Errorf("%d %s", stale.status, stale.body)
	}
	if got := w.do(call{method: "POST", path: "/v1/workspaces", body: `{"ttl_seconds":100}`, key: made.Secret}); got.status != 201 {
		t.Errorf("after the quota was raised: %d %s", got.status, got.body)
	}
	if got := w.do(call{method: "DELETE", path: "/v1/projects/" + p.ID}); got.status != 409 || got.problem(t).Code != "PROJECT_NOT_EMPTY" {
		t.Errorf("%d %s", got.status, got.body)
	}
	// A key of the project sees it and no other.
	var list api.ProjectList
	got = w.do(call{method: "GET", path: "/v1/projects", key: made.Secret})
	if err := json.Unmarshal(got.body, &list); err != nil || len(list.Items) != 1 || list.Items[0].ID != p.ID {
		t.Errorf("%s", got.body)
	}
	w.want(200, "GET", "/v1/projects", nil, &list)
	if len(list.Items) != 2 || list.Items[0].Name != "blue" {
		t.Errorf("%+v", list)
	}
	all := w.do(call{method: "GET", path: "/v1/workspaces", key: made.Secret})
	var there api.WorkspaceList
	if err := json.Unmarshal(all.body, &there); err != nil {
		t.Fatal(err)
	}
	for _, ws := range there.Items {
		if got := w.do(call{method: "DELETE", path: "/v1/workspaces/" + ws.ID, key: made.Secret}); got.status != 200 {
			t.Fatalf("%d %s", got.status, got.body)
		}
	}
	if got := w.do(call{method: "DELETE", path: "/v1/projects/" + p.ID}); got.status != 204 {
		t.Fatalf("%d %s", got.status, got.body)
	}
	w.refusedWithin(time.Now(), made.Secret)
	if got := w.do(call{method: "GET", path: "/v1/projects/" + p.ID}); got.status != 404 {
		t.Errorf("a deleted project: %d %s", got.status, got.body)
	}
	w.want(201, "POST", "/v1/projects", map[string]any{"name": "blue"}, &p) // its name is free again
}

// TestRates empties buckets: a key's, a project's, an address's. What is left is said in every answer.
func TestRates(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	slow := controller.Rate{PerSecond: 0.001, Burst: 3} // nothing comes back while the test runs
	rated := w.second(controller.Limits{
		Key:     map[controller.RateClass]controller.Rate{controller.RateRead: slow, controller.RateAdmin: {PerSecond: 1e6, Burst: 1e6}, controller.RateWrite: {PerSecond: 1e6, Burst: 1e6}},
		Project: map[controller.RateClass]controller.Rate{controller.RateRead: {PerSecond: 0.001, Burst: 5}},
		Open:    controller.Rate{PerSecond: 0.001, Burst: 12}, FailureDelay: 1,
	})
	first, second := w.newKey("first").Secret, w.newKey("second").Secret
	read := func(key string) reply { return rated.do(call{method: "GET", path: "/v1/workspaces", key: key}) }
	for left := 2; left >= 0; left-- {
		if got := read(first); got.status != 200 || got.header.Get("RateLimit-Remaining") != strconv.Itoa(left) || got.header.Get("RateLimit-Limit") != "3" || got.header.Get("RateLimit-Reset") == "" {
			t.Errorf("with %d left: %d %v", left, got.status, got.header)
		}
	}
	refused := func(got reply) {
		t.Helper()
		after, err := strconv.Atoi(got.header.Get("Retry-After"))
		if p := got.problem(t); got.status != 429 || p.Code != "RATE_LIMITED" || err != nil || after < 100 || after > 1000 || got.header.Get("RateLimit-Remaining") != "0" {
			t.Errorf("%d %s %v", got.status, got.body, got.header)
		}
	}
	refused(read(first))
	if got := rated.do(call{method: "POST", path: "/v1/workspaces", body: `{"bad":1}`, key: first}); got.status != 400 {
		t.Errorf("another class: %d %s", got.status, got.body)
	}
	for range 2 {
		if got := read(second); got.status != 200 {
			t.Errorf("another key: %d %s", got.status, got.body)
		}
	}
	refused(read(second)) // it has one left, its project none
	if got := w.do(call{method: "GET", path: "/v1/workspaces", key: first}); got.status != 200 {
		t.Errorf("limits are a process's own: %d", got.status)
	}
	// Keys that are not known are counted by address before the database is asked, and health is never refused.
	last := reply{}
	for range 12 {
		if last = rated.do(call{method: "GET", path: "/v1/self", key: "guess"}); last.status == 429 {
			break
		}
	}
	refused(last)
	refused(rated.do(call{method: "GET", path: "/openapi.yaml", key: "-"}))
	if got := rated.do(call{method: "GET", path: "/healthz", key: "-"}); got.status != 200 {
		t.Errorf("health: %d", got.status)
	}
	if got := rated.do(call{method: "POST", path: "/v1/workspaces", body: `{"bad":1}`, key: first}); got.status != 400 {
		t.Errorf("a key that is known does not count for its address: %d %s", got.status, got.body)
	}
}

// TestWrongKeysAreSlowed measures that answers to guesses come ever later. A right key from the same place still works.
func TestWrongKeysAreSlowed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	slow := w.second(controller.Limits{FailureDelay: 100 * time.Millisecond})
	guess := func() time.Duration {
		began := time.Now()
		if got := slow.do(call{method: "GET", path: "/v1/self", key: "guess"}); got.status != 401 {
			t.Errorf("%d %s", got.status, got.body)
		}
		return time.Since(began)
	}
	for range 5 {
		guess()
	}
	for _, atLeast := range []time.Duration{100 * time.Millisecond, 200 * time.Millisecond, 400 * time.Millisecond} {
		if took := guess(); took < atLeast {
			t.Errorf("answered after %v, want %v", took, atLeast)
		}
	}
	if got := slow.do(call{method: "GET", path: "/v1/self"}); got.status != 200 {
		t.Errorf("a right key from there: %d", got.status)
	}
}
