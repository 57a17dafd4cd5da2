package fakevmm_test

import (
	"encoding/json"
	"net/http"
	"testing"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/runner/vmm/fakevmm"
)

// TestAgentFileWork: the fake guest does with files what the real one has learned.
func TestAgentFileWork(t *testing.T) {
	t.Parallel()
	m, _ := newHost(t, fakevmm.Config{}).boot(t)
	agent := dial(t, m)
	want := func(status int, method, path string, body, out any) {
		t.Helper()
		got, _, b := request(t, agent, method, path, body)
		if got != status || out != nil && json.Unmarshal(b, out) != nil {
			t.Fatalf("%s %s: %d %s", method, path, got, b)
		}
	}
	var made guestapi.MadeDir
	want(200, http.MethodPost, guestapi.PathMakeDir, guestapi.MakeDir{Path: "~/a/b", User: "ann", Parents: true}, &made)
	if !made.Created || made.Path != "/home/ann/a/b" || made.Owner != "ann" || made.Type != "dir" {
		t.Errorf("%+v", made)
	}
	want(200, http.MethodPut, guestapi.PathFileContent+"?path=/home/ann/a/f&in_place=1", []byte("hello"), nil)
	want(200, http.MethodPut, guestapi.PathFileContent+"?path=/home/ann/a/f&in_place=1&offset=1", []byte("ELL"), nil)
	want(200, http.MethodPut, guestapi.PathFileContent+"?path=~/a/f&user=ann&in_place=1&append=1", []byte("!"), nil)
	if _, _, b := request(t, agent, http.MethodGet, guestapi.PathFiles+"?path=/home/ann/a/f", nil); string(b) != "hELLo!" {
		t.Errorf("%s", b)
	}
	var list guestapi.FileList
	want(200, http.MethodGet, guestapi.PathFiles+"?list=1&depth=2&path=/home/ann", nil, &list)
	if len(list.Entries) != 3 {
		t.Errorf("%+v", list)
	}
	want(200, http.MethodPost, guestapi.PathRename, guestapi.Rename{From: "/home/ann/a", To: "/c"}, nil)
	var info guestapi.FileInfo
	want(200, http.MethodPost, guestapi.PathXAttrs, guestapi.SetXAttrs{Path: "/c/f", Set: map[string]string{"user.a": "1"}}, &info)
	if info.XAttrs["user.a"] != "1" {
		t.Errorf("%+v", info)
	}
	s := start(t, agent, guestapi.SessionSpec{Command: []string{"/bin/sh", "-c", "sleep 100000"}})
	want(204, http.MethodPost, sessionPath(guestapi.PathSessionDeadline, s.ID), guestapi.Deadline{TimeoutMS: 1}, nil)
	if end := wait(t, agent, s.ID); !end.TimedOut {
		t.Errorf("%+v", end)
	}
}
