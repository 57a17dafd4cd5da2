package search_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"

	coppice "github.com/coppice-dev/coppice/sdk/go"
	"github.com/coppice-dev/coppice/sdk/go/search"
)

// answers serves one JSON answer after the other, the last one again and again.
func answers(t *testing.T, status int, list ...any) search.Checkpoints {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if q := r.URL.Query(); r.URL.Path == "/v1/checkpoints" && (q.Get("parent_id") != "root" || len(q["state"]) != 3 || q["state"][0] != "capturing") {
			t.Errorf("it asks for %s", r.URL)
		}
		answer, code := list[0], http.StatusOK
		if len(list) > 1 {
			list = list[1:]
		}
		if r.Method != http.MethodGet {
			answer, code = map[string]any{"code": coppice.CodeStateConflict, "detail": "checkpoint c is deleted and cannot be changed any more"}, status
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		if err := json.NewEncoder(w).Encode(answer); err != nil {
			t.Error(err)
		}
	}))
	t.Cleanup(server.Close)
	client, err := coppice.New(coppice.Config{Server: server.URL, Token: "coppice_x"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	return search.Checkpoints{Client: client}
}

// TestChildrenThatAreCaptured: a child that is being captured when a searcher looks for the children of another one counts as soon as it is there.
func TestChildrenThatAreCaptured(t *testing.T) {
	t.Parallel()
	child := func(id string, state coppice.CheckpointState) map[string]any {
		return map[string]any{"id": id, "state": state, "annotations": map[string]any{search.Key: map[string]any{"action": "a " + id, "value": 0.5}}}
	}
	page := func(items ...any) any { return map[string]any{"items": items} }
	c := answers(t, 0,
		page(child("one", coppice.CheckpointSealed), child("two", coppice.CheckpointCapturing), child("three", coppice.CheckpointCapturing)),
		page(child("one", coppice.CheckpointSealed), child("two", coppice.CheckpointCapturing), child("four", coppice.CheckpointCapturing)), // the capture of three failed
		page(child("one", coppice.CheckpointSealed), child("two", coppice.CheckpointCaptured), child("four", coppice.CheckpointCapturing)))  // and four began later
	got, err := c.Children(t.Context(), "root")
	if err != nil || len(got) != 2 || got["one"].Action != "a one" || got["two"].Action != "a two" {
		t.Errorf("%+v, %v", got, err)
	}
}

// TestSaveOfADeletedCheckpoint: the server says of a deleted checkpoint that its state does not allow a change.
func TestSaveOfADeletedCheckpoint(t *testing.T) {
	t.Parallel()
	for state, gone := range map[coppice.CheckpointState]bool{coppice.CheckpointDeleted: true, coppice.CheckpointCaptured: false} {
		c := answers(t, http.StatusConflict, map[string]any{"id": "c", "state": state, "version": 3})
		if _, err := c.Save(t.Context(), "c", 3, search.Record{}); err == nil || errors.Is(err, search.ErrGone) != gone {
			t.Errorf("%s: %v", state, err)
		}
	}
}
