package checkpoint

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/internal/cli/clitest"
	"github.com/coppice-dev/coppice/internal/cli/exit"
)

// TestExportAndImportCommands moves bytes out of a server and into it. What is not whole is no file.
func TestExportAndImportCommands(t *testing.T) {
	t.Parallel()
	const id = "ckpt_00000000000000000000000008"
	file := bytes.Repeat([]byte("checkpoint"), 100_000)
	sum := sha256.Sum256(file)
	file = append(file, sum[:]...)
	sent := bytes.Clone(file)
	cp := api.Checkpoint{
		ID: id, Name: "back", State: api.CheckpointSealed, Kind: api.CheckpointKindUser, Resources: api.Resources{VCPUs: 1, MemoryMiB: 128, DiskGiB: 1}, StoredBytes: 1 << 20,
		RunnerClass: &api.RunnerClass{Arch: "amd64", VMM: "qemu", VMMVersion: "7.2"}, Imported: &api.Imported{CheckpointID: id, ImageDigest: "sha256:00"},
	}
	mux := http.NewServeMux()
	var waits atomic.Int32 // the checkpoint is sealed while the second of them waits
	mux.HandleFunc("GET /v1/checkpoints/"+id, func(w http.ResponseWriter, r *http.Request) {
		now := cp
		if r.URL.Query().Get("wait") == "sealed" {
			waits.Add(1)
		}
		if waits.Load() < 2 {
			now.State = api.CheckpointCaptured
		}
		_ = json.NewEncoder(w).Encode(now)
	})
	mux.HandleFunc("GET /v1/checkpoints/"+id+"/export", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(sent) })
	mux.HandleFunc("POST /v1/checkpoints", func(w http.ResponseWriter, r *http.Request) {
		got, err := io.ReadAll(r.Body)
		if err != nil || !bytes.Equal(got, file) || r.URL.Query().Get("name") != "back" || r.Header.Get("Idempotency-Key") == "" {
			w.Header().Set("Content-Type", "application/problem+json")
			w.WriteHeader(http.StatusBadRequest)
			_ = json.NewEncoder(w).Encode(api.Problem{Status: 400, Code: "IMPORT_INVALID", Detail: "it ends after 5 bytes"})
			return
		}
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(cp)
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	dir := t.TempDir()
	path := filepath.Join(dir, "a.ckpt")
	run := func(stdin []byte, args ...string) (int, []byte, string) {
		a, stdout, stderr := clitest.App(nil)
		a.Stdin = bytes.NewReader(stdin)
		status := a.Run(t.Context(), append([]string{"--server", server.URL, "--token", "k"}, args...), NewCommand)
		return status, stdout.Bytes(), stderr.String()
	}
	if status, out, stderr := run(nil, "ckpt", "export", id, "-o", path); status != 0 || !strings.Contains(string(out), "MiB in") && !strings.Contains(string(out), "KiB in") {
		t.Errorf("%d %s%s", status, out, stderr)
	}
	if n := waits.Load(); n != 2 {
		t.Errorf("the command waited %d times", n)
	}
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, file) {
		t.Errorf("the file: %v", err)
	}
	if status, out, stderr := run(nil, "ckpt", "export", id, "-o", "-"); status != 0 || !bytes.Equal(out, file) {
		t.Errorf("%d, %d bytes, %s", status, len(out), stderr)
	}
	if status, out, stderr := run(nil, "ckpt", "import", path, "--name", "back"); status != 0 || !strings.Contains(string(out), id) || !strings.Contains(string(out), "qemu 7.2") {
		t.Errorf("%d %s%s", status, out, stderr)
	}
	if status, out, stderr := run(file, "ckpt", "import", "-", "--name", "back", "-q"); status != 0 || string(out) != id+"\n" {
		t.Errorf("%d %s%s", status, out, stderr)
	}
	if status, _, stderr := run(file[:5], "ckpt", "import", "-", "--name", "back"); status != exit.BadInput || !strings.Contains(stderr, "IMPORT_INVALID") {
		t.Errorf("%d %s", status, stderr)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	for what, bad := range map[string][]byte{"changed": append([]byte("x"), file[1:]...), "short": file[:len(file)-1], "nothing": nil} {
		sent = bad
		if status, _, _ := run(nil, "ckpt", "export", id, "-o", path); status == 0 {
			t.Errorf("%s: no error", what)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("%s: there is %v, %v", what, left, err)
		}
	}
}
