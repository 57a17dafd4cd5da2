package httpapi_test

import (
	"bufio"
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/api"
)

// TestWatches: a watch is made, read and ended through the API, and a fork has its own.
func TestWatches(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	at := "/v1/workspaces/" + ws.ID
	w.want(200, "POST", at+"/files/mkdir", map[string]any{"path": "/d"}, nil)
	var watch api.Watch
	w.want(201, "POST", at+"/watches", map[string]any{"path": "/d", "recursive": true}, &watch)
	if watch.Path != "/d" || !watch.Recursive {
		t.Errorf("%+v", watch)
	}
	one := at + "/watches/" + watch.ID
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, w.url+one+"/events?follow=true", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+apiKey)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK || res.Header.Get("Content-Type") != "application/x-ndjson" {
		t.Fatalf("%d %v", res.StatusCode, res.Header)
	}
	lines := bufio.NewScanner(res.Body)
	w.putFile(at, "path=/d/f", "x")
	for _, want := range []string{"create f", "write f"} {
		var e api.WatchEvent
		if !lines.Scan() || json.Unmarshal(lines.Bytes(), &e) != nil || string(e.Type)+" "+e.Name != want {
			t.Fatalf("%s, want %s", lines.Bytes(), want)
		}
	}
	var forks api.ForkResult
	w.want(201, "POST", at+"/fork", map[string]any{"count": 1}, &forks)
	fork := "/v1/workspaces/" + forks.Children[0].Workspace.ID
	w.putFile(fork, "path=/d/g", "x")
	for where, want := range map[string]int{at: 2, fork: 4} {
		if got := w.do(call{method: "GET", path: where + "/watches/" + watch.ID + "/events"}); strings.Count(string(got.body), "\n") != want {
			t.Errorf("%s has %s", where, got.body)
		}
	}
	w.want(204, "DELETE", one, nil, nil)
	if lines.Scan() {
		t.Errorf("after the end: %s", lines.Bytes())
	}
	if got := w.do(call{method: "GET", path: one + "/events"}); got.status != 404 || got.problem(t).Code != "WATCH_NOT_FOUND" {
		t.Errorf("%d %s", got.status, got.body)
	}
	var list api.WatchList
	w.want(200, "GET", at+"/watches", nil, &list)
	if len(list.Items) != 0 {
		t.Errorf("%+v", list)
	}
	w.want(200, "GET", fork+"/watches", nil, &list)
	if len(list.Items) != 1 {
		t.Errorf("the fork's: %+v", list)
	}
}
