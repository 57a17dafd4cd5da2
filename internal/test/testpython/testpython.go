// Package testpython runs checks that are written in Python against a package of others.
package testpython

import (
	"bufio"
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// Run runs testdata/client.py, which drives a package of others and prints one check a line, with the interpreter that `make test-compat` has
// made. None may fail, and at least want must work.
func Run(t *testing.T, module string, want int, env ...string) {
	t.Helper()
	python := os.Getenv("COPPICE_COMPAT_PYTHON")
	if python == "" {
		t.Fatalf("COPPICE_COMPAT_PYTHON must name a Python with the package %s; `make test-compat` makes one", module)
	}
	cmd := exec.CommandContext(t.Context(), python, "testdata/client.py") //nolint:gosec // G204: it is from who runs the tests
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "NO_PROXY=*", "PYTHONDONTWRITEBYTECODE=1"}, env...)
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
	if checks < want || strings.Contains(string(out), `"fails"`) {
		t.Errorf("%d checks worked; want %d", checks, want)
	}
}
