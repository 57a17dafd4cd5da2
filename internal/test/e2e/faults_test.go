package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestVMMKilled kills a VMM from outside: the workspace is lost, with the cause, and what it had on the host is gone.
func TestVMMKilled(t *testing.T) {
	s := theStack(t)
	ws := forkOne(t, s, seed(t))
	other := forkOne(t, s, seed(t))
	m := s.mustMachine(t, ws)
	mac := workspace(t, s, ws).Network.MAC
	began := time.Now()
	s.killVMM(t, m.pid)
	until(t, "the workspace is lost", func() (bool, error) {
		w, err := s.client.Workspace(t.Context(), ws)
		return w.State == coppice.WorkspaceLost, err
	})
	w := workspace(t, s, ws)
	t.Logf("lost after %.1f s: %+v", time.Since(began).Seconds(), w.Failure)
	if w.Failure == nil || w.Failure.Code == "" || !strings.Contains(w.Failure.Message, "kill") {
		t.Errorf("the cause is %+v, want one that says that it was killed", w.Failure)
	}
	if _, err := s.machineOf(mac); err == nil {
		t.Error("its namespace still leads to it")
	}
	_, err := s.client.Exec(t.Context(), ws, coppice.ExecRequest{Command: []string{"true"}})
	var e *coppice.Error
	if !errors.As(err, &e) || e.Status != 409 {
		t.Errorf("exec in it: %v, want a 409", err)
	}
	compareAlive(t, s, other)
	terminate(t, s, ws)
}

func workspace(t *testing.T, s *stack, id coppice.WorkspaceID) coppice.Workspace {
	t.Helper()
	w, err := s.client.Workspace(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// TestHardTimes kills the database of a server. With -long it fills the disk before that, and kills the server after it.
func TestHardTimes(t *testing.T) {
	s := newStack(t, "--disk-budget", "1G", "--warm", "1")
	ws, err := s.client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{
		Name: "survivor", Image: string(baseImage(t)), Resources: coppice.ResourcesRequest{MemoryMiB: new(512)},
	})
	if err != nil {
		t.Fatal(err)
	}
	upload(t, s, ws.ID)
	first := startWitness(t, s, ws.ID)
	step(t, s, ws.ID, "a")
	kept, err := s.client.CreateCheckpoint(t.Context(), ws.ID, coppice.CreateCheckpointRequest{Name: "kept"})
	if err != nil {
		t.Fatal(err)
	}
	// Each depends on the one before: it is one story.
	_ = (!*long || t.Run("full disk", func(t *testing.T) { fillDisk(t, s, ws.ID, first) })) &&
		t.Run("killed database", func(t *testing.T) { killDatabase(t, s, ws.ID) }) &&
		(!*long || t.Run("kill -9 and restart", func(t *testing.T) { killAndRestart(t, s, ws.ID, kept, first) }))
}

// fillDisk takes checkpoints of a machine that dirties its memory until there is no room: that one is refused as such, the machine
// goes on, the others can be forked, and once one is deleted there is room again.
func fillDisk(t *testing.T, s *stack, ws coppice.WorkspaceID, first sight) {
	t.Helper()
	if _, err := os.Stat(filepath.Join(s.data, "volume.xfs")); err != nil {
		t.Log("the temporary directory has reflink, so the server made no volume of its own, and there is no small disk to fill")
		return
	}
	shell(t, s, ws, "mount -t tmpfs -o size=400M tmpfs /mnt && "+probePath+" pour 300000000 > /mnt/full")
	var taken []coppice.CheckpointID
	var full error
	const most = 10 // 300 MB each, and a disk of 1 GiB
	for full == nil && len(taken) < most {
		c, err := s.client.CreateCheckpoint(t.Context(), ws, coppice.CreateCheckpointRequest{})
		if full = err; err == nil {
			taken = append(taken, c.ID)
			compare(t, "the parent goes on", after(first, "a"), look(t, s, ws))
		}
	}
	e := wantCode(t, full, coppice.CodeDiskFull)
	t.Logf("after %d checkpoints: %v", len(taken), e)
	if len(taken) == 0 || !strings.Contains(e.Detail, "delete checkpoints") {
		t.Errorf("after %d checkpoints: %v, want one that says what to do", len(taken), e)
	}
	compare(t, "the parent goes on after the refusal", after(first, "a"), look(t, s, ws))
	compareAlive(t, s, ws)
	for _, c := range taken {
		if err := s.client.DeleteCheckpoint(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	shell(t, s, ws, "umount /mnt")
	again := checkpoint(t, s, ws)
	child := forkOne(t, s, again.ID)
	compare(t, "a fork when there is room again", after(first, "a"), look(t, s, child))
	terminate(t, s, child)
}

// killDatabase kills PostgreSQL's first process.
func killDatabase(t *testing.T, s *stack, ws coppice.WorkspaceID) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(s.data, "postgres/data/postmaster.pid"))
	if err != nil {
		t.Fatal(err)
	}
	line, _, _ := strings.Cut(string(b), "\n")
	pid, err := strconv.Atoi(line)
	if err != nil {
		t.Fatal(err)
	}
	m := s.mustMachine(t, ws)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	// The server starts it again: there is a time of refusals, all of the same kind, and then all is well.
	refused := 0
	for begun := time.Now(); ; {
		_, err := s.client.Ready(t.Context())
		var e *coppice.Error
		if errors.As(err, &e) && e.Status == 503 && e.Code == coppice.CodeDatabaseUnavailable {
			if refused++; refused == 1 {
				_, err := s.client.CreateCheckpoint(t.Context(), ws, coppice.CreateCheckpointRequest{})
				// It may be back by now, and the disk has little room left.
				if err != nil && (!errors.As(err, &e) || e.Code != coppice.CodeDatabaseUnavailable && e.Code != coppice.CodeDiskFull) {
					t.Errorf("checkpoint without a database: %v", err)
				}
			}
		} else if err != nil {
			t.Fatal(err)
		} else if refused > 0 {
			break
		}
		if time.Since(begun) > 5*time.Minute {
			t.Fatalf("after %s: %d refusals, and now %v", time.Since(begun), refused, err)
		}
	}
	t.Logf("%d requests were refused", refused)
	if _, ok := s.vmms()[m.pid]; !ok {
		t.Error("the VM died with the database")
	}
	compareAlive(t, s, ws)
}

// killAndRestart kills the server and starts another on the same data: its VMs go on, and checkpoints are there and can be forked.
func killAndRestart(t *testing.T, s *stack, ws coppice.WorkspaceID, kept coppice.Checkpoint, first sight) {
	t.Helper()
	m := s.mustMachine(t, ws)
	s.kill(t)
	if _, ok := s.vmms()[m.pid]; !ok {
		t.Error("the VM died with the server")
	}
	s.start(t)
	awaitState(t, s, ws, coppice.WorkspaceReady)
	compare(t, "the VM of the killed server", after(first, "a"), look(t, s, ws))
	got, err := s.client.Checkpoint(t.Context(), kept.ID)
	if err != nil || got.State != coppice.CheckpointCaptured || got.Name != "kept" {
		t.Fatalf("%+v, %v", got, err)
	}
	for i, c := range fork(t, s, kept.ID, coppiceFork{count: 2}) {
		compare(t, fmt.Sprintf("fork %d of a checkpoint from before the crash", i), after(first, "a"), look(t, s, c.Workspace.ID))
	}
	back, err := s.client.RestoreCheckpoint(t.Context(), kept.ID, coppice.RestoreCheckpointRequest{WorkspaceName: "phoenix"})
	if err != nil {
		t.Fatal(err)
	}
	compare(t, "restored after the crash", after(first, "a", "b"), step(t, s, back.Workspace.ID, "b"))
	left, err := filepath.Glob(filepath.Join(s.data, "volume/runner/*/.part-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("unfinished files are left: %q, %v", left, err)
	}
}
