package e2e

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// TestDoctor asks what would be chosen when nothing is forced, which is what the other tests are told: on a host whose KVM works that is
// cloud-hypervisor where there is one.
func TestDoctor(t *testing.T) {
	needVM(t)
	baseImage(t)
	cmd := exec.CommandContext(t.Context(), program(t, "cmd/coppice"), "--json", "doctor", "--data-dir", t.TempDir())
	cmd.Env = append(os.Environ(), "COPPICE_IMAGES_DIR="+imageStore(t).Dir(), "COPPICE_VMM=auto", "COPPICE_ACCEL=auto")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if _, ran := errors.AsType[*exec.ExitError](err); err != nil && !ran {
		t.Fatal(err)
	}
	var report struct {
		Checks []struct {
			Name, Status, Detail string
		} `json:"checks"`
	}
	if err := json.Unmarshal(out, &report); err != nil {
		t.Fatal(err)
	}
	chosen := ""
	for _, c := range report.Checks {
		t.Logf("%-4s %-16s %s", c.Status, c.Name, c.Detail)
		if c.Name == "vmm" {
			chosen = c.Detail
		}
		// Where images are brought along there is nothing to build them with.
		if c.Status == "fail" && c.Name != "image-tools" {
			t.Errorf("coppice dev cannot run here for want of %s, and it does in the other tests", c.Name)
		}
	}
	for _, want := range []string{"VMs would run on " + *vmmName, *accel} {
		if !strings.Contains(strings.ToLower(chosen), strings.ToLower(want)) {
			t.Errorf("the choice is %q, want %q in it", chosen, want)
		}
	}
}
