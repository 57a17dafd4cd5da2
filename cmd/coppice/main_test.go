package main

import (
	"errors"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/clitest"
	"github.com/coppice-dev/coppice/internal/cli/exit"
)

func TestCommandLine(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args           []string
		status         int
		stdout, stderr string
	}{
		{[]string{}, exit.OK, "Usage:", ""},
		{[]string{"--help"}, exit.OK, "--server address", ""},
		{[]string{"--version"}, exit.OK, "version   devel\n", ""},
		{[]string{"--version", "--json"}, exit.OK, `"go_version": "go1.`, ""},
		{[]string{"--version", "frobnicate"}, exit.Usage, "", `unknown command "frobnicate"`},
		{[]string{"version"}, exit.OK, "platform  " + runtime.GOOS + "/" + runtime.GOARCH, ""},
		{[]string{"version", "--json"}, exit.OK, `"version": "devel"`, ""},
		{[]string{"version", "extra"}, exit.Usage, "", "Try 'coppice version --help'."},
		{[]string{"frobnicate"}, exit.Usage, "", `unknown command "frobnicate"`},
		{[]string{"--frobnicate"}, exit.Usage, "", "unknown flag: --frobnicate"},
		{[]string{"doctor", "extra"}, exit.Usage, "", "Try 'coppice doctor --help'."},
		{[]string{"--json", "frobnicate"}, exit.Usage, "", `"exit_status":2`},
	} {
		t.Run(strings.Join(c.args, " "), func(t *testing.T) {
			t.Parallel()
			a, stdout, stderr := clitest.App(nil)
			if got := run(t.Context(), a, c.args); got != c.status {
				t.Errorf("exit status %d, want %d", got, c.status)
			}
			if !strings.Contains(stdout.String(), c.stdout) || c.stdout == "" && stdout.Len() > 0 {
				t.Errorf("stdout %q, want %q in it", stdout, c.stdout)
			}
			if !strings.Contains(stderr.String(), c.stderr) || c.stderr == "" && stderr.Len() > 0 {
				t.Errorf("stderr %q, want %q in it", stderr, c.stderr)
			}
		})
	}
}

func TestBadFailpoints(t *testing.T) {
	t.Parallel()
	a, _, stderr := clitest.App(map[string]string{"COPPICE_FAILPOINTS": "absent=kill"})
	if got := run(t.Context(), a, []string{"--version"}); got != exit.Usage || !strings.Contains(stderr.String(), `failpoint "absent"`) {
		t.Errorf("exit status %d, %q", got, stderr)
	}
}

// TestHangup closes the terminal of a server.
func TestHangup(t *testing.T) { //nolint:paralleltest // it sends a signal to this process
	was := ignored
	ignored = func(os.Signal) bool { return false }
	t.Cleanup(func() { ignored = was })
	serving := func(*cli.App) *cobra.Command {
		return &cobra.Command{Use: "serve", RunE: func(c *cobra.Command, _ []string) error {
			if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
				return err
			}
			select {
			case <-c.Context().Done():
				return nil
			case <-time.After(time.Minute):
				return errors.New("the server went on")
			}
		}}
	}
	a, _, stderr := clitest.App(nil)
	if status := a.Run(t.Context(), []string{"serve"}, endsAtHangup(serving)); status != exit.OK {
		t.Errorf("status %d: %s", status, stderr)
	}
	ignored = func(os.Signal) bool { return true }
	after := func(*cli.App) *cobra.Command {
		return &cobra.Command{Use: "serve", RunE: func(c *cobra.Command, _ []string) error {
			if c.Context() != t.Context() {
				return errors.New("the signal is not ignored any more")
			}
			return nil
		}}
	}
	if status := a.Run(t.Context(), []string{"serve"}, endsAtHangup(after)); status != exit.OK {
		t.Errorf("after nohup: status %d: %s", status, stderr)
	}
}
