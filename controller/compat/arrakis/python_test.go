//go:build compat

package arrakis_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// TestPythonClient runs the unmodified Python package against the layer, with a runner without machines. `make test-compat` makes the
// interpreter's environment.
func TestPythonClient(t *testing.T) {
	python := os.Getenv("COPPICE_COMPAT_PYTHON")
	if python == "" {
		t.Fatal("COPPICE_COMPAT_PYTHON must name a Python with the package py-arrakis; `make test-compat` makes one")
	}
	w := newWorld(t)
	cmd := exec.CommandContext(t.Context(), python, "testdata/client.py")
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "ARRAKIS_URL=" + w.url, "NO_PROXY=*", "PYTHONDONTWRITEBYTECODE=1"}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Errorf("%v\n%s", err, stderr.String())
	}
	checks := 0
	for s := bufio.NewScanner(bytes.NewReader(out)); s.Scan(); {
		var row struct{ Method, Verdict, Note string }
		if err := json.Unmarshal(s.Bytes(), &row); err != nil {
			t.Fatalf("%v: %s", err, s.Text())
		}
		t.Logf("%-60s %s %s", row.Method, row.Verdict, row.Note)
		if row.Verdict == "works" {
			checks++
		}
	}
	const want = 15
	if checks < want || strings.Contains(string(out), `"fails"`) {
		t.Errorf("%d checks worked; want %d", checks, want)
	}
}
