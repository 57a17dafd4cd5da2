package session

import (
	"encoding/json"
	"os"
	"os/signal"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/clitest"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// groupWS has the commands of this package below ws, where users find them.
func groupWS(a *cli.App) *cobra.Command {
	c := &cobra.Command{Use: "ws"}
	c.AddCommand(NewExecCommand(a), NewShellCommand(a), NewLogsCommand(a))
	return c
}

// TestKill ends a program that was left running.
func TestKill(t *testing.T) {
	t.Parallel()
	f, run := clitest.NewServer(t, groupWS, NewCommand)
	f.Workspaces = []api.Workspace{clitest.Workspace(1, "demo", api.WorkspaceReady)}
	if status, _, stderr := run("ws", "exec", "-d", "demo", "sleep", "1000"); status != 0 {
		t.Fatal(stderr)
	}
	if status, stdout, stderr := run("session", "kill", "demo", "00000001", "-s", "kill"); status != 0 || !strings.Contains(stdout, "was sent SIGKILL") {
		t.Errorf("status %d, %q, %q", status, stdout, stderr)
	}
	if status, _, stderr := run("ws", "logs", "-f", "demo", "00000001"); status == 0 {
		t.Errorf("it goes on: %q", stderr)
	}
	if status, stdout, _ := run("session", "ls", "demo"); status != 0 || !strings.Contains(stdout, "exited") {
		t.Errorf("status %d, %q", status, stdout)
	}
}

func TestExecPassesOutputAndStatusOn(t *testing.T) {
	t.Parallel()
	f, run := clitest.NewServer(t, groupWS)
	f.Workspaces = []api.Workspace{clitest.Workspace(1, "demo", api.WorkspaceReady)}
	status, stdout, stderr := run("ws", "exec", "demo", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
	if status != 7 || stdout != "out\n" || stderr != "err\n" {
		t.Errorf("status %d, stdout %q, stderr %q", status, stdout, stderr)
	}
	if status, _, stderr = run("ws", "exec", "demo", "--", "no-such-program"); status != noCommand || !strings.Contains(stderr, "COMMAND_NOT_FOUND") {
		t.Errorf("status %d, stderr %q", status, stderr)
	}
	if status, _, stderr = run("ws", "exec", "--json", "demo", "--", "no-such-program"); status != noCommand || !strings.Contains(stderr, `"exit_status":127`) {
		t.Errorf("as JSON: status %d, stderr %q", status, stderr)
	}
	// Flags after the program are the program's, with or without --.
	if status, stdout, stderr = run("ws", "exec", "demo", "echo", "-n", "--json"); status != 0 || stdout != "--json" {
		t.Errorf("status %d, stdout %q, stderr %q", status, stdout, stderr)
	}
	status, stdout, _ = run("ws", "exec", "--json", "demo", "--", "sh", "-c", "echo out; exit 3")
	var res coppice.ExecResult
	if err := json.Unmarshal([]byte(stdout), &res); err != nil || status != 3 || res.ExitCode != 3 || res.Stdout != "out\n" {
		t.Errorf("status %d, %v, %q", status, err, stdout)
	}
	if status, stdout, _ = run("ws", "exec", "-d", "demo", "--", "true"); status != 0 || stdout != clitest.ID("sess", 4)+"\n" {
		t.Errorf("detached: status %d, %q", status, stdout)
	}
	if status, stdout, _ = run("ws", "logs", "-f", "demo", "00000001"); status != 7 || stdout != "out\n" {
		t.Errorf("logs: status %d, %q", status, stdout)
	}
	if status, stdout, _ = run("ws", "logs", "demo", "--list"); status != 0 || !strings.Contains(stdout, "00000001  exited") {
		t.Errorf("sessions: status %d, %q", status, stdout)
	}
}

// TestFlagsAfterTheWorkspace: flags are taken until "--" or the first word that is none.
func TestFlagsAfterTheWorkspace(t *testing.T) {
	t.Parallel()
	f, run := clitest.NewServer(t, groupWS)
	f.Workspaces = []api.Workspace{clitest.Workspace(1, "demo", api.WorkspaceReady)}
	for _, c := range []struct {
		args    []string
		command []string
		user    string
	}{
		{[]string{"demo", "-u", "nobody", "--", "echo", "-n"}, []string{"echo", "-n"}, "nobody"},
		{[]string{"demo", "-u", "nobody", "echo", "-n", "-u"}, []string{"echo", "-n", "-u"}, "nobody"},
		{[]string{"-u", "root", "demo", "--user=nobody", "--", "echo", "--", "x"}, []string{"echo", "--", "x"}, "nobody"},
		{[]string{"-u", "nobody", "demo", "echo", "--", "-u"}, []string{"echo", "--", "-u"}, "nobody"},
		{[]string{"demo", "--", "--json"}, []string{"--json"}, ""},
	} {
		f.Requests = nil
		_, _, stderr := run(append([]string{"ws", "exec"}, c.args...)...)
		if len(f.Requests) != 1 {
			t.Errorf("%q: %d requests; %s", c.args, len(f.Requests), stderr)
			continue
		}
		if got := f.Requests[0].(api.ExecRequest); !slices.Equal(got.Command, c.command) || got.User != c.user {
			t.Errorf("%q: runs %q as %q, want %q as %q", c.args, got.Command, got.User, c.command, c.user)
		}
	}
	f.Requests = nil
	for _, args := range [][]string{{"demo"}, {"demo", "-u", "nobody"}, {"demo", "--unknown", "echo"}, {"demo", "-u", "nobody", "--"}} {
		if status, _, stderr := run(append([]string{"ws", "exec"}, args...)...); status != exit.Usage || len(f.Requests) > 0 {
			t.Errorf("%q: exit status %d, %q, %d requests", args, status, stderr, len(f.Requests))
		}
	}
	if status, stdout, _ := run("ws", "exec", "demo", "--help"); status != exit.OK || !strings.Contains(stdout, "exec WORKSPACE [flags] [--] COMMAND") {
		t.Errorf("help after the workspace: %d, %q", status, stdout)
	}
}

func TestExecPassesInputOn(t *testing.T) {
	t.Parallel()
	f, _ := clitest.NewServer(t)
	f.Workspaces = []api.Workspace{clitest.Workspace(1, "demo", api.WorkspaceReady)}
	a, stdout, stderr := clitest.App(map[string]string{"COPPICE_SERVER": f.URL(), "COPPICE_TOKEN": "k"})
	a.Stdin = strings.NewReader("one\ntwo\n")
	if status := a.Run(t.Context(), []string{"ws", "exec", "-i", "demo", "--", "sort", "-r"}, groupWS); status != 0 || stdout.String() != "two\none\n" {
		t.Errorf("status %d, stdout %q, stderr %q", status, stdout, stderr)
	}
}

// TestShell drives the command through a real terminal, against a shell on a real terminal.
func TestShell(t *testing.T) {
	// Where the tests run in a script's background, SIGINT is ignored, and so it would be by the shell. What is caught, it has as usual.
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, os.Interrupt)
	defer signal.Stop(caught)
	f, _ := clitest.NewServer(t)
	f.Workspaces = []api.Workspace{clitest.Workspace(1, "demo", api.WorkspaceReady)}
	ours, theirs, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ours.Close() }()
	if err := pty.Setsize(ours, &pty.Winsize{Cols: 100, Rows: 30}); err != nil {
		t.Fatal(err)
	}
	before, err := term.GetState(int(theirs.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	a, _, stderr := clitest.App(map[string]string{"COPPICE_SERVER": f.URL(), "COPPICE_TOKEN": "k", "TERM": "vt220"})
	a.Stdin, a.Stdout = theirs, theirs
	status := make(chan int, 1)
	go func() {
		status <- a.Run(t.Context(), []string{"ws", "shell", "--env", "PS1=ready> ", "demo", "--", "/bin/sh"}, groupWS)
		_, _ = theirs.WriteString("ended: " + stderr.String())
	}()
	screen := watch(t, ours)
	screen.wait("ready> ") // this terminal is raw by now
	typed := func(keys string) {
		if _, err := ours.WriteString(keys); err != nil {
			t.Fatal(err)
		}
	}
	typed("stty size; echo mark-$((1+1))\n")
	screen.wait("30 100")
	screen.wait("mark-2")
	screen.wait("ready> ")
	// The window's size follows.
	if err := pty.Setsize(ours, &pty.Winsize{Cols: 132, Rows: 43}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(os.Getpid(), syscall.SIGWINCH); err != nil {
		t.Fatal(err)
	}
	typed("until [ \"$(stty size)\" = \"43 132\" ]; do :; done; echo now-$((1+2))\n")
	screen.wait("now-3")
	screen.wait("ready> ")
	// Ctrl-C goes to the program.
	typed("sh -c 'echo sleeping-$((3+3)); exec sleep 1000'\n")
	screen.wait("sleeping-6")
	typed("\x03")
	screen.wait("ready> ") // what is typed before the interrupt is handled is dropped, as on any terminal
	typed("echo after-$((2+2))\n")
	screen.wait("after-4")
	typed("exit 5\n")
	if got := <-status; got != 5 {
		t.Errorf("exit status %d, stderr %q", got, stderr)
	}
	after, err := term.GetState(int(theirs.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(before, after) {
		t.Errorf("the terminal was not put back: %+v, was %+v", after, before)
	}
	if got := f.Requests[0].(api.ExecRequest); got.Env["TERM"] != "vt220" || !got.PTY || got.Cols != 100 {
		t.Errorf("request %+v", got)
	}
}

// screen is what a terminal shows.
type screen struct {
	t    *testing.T
	come chan string
	text string
}

// watch reads a terminal until it is closed.
func watch(t *testing.T, from *os.File) *screen {
	t.Helper()
	s := &screen{t: t, come: make(chan string, 1000)}
	go func() {
		defer close(s.come)
		for buf := make([]byte, 4096); ; {
			n, err := from.Read(buf)
			if err != nil {
				return
			}
			s.come <- string(buf[:n])
		}
	}()
	return s
}

// wait waits until the text is there, and forgets what came up to it.
func (s *screen) wait(text string) {
	s.t.Helper()
	late := time.NewTimer(5 * time.Minute)
	defer late.Stop()
	for !strings.Contains(s.text, text) {
		select {
		case more := <-s.come:
			s.text += more
		case <-late.C:
			s.t.Fatalf("%q does not come; the terminal shows %q", text, s.text)
		}
	}
	_, s.text, _ = strings.Cut(s.text, text)
}

// TestExecThenCheckpoint: the output and the status are the program's. The checkpoint is named on standard error, and why there is none is an error.
func TestExecThenCheckpoint(t *testing.T) {
	t.Parallel()
	f, run := clitest.NewServer(t, groupWS)
	f.Workspaces = []api.Workspace{clitest.Workspace(1, "demo", api.WorkspaceReady)}
	for command, want := range map[string]struct {
		status int
		stderr string
	}{
		"true":  {0, "err\ncoppice: checkpoint " + clitest.ID("ckpt", 1) + "\n"},
		"false": {1, "err\n"},
		"full":  {exit.Exhausted, "no checkpoint: no room"},
	} {
		status, stdout, stderr := run("ws", "exec", "demo", "--checkpoint", "on_success", "--", command)
		if status != want.status || stdout != "out\n" || !strings.Contains(stderr, want.stderr) || strings.Contains(stderr, "ckpt_") != (command == "true") {
			t.Errorf("%s: status %d, %q, %q", command, status, stdout, stderr)
		}
	}
	if status, stdout, _ := run("ws", "exec", "demo", "--json", "--checkpoint", "always", "--", "true"); status != 0 || !strings.Contains(stdout, `"kept": "checkpoint"`) {
		t.Errorf("status %d, %q", status, stdout)
	}
	for _, with := range []string{"--detach", "--interactive", "--tty"} {
		if status, _, _ := run("ws", "exec", "demo", "--checkpoint", "always", with, "--", "true"); status != exit.Usage {
			t.Errorf("%s: status %d", with, status)
		}
	}
}
