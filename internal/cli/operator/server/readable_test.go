package server

import (
	"bytes"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
)

func TestReadable(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	log, err := newLogger(&b, "info", "text")
	if err != nil {
		t.Fatal(err)
	}
	api := log.With("component", "api")
	api.InfoContext(core.WithRequestID(t.Context(), "req_1"), "request", "request_id", "req_1", "method", "POST", "path", "/v1/workspaces", "status", 201, "bytes", 7, "duration_ms", 850.4, "project_id", "prj_1")
	api.Info("request", "request_id", "req_2", "method", "GET", "path", "/v1/\x1b[31m", "status", 404, "duration_ms", 3.9)
	log.With("runner_id", "rnr_1").Warn("a line\nand another", "err", "no\x1b")
	log.Debug("not shown")
	lines := strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
	for i, want := range []string{"  POST /v1/workspaces 201 in 850ms", "  GET /v1/?[31m 404 in 4ms  request_id=req_2", ` WARN  "a line\nand another"  runner_id=rnr_1  err="no\x1b"`} {
		if len(lines) != 3 || lines[i][len("15:04:05"):] != want {
			t.Fatalf("line %d of %q is not %q", i, lines, want)
		}
	}
	if _, err := newLogger(&b, "info", "pretty"); err == nil {
		t.Error("an unknown format was accepted")
	}
	b.Reset()
	if log, err = newLogger(&b, "info", "auto"); err != nil {
		t.Fatal(err)
	}
	log.Info("for programs")
	if !strings.HasPrefix(b.String(), "{") {
		t.Errorf("not on a terminal: %q", b.String())
	}
}
