package e2e

import (
	"io"
	"net"
	"strings"
	"testing"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestCtrlCSuspends ends the server with Ctrl-C while a workspace runs, which serves on its loopback through a forwarded port. The next
// server resumes it, and its program goes on where it was.
func TestCtrlCSuspends(t *testing.T) {
	s := newStack(t, "--warm", "1", "--on-exit", "suspend")
	ws, err := s.client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{
		Name: "sleeper", Image: string(baseImage(t)), Resources: coppice.ResourcesRequest{MemoryMiB: new(256)},
	})
	if err != nil {
		t.Fatal(err)
	}
	ask := func(address string) string {
		t.Helper()
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		b, err := io.ReadAll(conn)
		if err != nil {
			return err.Error()
		}
		return string(b)
	}
	closed, err := s.client.CreatePort(t.Context(), ws.ID, coppice.CreatePortRequest{GuestPort: 8123})
	if err != nil || closed.Problem == nil || closed.Problem.Code != "PORT_CLOSED" {
		t.Fatalf("a port that nobody listens on: %+v, %v", closed, err)
	}
	launch(t, s, ws.ID, "python3", "-u", "-c", `import socket
n, s = 0, socket.create_server(("127.0.0.1", 8123))
while True:
    c, _ = s.accept(); n += 1; c.sendall(b"answer %d" % n); c.close()`)
	until(t, "the server on the guest's loopback answers", func() (bool, error) { return ask(closed.Listen) == "answer 1", nil })
	if err := s.interrupt(); err != nil {
		t.Fatal(err)
	}
	s.start(t)
	if w := workspace(t, s, ws.ID); w.State != coppice.WorkspaceSuspended {
		t.Fatalf("after Ctrl-C it is %s: %+v", w.State, w.Failure)
	}
	if _, err := s.client.ResumeWorkspace(t.Context(), ws.ID); err != nil {
		t.Fatal(err)
	}
	open, err := s.client.CreatePort(t.Context(), ws.ID, coppice.CreatePortRequest{GuestPort: 8123})
	if err != nil || open.Problem != nil {
		t.Fatalf("%+v, %v", open, err)
	}
	if got := ask(open.Listen); !strings.HasPrefix(got, "answer ") || got == "answer 1" {
		t.Errorf("after a resume: %q", got)
	}
}
