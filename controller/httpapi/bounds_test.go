package httpapi_test

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/httpapi"
	"github.com/coppice-dev/coppice/controller/internalapi"
	"github.com/coppice-dev/coppice/controller/transfer"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/blob/dir"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// counted counts what is read of a body.
type counted struct {
	r io.Reader
	n int64
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n += int64(n)
	return n, err
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}

// TestUploadsAreBounded: an upload that says its length is refused by it, and one that does not is cut off. Neither becomes a file.
func TestUploadsAreBounded(t *testing.T) {
	t.Parallel()
	const most = 1 << 20
	w := newWorld(t)
	ws := w.create("a")
	handler, usual := httpapi.NewWithUploads(w.control, slog.New(slog.DiscardHandler), most)
	if usual != 10<<30 {
		t.Errorf("an upload has %d bytes at most", usual)
	}
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	for name, c := range map[string]struct {
		length, given int64 // length: -1 is unknown
		status        int
	}{
		"the longest":            {most, most, 200},
		"the longest, in chunks": {-1, most, 200},
		"too long":               {most + 1, most + 1, 413},
		"too long, in chunks":    {-1, most + 1, 413},
		"endless":                {-1, 1 << 40, 413},
	} {
		path := "/v1/workspaces/" + ws.ID + "/files?path=/" + strings.NewReplacer(" ", "_", ",", "").Replace(name)
		body := &counted{r: io.LimitReader(zeros{}, c.given)}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, server.URL+path, io.NopCloser(body))
		if err != nil {
			t.Fatal(err)
		}
		req.ContentLength = c.length
		req.Header.Set("Authorization", "Bearer "+apiKey)
		req.Header.Set("Content-Type", "application/octet-stream")
		var recorder httptest.ResponseRecorder
		recorder.Body = new(bytes.Buffer)
		req.RequestURI = req.URL.RequestURI()
		handler.ServeHTTP(&recorder, req)
		if recorder.Code != c.status || c.status == 413 && !strings.Contains(recorder.Body.String(), string(core.CodeBodyTooLarge)) {
			t.Errorf("%s: %d %s", name, recorder.Code, recorder.Body)
		}
		if body.n > most+1<<20 {
			t.Errorf("%s: %d bytes were read", name, body.n)
		}
		got := w.do(call{method: "GET", path: path})
		if c.status == 200 && (got.status != 200 || len(got.body) != most) || c.status != 200 && got.status != 404 {
			t.Errorf("%s: the file has %d bytes, status %d", name, len(got.body), got.status)
		}
	}
}

// TestJoinIsBounded: who has shown no certificate sends 32 KiB, and no more of it is read.
func TestJoinIsBounded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	handler := internalapi.NewTLS(w.control, slog.New(slog.DiscardHandler))
	for size, want := range map[int]core.Code{32 << 10: core.CodeInvalidField, 32<<10 + 1: core.CodeMalformedBody, 64 << 20: core.CodeMalformedBody} {
		const around = len(`{"token":"x","more":""}`)
		body := &counted{r: strings.NewReader(`{"token":"x","more":"` + strings.Repeat("m", size-around) + `"}`)}
		req := httptest.NewRequestWithContext(t.Context(), http.MethodPost, runnerapi.PathJoin, body)
		req.TLS = &tls.ConnectionState{ServerName: "join.coppice.internal"}
		got := httptest.NewRecorder()
		handler.ServeHTTP(got, req)
		var p runnerapi.Problem
		if err := json.Unmarshal(got.Body.Bytes(), &p); err != nil || p.Code != want {
			t.Errorf("%d bytes: %d %s, want %s", size, got.Code, got.Body, want)
		}
		if body.n > 64<<10 {
			t.Errorf("%d bytes: %d were read", size, body.n)
		}
	}
}

// TestExportsTakeTurns: eight exports are written at once, and the next one is refused until one has ended.
func TestExportsTakeTurns(t *testing.T) {
	t.Parallel()
	const most = 8
	w := newWorld(t)
	cp := w.sealed(1)
	project, err := w.control.Bootstrap(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var open []*transfer.ExportedFile
	for range most {
		f, err := w.control.ExportCheckpoint(t.Context(), project.ID, core.CheckpointID(cp.ID))
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, f)
	}
	path := "/v1/checkpoints/" + cp.ID + "/export"
	for range 2 {
		if got := w.do(call{method: "GET", path: path}); got.status != 429 || got.problem(t).Code != string(core.CodeCapacity) {
			t.Errorf("beyond %d: %d", most, got.status)
		}
	}
	open[0].Close()
	for range 2 { // each gives its place back
		if got := w.do(call{method: "GET", path: path}); got.status != 200 {
			t.Errorf("after one has ended: %d", got.status)
		}
	}
	for _, f := range open[1:] {
		f.Close()
	}
}

// TestTextsOfAnImport: a text of a file that is kept has 512 bytes. A longer one is refused, and what guests have said is cut.
func TestTextsOfAnImport(t *testing.T) {
	t.Parallel()
	const most = 512
	w := newWorld(t)
	file := func(image, model, command int) []byte {
		class := runnerapi.RunnerClass{Arch: "amd64", Accelerator: "tcg", VMM: "qemu", VMMVersion: "7.2", MachineType: "pc-q35-7.2", CPUModel: strings.Repeat("m", model)}
		h := manifest.Header{
			ProjectID: "prj_00000000000000000000000004", CheckpointID: "ckpt_00000000000000000000000008", GuestImage: core.DigestOf(nil),
			Class: class.Fields(), Resources: core.Resources{VCPUs: 1, MemoryMiB: 128, DiskGiB: 1},
			Record: json.RawMessage(`{"stale_prng_processes":[{"pid":7,"command":"` + strings.Repeat("c", command) + `","runtime":"go"}]}`),
		}
		blobs, err := dir.Open(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		defer blobs.Close()
		made, err := machine(t.Context(), blobs, "v1/x/", h, 'a')
		if err != nil {
			t.Fatal(err)
		}
		e, err := snapshotstore.NewExport(made.Snapshot, strings.Repeat("i", image))
		if err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		if err := e.Write(t.Context(), blobs, &b); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	for name, b := range map[string][]byte{"the image's name": file(most+1, 1, 1), "a field of the class": file(1, most+1, 1)} {
		if got := w.importFile("", b); got.status != 400 || got.problem(t).Code != string(core.CodeImportInvalid) {
			t.Errorf("%s: %d %s", name, got.status, got.body)
		}
	}
	got := w.importFile("", file(most, most, 2*most))
	if got.status != 201 {
		t.Fatalf("%d %s", got.status, got.body)
	}
	var cp api.Checkpoint
	if err := json.Unmarshal(got.body, &cp); err != nil || len(cp.StalePRNGProcesses) != 1 || len(cp.StalePRNGProcesses[0].Command) != most || len(cp.Image.Name) != most {
		t.Errorf("%v: %s", err, got.body)
	}
}
