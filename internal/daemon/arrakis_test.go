package daemon_test

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/daemon"
)

// TestArrakisListener is a controller whose clients of Arrakis need no key, and one whose clients do.
func TestArrakisListener(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		keyless bool
		status  int
		says    string
	}{"with a key": {true, http.StatusOK, "no key needed, all in project default; egress closed"}, "without": {false, http.StatusUnauthorized, "each request needs an API key; egress open"}} {
		cl := newClusterOf(t, func(cfg *daemon.ControllerConfig) {
			cfg.Arrakis = daemon.ArrakisConfig{Listen: "127.0.0.1:0", OpenEgress: !c.keyless}
			if c.keyless {
				cfg.Arrakis.KeyFile = cfg.APIKeyFile
			}
		})
		if !strings.HasPrefix(cl.ready.ArrakisTerms, c.says) {
			t.Errorf("%s: %q", name, cl.ready.ArrakisTerms)
		}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, cl.ready.Arrakis+"/v1/vms", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		var answer map[string]any
		if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil || resp.StatusCode != c.status {
			t.Errorf("%s: %s: %v, %v", name, resp.Status, answer, err)
		}
		_ = resp.Body.Close()
	}
	http.DefaultClient.CloseIdleConnections()
}

// TestArrakisKeyFile: a file without a good key ends the start.
func TestArrakisKeyFile(t *testing.T) {
	t.Parallel()
	cl := newCluster(t)
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, []byte("\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for file, says := range map[string]string{empty: "write an API key", "/absent": "--arrakis-key-file", cl.cfg.KeyFile: "key for Arrakis"} {
		cfg := cl.cfg
		cfg.Listen, cfg.RunnerListen, cfg.Arrakis = "127.0.0.1:0", "127.0.0.1:0", daemon.ArrakisConfig{Listen: "127.0.0.1:0", KeyFile: file}
		p := begin(t, "controller", serverConfig{Controller: cfg}, nil)
		if status := p.wait(t); status == 0 || !strings.Contains(p.text(t), says) {
			t.Errorf("%s: status %d, want a word of %s:\n%s", file, status, says, p.text(t))
		}
	}
}
