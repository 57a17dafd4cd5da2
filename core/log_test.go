package core_test

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
)

func TestLogHandler(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	log := slog.New(core.LogHandler(slog.NewTextHandler(&b, nil))).With("component", "x")
	ctx := core.WithOperationID(core.WithRequestID(t.Context(), "req_1"), "op_1")
	log.InfoContext(ctx, "both")
	log.InfoContext(ctx, "said", "operation_id", "op_2")
	log.InfoContext(t.Context(), "none")
	lines := strings.Split(strings.TrimSpace(b.String()), "\n")
	for i, want := range []string{"msg=both component=x request_id=req_1 operation_id=op_1", "msg=said component=x operation_id=op_2 request_id=req_1", "msg=none component=x"} {
		if !strings.HasSuffix(lines[i], want) {
			t.Errorf("got %s, want %s", lines[i], want)
		}
	}
	for id, want := range map[string]bool{"req_0a-Z": true, "": false, "a b": false, "a\nb": false, strings.Repeat("a", 65): false} {
		if core.Traceable(id) != want {
			t.Errorf("Traceable(%q) is %v", id, !want)
		}
	}
}
