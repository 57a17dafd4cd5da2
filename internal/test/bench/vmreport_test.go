package main

import (
	"bytes"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/bench/report"
)

// reportOf is a small run: one ratio and, if the VMM has it, one section that only one VMM has.
func reportOf(t *testing.T, h report.Host) (vmReport, string) {
	t.Helper()
	r := vmReport{Head: report.Head{Host: h}, Body: report.NewBody()}
	r.over("fork_over_boot", report.Samples{30}, report.Samples{3000}, "fork over boot, ms")
	r.over("no_such_ratio", report.Samples{1}, report.Samples{1}, "nothing")
	if h.VMM != "qemu" {
		r.NotMeasured = append(r.NotMeasured, "savevm and loadvm")
	}
	var out bytes.Buffer
	if err := r.show(&out); err != nil {
		t.Fatal(err)
	}
	return r, out.String()
}

// TestReportOfVMM: each VMM and accelerator has its own file and its own name at the top, and the aims for one are not
// applied to another.
func TestReportOfVMM(t *testing.T) {
	t.Parallel()
	dir, files := t.TempDir(), map[string]bool{}
	for _, c := range []struct {
		host       report.Host
		file       string
		says, hush []string
	}{
		{
			host: report.Host{VMM: "qemu", VMMVersion: "10.0.2", Accelerator: "tcg", Why: "there is no /dev/kvm"},
			file: "report-qemu-tcg.json",
			says: []string{"VMM      qemu 10.0.2, tcg,", "there is no /dev/kvm", "\nAims\n", "<= 0.0333"},
			hush: []string{"not measured", "which no aims"},
		},
		{
			host: report.Host{VMM: "qemu", VMMVersion: "10.0.2", Accelerator: "kvm"},
			file: "report-qemu-kvm.json",
			says: []string{"VMM      qemu 10.0.2, kvm,", "Ratios on qemu with kvm, which no aims are set for"},
			hush: []string{"Aims", "0.0333", "MISSED", "not measured"},
		},
		{
			host: report.Host{VMM: "cloud-hypervisor", VMMVersion: "53.0", Accelerator: "kvm"},
			file: "report-cloud-hypervisor-kvm.json",
			says: []string{"VMM      cloud-hypervisor 53.0, kvm,", "savevm and loadvm: not measured on cloud-hypervisor", "Ratios on cloud-hypervisor"},
			hush: []string{"Aims", "0.0333", "MISSED", "QEMU"},
		},
	} {
		r, out := reportOf(t, c.host)
		for _, want := range c.says {
			if !strings.Contains(out, want) {
				t.Errorf("%s: there is no %q in:\n%s", c.file, want, out)
			}
		}
		for _, never := range c.hush {
			if strings.Contains(out, never) {
				t.Errorf("%s: there is %q in:\n%s", c.file, never, out)
			}
		}
		if r.Host.ReportName() != c.file || files[c.file] {
			t.Errorf("the report is %s, want %s", r.Host.ReportName(), c.file)
		}
		files[c.file] = true
		path := filepath.Join(dir, r.Host.ReportName())
		if err := r.write(path); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var kept vmReport
		if err := json.Unmarshal(b, &kept); err != nil {
			t.Fatal(err)
		}
		if kept.Host != c.host || kept.Ratios["fork_over_boot"] != 0.01 || len(kept.Compared) != 1 || (len(kept.Aims) > 0) != (c.host.Accelerator == "tcg") {
			t.Errorf("%s holds %+v", c.file, kept)
		}
	}
}

// TestSectionsOfVMMs: a section that compares with a VMM's own means names the VMM.
func TestSectionsOfVMMs(t *testing.T) {
	t.Parallel()
	for _, s := range sections() {
		if want := map[string]string{"loadvm": "qemu"}[s.name]; s.only != want {
			t.Errorf("%s is about %q, want %q", s.name, s.only, want)
		}
	}
}

func TestNamed(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]bool{
		"qemu-system-x86_64 -name coppice-0a1b-sbx_1 -m 512M": true,
		"qemu-system-x86_64 -name coppice-ffff-sbx_1 -m 512M": false,
		"qemu-system-x86_64 -m 512M -name":                    false,
		"cloud-hypervisor:coppice-0a1b-sbx_1 --api-socket x":  true,
		"cloud-hypervisor:coppice-ffff-sbx_1 --api-socket x":  false,
		"vi coppice-0a1b-notes":                               false,
		"":                                                    false,
	} {
		if got := named(strings.Split(line, " "), "coppice-0a1b-"); got != want {
			t.Errorf("%q: got %v", line, got)
		}
	}
}

// TestReadFigures wants a figure that is missing, or is no number, to be an error: as 0 it would meet an aim.
func TestReadFigures(t *testing.T) {
	t.Parallel()
	const text = "# HELP x\ncoppice_runner_machines_prepared 3\nother NaN\n" +
		"coppice_runner_prepared_cpu_seconds_total{outcome=\"taken\"} 1.5\ncoppice_runner_prepared_cpu_seconds_total{outcome=\"wasted\"} 0\n"
	got, err := readFigures(strings.NewReader(text))
	if want := (preparedState{ready: 3, taken: 1.5}); err != nil || got != want {
		t.Errorf("%+v, %v", got, err)
	}
	for _, bad := range []string{
		"", strings.ReplaceAll(text, "} 0", "} NaN"), strings.ReplaceAll(text, "wasted", "other"), strings.ReplaceAll(text, "} 1.5", "} much"),
		text[:20] + strings.Repeat("x", 1<<20) + text[20:],
	} {
		if got, err := readFigures(strings.NewReader(bad)); err == nil {
			t.Errorf("%.80q gives %+v", bad, got)
		}
	}
}

func TestNoNumberMissesAnAim(t *testing.T) {
	t.Parallel()
	for _, a := range []report.Aim{{Aim: 0.3}, {Aim: 0.3, AtLeast: true}} {
		for _, v := range []float64{math.NaN(), math.Inf(1), 0} {
			if a.Judged(report.Finite(v)).Met || a.Judged(math.NaN()).Met {
				t.Errorf("%v meets %+v", v, a)
			}
		}
	}
}
