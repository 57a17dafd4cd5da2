package e2e

import (
	"encoding/json"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/hostcheck"
)

// weakHost allows a runner of a test to start on any host: the guests of tests trust each other.
var weakHost = strings.Join(hostcheck.IsolationNames(), ",")

// refusedOnWeakHost starts a runner without that, on a host where the doctor has something to say about isolation: it does not start, and
// names what the doctor has found and the flag.
func refusedOnWeakHost(t *testing.T, binary string, args []string) {
	t.Helper()
	out, _ := exec.CommandContext(t.Context(), binary, "--json", "doctor").Output() // its status is about coppice dev
	var report hostcheck.Report
	if err := json.Unmarshal(out, &report); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var weak []string
	for _, r := range report.Checks {
		if slices.Contains(hostcheck.IsolationNames(), r.Name) && r.Status != hostcheck.OK {
			weak = append(weak, r.Name)
		}
	}
	if len(weak) == 0 {
		t.Log("the doctor finds nothing that weakens isolation on this host, so there is nothing to refuse")
		return
	}
	said, err := exec.CommandContext(t.Context(), binary, args...).CombinedOutput()
	if err == nil || !strings.Contains(string(said), "--allow-weak-host=") {
		t.Fatalf("on a host with %v the runner ended with %v: %s", weak, err, said)
	}
	for _, name := range weak {
		if !strings.Contains(string(said), name+": ") {
			t.Errorf("the refusal does not name %s: %s", name, said)
		}
	}
}
