package e2e

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestFileWork has one machine do what the guest agent has learned: work on files as a user, watches that survive a
// checkpoint and are a fork's own, targets and deadlines of sessions, and a suspension at the end of the time.
func TestFileWork(t *testing.T) {
	s := theStack(t)
	ctx := t.Context()
	id := forkOne(t, s, seed(t))
	const user = "nobody"
	shell(t, s, id, "mkdir -p /tmp/w && chown nobody /tmp/w && mkdir -m 0700 /tmp/rootonly && echo secret > /tmp/rootonly/f")

	// What nobody does is nobody's, and nobody may do no more than nobody.
	made, err := s.client.MakeDirectory(ctx, id, coppice.MakeDirectoryRequest{Path: "/tmp/w/a/b", Parents: true, User: user})
	if err != nil || !made.Created || made.File.Owner != user {
		t.Fatalf("%+v (%v)", made, err)
	}
	write := func(path, body string, opts coppice.WriteOptions) error {
		_, err := s.client.WriteFile(ctx, id, path, strings.NewReader(body), opts)
		return err
	}
	one := int64(1)
	for _, err := range []error{
		write("/tmp/w/a/f", "hello", coppice.WriteOptions{User: user, InPlace: true}),
		write("/tmp/w/a/f", "ELL", coppice.WriteOptions{User: user, InPlace: true, Offset: &one}),
		write("/tmp/w/a/f", "!", coppice.WriteOptions{User: user, InPlace: true, Append: true}),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for path, opts := range map[string]coppice.WriteOptions{"/etc/f": {User: user}, "/tmp/rootonly/f": {User: user, InPlace: true}} {
		if err := write(path, "x", opts); !errors.Is(err, coppice.Code("FILE_DENIED")) {
			t.Errorf("%s as %s: %v", path, user, err)
		}
	}
	for _, path := range []string{"/tmp/rootonly/f", "/proc/1/environ"} {
		if body, _, err := s.client.OpenFileAs(ctx, id, path, user); err == nil {
			b, _ := io.ReadAll(body)
			_ = body.Close()
			t.Errorf("%s was read as %s: %q", path, user, b)
		}
	}
	if _, err := s.client.RenameFile(ctx, id, coppice.RenameFileRequest{From: "/tmp/w/a/f", To: "/tmp/w/a/b/g", User: user}); err != nil {
		t.Error(err)
	}
	if _, err := s.client.SetFileAttributes(ctx, id, coppice.SetFileAttributesRequest{Path: "/tmp/w/a/b", User: user, Set: map[string]string{"user.note": "x"}}); err != nil && !errors.Is(err, coppice.Code("UNSUPPORTED")) {
		t.Error(err)
	}
	tree, err := s.client.ListTree(ctx, id, "/tmp/w", coppice.ListOptions{Depth: 3})
	if err != nil || len(tree.Entries) != 3 || tree.Entries[2].Path != "/tmp/w/a/b/g" || tree.Entries[2].Size != 6 {
		t.Errorf("%+v (%v)", tree, err)
	}

	// A watch goes on after a checkpoint, and a fork has its own.
	watch, err := s.client.CreateWatch(ctx, id, coppice.CreateWatchRequest{Path: "/tmp/w", Recursive: true, User: user})
	if err != nil {
		t.Fatal(err)
	}
	shell(t, s, id, "touch /tmp/w/a/before")
	cp, err := s.client.CreateCheckpoint(ctx, id, coppice.CreateCheckpointRequest{})
	if err != nil {
		t.Fatal(err)
	}
	twin := forkOne(t, s, cp.ID)
	shell(t, s, id, "touch /tmp/w/a/b/mine")
	shell(t, s, twin, "touch /tmp/w/a/b/twins")
	for where, names := range map[coppice.WorkspaceID][]string{id: {"a/before", "a/b/mine"}, twin: {"a/before", "a/b/twins"}} {
		awaitCreated(t, s, where, watch.ID, names)
	}

	// Signals and deadlines.
	session, err := s.client.StartSession(ctx, id, coppice.ExecRequest{Command: []string{"sleep", "100000"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.client.SignalTarget(ctx, session.ID, "TERM", coppice.SignalProcess); err != nil {
		t.Error(err)
	}
	if end, err := s.client.WaitSession(ctx, session.ID); err != nil || end.Signal != "SIGTERM" {
		t.Errorf("%+v (%v)", end, err)
	}
	if session, err = s.client.StartSession(ctx, id, coppice.ExecRequest{Command: []string{"sleep", "100000"}}); err != nil {
		t.Fatal(err)
	}
	if err := s.client.SetSessionDeadline(ctx, session.ID, 1_000_000); err != nil {
		t.Error(err)
	}
	if end, err := s.client.WaitSession(ctx, session.ID); err != nil || !end.TimedOut {
		t.Errorf("%+v (%v)", end, err)
	}

	// The end of its time suspends it, and a resume gives it all of its time again.
	ttl := int64(1)
	if _, err := s.client.PatchWorkspace(ctx, id, coppice.PatchWorkspaceRequest{TTLSeconds: &ttl, OnTTL: coppice.TTLSuspend}); err != nil {
		t.Fatal(err)
	}
	awaitState(t, s, id, coppice.WorkspaceSuspended)
	hour := int64(3600)
	if _, err := s.client.PatchWorkspace(ctx, id, coppice.PatchWorkspaceRequest{TTLSeconds: &hour}); err != nil {
		t.Fatal(err)
	}
	back, err := s.client.ResumeWorkspace(ctx, id)
	if err != nil || back.State != coppice.WorkspaceReady || back.OnTTL != coppice.TTLSuspend {
		t.Fatalf("%+v (%v)", back, err)
	}
	shell(t, s, id, "touch /tmp/w/a/b/again")
	awaitCreated(t, s, id, watch.ID, []string{"a/before", "a/b/mine", "a/b/again"})
}

// awaitCreated reads the events of a watch until files were created, in this order and no others.
func awaitCreated(t *testing.T, s *stack, id coppice.WorkspaceID, watch coppice.WatchID, names []string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for e, err := range s.client.WatchEvents(ctx, id, watch, 0) {
		if err != nil {
			t.Fatalf("%s: %v", id, err)
		}
		if e.Type != coppice.WatchCreate {
			continue
		}
		if e.Name != names[0] {
			t.Fatalf("%s: %+v, want %s", id, e, names[0])
		}
		if names = names[1:]; len(names) == 0 {
			return
		}
	}
	t.Fatalf("%s: the watch has ended without %v", id, names)
}
