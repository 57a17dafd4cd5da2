package host

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images/build"
	"github.com/coppice-dev/coppice/internal/cli/clitest"
)

func TestTables(t *testing.T) {
	t.Parallel()
	now := clitest.Dawn.Add(3 * time.Hour)
	var b strings.Builder
	b.WriteString("-- images\n")
	if err := printImages(&b, now, []imageLine{{Name: "base", Digest: "sha256:0123456789abcdef0123", Source: "debian", KernelRelease: "6.1.0-cloud", SizeBytes: 512 << 20, CreatedAt: clitest.Dawn.Add(-100 * time.Hour)}}); err != nil {
		t.Error(err)
	}
	clitest.Golden(t, "tables.txt", b.String())
}

// TestDerivedName: a reference that nobody gave a name for does not become the default image.
func TestDerivedName(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, reference := range []string{"registry.example/other/base", "other/base:latest"} {
		a, _, _ := clitest.App(nil)
		c := newImagePullCommand(a, &dir)
		c.SetArgs([]string{"--agent", os.Args[0], reference})
		c.SilenceErrors, c.SilenceUsage = true, true
		if err := c.ExecuteContext(t.Context()); core.CodeOf(err) != core.CodeNameTaken || !strings.Contains(err.Error(), "--name") {
			t.Errorf("%s: %v", reference, err)
		}
	}
}

// TestBuildSteps: the step that is shown with its time is the one that began first and still goes on.
func TestBuildSteps(t *testing.T) {
	t.Parallel()
	a, _, stderr := clitest.App(nil)
	s := &buildSteps{a: a}
	want := func(text string) {
		t.Helper()
		if got := s.current(); got != text {
			t.Errorf("shown: %q, want %q", got, text)
		}
	}
	want("building")
	s.show(build.Event{Stage: "rootfs", Msg: "installing packages"})
	s.show(build.Event{Stage: "kernel", Msg: "fetching"})
	want("installing packages")
	s.show(build.Event{Stage: "lint", Msg: "a remark", Done: true})
	s.show(build.Event{Stage: "rootfs", Msg: "made it", Done: true})
	want("fetching")
	s.show(build.Event{Stage: "kernel", Msg: "unpacked", Done: true})
	want("building")
	if lines := stderr.String(); strings.Count(lines, "\n") != 5 || strings.Contains(lines, "\x1b") {
		t.Errorf("printed %q", lines)
	}
}
