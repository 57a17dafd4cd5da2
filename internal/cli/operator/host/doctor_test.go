package host

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/internal/cli/clitest"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/hostcheck"
)

func TestPrintReport(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	err := printReport(&b, hostcheck.Report{OK: false, Checks: []hostcheck.Result{
		{Name: "one", Status: hostcheck.OK, Detail: "fine"},
		{Name: "second", Status: hostcheck.Fail, Detail: strings.Repeat("long words ", 12), Cure: "do this"},
	}}, false)
	if err != nil {
		t.Fatal(err)
	}
	want := `ok    one     fine
fail  second  long words long words long words long words long words long words long words long words
              long words long words long words long words
              cure: do this

coppice dev cannot run on this host yet: see the lines that begin with "fail".
`
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Error(diff)
	}
}

// TestDoctorForRunner: where only a runner runs, as in its container, nothing that others need is missing.
func TestDoctorForRunner(t *testing.T) {
	t.Parallel()
	a, stdout, stderr := clitest.App(map[string]string{"PGBIN": t.TempDir(), "PATH": t.TempDir()})
	_ = a.Run(t.Context(), []string{"doctor", "--runner", "--json", "--data-dir", t.TempDir()}, NewDoctorCommand)
	var report hostcheck.Report
	if err := json.Unmarshal(stdout.Bytes(), &report); err != nil || len(report.Checks) < 10 {
		t.Fatalf("%v: %s%s", err, stdout, stderr)
	}
	for _, r := range report.Checks {
		if r.Name == "postgres" || r.Name == "image-tools" {
			t.Errorf("a runner was asked for %s: %s", r.Name, r.Detail)
		}
	}
	var b bytes.Buffer
	if err := printReport(&b, hostcheck.Report{OK: true}, true); err != nil || b.String() != "\ncoppice runner can run on this host.\n" {
		t.Errorf("%v, %q", err, b.String())
	}
}

func TestDoctor(t *testing.T) {
	t.Parallel()
	a, stdout, stderr := clitest.App(nil)
	status := a.Run(t.Context(), []string{"doctor", "--json", "--data-dir", t.TempDir()}, NewDoctorCommand)
	var report hostcheck.Report
	if err := json.Unmarshal(stdout.Bytes(), &report); err != nil {
		t.Fatalf("%v: %s%s", err, stdout, stderr)
	}
	if want := map[bool]int{true: exit.OK, false: exit.Failure}[report.OK]; status != want || len(report.Checks) < 10 {
		t.Errorf("exit status %d with ok %v and %d checks", status, report.OK, len(report.Checks))
	}
}
