package e2e

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/test/testaddr"
	"github.com/coppice-dev/coppice/internal/test/testpg"
	"github.com/coppice-dev/coppice/migrations"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// serverOf starts a server whose first output says that it is ready.
func serverOf(t *testing.T, ready any, binary string, args ...string) (stop func(os.Signal) int) {
	t.Helper()
	log, err := os.Create(filepath.Join(t.TempDir(), args[1]+".log"))
	if err != nil {
		t.Fatal(err)
	}
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cmd := exec.Command(binary, args...)
	cmd.Stdout, cmd.Stderr = in, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	if err := startBound(cmd); err != nil {
		t.Fatal(err)
	}
	_ = in.Close()
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait() // the state says it
		close(ended)
	}()
	stop = func(s os.Signal) int {
		_ = cmd.Process.Signal(s) // it may have ended
		select {
		case <-ended:
		case <-time.After(stopPatience):
			_ = cmd.Process.Kill()
			<-ended
		}
		return cmd.ProcessState.ExitCode()
	}
	t.Cleanup(func() {
		stop(syscall.SIGTERM)
		_ = log.Close()
		if b, err := os.ReadFile(log.Name()); err == nil && t.Failed() {
			t.Logf("the %s's log ends with:\n%s", args[1], b[max(0, len(b)-16<<10):])
		}
	})
	if err := json.NewDecoder(out).Decode(ready); err != nil {
		t.Fatalf("%s: %v", args[1], err)
	}
	return stop
}

// TestSeparateProcesses runs controller and runner as a real installation does, on real machines: a terminal goes on through the
// death of the controller, and files go straight to the runner.
func TestSeparateProcesses(t *testing.T) {
	needVM(t)
	baseImage(t)
	dir, binary := t.TempDir(), program(t, "cmd/coppice")
	key, token := filepath.Join(dir, "api.key"), filepath.Join(dir, "join-token")
	var ready struct {
		Server, Runners string
		ClusterID       string `json:"cluster_id"`
	}
	controller := []string{"--json", "controller", "--allow-weak-database=fsync,full_page_writes,synchronous_commit", "--database", testpg.New(t, migrations.Up), "--key-file", filepath.Join(dir, "cluster.key"), "--api-key-file", key}
	kill := serverOf(t, &ready, binary, append(controller, "--listen", testaddr.New(), "--runner-listen", testaddr.New())...)
	secret, err := os.ReadFile(key)
	if err != nil {
		t.Fatal(err)
	}
	client, err := coppice.New(coppice.Config{Server: ready.Server, Token: strings.TrimSpace(string(secret))})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ticket, err := client.CreateRunnerToken(t.Context(), coppice.CreateRunnerTokenRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(token, []byte(ticket.Token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	host := &stack{dir: dir, data: filepath.Join(dir, "runner")}
	var member struct {
		RunnerID string `json:"runner_id"`
	}
	runner := []string{
		"--json", "runner", "--data-dir", host.data, "--images-dir", imageStore(t).Dir(), "--controller", ready.Runners,
		"--join-token-file", token, "--listen", "127.0.0.1:0", "--data-listen", "127.0.0.1:0", "--disk-budget", "1G", "--warm", "0", "--accel", "tcg",
	}
	refusedOnWeakHost(t, binary, runner)
	stopRunner := serverOf(t, &member, binary, append(runner, "--allow-weak-host", weakHost)...)
	if err := os.WriteFile(filepath.Join(host.data, "cluster-id"), []byte(ready.ClusterID+"/"+member.RunnerID), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := host.learnNames(); err != nil {
		t.Fatal(err)
	}
	ws, err := client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{
		Name: "apart", Image: string(baseImage(t)), Resources: coppice.ResourcesRequest{MemoryMiB: new(512)},
	})
	if err != nil {
		t.Fatal(err)
	}
	if found, err := host.find(); err != nil || len(found["process"]) == 0 || len(found["network namespace"]) == 0 {
		t.Fatalf("the runner's things are not found under its name: %v, %v", found, err)
	}

	cmd := exec.Command(binary, "ws", "shell", "--env", "PS1=ready> ", "apart", "--", "/bin/sh")
	cmd.Env = append(os.Environ(), "COPPICE_SERVER="+ready.Server, "COPPICE_TOKEN="+strings.TrimSpace(string(secret)))
	x, _, say := terminalOf(t, cmd)
	x.await("ready> ")
	say("stty size; n=41\n")
	x.await("30 100")
	kill(syscall.SIGKILL)
	say("echo alone-$((n+1))\n")
	x.await("alone-42")
	kill = serverOf(t, &ready, binary, append(controller, "--listen", strings.TrimPrefix(ready.Server, "http://"), "--runner-listen", strings.TrimPrefix(ready.Runners, "https://"))...)
	say("sh -c 'echo sleeping-$((3+3)); exec sleep 1000'\n")
	x.await("sleeping-6")
	say("\x03")
	x.await("ready> ")
	say("exit $n\n")
	if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 41 {
		t.Errorf("%v; the terminal shows %q", err, x.text)
	}
	if _, err := client.WriteFile(t.Context(), ws.ID, "/root/f", strings.NewReader("straight"), coppice.WriteOptions{}); err != nil {
		t.Error(err)
	}
	out, err := client.Exec(t.Context(), ws.ID, coppice.ExecRequest{Command: []string{"cat", "/root/f"}})
	if err != nil || out.Stdout != "straight" {
		t.Errorf("%+v, %v", out, err)
	}
	if _, err := client.TerminateWorkspace(t.Context(), ws.ID); err != nil {
		t.Error(err)
	}
	if status := stopRunner(syscall.SIGTERM); status != 0 {
		t.Errorf("the runner ended with status %d", status)
	}
	if status := kill(syscall.SIGTERM); status != 0 {
		t.Errorf("the controller ended with status %d", status)
	}
	for _, fault := range host.remains() {
		t.Error(fault)
	}
}
