//go:build chromium

package router_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/test/require"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// The page keeps a script in the cache of the browser, and then wants it as a service worker: by a request, and out of the cache.
const workerPage = `<!doctype html><script>
(async () => {
	await fetch("/worker.js");
	const got = {};
	for (const way of ["none", "all"]) {
		try {
			await navigator.serviceWorker.register("/worker.js", {updateViaCache: way, scope: "/" + way});
			got[way] = "registered";
		} catch (err) {
			got[way] = err.name;
		}
	}
	await fetch("/report", {method: "POST", body: JSON.stringify(got)});
})();
</script>`

// TestChromiumHasNoWorkers: a page of a preview cannot register a service worker in a real browser. The same page without the router can.
func TestChromiumHasNoWorkers(t *testing.T) {
	t.Parallel()
	program := require.Program(t, "chromium", "chromium")
	w := newWorld(t)
	ws := w.create(w.rest)
	reports := make(chan map[string]string, 2)
	guest := w.guest(func(rw http.ResponseWriter, q *http.Request) {
		switch q.URL.Path {
		case "/":
			rw.Header().Set("Content-Type", "text/html")
			_, _ = io.WriteString(rw, workerPage)
		case "/worker.js":
			rw.Header().Set("Content-Type", "text/javascript")
			rw.Header().Set("Cache-Control", "max-age=3600")
			_, _ = io.WriteString(rw, `addEventListener("fetch", () => {});`)
		case "/report":
			var got map[string]string
			if err := json.NewDecoder(q.Body).Decode(&got); err != nil {
				t.Error(err)
			}
			reports <- got
		}
	})
	w.listen(ws.ID, 3000, guest)
	p := w.preview(ws.ID, 3000, coppice.VisibilityPublic)
	visit := func(url string) map[string]string {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--ignore-certificate-errors",
			"--user-data-dir="+t.TempDir(), "--host-resolver-rules=MAP *."+domain+":443 "+w.server.Listener.Addr().String(), "--remote-debugging-port=0", url)
		var said strings.Builder
		cmd.Stderr = &said
		cmd.WaitDelay = 10 * time.Second
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() {
			cancel()
			_ = cmd.Wait()
		}()
		select {
		case got := <-reports:
			return got
		case <-ctx.Done():
			t.Fatalf("the browser reports nothing; it says %s", said.String())
			return nil
		}
	}
	for way, got := range visit(guest.URL + "/") {
		if got != "registered" {
			t.Errorf("without the router, by %s: %s", way, got)
		}
	}
	for way, got := range visit(p.URL) {
		if got == "registered" {
			t.Errorf("in a preview, by %s: %s", way, got)
		}
	}
}
