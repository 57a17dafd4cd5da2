package e2b_test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/controller/compat/e2b"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func TestLifeOfASandbox(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var s sandbox
	w.do(ask{method: "POST", path: "/sandboxes", body: `{"templateID":"base","timeout":600,"secure":true,"allow_internet_access":true,"metadata":{"K!":"ü"},"envVars":{"A":"b"}}`}).
		want(t, http.StatusCreated, &s)
	if s.TemplateID != "base" || s.EnvdVersion == "" || s.ClientID == "" || s.EnvdAccessToken == "" || s.Domain != "sandbox.example" {
		t.Errorf("%+v", s)
	}
	ws, err := w.rest.Workspace(t.Context(), "ws_"+s.SandboxID)
	if err != nil || ws.Env["A"] != "b" || ws.Network.EgressPolicy != coppice.EgressDenyAll || ws.ExpiresAt.IsZero() {
		t.Errorf("%v: %+v; egress is open only if the operator says so", err, ws)
	}
	at := "/sandboxes/" + s.SandboxID
	var info struct {
		State, EndAt string
		Metadata     map[string]string
	}
	w.do(ask{method: "GET", path: at}).want(t, http.StatusOK, &info)
	if info.State != "running" || info.Metadata["K!"] != "ü" {
		t.Errorf("%+v", info)
	}
	w.do(ask{method: "POST", path: at + "/timeout", body: `{"timeout":5000}`}).want(t, http.StatusNoContent, nil)
	w.do(ask{method: "POST", path: at + "/refreshes", body: `{"duration":1}`}).want(t, http.StatusNoContent, nil)
	w.do(ask{method: "POST", path: at + "/pause"}).want(t, http.StatusNoContent, nil)
	w.do(ask{method: "POST", path: at + "/pause"}).want(t, http.StatusConflict, nil)
	if ws, err = w.rest.Workspace(t.Context(), ws.ID); err != nil || !ws.ExpiresAt.IsZero() {
		t.Errorf("%v: a paused sandbox ends at %v", err, ws.ExpiresAt)
	}
	w.do(ask{method: "GET", path: at}).want(t, http.StatusOK, &info)
	if info.State != "paused" {
		t.Errorf("%+v", info)
	}
	w.envd(s, ask{method: "GET", path: "/health"}).want(t, http.StatusBadGateway, nil)
	var again sandbox
	w.do(ask{method: "POST", path: "/v2" + at + "/connect", body: `{"timeout":600}`}).want(t, http.StatusCreated, &again)
	w.do(ask{method: "POST", path: at + "/connect", body: `{"timeout":600}`}).want(t, http.StatusOK, &again)
	w.do(ask{method: "POST", path: at + "/connect", body: `{"timeout":600}`, header: map[string]string{"E2b-Sandbox-Id": s.SandboxID, "E2b-Sandbox-Port": "49983"}}).
		want(t, http.StatusOK, &again) // as 2.7.0 does
	if again != s {
		t.Errorf("a resume changed what the client has: %+v, %+v", s, again)
	}
	w.envd(s, ask{method: "GET", path: "/health"}).want(t, http.StatusNoContent, nil)
	w.do(ask{method: "GET", path: "/health", key: "-", header: map[string]string{"X-Access-Token": s.EnvdAccessToken}}).want(t, http.StatusNoContent, nil)
	w.do(ask{method: "DELETE", path: at}).want(t, http.StatusNoContent, nil)
	w.do(ask{method: "DELETE", path: at}).want(t, http.StatusNotFound, nil)
	gone := w.envd(s, ask{method: "GET", path: "/health"})
	gone.want(t, http.StatusBadGateway, nil)
	if !strings.Contains(gone.Body, "The sandbox was not found") {
		t.Error(gone.Body)
	}
}

// A sandbox with autoPause is suspended at the end of its time, and so are its forks. A resume gives it a time again.
func TestPauseAtTheEndOfItsTime(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.create("", `{"templateID":"base","timeout":600,"autoPause":true}`)
	at := "/sandboxes/" + s.SandboxID
	var info struct {
		State     string
		Lifecycle struct{ OnTimeout string }
	}
	w.do(ask{method: "GET", path: at}).want(t, http.StatusOK, &info)
	if info.Lifecycle.OnTimeout != "pause" {
		t.Errorf("%+v", info)
	}
	var children []struct{ Sandbox sandbox }
	w.do(ask{method: "POST", path: at + "/fork", body: `{}`}).want(t, http.StatusCreated, &children)
	w.do(ask{method: "GET", path: "/sandboxes/" + children[0].Sandbox.SandboxID}).want(t, http.StatusOK, &info)
	if info.Lifecycle.OnTimeout != "pause" {
		t.Errorf("the fork has %+v", info)
	}
	w.do(ask{method: "POST", path: at + "/timeout", body: `{"timeout":0}`}).want(t, http.StatusNoContent, nil)
	eventually.True(t, "it is paused", func() bool {
		w.do(ask{method: "GET", path: at}).want(t, http.StatusOK, &info)
		return info.State == "paused"
	})
	w.do(ask{method: "POST", path: "/v2" + at + "/connect", body: `{"timeout":600}`}).want(t, http.StatusCreated, nil)
	ws, err := w.rest.Workspace(t.Context(), "ws_"+s.SandboxID)
	if err != nil || ws.OnTTL != coppice.TTLSuspend || time.Until(ws.ExpiresAt) < time.Minute {
		t.Errorf("%v: %+v", err, ws)
	}
}

// An update replaces what a sandbox may reach. It does not open what was closed.
func TestUpdateOfTheNetwork(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.create("", `{"templateID":"base","network":{"allowOut":["a.example.com"],"denyOut":["0.0.0.0/0"]}}`)
	at := "/sandboxes/" + s.SandboxID + "/network"
	for body, want := range map[string]coppice.Allow{
		`{"allowOut":["b.example.com"],"denyOut":["0.0.0.0/0"]}`: {"b.example.com"},
		`{"allow_internet_access":false}`:                        nil,
		`{"allow_internet_access":true}`:                         nil, // the policy stays: an update never opens a sandbox
	} {
		w.do(ask{method: "PUT", path: at, body: body}).want(t, http.StatusNoContent, nil)
		ws, err := w.rest.Workspace(t.Context(), "ws_"+s.SandboxID)
		if diff := cmp.Diff(want, ws.Network.Allow); err != nil || diff != "" || ws.Network.EgressPolicy != coppice.EgressDenyAll {
			t.Errorf("%s: %v (-want +got):\n%s", body, err, diff)
		}
	}
	w.do(ask{method: "PUT", path: at, body: `{"denyOut":["10.0.0.0/8"]}`}).want(t, http.StatusNotImplemented, nil)
	w.do(ask{method: "PUT", path: "/sandboxes/x/network", body: `{}`}).want(t, http.StatusNotFound, nil)
	open, err := w.rest.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{Image: "base", Network: coppice.NetworkRequest{EgressPolicy: coppice.EgressAllowAll}})
	if err != nil {
		t.Fatal(err)
	}
	w.do(ask{method: "PUT", path: "/sandboxes/" + strings.TrimPrefix(open.ID, "ws_") + "/network", body: `{"allow_internet_access":false}`}).
		want(t, http.StatusNotImplemented, nil) // it must not look closed
}

// A sandbox that does not run has no metrics, and there are none of the past.
func TestMetricsThatAreNotThere(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.create("", `{"templateID":"base","timeout":600}`)
	at := "/sandboxes/" + s.SandboxID
	empty := func(query string) {
		t.Helper()
		var got []any
		if w.do(ask{method: "GET", path: at + "/metrics" + query}).want(t, http.StatusOK, &got); got == nil || len(got) != 0 {
			t.Errorf("%s: %v", query, got)
		}
	}
	empty("?start=1&end=2")
	empty("?start=99999999999")
	w.do(ask{method: "GET", path: at + "/metrics?start=x"}).want(t, http.StatusBadRequest, nil)
	w.do(ask{method: "POST", path: at + "/pause"}).want(t, http.StatusNoContent, nil)
	empty("")
}

// A repeated create with a key makes one sandbox.
func TestCreateIsIdempotent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var first, second sandbox
	a := ask{method: "POST", path: "/v2/sandboxes", body: `{"templateID":"base"}`, header: map[string]string{"Idempotency-Key": "once"}}
	w.do(a).want(t, http.StatusCreated, &first)
	w.do(a).want(t, http.StatusCreated, &second)
	if first != second {
		t.Errorf("%+v, %+v", first, second)
	}
}

func TestListPages(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	want := []string{}
	for _, owner := range []string{"a", "b", "a", "a"} {
		s := w.create("", `{"templateID":"base","metadata":{"o w":"`+owner+`"}}`)
		if owner == "a" {
			want = append([]string{s.SandboxID}, want...)
		}
	}
	for _, order := range []string{"desc", "asc"} {
		var got []string
		for token := ""; ; {
			r := w.do(ask{method: "GET", path: "/v2/sandboxes?metadata=o%252520w%3Da&limit=2&order=" + order + "&nextToken=" + token})
			var page []struct{ SandboxID string }
			r.want(t, http.StatusOK, &page)
			for _, s := range page {
				got = append(got, s.SandboxID)
			}
			if token = r.Header.Get("X-Next-Token"); token == "" {
				break
			}
		}
		if order == "asc" {
			for i, j := 0, len(got)-1; i < j; i, j = i+1, j-1 {
				got[i], got[j] = got[j], got[i]
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", order, diff)
		}
	}
}

// Every refusal has E2B's form, and its code is the status.
func TestErrorsHaveTheirForm(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, c := range []struct {
		ask
		status int
	}{
		{ask{method: "GET", path: "/nothing"}, 404},
		{ask{method: "PUT", path: "/v2/sandboxes"}, 404},
		{ask{method: "GET", path: "/sandboxes/x"}, 404},
		{ask{method: "GET", path: "/sandboxes/x", key: "-"}, 401},
		{ask{method: "GET", path: "/v2/sandboxes", key: "wrong"}, 401},
		{ask{method: "GET", path: "/v2/sandboxes?metadata=%25zz"}, 400},
		{ask{method: "GET", path: "/v2/sandboxes?limit=0"}, 400},
		{ask{method: "GET", path: "/v2/sandboxes?state=odd"}, 400},
		{ask{method: "POST", path: "/v2/sandboxes", body: `{`}, 400},
		{ask{method: "POST", path: "/v2/sandboxes", body: `{"templateID":"base","surprise":1}`}, 400},
		{ask{method: "POST", path: "/v2/sandboxes", body: `{"templateID":"base","timeout":-1}`}, 400},
		{ask{method: "POST", path: "/v2/sandboxes", body: `{"templateID":"base","envVars":{"1":"x"}}`}, 400},
		{ask{method: "POST", path: "/v2/sandboxes", body: `{"templateID":"none"}`}, 404},
		{ask{method: "POST", path: "/v2/sandboxes", body: `{"templateID":"team/none:v1"}`}, 404},
		{ask{method: "POST", path: "/v2/sandboxes", body: `{"templateID":"base","network":{"rules":{"x":[]}}}`}, 501},
		{ask{method: "POST", path: "/v2/sandboxes", body: `{"templateID":"base","metadata":{"k":"` + strings.Repeat("x", 20_000) + `"}}`}, 400},
		{ask{method: "POST", path: "/v2/sandboxes", body: `{"templateID":"` + strings.Repeat("x", 2<<20) + `"}`}, 413},
		{ask{method: "DELETE", path: "/templates/ns%2Fsnap%3Adefault"}, 404},
		{ask{method: "GET", path: "/templates/aliases/none"}, 404},
		{ask{method: "POST", path: "/v3/templates", body: `{}`}, 400},
		{ask{method: "POST", path: "/v3/templates", body: `{}`, key: "-"}, 401},
		{ask{method: "POST", path: "/v3/templates", body: `{"name":"t:v1"}`}, 501},
		{ask{method: "POST", path: "/v3/templates", body: `{"name":"t","minFreeDiskMb":1}`}, 501},
		{ask{method: "GET", path: "/templates/t/files/x"}, 400},
		{ask{method: "PUT", path: "/templates/files/" + strings.Repeat("a", 64) + "?token=x.9999999999.00", key: "-"}, 403},
		{ask{method: "POST", path: "/v2/templates/t/builds/x", body: `{}`}, 404},
		{ask{method: "GET", path: "/templates/t/builds/00000000-0000-8000-8000-000000000000/status"}, 404},
		{ask{method: "GET", path: "/templates/t/builds/00000000-0000-8000-8000-000000000000/status", key: "-"}, 401},
		{ask{method: "POST", path: "/v2/templates/t/builds/00000000-0000-8000-8000-000000000000", body: `{"steps":[]}`}, 400},
		{ask{method: "POST", path: "/templates/tags", body: `{}`}, 501},
		{ask{method: "GET", path: "/v2/sandboxes", host: "evil.example"}, 421},
	} {
		r := w.do(c.ask)
		var e struct {
			Code    int
			Message string
		}
		if json.Unmarshal([]byte(r.Body), &e) != nil || r.Status != c.status || e.Code != c.status || e.Message == "" {
			t.Errorf("%s %s %.80s: %d %.200s, want %d", c.method, c.path, c.body, r.Status, r.Body, c.status)
		}
	}
}

// The two forms of a key are the same key.
func TestWrappedKey(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.do(ask{method: "GET", path: "/v2/sandboxes", key: e2b.WrapKey(firstKey)}).want(t, http.StatusOK, nil)
	w.do(ask{method: "GET", path: "/v2/sandboxes", key: "-", header: map[string]string{"Authorization": "Bearer " + firstKey}}).want(t, http.StatusOK, nil)
}

func TestSnapshotsAndForks(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.create("", `{"templateID":"base","timeout":600,"metadata":{"k":"v"}}`)
	var snap struct {
		SnapshotID string
		Names      []string
	}
	w.do(ask{method: "POST", path: "/sandboxes/" + s.SandboxID + "/snapshots", body: `{"name":"first"}`}).want(t, http.StatusCreated, &snap)
	w.do(ask{method: "POST", path: "/v2/sandboxes", body: `{"templateID":"first"}`, header: map[string]string{"Idempotency-Key": "k"}}).want(t, http.StatusCreated, nil)
	for _, template := range []string{snap.SnapshotID, "first", "team/first:default"} {
		if c := w.create("", `{"templateID":"`+template+`"}`); c.SandboxID == s.SandboxID || c.EnvdAccessToken == s.EnvdAccessToken {
			t.Errorf("%s: %+v", template, c)
		}
	}
	var children []struct {
		Sandbox *sandbox
		Error   any
	}
	w.do(ask{method: "POST", path: "/sandboxes/" + s.SandboxID + "/fork", body: `{"count":3}`}).want(t, http.StatusCreated, &children)
	if len(children) != 3 {
		t.Fatalf("%+v", children)
	}
	for _, c := range children {
		if c.Sandbox == nil {
			t.Fatalf("%+v", c)
		}
		var info struct {
			EndAt    string
			Metadata map[string]string
		}
		w.do(ask{method: "GET", path: "/sandboxes/" + c.Sandbox.SandboxID}).want(t, http.StatusOK, &info)
		if info.Metadata["k"] != "v" || strings.HasPrefix(info.EndAt, "9999") {
			t.Errorf("a child has %+v", info)
		}
	}
	w.do(ask{method: "POST", path: "/sandboxes/" + s.SandboxID + "/fork", body: `{"count":101}`}).want(t, http.StatusBadRequest, nil)
	w.do(ask{method: "DELETE", path: "/templates/team%2Ffirst%3Adefault"}).want(t, http.StatusNoContent, nil)
	w.do(ask{method: "DELETE", path: "/templates/" + snap.SnapshotID}).want(t, http.StatusNotFound, nil)
	// A checkpoint that is no snapshot of a client is not theirs to delete.
	cp, err := w.rest.CreateCheckpoint(t.Context(), "ws_"+s.SandboxID, coppice.CreateCheckpointRequest{})
	if err != nil {
		t.Fatal(err)
	}
	w.do(ask{method: "DELETE", path: "/templates/" + strings.TrimPrefix(cp.ID, "ckpt_")}).want(t, http.StatusNotFound, nil)
}
