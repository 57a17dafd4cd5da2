package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// Where guestprobe is in a guest.
const probePath = "/usr/local/bin/guestprobe"

// small are the machines of most tests.
func small() coppice.ResourcesRequest {
	return coppice.ResourcesRequest{MemoryMiB: new(256)}
}

// plant makes a workspace with guestprobe in it and a checkpoint of that. The workspace goes on: it grows old.
func plant(t *testing.T, s *stack) (coppice.CheckpointID, coppice.WorkspaceID) {
	t.Helper()
	ctx := t.Context()
	ws, err := s.client.CreateWorkspace(ctx, coppice.CreateWorkspaceRequest{Name: "seed", Image: string(baseImage(t)), Resources: small()})
	if err != nil {
		t.Fatalf("create the first workspace: %v", err)
	}
	upload(t, s, ws.ID)
	ckpt, err := s.client.CreateCheckpoint(ctx, ws.ID, coppice.CreateCheckpointRequest{Name: "seed"})
	if err != nil {
		t.Fatalf("checkpoint the first workspace: %v", err)
	}
	return ckpt.ID, ws.ID
}

func upload(t *testing.T, s *stack, ws coppice.WorkspaceID) {
	t.Helper()
	f, err := os.Open(program(t, probe))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := s.client.WriteFile(t.Context(), ws, probePath, f, coppice.WriteOptions{Mode: "0755"}); err != nil {
		t.Fatalf("upload guestprobe: %v", err)
	}
}

// seed is the checkpoint that tests fork.
func seed(t *testing.T) coppice.CheckpointID {
	t.Helper()
	theStack(t)
	shared.mu.Lock()
	defer shared.mu.Unlock()
	return shared.seed
}

// coppiceFork says what to fork. Its zero value is one child.
type coppiceFork struct {
	count  int
	env    coppice.Env
	spread bool
}

func (f coppiceFork) request() coppice.ForkCheckpointRequest {
	return coppice.ForkCheckpointRequest{Count: new(max(f.count, 1)), Env: f.env, Spread: f.spread}
}

// fork grows workspaces that end with the test. Every child must become ready.
func fork(t *testing.T, s *stack, from coppice.CheckpointID, f coppiceFork) []coppice.ForkChild {
	t.Helper()
	res, err := s.client.ForkCheckpoint(t.Context(), from, f.request())
	if err != nil {
		t.Fatalf("fork %s: %v", from, err)
	}
	for _, c := range res.Children {
		if c.Workspace != nil {
			endWithTest(t, s, c.Workspace.ID)
		}
	}
	for i, c := range res.Children {
		switch {
		case c.Problem != nil:
			t.Fatalf("child %d of %d: %v", i, len(res.Children), c.Problem.Err())
		case c.Workspace.State != coppice.WorkspaceReady:
			t.Fatalf("child %d of %d is %s", i, len(res.Children), c.Workspace.State)
		}
	}
	return res.Children
}

// forkOne grows one workspace.
func forkOne(t *testing.T, s *stack, from coppice.CheckpointID) coppice.WorkspaceID {
	t.Helper()
	return fork(t, s, from, coppiceFork{})[0].Workspace.ID
}

func endWithTest(t *testing.T, s *stack, ws coppice.WorkspaceID) {
	t.Helper()
	t.Cleanup(func() {
		ctx, cancel := later(t)
		defer cancel()
		if _, err := s.client.TerminateWorkspace(ctx, ws); err != nil {
			t.Errorf("terminate %s: %v", ws, err)
		}
	})
}

func checkpoint(t *testing.T, s *stack, ws coppice.WorkspaceID) coppice.Checkpoint {
	t.Helper()
	c, err := s.client.CreateCheckpoint(t.Context(), ws, coppice.CreateCheckpointRequest{})
	if err != nil {
		t.Fatalf("checkpoint %s: %v", ws, err)
	}
	return c
}

// execute runs a program, which must end with status 0, and returns what it printed.
func execute(t *testing.T, s *stack, ws coppice.WorkspaceID, command ...string) string {
	t.Helper()
	res, err := s.client.Exec(t.Context(), ws, coppice.ExecRequest{Command: command})
	if err != nil {
		t.Fatalf("exec %q in %s: %v", command, ws, err)
	}
	stdout, stderr, err := res.Output()
	if err != nil {
		t.Fatal(err)
	}
	if res.ExitCode != 0 {
		t.Fatalf("exec %q in %s: exit status %d\n%s%s", command, ws, res.ExitCode, stdout, stderr)
	}
	return string(stdout)
}

func shell(t *testing.T, s *stack, ws coppice.WorkspaceID, script string) string {
	t.Helper()
	return execute(t, s, ws, "/bin/sh", "-ec", script)
}

// ask runs guestprobe and decodes what it prints.
func ask[T any](t *testing.T, s *stack, ws coppice.WorkspaceID, args ...string) T {
	t.Helper()
	var out T
	text := execute(t, s, ws, append([]string{probePath}, args...)...)
	if err := json.Unmarshal([]byte(text), &out); err != nil {
		t.Fatalf("guestprobe %q in %s: %v in %q", args, ws, err, text)
	}
	return out
}

// begin starts guestprobe and lets it run.
func begin(t *testing.T, s *stack, ws coppice.WorkspaceID, args ...string) coppice.Session {
	t.Helper()
	return launch(t, s, ws, append([]string{probePath}, args...)...)
}

func launch(t *testing.T, s *stack, ws coppice.WorkspaceID, command ...string) coppice.Session {
	t.Helper()
	session, err := s.client.StartSession(t.Context(), ws, coppice.ExecRequest{Command: command})
	if err != nil {
		t.Fatalf("start %q in %s: %v", command, ws, err)
	}
	return session
}

// each runs f for every child at the same time. f must not end the test.
func each(children []coppice.ForkChild, f func(i int, ws coppice.WorkspaceID)) {
	var wg sync.WaitGroup
	for i, c := range children {
		wg.Go(func() { f(i, c.Workspace.ID) })
	}
	wg.Wait()
}

// gather asks guestprobe in every child at once.
func gather[T any](t *testing.T, s *stack, children []coppice.ForkChild, args ...string) []T {
	t.Helper()
	out := make([]T, len(children))
	errs := make([]error, len(children))
	each(children, func(i int, ws coppice.WorkspaceID) {
		errs[i] = query(t.Context(), s, ws, &out[i], args...)
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return out
}

func query(ctx context.Context, s *stack, ws coppice.WorkspaceID, into any, args ...string) error {
	res, err := s.client.Exec(ctx, ws, coppice.ExecRequest{Command: append([]string{probePath}, args...)})
	if err != nil {
		return err
	}
	if res.ExitCode != 0 {
		return errors.New("guestprobe " + strings.Join(args, " ") + ": exit status " + strconv.Itoa(res.ExitCode) + ": " + res.Stderr)
	}
	return json.Unmarshal([]byte(res.Stdout), into)
}

// wantCode wants an error of the API with a code.
func wantCode(t *testing.T, err error, code coppice.Code) *coppice.Error {
	t.Helper()
	var e *coppice.Error
	if !errors.As(err, &e) || e.Code != code {
		t.Fatalf("got %v, want %s", err, code)
	}
	return e
}
