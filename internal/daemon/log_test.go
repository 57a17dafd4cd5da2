package daemon_test

import (
	"encoding/json"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestLogsCarryTheRequest follows one fork from its request to the runner's log by its ids.
func TestLogsCarryTheRequest(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	m := c.join(nil)
	ws, err := c.client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{Resources: coppice.ResourcesRequest{MemoryMiB: new(128)}})
	if err != nil {
		t.Fatal(err)
	}
	cp, err := c.client.CreateCheckpoint(t.Context(), ws.ID, coppice.CreateCheckpointRequest{})
	if err != nil {
		t.Fatal(err)
	}
	key, err := os.ReadFile(c.cfg.APIKeyFile)
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, c.ready.Server+"/v1/checkpoints/"+cp.ID+"/fork", strings.NewReader(`{"count":1}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(key)))
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	var out struct {
		Operation string `json:"operation_id"`
	}
	if err := json.Unmarshal(body, &out); err != nil || out.Operation == "" {
		t.Fatalf("%v: %s", err, body)
	}
	request := res.Header.Get("X-Request-Id")
	until(t, "the runner's line is written", func() (bool, error) {
		for line := range strings.Lines(m.text(t)) {
			if strings.Contains(line, "/v1/forks") && strings.Contains(line, "request_id="+request) && strings.Contains(line, "operation_id="+out.Operation) {
				return true, nil
			}
		}
		return false, nil
	})
	if text := c.text(t); !strings.Contains(text, "request_id="+request) {
		t.Errorf("the controller's log does not have %s:\n%s", request, text)
	}
}
