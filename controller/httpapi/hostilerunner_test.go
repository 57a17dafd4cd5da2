package httpapi_test

import (
	"fmt"
	"net/http"
	"runtime"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// TestReportsOfManyElements has a runner that was taken over send small messages that decode into large heaps.
func TestReportsOfManyElements(t *testing.T) { //nolint:paralleltest // it measures the heap of the process
	w := newWorld(t)
	const size = 6 << 20
	many := func(open, each, end string) string {
		return open + strings.Repeat(each+",", size/(len(each)+1)) + each + end
	}
	id := func(path string) string { return strings.Replace(path, "{id}", string(w.runner.ID()), 1) }
	commit := strings.Replace(id(runnerapi.PathSealCommit), "{checkpoint_id}", string(core.NewID[core.CheckpointID]()), 1)
	for name, c := range map[string]struct{ path, body string }{
		"sandboxes":    {id(runnerapi.PathHeartbeat), many(`{"lease_epoch":1,"sandboxes":[`, "{}", "]}")},
		"gone":         {id(runnerapi.PathBeats), many(`{"lease_epoch":1,"gone_checkpoints":[`, `"x"`, "]}")},
		"usage":        {id(runnerapi.PathHeartbeat), many(`{"lease_epoch":1,"usage":[`, "{}", "]}")},
		"again":        {id(runnerapi.PathHeartbeat), many(`{`, `"sandboxes":[{}]`, "}")},
		"levels":       {id(runnerapi.PathHeartbeat), strings.Repeat(`{"a":[`, size/6)},
		"flows":        {id(runnerapi.PathFlows), many(`{"flows":[`, "{}", "]}")},
		"needs":        {commit, many(`{"needs":[`, `""`, "]}")},
		"objects":      {commit, many(`{"written":[{}],"needs":[`, `["",""]`, "]}")},
		"ancestors":    {id(runnerapi.PathSeals), many(`{"ancestors":[`, `""`, "]}")},
		"long":         {commit, `{"needs":["` + strings.Repeat("x", 32<<20) + `"]}`},
		"registration": {runnerapi.PathRegister, many(`{"x":[`, "{}", "]}")},
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		status := postReport(t, w.inner+c.path, c.body)
		runtime.ReadMemStats(&after)
		if status != http.StatusBadRequest {
			t.Errorf("%s: status %d", name, status)
		}
		if grown := after.TotalAlloc - before.TotalAlloc; grown > max(64<<20, 5*uint64(len(c.body))) {
			t.Errorf("%s: %d MiB were allocated for a message of %d", name, grown>>20, len(c.body)>>20)
		}
	}
	w.create("unaffected")
}

func postReport(t *testing.T, url, body string) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+runnerSecret)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(fmt.Errorf("post: %w", err))
	}
	defer res.Body.Close()
	return res.StatusCode
}
