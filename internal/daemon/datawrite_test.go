package daemon_test

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/daemon"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestDataPlaneWritesAreAudited writes and deletes files by a pass, which no controller sees, also while there is no controller: the audit log
// says who did so, to which path of which workspace. Reads are not in it.
func TestDataPlaneWritesAreAudited(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.cfg.Tune.RunnerLease = 3 * time.Second // heartbeats every second
	c.kill()
	c.start()
	r := c.join(func(cfg *daemon.RunnerConfig) { cfg.DataListen = "127.0.0.1:0" })
	ws := create(t, c.client)
	self, err := c.client.Self(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	pass, err := c.client.FilesPass(t.Context(), ws.ID)
	if err != nil {
		t.Fatal(err)
	}
	config := load(t, r).Identity.Open()
	config.InsecureSkipVerify = true
	transport := &http.Transport{TLSClientConfig: config}
	t.Cleanup(transport.CloseIdleConnections)
	ask := func(method, path string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, pass.URL+"?path="+path, strings.NewReader("secret content"))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+pass.Token)
		res, err := transport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, res.Body)
		_ = res.Body.Close()
		if res.StatusCode >= 300 {
			t.Fatalf("%s %s: %s", method, path, res.Status)
		}
	}
	ask(http.MethodPut, "/one")
	ask(http.MethodGet, "/one")
	ask(http.MethodDelete, "/one")
	c.kill()
	ask(http.MethodPut, "/nul%0a%C3%A4") // what is no text of a database must not stop the rest
	ask(http.MethodPut, "/while-away")
	c.start()
	want := []string{"putFile /one", "deleteFile /one", "putFile /nul?ä", "putFile /while-away"}
	until(t, "the writes are in the audit log", func() (bool, error) {
		var got []string
		for rec, err := range c.client.Audit(t.Context(), coppice.AuditFilter{ObjectID: ws.ID, Actor: self.ID}) {
			if err != nil {
				return false, err
			}
			var detail struct{ Path, By string }
			b, err := json.Marshal(rec.Detail)
			if err != nil {
				return false, err
			}
			if json.Unmarshal(b, &detail) == nil && detail.By == "pass" {
				got = append([]string{rec.Action + " " + detail.Path}, got...) // newest first
			}
		}
		return strings.Join(got, "\n") == strings.Join(want, "\n"), nil
	})
}
