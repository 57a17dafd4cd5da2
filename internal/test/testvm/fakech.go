package testvm

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/testprog"
)

// faultsMark is written before the faults at the end of a program made by With. The fake looks for it there.
const faultsMark = "\x00fakech faults:\n"

// FakeCloudHypervisor is a program that stands for cloud-hypervisor: package runner/vmm/cloudhypervisor/fakech.
type FakeCloudHypervisor struct {
	Path string // any user may run it
	dir  string
}

// BuildFakeCloudHypervisor builds it for the test, with the race detector if the test has it.
func BuildFakeCloudHypervisor(t testing.TB) FakeCloudHypervisor {
	t.Helper()
	dir, err := os.MkdirTemp("", "fakech") //nolint:usetesting // a VMM with its own user must reach it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // G302: see above
		t.Fatal(err)
	}
	f := FakeCloudHypervisor{Path: filepath.Join(dir, "cloud-hypervisor"), dir: dir}
	args := []string{"build", "-buildvcs=false", "-o", f.Path}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "-race" && s.Value == "true" {
				args = append(args, "-race")
			}
		}
	}
	args = append(args, "github.com/coppice-dev/coppice/runner/vmm/cloudhypervisor/fakech")
	if out, err := exec.CommandContext(t.Context(), "go", args...).CombinedOutput(); err != nil { //nolint:gosec // G204: fixed arguments
		t.Fatalf("build the fake cloud-hypervisor: %v\n%s", err, out)
	}
	return f
}

// With returns a copy of the program with the faults; their names are in package fakech.
func (f FakeCloudHypervisor) With(t testing.TB, faults ...string) string {
	t.Helper()
	dir, err := os.MkdirTemp(f.dir, "with") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // G302: a VMM with its own user must reach it
		t.Fatal(err)
	}
	path := filepath.Join(dir, "cloud-hypervisor")
	program, err := os.ReadFile(f.Path)
	if err != nil {
		t.Fatal(err)
	}
	// The faults are in the program itself, because a VMM sees no other file of the host.
	testprog.Write(t, path, slices.Concat(program, []byte(faultsMark+strings.Join(faults, "\n"))))
	return path
}
