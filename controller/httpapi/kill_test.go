package httpapi_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/httpapi"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/controller/runnerclient"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/failpoint"
	"github.com/coppice-dev/coppice/internal/masterkey"
	"github.com/coppice-dev/coppice/snapshotstore/blob/dir"
)

const (
	killDSN   = "HTTPAPI_TEST_KILL_DSN"
	killPoint = "HTTPAPI_TEST_KILL_POINT"
	killStore = "HTTPAPI_TEST_KILL_STORE"
)

// serveUntilKilled is a controller in a process of its own, which dies at the given failpoint.
func serveUntilKilled(dsn string) {
	fail := func(err error) {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	ctx := context.Background()
	store, err := postgres.Open(ctx, postgres.Config{DSN: dsn})
	if err != nil {
		fail(err)
	}
	blobs, err := dir.Open(os.Getenv(killStore))
	if err != nil {
		fail(err)
	}
	key, err := masterkey.New(make([]byte, 32)) // as newWorld has it
	if err != nil {
		fail(err)
	}
	trust, err := controller.OpenTrust(ctx, store, key, nil)
	if err != nil {
		fail(err)
	}
	control := controller.New(controller.Config{Trust: &trust, Store: blobs, ClusterID: "test", OperationLease: time.Hour, LoopInterval: time.Hour}, store, runnerclient.New(runnerSecret), slog.New(slog.DiscardHandler))
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fail(err)
	}
	if err := failpoint.ArmList(os.Getenv(killPoint) + "=kill"); err != nil {
		fail(err)
	}
	go func() { fail(control.Run(ctx)) }()
	fmt.Println("http://" + listener.Addr().String())
	fail(http.Serve(listener, httpapi.New(control, slog.New(slog.DiscardHandler))))
}

// killed starts a controller that dies at the point.
func (w *world) killed(point string) (url string, cmd *exec.Cmd) {
	w.t.Helper()
	cmd = exec.CommandContext(w.t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), killDSN+"="+w.dsn, killStore+"="+w.storeDir, killPoint+"="+point)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		w.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	url, err = bufio.NewReader(out).ReadString('\n')
	if err != nil {
		w.t.Fatal(err)
	}
	return strings.TrimSpace(url), cmd
}

// TestKilledController kills a real controller process with SIGKILL at each point of a request's life. The client repeats its
// request, with its key, at another controller: it was done once, and the client gets its result.
func TestKilledController(t *testing.T) {
	t.Parallel()
	operation := []string{"controller.before_admission", "controller.in_admission", "controller.after_admission", "controller.before_end", "controller.after_end"}
	for id, points := range map[string][]string{
		"createWorkspace": operation, "forkCheckpoint": operation, "forkWorkspace": operation, "createCheckpoint": operation, "restoreWorkspace": operation,
		"exec":       {"controller.before_launch", "controller.after_launch"},
		"createPort": {"controller.before_port", "controller.after_port"},
		"stepCheckpoint": append([]string{
			"controller.before_launch", "controller.after_launch", "controller.after_step_fork", "controller.after_step_files", "controller.after_step_command",
			"controller.after_step_capture", "controller.after_step_action",
		}, operation...),
		"stepWorkspace": append([]string{"controller.before_launch", "controller.after_launch", "controller.after_step_command", "controller.after_step_capture"}, operation...),
		"buildImage": append([]string{
			"controller.after_step_fork", "controller.after_step_files", "controller.after_step_command", "controller.after_step_capture", "controller.after_step_action",
			"controller.after_build_instruction",
		}, operation...),
	} {
		for _, point := range points {
			t.Run(id+" "+point, func(t *testing.T) {
				t.Parallel()
				w := newWorld(t)
				ws := w.create("main")
				cp := w.checkpoint(ws.ID)
				path, body, _ := creating[id](ws, cp)
				before := w.counts()
				url, cmd := w.killed(point)
				request := call2(path, body, map[string]string{"Idempotency-Key": "k"})
				if err := w.broken(url, request); err == nil {
					t.Fatal("the controller was to be killed and has answered")
				}
				if err := cmd.Wait(); cmd.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
					t.Fatalf("it ended otherwise: %v", err)
				}
				w.sql(`UPDATE operations SET lease_expires_at = now() WHERE state = 'running'`) // time goes by
				got := w.insist(request)
				if got.status/100 != 2 {
					t.Fatalf("%d %s", got.status, got.body)
				}
				again := w.do(request)
				if again.status != got.status || again.header.Get("Idempotency-Replayed") != "true" || ident(t, again) != ident(t, got) {
					t.Errorf("again: %d %s\n%s", again.status, again.body, got.body)
				}
				if made, want := w.counts().minus(before), once[id]; made != want {
					t.Errorf("it made %+v, want %+v", made, want)
				}
				if _, err := w.runner.Beat(t.Context(), w.inner, runnerSecret); err != nil {
					t.Fatal(err)
				}
				if held := len(w.runner.Sandboxes()); held != w.counts().living {
					t.Errorf("the runner holds %d sandboxes, the rows say %d", held, w.counts().living)
				}
			})
		}
	}
}

// tally counts what requests make; living sandboxes are compared with the runner's.
type tally struct{ operations, workspaces, checkpoints, sessions, ports, living int }

func (a tally) minus(b tally) tally {
	return tally{a.operations - b.operations, a.workspaces - b.workspaces, a.checkpoints - b.checkpoints, a.sessions - b.sessions, a.ports - b.ports, a.living - b.living}
}

// once is what each request makes when it is done once.
var once = map[string]tally{
	"createWorkspace":  {operations: 1, workspaces: 1, living: 1},
	"forkCheckpoint":   {operations: 1, workspaces: 3, living: 3},
	"forkWorkspace":    {operations: 1, workspaces: 2, checkpoints: 1, living: 2},
	"createCheckpoint": {operations: 1, checkpoints: 1},
	"restoreWorkspace": {operations: 1},
	"exec":             {sessions: 1},
	"createPort":       {ports: 1},
	"stepWorkspace":    {operations: 2, checkpoints: 1, sessions: 1},                 // and a capture
	"buildImage":       {operations: 10, workspaces: 3, checkpoints: 3, sessions: 1}, // and for the base, the command and the end a fork, a capture and a termination each
	"stepCheckpoint":   {operations: 4, workspaces: 1, checkpoints: 1, sessions: 1},  // and a fork, a capture and a termination
}

func (w *world) counts() tally {
	w.t.Helper()
	var c tally
	if err := w.conn().QueryRow(w.t.Context(), `
		SELECT (SELECT count(*) FROM operations), (SELECT count(*) FROM workspaces), (SELECT count(*) FROM checkpoints), (SELECT count(*) FROM sessions),
			(SELECT count(*) FROM ports), (SELECT count(*) FROM sandboxes WHERE ended_at IS NULL)`).
		Scan(&c.operations, &c.workspaces, &c.checkpoints, &c.sessions, &c.ports, &c.living); err != nil {
		w.t.Fatal(err)
	}
	return c
}

// broken sends a request whose connection is to break.
func (w *world) broken(url string, c call) error {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.t.Context(), c.method, url+c.path, strings.NewReader(c.body))
	if err != nil {
		w.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+apiKey)
	for k, v := range c.header {
		req.Header.Set(k, v)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	_, err = io.Copy(io.Discard, res.Body)
	return err
}

// insist repeats a request while it is in progress.
func (w *world) insist(c call) reply {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), watchdog)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		if _, err := w.runner.Beat(ctx, w.inner, runnerSecret); err != nil {
			w.t.Fatal(err)
		}
		got := w.do(c)
		if got.status != 409 || got.problem(w.t).Code != string(core.CodeIdempotencyInProgress) {
			return got
		}
		select {
		case <-ctx.Done():
			w.t.Fatalf("it never ended: %s", got.body)
		case <-tick.C:
		}
	}
}
