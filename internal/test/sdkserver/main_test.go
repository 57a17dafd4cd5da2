package main

import (
	"bufio"
	"encoding/json"
	"io"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pgcluster"
	"github.com/coppice-dev/coppice/internal/test/require"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// begin serves until the input is closed. next reads a line of the answers, and done has how it ended.
func begin(t *testing.T) (next func() address, input io.WriteCloser, done <-chan error) {
	t.Helper()
	_, err := pgcluster.Find(t.Context(), "")
	require.That(t, "postgres", core.CodeOf(err) != core.CodeIncompatibleHost, core.MessageOf(err))
	commands, input := io.Pipe()
	output, answers := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := serve(t.Context(), commands, answers)
		ended <- err
		_ = answers.CloseWithError(io.EOF) // for a reader that waits for a line
	}()
	read := bufio.NewScanner(output)
	return func() (at address) {
		t.Helper()
		if !read.Scan() {
			t.Fatalf("no line: %v", <-ended)
		}
		if err := json.Unmarshal(read.Bytes(), &at); err != nil {
			t.Fatal(err)
		}
		return at
	}, input, ended
}

// TestServe talks to the server as a test of an SDK does: it finds it by the first line, and again after a restart.
func TestServe(t *testing.T) {
	t.Parallel()
	next, input, done := begin(t)
	at := next()
	client, err := coppice.New(coppice.Config{Server: at.URL, Token: at.Token})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	ws, err := client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{Image: at.Image})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(input, "restart\n"); err != nil {
		t.Fatal(err)
	}
	if again := next(); again != at {
		t.Errorf("after the restart it is at %+v, it was at %+v", again, at)
	}
	got, err := client.Exec(t.Context(), ws.ID, coppice.ExecRequest{Command: []string{"echo", "hello"}})
	if err != nil || got.Stdout != "hello\n" {
		t.Errorf("exec after the restart: %q, %v", got.Stdout, err)
	}
	if err := input.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}
