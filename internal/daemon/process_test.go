package daemon_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/runner/vmm"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func wantCode(t *testing.T, err error, code core.Code) {
	t.Helper()
	if !errors.Is(err, coppice.Code(code)) {
		t.Errorf("got %v, want %s", err, code)
	}
}

// create makes a workspace of the fake image.
func create(t *testing.T, client *coppice.Client) coppice.Workspace {
	t.Helper()
	ws, err := client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{Image: "base", Resources: coppice.ResourcesRequest{MemoryMiB: new(128)}})
	if err != nil {
		t.Fatal(err)
	}
	return ws
}

// sealedCheckpoint takes a checkpoint of a workspace and waits until it is in the store.
func sealedCheckpoint(t *testing.T, client *coppice.Client, id coppice.WorkspaceID) coppice.Checkpoint {
	t.Helper()
	cp, err := client.CreateCheckpoint(t.Context(), id, coppice.CreateCheckpointRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if cp, err = client.WaitSealed(t.Context(), cp.ID); err != nil || cp.State != coppice.CheckpointSealed {
		t.Fatalf("%+v, %v", cp, err)
	}
	return cp
}

func echo(t *testing.T, client *coppice.Client, ws coppice.WorkspaceID) {
	t.Helper()
	out, err := client.Exec(t.Context(), ws, coppice.ExecRequest{Command: []string{"echo", "hello"}})
	if err != nil || out.Stdout != "hello\n" {
		t.Fatalf("%+v, %v", out, err)
	}
}

// TestControllerAndRunner runs both as processes: a runner joins, machines work, and a controller that is killed comes back to
// machines that have gone on.
func TestControllerAndRunner(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	r := c.join(nil)
	ws := create(t, c.client)
	echo(t, c.client, ws.ID)
	forked, err := c.client.ForkWorkspace(t.Context(), ws.ID, coppice.ForkWorkspaceRequest{Count: new(3)})
	if err != nil || len(forked.Children) != 3 {
		t.Fatalf("%+v, %v", forked, err)
	}

	// Another controller on the same database needs the key file, and then serves the same machines.
	other := c.cfg
	other.Listen, other.RunnerListen, other.KeyFile = "127.0.0.1:0", "127.0.0.1:0", c.dir+"/absent.key"
	alone := begin(t, "controller", serverConfig{Controller: other}, nil)
	if status := alone.wait(t); status == 0 || !strings.Contains(alone.text(t), "copy it from the controller that was started first") {
		t.Errorf("without the key file: status %d, %s", status, alone.text(t))
	}
	other.KeyFile = c.cfg.KeyFile
	var second daemon.ControllerReady
	begin(t, "controller", serverConfig{Controller: other}, &second)
	echo(t, c.connect(second.Server), ws.ID)

	c.kill()
	echo(t, c.connect(second.Server), forked.Children[0].Workspace.ID)
	c.start()
	echo(t, c.client, ws.ID)

	if status := r.stop(t); status != 0 {
		t.Errorf("the runner ended with status %d:\n%s", status, r.text(t))
	}
	// It knows itself by its certificate: a second start needs no token, and it is the same runner.
	was := r.ready.RunnerID
	r.cfg.Runner.JoinToken = ""
	r.process = begin(t, "runner", r.cfg, &r.ready)
	if r.ready.RunnerID != was {
		t.Errorf("the runner came back as %s, was %s", r.ready.RunnerID, was)
	}
	if status := c.stop(t); status != 0 {
		t.Errorf("the controller ended with status %d:\n%s", status, c.text(t))
	}
}

// TestRunnerOfAnotherVMM starts a runner again with another VMM: what it kept cannot be forked on that, by the name of the field, and can once
// the runner is what it was. Machines of a VMM that it does not know are lost, with that cause.
func TestRunnerOfAnotherVMM(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	r := c.join(func(rc *daemon.RunnerConfig) { rc.Leave = true })
	ctx := t.Context()
	lives, sleeps := create(t, c.client), create(t, c.client)
	cp, err := c.client.CreateCheckpoint(ctx, lives.ID, coppice.CreateCheckpointRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.client.SuspendWorkspace(ctx, sleeps.ID); err != nil {
		t.Fatal(err)
	}
	again := func(fp vmm.Fingerprint) {
		t.Helper()
		if status := r.stop(t); status != 0 {
			t.Fatalf("the runner ended with status %d:\n%s", status, r.text(t))
		}
		r.cfg.VMM, r.cfg.Runner.JoinToken = fp, ""
		r.process = begin(t, "runner", r.cfg, &r.ready)
	}
	again(vmm.Fingerprint{VMM: "other", Version: "53.0", Detail: "because a test says so"})
	for what, err := range map[string]error{
		"fork": func() error {
			_, err := c.client.ForkCheckpoint(ctx, cp.ID, coppice.ForkCheckpointRequest{})
			return err
		}(),
		"resume": func() error { _, err := c.client.ResumeWorkspace(ctx, sleeps.ID); return err }(),
	} {
		wantCode(t, err, core.CodeIncompatibleHost)
		if err != nil && !strings.Contains(err.Error(), "its vmm is \"fake\" and the runner's is \"other\"") {
			t.Errorf("%s: %v", what, err)
		}
	}
	for got, err := range c.client.Runners(ctx) {
		if err != nil || got.Class.VMM != "other" || got.Class.VMMVersion != "53.0" || got.KVM != "because a test says so" {
			t.Errorf("the runner is %+v, %v", got, err)
		}
	}
	until(t, "the workspace is lost", func() (bool, error) {
		ws, err := c.client.Workspace(ctx, lives.ID)
		if err == nil && ws.State == coppice.WorkspaceLost && (ws.Failure == nil || !strings.Contains(ws.Failure.Message, `its VMM is "fake", which this runner does not know`)) {
			t.Errorf("it was lost because of %+v", ws.Failure)
		}
		return err == nil && ws.State == coppice.WorkspaceLost, err
	})
	fresh := create(t, c.client)
	echo(t, c.client, fresh.ID)

	again(vmm.Fingerprint{})
	if _, err := c.client.ResumeWorkspace(ctx, sleeps.ID); err != nil {
		t.Fatal(err)
	}
	echo(t, c.client, sleeps.ID)
	forked, err := c.client.ForkCheckpoint(ctx, cp.ID, coppice.ForkCheckpointRequest{})
	if err != nil || len(forked.Children) != 1 {
		t.Fatalf("%+v, %v", forked, err)
	}
	echo(t, c.client, forked.Children[0].Workspace.ID)
}

// TestFollowOutlivesControllers follows a program's output, and waits for its end, through the death of the controller.
func TestFollowOutlivesControllers(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.join(nil)
	ws := create(t, c.client)
	session, err := c.client.StartSession(t.Context(), ws.ID, coppice.ExecRequest{Command: []string{"cat"}, StdinOpen: true})
	if err != nil {
		t.Fatal(err)
	}
	// The client that follows is not told of the new one: the address is the same.
	follower := c.connect(c.ready.Server)
	var out bytes.Buffer
	var group errgroup.Group
	group.Go(func() error { return follower.Follow(t.Context(), session.ID, coppice.Stdout, 0, &out) })
	group.Go(func() error {
		got, err := follower.WaitSession(t.Context(), session.ID)
		if err == nil && (got.ExitCode == nil || *got.ExitCode != 0) {
			return fmt.Errorf("the session is %+v", got)
		}
		return err
	})
	want := ""
	for i := range 3 {
		text := fmt.Sprintf("line %d\n", i)
		want += text
		if err := c.client.WriteStdin(t.Context(), session.ID, strings.NewReader(text), i == 2); err != nil {
			t.Fatal(err)
		}
		if i < 2 {
			c.kill()
			c.start()
		}
	}
	if err := group.Wait(); err != nil || out.String() != want {
		t.Errorf("%q, want %q; %v", out.String(), want, err)
	}
}
