package e2b_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"
)

type logEntry struct {
	Timestamp      time.Time
	Level, Message string
	Fields         map[string]string
}

// The log of a sandbox has its events, in the order and with the filters that the client wants, also after its end.
func TestLogs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.create("", `{"templateID":"base","timeout":600}`)
	other := w.create("", `{"templateID":"base","timeout":600}`)
	at := "/sandboxes/" + s.SandboxID
	w.do(ask{method: "POST", path: at + "/pause"}).want(t, http.StatusNoContent, nil)
	w.do(ask{method: "DELETE", path: at}).want(t, http.StatusNoContent, nil)
	read := func(query string) []logEntry {
		t.Helper()
		var got struct{ Logs []logEntry }
		w.do(ask{method: "GET", path: "/v2" + at + "/logs" + query}).want(t, http.StatusOK, &got)
		if got.Logs == nil {
			t.Errorf("%s: the list is null", query)
		}
		return got.Logs
	}
	all := read("")
	seen := map[string]bool{}
	for i, e := range all {
		seen[e.Message] = true
		if e.Level != "info" || e.Fields["event"] == "" || i > 0 && e.Timestamp.Before(all[i-1].Timestamp) {
			t.Errorf("entry %d: %+v", i, e)
		}
	}
	for _, message := range []string{"workspace ready", "workspace suspended", "workspace terminated", "operation succeeded: suspend_workspace"} {
		if !seen[message] {
			t.Errorf("%q is missing in %v", message, seen)
		}
	}
	back := read("?direction=backward&limit=2")
	if n := len(all); len(back) != 2 || back[0].Fields["event_id"] != all[n-1].Fields["event_id"] || back[1].Fields["event_id"] != all[n-2].Fields["event_id"] {
		t.Errorf("backward: %+v", back)
	}
	if got := read("?limit=1"); len(got) != 1 || got[0].Fields["event_id"] != all[0].Fields["event_id"] {
		t.Errorf("limit: %+v", got)
	}
	if got := read("?limit=0"); len(got) != 0 {
		t.Errorf("limit 0: %+v", got)
	}
	if got := read("?level=warn"); len(got) != 0 {
		t.Errorf("level: %+v", got)
	}
	if got := read("?search=suspended"); len(got) != 1 || got[0].Message != "workspace suspended" {
		t.Errorf("search: %+v", got)
	}
	later := time.Now().Add(time.Hour).UnixMilli()
	if got := read(fmt.Sprintf("?cursor=%d", later)); len(got) != 0 {
		t.Errorf("cursor: %+v", got)
	}
	if got := read(fmt.Sprintf("?cursor=%d&direction=backward", later)); len(got) != len(all) {
		t.Errorf("cursor backward: %d entries of %d", len(got), len(all))
	}
	var v1 struct {
		Logs       []struct{ Line string }
		LogEntries []logEntry
	}
	w.do(ask{method: "GET", path: at + "/logs?start=1"}).want(t, http.StatusOK, &v1)
	if len(v1.Logs) != len(all) || len(v1.LogEntries) != len(all) || v1.Logs[0].Line != all[0].Message {
		t.Errorf("version 1: %+v", v1)
	}
	for _, query := range []string{"?cursor=x", "?cursor=-1", "?limit=-1", "?direction=up", "?level=loud", "?search=" + strings.Repeat("x", 257)} {
		w.do(ask{method: "GET", path: "/v2" + at + "/logs" + query}).want(t, http.StatusBadRequest, nil)
	}
	w.do(ask{method: "GET", path: "/v2/sandboxes/x/logs"}).want(t, http.StatusNotFound, nil)
	w.do(ask{method: "GET", path: "/v2/sandboxes/x/logs", key: "-"}).want(t, http.StatusUnauthorized, nil)
	w.do(ask{method: "GET", path: "/v2/sandboxes/" + other.SandboxID + "/logs"}).want(t, http.StatusOK, nil)
}
