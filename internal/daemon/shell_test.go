package daemon_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/test/testvm"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// terminal is a real one with `coppice ws shell` on it.
type terminal struct {
	*os.File
	t    *testing.T
	cmd  *exec.Cmd
	come chan string
	text string // all that it has shown
}

// program is the coppice that is tested.
var program = sync.OnceValues(func() (string, error) {
	binary := filepath.Join(buildDir, "coppice")
	return binary, testvm.Compile(context.Background(), binary, "github.com/coppice-dev/coppice/cmd/coppice")
})

func (c *cluster) shell(args ...string) *terminal {
	c.t.Helper()
	binary, err := program()
	if err != nil {
		c.t.Fatal(err)
	}
	key, err := os.ReadFile(c.cfg.APIKeyFile)
	if err != nil {
		c.t.Fatal(err)
	}
	cmd := exec.Command(binary, append([]string{"ws", "shell"}, args...)...)
	cmd.Env = append(os.Environ(), "COPPICE_SERVER="+c.ready.Server, "COPPICE_TOKEN="+strings.TrimSpace(string(key)), "TERM=vt220")
	file, err := pty.StartWithSize(cmd, &pty.Winsize{Cols: 100, Rows: 30})
	if err != nil {
		c.t.Fatal(err)
	}
	x := &terminal{File: file, t: c.t, cmd: cmd, come: make(chan string, 1000)}
	read := make(chan struct{})
	go func() {
		defer close(read)
		defer close(x.come)
		for buf := make([]byte, 4096); ; {
			n, err := file.Read(buf)
			if err != nil {
				return
			}
			x.come <- string(buf[:n])
		}
	}()
	c.t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = file.Close()
		<-read
	})
	return x
}

func (x *terminal) say(keys string) {
	x.t.Helper()
	if _, err := x.WriteString(keys); err != nil {
		x.t.Fatal(err)
	}
}

// await waits until the terminal has shown a text as often as said.
func (x *terminal) await(text string, times int) {
	x.t.Helper()
	late := time.NewTimer(watchdog)
	defer late.Stop()
	for strings.Count(x.text, text) < times {
		select {
		case more, ok := <-x.come:
			if !ok {
				x.t.Fatalf("the terminal ended before %q; it shows %q", text, x.text)
			}
			x.text += more
		case <-late.C:
			x.t.Fatalf("%q does not come %d times; the terminal shows %q", text, times, x.text)
		}
	}
}

// TestShellOutlivesControllers has a program count through the deaths of its controller. Each line is shown once: none is lost,
// none comes twice, and what was typed meanwhile arrives.
func TestShellOutlivesControllers(t *testing.T) {
	t.Parallel()
	for _, way := range []string{"through the controller", "straight to the runner"} {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			c.join(func(cfg *daemon.RunnerConfig) {
				if way == "straight to the runner" {
					cfg.DataListen = "127.0.0.1:0"
				}
			})
			ws := create(t, c.client)
			x := c.shell(ws.ID, "--", "sh", "-c", "echo ready; cat")
			x.await("ready", 1) // from here on the terminal is raw
			lines := 0
			count := func(upTo int) {
				for ; lines < upTo; lines++ {
					x.say(fmt.Sprintf("<line-%d>\n", lines))
				}
			}
			count(20)
			x.await("<line-19>", 1)
			for round := range 2 {
				c.kill()
				if way == "through the controller" {
					x.await("the connection is lost", round+1)
				}
				count(lines + 20) // typed while nobody listens
				c.start()
				count(lines + 20)
				x.await(fmt.Sprintf("<line-%d>", lines-1), 1)
			}
			for i := range lines {
				if n := strings.Count(x.text, fmt.Sprintf("<line-%d>", i)); n != 1 {
					t.Errorf("line %d is shown %d times", i, n)
				}
			}
			if t.Failed() {
				t.Logf("the terminal shows %q", x.text)
			}
			// The session is there for the next terminal, from its first byte.
			x.say("\n~.")
			x.await("goes on", 1)
			if err := x.cmd.Wait(); err != nil {
				t.Errorf("after leaving: %v", err)
			}
			sessions := c.client.Sessions(t.Context(), ws.ID)
			for s, err := range sessions {
				if err != nil || s.State != coppice.SessionRunning {
					t.Fatalf("%+v, %v", s, err)
				}
				again := c.shell("--session", s.ID, ws.ID)
				again.await("<line-0>", 1)
				again.await(fmt.Sprintf("<line-%d>", lines-1), 1)
			}
		})
	}
}

// TestGivingUp presses Ctrl-C while there is no connection: that is for this program, not for the one that cannot be reached.
func TestGivingUp(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.join(nil)
	x := c.shell(create(t, c.client).ID, "--", "sh", "-c", "echo ready; cat")
	x.await("ready", 1)
	c.kill()
	x.await("Ctrl-C gives up", 1)
	x.say("\x03")
	x.await("attach to it again", 1)
	if err := x.cmd.Wait(); err != nil {
		t.Errorf("after giving up: %v", err)
	}
}

// TestRunnerTokenCommand lets a runner in and removes it by the command line.
func TestRunnerTokenCommand(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.cfg.Tune.RunnerLease = 9 * time.Second // heartbeats every three
	c.kill()
	c.start()
	binary, err := program()
	if err != nil {
		t.Fatal(err)
	}
	key, err := os.ReadFile(c.cfg.APIKeyFile)
	if err != nil {
		t.Fatal(err)
	}
	run := func(args ...string) (string, int) {
		cmd := exec.Command(binary, args...)
		cmd.Env = append(os.Environ(), "COPPICE_SERVER="+c.ready.Server, "COPPICE_TOKEN="+strings.TrimSpace(string(key)))
		out, err := cmd.Output()
		if cmd.ProcessState == nil {
			t.Fatal(err)
		}
		return string(out), cmd.ProcessState.ExitCode()
	}
	token, status := run("runner-token", "create", "--ttl", "1m")
	if status != 0 {
		t.Fatal(status, token)
	}
	r := &member{cfg: c.runnerConfig()}
	r.cfg.Runner.JoinToken = token
	r.process = begin(t, "runner", r.cfg, &r.ready)
	id := string(r.ready.RunnerID)
	var again coppice.RunnerToken
	out, status := run("--json", "runner-token", "create", "--runner", id)
	if err := json.Unmarshal([]byte(out), &again); err != nil || status != 0 || again.RunnerID != id {
		t.Errorf("%d, %s", status, out)
	}
	create(t, c.client)
	if out, status := run("runner-token", "revoke", id); status != 75 {
		t.Errorf("a runner in use: status %d, %s", status, out)
	}
	if out, status := run("runner-token", "revoke", "--force", id); status != 0 {
		t.Errorf("by force: status %d, %s", status, out)
	}
	if status := r.wait(t); status == 0 {
		t.Errorf("the removed runner ended as if nothing were:\n%s", r.text(t))
	}
}
