package guest

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

func TestFlush(t *testing.T) {
	t.Parallel()
	for name, x := range map[string]struct {
		answer http.HandlerFunc
		want   core.Category
	}{
		"done": {func(w http.ResponseWriter, _ *http.Request) {
			_ = json.NewEncoder(w).Encode(guestapi.FlushResponse{Flushed: true})
		}, ""},
		"an agent of an early image": {func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusNotFound)
			_ = json.NewEncoder(w).Encode(guestapi.Problem{Category: core.NotFound, Code: core.CodeRouteNotFound, Message: "no such route"})
		}, core.NotFound},
		"an agent that hangs": {func(_ http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			<-r.Context().Done()
		}, core.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, err := serveHTTP(t, x.answer).Flush(t.Context(), guestapi.FlushRequest{TimeoutMS: 1})
			if core.CategoryOf(err) != x.want || out.Flushed != (x.want == "") {
				t.Errorf("%+v, %v", out, err)
			}
		})
	}
}

func TestWorkloadIsClipped(t *testing.T) {
	t.Parallel()
	evil := "\x1b[2J\x00\n" + strings.Repeat("A", 300)
	c := serveHTTP(t, func(w http.ResponseWriter, _ *http.Request) {
		out := guestapi.QuiesceResponse{Workload: make([]core.WorkloadProcess, 3000)}
		out.Workload[0] = core.WorkloadProcess{Command: evil, Args: evil}
		_ = json.NewEncoder(w).Encode(out)
	})
	out, err := c.Quiesce(t.Context(), guestapi.QuiesceRequest{CaptureID: "c"})
	if err != nil || len(out.Workload) != maxWorkload || out.Workload[0].Command != core.Clip(evil) || out.Workload[0].Args != core.Clip(evil) {
		t.Errorf("%d processes, the first %+v, %v", len(out.Workload), out.Workload[0], err)
	}
}
