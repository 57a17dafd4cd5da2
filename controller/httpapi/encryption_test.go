package httpapi_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/core"
)

// TestProjectEncryption: encryption is chosen when a project is made or later, each key has its number, and what is imported is encrypted.
func TestProjectEncryption(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var p, self api.Project
	w.want(201, "POST", "/v1/projects", map[string]any{"name": "plain"}, &p)
	if p.Encryption != api.EncryptionNone || p.KeyVersion != 0 {
		t.Errorf("by itself: %+v", p)
	}
	w.want(201, "POST", "/v1/projects", map[string]any{"name": "closed", "encryption": "envelope"}, &p)
	if p.Encryption != api.EncryptionEnvelope || p.KeyVersion != 1 {
		t.Errorf("made so: %+v", p)
	}
	w.want(204, "DELETE", "/v1/projects/"+p.ID, nil, nil)
	var left int
	if err := w.conn().QueryRow(t.Context(), `SELECT count(*) FROM project_keys`).Scan(&left); err != nil || left != 0 {
		t.Errorf("%d keys are left of a project that was deleted, %v", left, err)
	}
	var key api.APIKey
	w.want(200, "GET", "/v1/self", nil, &key)
	path := "/v1/projects/" + key.ProjectID
	for _, bad := range []string{`{"encryption": "rot13"}`, `{"key_version": 1}`, `{"encryption": "envelope", "key_version": 2}`, `{"encryption": "envelope", "key_version": -1}`} {
		if r := w.do(call{method: "PATCH", path: path, body: bad, header: map[string]string{"Content-Type": "application/json"}}); r.status != 400 {
			t.Errorf("%v: %+v", bad, r)
		}
	}
	file := exportedFile(7)
	var clear, closed api.Checkpoint
	imported := func(cp *api.Checkpoint) {
		t.Helper()
		r := w.importFile("", file)
		if err := json.Unmarshal(r.body, cp); r.status != 201 || err != nil {
			t.Fatalf("%d %s %v", r.status, r.body, err)
		}
	}
	imported(&clear)
	for _, x := range []struct {
		body    map[string]any
		mode    api.Encryption
		version int64
	}{
		{map[string]any{"encryption": "envelope"}, api.EncryptionEnvelope, 1},
		{map[string]any{"encryption": "envelope", "key_version": 1}, api.EncryptionEnvelope, 1},
		{map[string]any{"key_version": 2}, api.EncryptionEnvelope, 2},
		{map[string]any{"key_version": 2}, api.EncryptionEnvelope, 2},
		{map[string]any{"encryption": "none"}, api.EncryptionNone, 2},
		{map[string]any{"encryption": "envelope"}, api.EncryptionEnvelope, 2},
	} {
		w.want(200, "PATCH", path, x.body, &p)
		w.want(200, "GET", path, nil, &self)
		if p.Encryption != x.mode || p.KeyVersion != x.version || self.Encryption != x.mode || self.KeyVersion != x.version {
			t.Errorf("%v: %+v", x.body, p)
		}
	}
	imported(&closed)
	seen := map[string]int{}
	for info, err := range w.blobs.List(t.Context(), "v1/"+key.ProjectID+"/") {
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case strings.Contains(info.Key, closed.ID) && strings.HasSuffix(info.Key, ".k2"):
			seen["closed"]++
		case strings.Contains(info.Key, clear.ID) && !strings.Contains(info.Key, ".k"):
			seen["clear"]++
		default:
			t.Errorf("there is %s", info.Key)
		}
	}
	if seen["closed"] < 2 || seen["closed"] != seen["clear"] {
		t.Errorf("%v", seen)
	}
	one, other := w.do(call{method: "GET", path: "/v1/checkpoints/" + clear.ID + "/export"}), w.do(call{method: "GET", path: "/v1/checkpoints/" + closed.ID + "/export"})
	if one.status != 200 || other.status != 200 || len(one.body) != len(other.body) {
		t.Errorf("exports of %d and %d bytes", len(one.body), len(other.body))
	}
	var data api.StoreData
	w.want(200, "GET", "/v1/store/check/data", nil, &data)
	if len(data.Problems) > 0 || data.Checkpoints != 2 {
		t.Errorf("%+v", data)
	}
	w.sql(`DELETE FROM project_keys`) // as who destroys keys
	w.want(200, "GET", "/v1/store/check/data", nil, &data)
	if len(data.Problems) != 1 || data.Problems[0].Code != string(core.CodeKeyUnavailable) || data.Problems[0].Checkpoints[0] != closed.ID {
		t.Errorf("%+v", data)
	}
	if r := w.do(call{method: "GET", path: "/v1/checkpoints/" + closed.ID + "/export"}); r.status != 409 || !strings.Contains(string(r.body), "KEY_UNAVAILABLE") {
		t.Errorf("an export: %d %s", r.status, r.body)
	}
	if r := w.importFile("", file); r.status != 409 || !strings.Contains(string(r.body), "KEY_UNAVAILABLE") {
		t.Errorf("an import: %d %s", r.status, r.body)
	}
}
