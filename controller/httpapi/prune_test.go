package httpapi_test

import (
	"testing"

	"github.com/coppice-dev/coppice/api"
)

// TestPrune drives pins, cascades and retention through the wire.
func TestPrune(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	var first api.Checkpoint
	w.want(201, "POST", "/v1/workspaces/"+ws.ID+"/checkpoints", map[string]any{"pinned": true, "annotations": map[string]any{"score": 1}}, &first)
	second := w.checkpoint(ws.ID)
	third := w.checkpoint(ws.ID)
	at := "/v1/checkpoints/" + first.ID
	if !first.Pinned {
		t.Errorf("%+v", first)
	}
	for _, query := range []string{"", "?cascade=true", "?dry_run=true", "?cascade=true&dry_run=true"} {
		if p := w.want(409, "DELETE", at+query, nil, nil).problem(t); p.Code != "CHECKPOINT_PINNED" {
			t.Errorf("%s: %+v", query, p)
		}
	}
	var res api.PruneResult
	w.want(200, "POST", at+"/prune", map[string]any{"keep_best": map[string]any{"k": 1, "annotation": "score"}, "dry_run": true}, &res)
	if !res.DryRun || len(res.Items) != 1 || res.Items[0].CheckpointID != second.ID || res.Items[0].Reason != api.PruneNotKept || res.Kept != 2 || res.Bytes == 0 {
		t.Errorf("plan: %+v", res)
	}
	w.want(200, "POST", at+"/prune", map[string]any{"max_bytes": 1}, &res)
	if res.DryRun || len(res.Items) != 1 || !res.OverBudget || res.Kept != 2 {
		t.Errorf("pruned: %+v", res)
	}
	for _, body := range []map[string]any{{}, {"keep_path_to_root": true}, {"keep_best": map[string]any{"k": 0, "annotation": "x"}}, {"keep_best": map[string]any{"k": 1}}, {"max_bytes": -1}} {
		w.want(400, "POST", at+"/prune", body, nil)
		w.want(400, "PUT", at+"/retention", body, nil)
	}
	w.want(404, "GET", at+"/retention", nil, nil)
	var policy api.Retention
	w.want(200, "PUT", at+"/retention", map[string]any{"max_age_seconds": 86400, "max_bytes": 1 << 40, "keep_path_to_root": true}, &policy)
	if policy.CheckpointID != first.ID || policy.Version != 1 || policy.Policy.MaxAgeSeconds != 86400 || policy.Policy.MaxBytes != 1<<40 || !policy.Policy.KeepPathToRoot {
		t.Errorf("stored: %+v", policy)
	}
	w.want(200, "GET", at+"/retention", nil, &policy)
	w.want(204, "DELETE", at+"/retention", nil, nil)
	w.want(204, "DELETE", at+"/retention", nil, nil)

	w.want(200, "PATCH", at, map[string]any{"pinned": false}, &first)
	w.want(200, "DELETE", at+"?cascade=true", nil, &res)
	if first.Pinned || res.DryRun || len(res.Items) != 2 || res.Items[1].CheckpointID != third.ID || res.Items[1].Reason != api.PruneCascade {
		t.Errorf("cascade: %+v", res)
	}
	var usage api.Usage
	w.want(200, "GET", "/v1/workspaces/"+ws.ID+"/usage", nil, &usage)
	if usage.Workspaces != 1 || usage.Checkpoints != 0 || usage.GibSeconds <= 0 {
		t.Errorf("usage: %+v", usage)
	}
	w.want(200, "GET", "/v1/checkpoints/"+ws.ParentCheckpointID+"/usage", nil, &usage)
	if usage.Workspaces != 1 || usage.Checkpoints != 1 || usage.StoredBytes == 0 {
		t.Errorf("usage of the tree: %+v", usage)
	}
	var op api.Operation
	w.want(202, "POST", "/v1/checkpoints/"+ws.ParentCheckpointID+"/prune?wait=0", map[string]any{"max_age_seconds": 1}, &op)
	w.want(200, "GET", "/v1/operations/"+op.ID+"?wait=30", nil, &op)
	if op.State != api.OperationSucceeded || op.Kind != api.OperationPruneCheckpoints {
		t.Errorf("%+v", op)
	}
}
