package testhalt_test

import (
	"os/exec"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testhalt"
)

func TestHalt(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), "sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	goOn := testhalt.Halt(t, cmd.Process.Pid)
	if s := testhalt.State(t, cmd.Process.Pid); s != "T" {
		t.Errorf("it is %q", s)
	}
	goOn()
	eventually.True(t, "it goes on", func() bool { return testhalt.State(t, cmd.Process.Pid) != "T" })
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	if s := testhalt.State(t, cmd.Process.Pid); s != "" {
		t.Errorf("one that is gone is %q", s)
	}
}
