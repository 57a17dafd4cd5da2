package qemu

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/internal/test/testprog"
	"github.com/coppice-dev/coppice/runner/vmm"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(runnerVariable); dir != "" {
		standInRunner(dir)
		return
	}
	testleak.Main(m)
}

// program writes a script that stands in for QEMU.
func program(t *testing.T, script string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "qemu-system-x86_64")
	testprog.Write(t, path, []byte("#!/bin/sh\n"+script))
	return path
}

func TestVersion(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		says     string
		version  string // "" when it is refused
		machine  string
		readOnly bool
		refusal  string
	}{
		{"QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)", "7.2.22", "pc-i440fx-7.2", false, ""},
		{"QEMU emulator version 8.1.5", "8.1.5", "pc-i440fx-8.1", false, ""},
		{"QEMU emulator version 8.2.0", "8.2.0", "pc-i440fx-8.2", true, ""},
		{"QEMU emulator version 9.0.2 (qemu-9.0.2-1.fc40)", "9.0.2", "pc-i440fx-9.0", true, ""},
		{"QEMU emulator version 10.0.13 (Debian 1:10.0.13+ds-0+deb13u1~bpo12+1)", "10.0.13", "pc-i440fx-10.0", true, ""},
		{"QEMU emulator version 10.2.0-rc1", "10.2.0", "pc-i440fx-10.2", true, ""},
		{"QEMU emulator version 6.2.0", "", "", false, "needs 7.2 or later"},
		{"QEMU emulator version 7.1.99", "", "", false, "needs 7.2 or later"},
		{"QEMU emulator version 2.11.1", "", "", false, "needs 7.2 or later"},
		{"qemu-img version 7.2.0", "", "", false, "does not print a known form of a version"},
		{"", "", "", false, "does not print a known form of a version"},
		{"\x1b[31mQEMU emulator version x.y.z", "", "", false, `"?[31mQEMU`},
	} {
		d := New(Config{Binary: program(t, fmt.Sprintf("cat <<'EOT'\n%s\nCopyright\nEOT\n", c.says))})
		if d.Capabilities().ReadOnlyBase {
			t.Error("a driver that has not looked at QEMU knows what it can")
		}
		fp, err := d.Fingerprint(t.Context())
		if c.version == "" {
			if core.CategoryOf(err) != core.FailedPrecondition || !strings.Contains(core.MessageOf(err), c.refusal) {
				t.Errorf("%q: got %v, want %q", c.says, err, c.refusal)
			}
			continue
		}
		if err != nil || fp.Version != c.version || fp.MachineType != c.machine || d.Capabilities().ReadOnlyBase != c.readOnly {
			t.Errorf("%q: got %+v, read-only base %v, %v", c.says, fp, d.Capabilities().ReadOnlyBase, err)
		}
	}
}

func TestNoQEMU(t *testing.T) {
	t.Parallel()
	for name, binary := range map[string]string{
		"absent": filepath.Join(t.TempDir(), "absent"), "failing": program(t, "exit 1"), "not a program": "/etc/passwd",
	} {
		d := New(Config{Binary: binary})
		if _, err := d.Fingerprint(t.Context()); core.CategoryOf(err) != core.FailedPrecondition {
			t.Errorf("%s: got %v", name, err)
		}
		if _, err := d.Spawn(t.Context(), vmm.Spec{}); err == nil {
			t.Errorf("%s: a machine was spawned", name)
		}
	}
}

// TestVersionIsAskedAgain: a failure is not remembered, because somebody may have fixed it.
func TestVersionIsAskedAgain(t *testing.T) {
	t.Parallel()
	path := program(t, "exit 1")
	d := New(Config{Binary: path})
	if _, err := d.Fingerprint(t.Context()); err == nil {
		t.Fatal("it works already")
	}
	testprog.Write(t, path, []byte("#!/bin/sh\necho QEMU emulator version 8.2.1\n"))
	if _, err := d.Fingerprint(t.Context()); err != nil {
		t.Error(err)
	}
	expired, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := d.Fingerprint(expired); err != nil {
		t.Errorf("a version that is known was asked for again: %v", err)
	}
}
