package httpapi_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/httpapi"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/controller/runnerclient"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// TestExportWithoutStore: a controller without a store passes on the file that the checkpoint's host makes. A host that vanishes before the file
// begins is a clear error, and one that vanishes in the middle cuts the file short.
func TestExportWithoutStore(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cp := w.checkpoint(w.create("young").ID)
	store, err := postgres.Open(t.Context(), postgres.Config{DSN: w.dsn})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	client := runnerclient.New(runnerSecret)
	t.Cleanup(client.Close)
	log := slog.New(slog.NewTextHandler(testLog{t}, nil))
	bare := httptest.NewServer(httpapi.New(controller.New(controller.Config{ClusterID: "test"}, store, client, log), log))
	t.Cleanup(bare.Close)
	with := w.url
	w.url = bare.URL
	path := "/v1/checkpoints/" + cp.ID + "/export"

	got := w.do(call{method: "GET", path: path})
	if got.status != 200 || got.header.Get("Content-Length") != fmt.Sprint(len(got.body)) {
		t.Fatalf("%d %v", got.status, got.header)
	}
	if other := w.do(call{method: "GET", path: path, key: w.secondProject()}); other.status != 404 {
		t.Errorf("another project: %d", other.status)
	}
	w.url = with
	answer := w.importFile("?name=back", got.body)
	var in api.Checkpoint
	if err := json.Unmarshal(answer.body, &in); err != nil || answer.status != 201 || in.Imported == nil || in.Imported.CheckpointID != cp.ID || in.Resources != cp.Resources {
		t.Errorf("%d %s", answer.status, answer.body)
	}
	w.url = bare.URL

	vanishAt := func(at string) {
		w.runner.Hook(func(_ context.Context, point, _ string) error {
			if point == at {
				return runnertest.ErrVanish
			}
			return nil
		})
	}
	vanishAt(runnertest.PointExport)
	if p := w.do(call{method: "GET", path: path}).problem(t); p.Status != 503 || p.Code != string(core.CodeRunnerUnreachable) {
		t.Errorf("a host that vanishes: %+v", p)
	}
	vanishAt(runnertest.PointExport + runnertest.Done)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, bare.URL+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+apiKey)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if cut, err := io.ReadAll(res.Body); !errors.Is(err, io.ErrUnexpectedEOF) || len(cut) >= len(got.body) || !bytes.Equal(cut, got.body[:len(cut)]) {
		t.Errorf("a host that vanishes in the middle: %d of %d bytes, %v", len(cut), len(got.body), err)
	}
}
