package httpapi_test

import (
	"context"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// sealer speaks to the listener for runners.
type sealer struct{ w *world }

func (s sealer) post(ctx context.Context, path string, in, out any) error {
	return runnertest.Post(ctx, s.w.inner+path, runnerSecret, in, out)
}

func (s sealer) path(form string, runner core.RunnerID, id core.CheckpointID) string {
	return strings.NewReplacer("{id}", string(runner), "{checkpoint_id}", string(id)).Replace(form)
}

func (s sealer) BeginSeal(ctx context.Context, runner core.RunnerID, in runnerapi.BeginSeal) (out runnerapi.SealBegun, err error) {
	err = s.post(ctx, s.path(runnerapi.PathSeals, runner, ""), in, &out)
	return out, err
}

func (s sealer) CommitSeal(ctx context.Context, runner core.RunnerID, id core.CheckpointID, in runnerapi.CommitSeal) error {
	return s.post(ctx, s.path(runnerapi.PathSealCommit, runner, id), in, &struct{}{})
}

func (s sealer) FailSeal(ctx context.Context, runner core.RunnerID, id core.CheckpointID, in runnerapi.FailSeal) error {
	return s.post(ctx, s.path(runnerapi.PathSealFail, runner, id), in, &struct{}{})
}

func TestSealing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var ws api.Workspace
	w.want(201, "POST", "/v1/workspaces", map[string]any{"name": "a"}, &ws)
	var cp api.Checkpoint
	w.want(201, "POST", "/v1/workspaces/"+ws.ID+"/checkpoints?wait=30", map[string]any{}, &cp)
	if cp.Seal == nil || cp.Seal.State != api.SealQueued || !cp.SealedAt.IsZero() {
		t.Errorf("captured: %+v", cp.Seal)
	}
	id := core.CheckpointID(cp.ID)
	u, err := w.runner.BeginSeal(t.Context(), sealer{w}, w.blobs, 1, id)
	if err != nil {
		t.Fatal(err)
	}
	if err := u.Fail(t.Context(), core.Errorf(core.Unavailable, core.CodeStoreUnavailable, "the store is unreachable")); err != nil {
		t.Fatal(err)
	}
	at := "/v1/checkpoints/" + cp.ID
	w.want(200, "GET", at, nil, &cp)
	if s := cp.Seal; s == nil || s.State != api.SealFailed || s.Attempt != 1 || s.Problem == nil || s.Problem.Code != "STORE_UNAVAILABLE" || s.Problem.Message != "the store is unreachable" {
		t.Errorf("failed: %+v", s)
	}
	if err := w.runner.Seal(t.Context(), sealer{w}, w.blobs, 1, id); err != nil {
		t.Fatal(err)
	}
	w.want(200, "GET", at+"?wait=sealed", nil, &cp)
	if cp.State != api.CheckpointSealed || cp.StoredBytes == 0 || cp.SealedAt.IsZero() {
		t.Errorf("sealed: %+v", cp)
	}
	w.want(400, "GET", at+"?wait=10", nil, nil)
	w.want(400, "POST", "/v1/workspaces/"+ws.ID+"/checkpoints?wait=601", map[string]any{}, nil)
	// The answer to this one waits for the runner.
	project, err := w.control.Bootstrap(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for t.Context().Err() == nil {
			for _, held := range w.runner.Checkpoints() {
				if held != id && string(held) != ws.ParentCheckpointID {
					_ = w.runner.Seal(t.Context(), sealer{w}, w.blobs, 1, held) // it may be captured, and not be recorded yet
					if got, err := w.control.Tree.Checkpoint(t.Context(), project.ID, held); err == nil && got.State == core.CheckpointSealed {
						return
					}
				}
			}
		}
	}()
	var second api.Checkpoint
	w.want(201, "POST", "/v1/workspaces/"+ws.ID+"/checkpoints?wait=sealed", map[string]any{}, &second)
	if second.State != api.CheckpointSealed || second.ID == cp.ID {
		t.Errorf("waited: %+v", second)
	}
	<-done
}

func TestStoreRoutes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("a")
	var cp api.Checkpoint
	w.want(201, "POST", "/v1/workspaces/"+ws.ID+"/checkpoints", map[string]any{}, &cp)
	if err := w.runner.Seal(t.Context(), sealer{w}, w.blobs, 1, core.CheckpointID(cp.ID)); err != nil {
		t.Fatal(err)
	}
	var report api.StoreReport
	w.want(200, "GET", "/v1/store/check", nil, &report)
	if !report.Sound || report.Objects != 3 || len(report.Missing)+len(report.Foreign) != 0 {
		t.Errorf("%+v", report)
	}
	w.want(204, "DELETE", "/v1/checkpoints/"+cp.ID, nil, nil)
	var garbage api.StoreGarbage
	w.want(200, "POST", "/v1/store/gc?dry_run=true", nil, &garbage)
	if !garbage.DryRun || garbage.Condemned+garbage.Waiting != 3 {
		t.Errorf("%+v", garbage)
	}
	w.want(200, "POST", "/v1/store/gc", nil, &garbage)
	if garbage.DryRun || garbage.Waiting != 3 || garbage.Objects != 0 {
		t.Errorf("%+v", garbage)
	}
	w.want(200, "GET", "/v1/store/check", nil, &report)
	if !report.Sound || report.Objects != 0 || report.Debris != 3 {
		t.Errorf("%+v", report)
	}
	object := ""
	for info, err := range w.blobs.List(t.Context(), "") {
		if err != nil {
			t.Fatal(err)
		}
		object = info.Key
	}
	if err := w.blobs.Put(t.Context(), object+"0", strings.NewReader("x"), 1, core.DigestOf([]byte("x"))); err != nil {
		t.Fatal(err)
	}
	w.want(200, "GET", "/v1/store/check", nil, &report)
	if report.Sound || len(report.Foreign) != 1 || report.Foreign[0].Key != object+"0" || report.Foreign[0].Bytes != 1 {
		t.Errorf("%+v", report)
	}
}
