package daemon_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/daemon"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// scrape returns the text of /metrics.
func scrape(t *testing.T, address string) string {
	t.Helper()
	res, err := http.Get("http://" + address + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != http.StatusOK {
		t.Fatalf("%s, %v", res.Status, err)
	}
	return string(b)
}

// TestMetrics lets a controller and a runner create, capture, fork and fail, and compares what they count with that; every metric
// that the dashboard asks for is there, and no label has an id.
func TestMetrics(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	m := c.join(func(cfg *daemon.RunnerConfig) { cfg.Metrics = "127.0.0.1:0" })
	ws, err := c.client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{Resources: coppice.ResourcesRequest{MemoryMiB: new(128)}})
	if err != nil {
		t.Fatal(err)
	}
	cp, err := c.client.CreateCheckpoint(t.Context(), ws.ID, coppice.CreateCheckpointRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.client.ForkCheckpoint(t.Context(), cp.ID, coppice.ForkCheckpointRequest{Count: new(3)}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.client.Workspace(t.Context(), "ws_00000000000000000000000000"); err == nil {
		t.Fatal("a workspace that is not there")
	}
	controller, runner := scrape(t, c.ready.Metrics), scrape(t, m.ready.Metrics)
	for text, lines := range map[*string][]string{
		&controller: {
			`coppice_controller_operations_total{kind="fork_checkpoint",outcome="succeeded"} 1`,
			`coppice_controller_operations_total{kind="create_workspace",outcome="succeeded"} 1`,
			`coppice_controller_children_total{outcome="ready"} 4`,
			`coppice_controller_phase_seconds_count{kind="fork_checkpoint",phase="admit"} 1`,
			`coppice_controller_phase_seconds_count{kind="child",phase="reseal"} 4`,
			`coppice_controller_reseal_step_seconds_count{step="entropy"} 4`,
			`coppice_controller_request_seconds_count{method="GET",route="/v1/workspaces/:workspace_id",status="404"} 1`,
			`coppice_controller_request_seconds_count{method="POST",route="/v1/checkpoints/:checkpoint_id/fork",status="201"} 1`,
			`coppice_database_workspaces{state="ready"} 4`, `coppice_database_runners{state="fresh"} 1`, `coppice_database_up 1`,
		},
		&runner: {
			`coppice_runner_children_total{outcome="ready"} 4`, `coppice_runner_captures_total{outcome="captured"} 2`,
			`coppice_runner_phase_seconds_count{kind="child",phase="restore"} 4`, `coppice_runner_phase_seconds_count{kind="capture",phase="memory"} 2`,
			`coppice_runner_reseal_step_seconds_count{step="entropy"} 4`, `coppice_runner_sandboxes{state="ready"} 4`, `coppice_runner_checkpoints 2`,
		},
	} {
		for _, line := range lines {
			if !strings.Contains(*text, line+"\n") {
				t.Errorf("no %s among\n%s", line, similar(*text, line))
			}
		}
	}
	id := regexp.MustCompile(`="[^"]*(ws|ckpt|sbx|op|rnr|prj|key|sess|base)_[0-9a-z]{26}`)
	if found := id.FindString(controller + runner); found != "" {
		t.Errorf("a label holds an id: %s", found)
	}
	known := regexp.MustCompile(`(?m)^# TYPE (coppice_\S+)`).FindAllStringSubmatch(controller+runner, -1)
	for _, name := range dashboardMetrics(t) {
		if !slices.ContainsFunc(known, func(k []string) bool { return k[1] == name || k[1]+"_bucket" == name || k[1]+"_count" == name }) && !lazy[name] {
			t.Errorf("the dashboard asks for %s, which nobody shows", name)
		}
	}
}

// lazy are metrics that are there only while there is something to count.
var lazy = map[string]bool{"coppice_database_operations_unfinished": true, "coppice_database_chores_queued": true}

func similar(text, line string) string {
	name, _, _ := strings.Cut(line, "{")
	var out []string
	for l := range strings.Lines(text) {
		if strings.HasPrefix(l, name) && !strings.Contains(l, "_bucket") {
			out = append(out, l)
		}
	}
	return strings.Join(out, "")
}

// dashboardMetrics are the metrics of deploy/grafana/coppice.json.
func dashboardMetrics(t *testing.T) []string {
	t.Helper()
	b, err := os.ReadFile("../../deploy/grafana/coppice.json")
	if err != nil {
		t.Fatal(err)
	}
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(b, &dashboard); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, p := range dashboard.Panels {
		if len(p.Targets) == 0 {
			t.Errorf("panel %s asks for nothing", p.Title)
		}
		for _, target := range p.Targets {
			found := regexp.MustCompile(`coppice_[a-z_]+`).FindAllString(target.Expr, -1)
			if len(found) == 0 {
				t.Errorf("panel %s: %s", p.Title, target.Expr)
			}
			names = append(names, found...)
		}
	}
	return names
}

// TestMetricsStayOnLoopback refuses an address that others reach: nobody is asked for a key there.
func TestMetricsStayOnLoopback(t *testing.T) {
	t.Parallel()
	for _, address := range []string{"0.0.0.0:0", ":0", "192.0.2.1:9100"} {
		if m, err := daemon.OpenMetrics(t.Context(), address, nil); err == nil {
			t.Errorf("%s: %v", address, fmt.Sprint(m.Address()))
		}
	}
}
