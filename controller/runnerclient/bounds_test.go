package runnerclient_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/runnerclient"
	"github.com/coppice-dev/coppice/core"
)

// TestAnswersOfManyElements has a runner that was taken over answer with what decodes into a large heap.
func TestAnswersOfManyElements(t *testing.T) { //nolint:paralleltest // it measures the heap of the process
	const size = 4 << 20
	many := func(open, each, end string) string {
		return open + strings.Repeat(each+",", size/(len(each)+1)) + each + end
	}
	var body string
	runner := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if body == "" {
			w.Header().Set("X", strings.Repeat("h", 1<<20))
		}
		_, _ = io.WriteString(w, body) // the reader may have gone
	}))
	t.Cleanup(runner.Close)
	c := runnerclient.New("secret")
	t.Cleanup(c.Close)
	for name, one := range map[string]struct {
		body string
		call func() error
	}{
		"images": {many(`{"images":[`, "{}", "]}"), func() error {
			_, err := c.Images(t.Context(), runner.URL)
			return err
		}},
		"children": {many(`{"children":[`, "{}", "]}"), func() error {
			_, err := c.Fork(t.Context(), runner.URL, runnerapi.Fork{Children: make([]runnerapi.Child, 2)})
			return err
		}},
		"evidence": {`{"children":[{"reseal":{"steps":[` + many(`{"evidence":{`, `"a":""`, "}}") + `]}}]}`, func() error {
			_, err := c.Fork(t.Context(), runner.URL, runnerapi.Fork{Children: make([]runnerapi.Child, 2)})
			return err
		}},
		"files": {many(`{"files":[`, "{}", "]}"), func() error {
			_, err := c.Diff(t.Context(), runner.URL, core.NewID[core.CheckpointID](), runnerapi.Diff{})
			return err
		}},
		"timings": {many(`{"timings":[`, "{}", "]}"), func() error {
			_, err := c.Capture(t.Context(), runner.URL, core.NewID[core.SandboxID](), runnerapi.Capture{})
			return err
		}},
		"header": {"", func() error {
			_, err := c.Images(t.Context(), runner.URL)
			return err
		}},
	} {
		body = one.body
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := one.call()
		runtime.ReadMemStats(&after)
		if core.CodeOf(err) != core.CodeRunnerUnreachable {
			t.Errorf("%s: %v", name, err)
		}
		if grown := after.TotalAlloc - before.TotalAlloc; grown > 24<<20 {
			t.Errorf("%s: %d MiB were allocated for an answer of %d", name, grown>>20, size>>20)
		}
	}
}
