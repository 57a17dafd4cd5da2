package httpapi_test

import (
	"strings"
	"syscall"
	"testing"
)

// TestKilledUpload kills a controller process in the middle of an upload. No half is an upload, a repeat at another controller is complete, and
// what was left goes with its time.
func TestKilledUpload(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	put := call{method: "PUT", path: "/v1/uploads/ctx", body: strings.Repeat("x", 3<<20), header: map[string]string{"Content-Type": "application/octet-stream"}}
	url, cmd := w.killed("controller.after_upload_part")
	if err := w.broken(url, put); err == nil {
		t.Fatal("the controller was to be killed and has answered")
	}
	if err := cmd.Wait(); cmd.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("it ended otherwise: %v", err)
	}
	if got := w.do(call{method: "GET", path: "/v1/uploads/ctx"}); got.status != 404 {
		t.Errorf("a half is there: %d %s", got.status, got.body)
	}
	if got := w.do(put); got.status != 200 || !strings.Contains(string(got.body), `"size_bytes":3145728`) {
		t.Fatalf("%d %s", got.status, got.body)
	}
	parts := func() (n int) {
		if err := w.conn().QueryRow(t.Context(), `SELECT count(*) FROM upload_parts`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	if n := parts(); n != 4 {
		t.Errorf("%d parts: three of the upload, and one that the killed controller has left", n)
	}
	w.sql(`UPDATE uploads SET expires_at = now() - interval '1 second' WHERE sha256 IS NULL`)
	if err := w.control.Uploads.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := parts(); n != 3 {
		t.Errorf("%d parts after the sweep", n)
	}
}
