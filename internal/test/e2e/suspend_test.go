package e2e

import (
	"context"
	"testing"
	"time"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestSuspendAndResume suspends a machine in which a process with state runs and resumes it: the process has what it had, goes
// on, and is found under its session's old id; the machine has another identity. Asked to, it is resumed by being used.
func TestSuspendAndResume(t *testing.T) {
	s := theStack(t)
	ctx := t.Context()
	id := forkOne(t, s, seed(t))
	first := startWitness(t, s, id)
	step(t, s, id, "one")
	before := step(t, s, id, "two")
	ws, err := s.client.Workspace(ctx, id)
	if err != nil {
		t.Fatal(err)
	}
	sessions, err := coppice.Collect(s.client.Sessions(ctx, id))
	if err != nil {
		t.Fatal(err)
	}

	asleep, err := s.client.SuspendWorkspace(ctx, id)
	if err != nil || asleep.State != coppice.WorkspaceSuspended || asleep.Network.IP != "" {
		t.Fatalf("suspended: %+v, %v", asleep, err)
	}
	back, err := s.client.ResumeWorkspace(ctx, id)
	if err != nil || back.State != coppice.WorkspaceReady || back.Epoch != ws.Epoch+1 {
		t.Fatalf("resumed: %+v, %v", back, err)
	}
	compare(t, "as resumed", before, look(t, s, id))
	compare(t, "after a step", after(first, "one", "two", "three"), step(t, s, id, "three"))
	if old, now := ws.Network, back.Network; now.Generation == old.Generation || now.MachineID == old.MachineID || now.MAC == old.MAC {
		t.Errorf("its identity is the old one: %+v", now)
	}
	for _, session := range sessions {
		now, err := s.client.Session(ctx, session.ID)
		if err != nil || now.PID != session.PID || now.State != session.State {
			t.Errorf("session %s, %s before: %+v, %v", session.ID, session.State, now, err)
		}
	}

	on := true
	if _, err := s.client.PatchWorkspace(ctx, id, coppice.PatchWorkspaceRequest{AutoResume: &on}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.client.SuspendWorkspace(ctx, id); err != nil {
		t.Fatal(err)
	}
	compare(t, "resumed by use", after(first, "one", "two", "three"), look(t, s, id))
	if _, err := s.client.TerminateWorkspace(ctx, id); err != nil {
		t.Error(err)
	}
	// What a machine has used is written when it has ended, at its runner's next heartbeat.
	wait, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		usage, err := s.client.WorkspaceUsage(ctx, id)
		if err != nil {
			t.Fatal(err)
		}
		if usage.CPUSeconds > 0 && usage.GibSeconds > 0 && usage.StoredBytes > 0 {
			break
		}
		select {
		case <-tick.C:
		case <-wait.Done():
			t.Fatalf("usage: %+v", usage)
		}
	}
}
