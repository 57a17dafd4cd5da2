package session

import (
	"io"
	"strings"
	"testing"

	"github.com/creack/pty"

	"github.com/coppice-dev/coppice/internal/cli/clitest"
)

// TestLogsOnATerminal prints what a guest has written to a real terminal and into a pipe.
func TestLogsOnATerminal(t *testing.T) {
	t.Parallel()
	f, _ := clitest.NewServer(t)
	f.Workspaces = append(f.Workspaces, clitest.Workspace(1, "demo", "ready"))
	for _, c := range []struct {
		args     []string
		terminal bool
		raw      bool
	}{{[]string{"ws", "logs", "--console", "demo"}, true, false}, {[]string{"ws", "logs", "--console", "demo", "--raw"}, true, true}, {[]string{"ws", "logs", "--console", "demo"}, false, true}} {
		a, stdout, _ := clitest.App(map[string]string{"COPPICE_SERVER": f.URL(), "COPPICE_TOKEN": "k"})
		got := func() string { return stdout.String() }
		if c.terminal {
			master, tty, err := pty.Open()
			if err != nil {
				t.Fatal(err)
			}
			a.Stdout = tty
			read := make(chan string, 1)
			go func() {
				b, _ := io.ReadAll(master) // it ends with an error when the other side is closed
				read <- string(b)
			}()
			got = func() string {
				_ = tty.Close()
				text := <-read
				_ = master.Close()
				return text
			}
		}
		status := a.Run(t.Context(), c.args, groupWS)
		text := got()
		if status != 0 || strings.Contains(text, "\x1b[2J") != c.raw || !strings.Contains(text, "ready") || !c.raw && !strings.Contains(text, `\x1b[2J`) {
			t.Errorf("%v: status %d, %q", c.args, status, text)
		}
	}
}
