package e2e

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/test/testprog"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// faultyPool is a pool of two to which faults are done: what the first loses must go on on the second.
type faultyPool struct {
	*pool
	first, second *poolHost
	base          grown // sealed, and nothing runs in it but the witness
	was           sight
}

// TestPoolFaults does the rows of the fault matrix that are about more than one host to two runners, each on a host of its own.
func TestPoolFaults(t *testing.T) {
	if !*long {
		return // two hosts take minutes: make faults
	}
	p := newPool(t)
	f := &faultyPool{pool: p, first: p.join(), second: p.join()}
	f.plant(t)
	for _, c := range []struct {
		name string
		run  func(*testing.T, *faultyPool)
	}{
		{"cut off", cutOff(false)},
		{"may send", cutOff(true)},
		{"stopped in a seal", stoppedInSeal},
		{"reboot", rebooted},
		{"another class", anotherClass},
		{"deleted while it is fetched", deletedInFetch},
		{"store away", storeAway},
		{"changed in the store", changedInStore},
		{"changed in the store, with memory that comes later", changedLater},
	} {
		if !t.Run(c.name, func(t *testing.T) { c.run(t, f) }) {
			break // what is left of the pool is of no use
		}
	}
}

// plant makes the base on the first host.
func (f *faultyPool) plant(t *testing.T) {
	t.Helper()
	f.only(t, f.first)
	ws, err := f.Client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{Image: string(f.image), Resources: small()})
	if err != nil {
		t.Fatal(err)
	}
	upload(t, f.first.stack, ws.ID)
	f.was = startWitness(t, f.first.stack, ws.ID)
	execute(t, f.first.stack, ws.ID, "sh", "-c", writeContent)
	f.base = f.capture(t, ws.ID, nil)
	terminate(t, f.first.stack, ws.ID)
}

// only drains every host but those.
func (f *faultyPool) only(t *testing.T, hosts ...*poolHost) {
	t.Helper()
	for _, h := range f.hosts {
		if _, err := f.Client.DrainRunner(t.Context(), h.ID, !slices.Contains(hosts, h)); err != nil {
			t.Fatal(err)
		}
	}
}

// capture makes a checkpoint and waits until it is sealed.
func (f *faultyPool) capture(t *testing.T, ws coppice.WorkspaceID, path []string) grown {
	t.Helper()
	g := grown{id: checkpoint(t, f.first.stack, ws).ID, path: path}
	f.sealed(t, g.id)
	return g
}

// parent is a fork of the base on the first host that has made a step, with a sealed checkpoint of that.
func (f *faultyPool) parent(t *testing.T) (coppice.WorkspaceID, grown) {
	t.Helper()
	ws := f.forkOn(t, f.first, f.base)
	compare(t, "the parent", after(f.was, "on"), step(t, f.first.stack, ws, "on"))
	return ws, f.capture(t, ws, []string{"on"})
}

// forkOn grows a child on a host, which must have all that the checkpoint had, and go on.
func (f *faultyPool) forkOn(t *testing.T, h *poolHost, g grown) coppice.WorkspaceID {
	t.Helper()
	f.only(t, h)
	res, err := f.Client.ForkCheckpoint(t.Context(), g.id, coppice.ForkCheckpointRequest{})
	if err != nil || len(ids(res)) != 1 {
		t.Fatalf("fork on %s: %+v, %v", h.Name, res, err)
	}
	f.look(t, h, g, *res.Children[0].Workspace)
	return ids(res)[0]
}

func (f *faultyPool) look(t *testing.T, h *poolHost, g grown, ws coppice.Workspace) {
	t.Helper()
	if ws.RunnerID != h.ID {
		t.Errorf("the child is on %s, want %s", ws.RunnerID, h.ID)
	}
	compare(t, "a child on "+h.Name, after(f.was, g.path...), look(t, h.stack, ws.ID))
	if got := execute(t, h.stack, ws.ID, "sha256sum", "-c", "/root/sum"); got != sameContent {
		t.Errorf("a child on %s has %q", h.Name, got)
	}
}

// goesOn forks a checkpoint on a host and ends the child.
func (f *faultyPool) goesOn(t *testing.T, h *poolHost, g grown) {
	t.Helper()
	terminate(t, h.stack, f.forkOn(t, h, g))
}

// awaitLost waits until a workspace is lost for one of these reasons.
func (f *faultyPool) awaitLost(t *testing.T, id coppice.WorkspaceID, codes ...string) (w coppice.Workspace) {
	t.Helper()
	until(t, "the workspace is lost", func() (bool, error) {
		var err error
		w, err = f.Client.Workspace(t.Context(), id)
		return w.State == coppice.WorkspaceLost, err
	})
	if w.Failure == nil || !slices.Contains(codes, w.Failure.Code) {
		t.Errorf("it is lost because %+v, want one of %v", w.Failure, codes)
	}
	return w
}

// back waits until the first host, healed, has no machine of before and takes work again, and wants what was lost to stay so.
func (f *faultyPool) back(t *testing.T, lost coppice.Workspace, g grown) {
	t.Helper()
	within(t, 2*time.Minute, "the first runner is ready, with no machine", func() (bool, error) {
		for r, err := range f.Client.Runners(t.Context()) {
			if err != nil {
				return false, err
			}
			if r.ID == f.first.ID {
				return r.State != coppice.RunnerUnreachable && r.Allocated.Sandboxes == 0 && len(f.first.vmms()) == 0, nil
			}
		}
		return false, nil
	})
	f.goesOn(t, f.first, g)
	if now := workspace(t, f.first.stack, lost.ID); now.State != coppice.WorkspaceLost || now.Epoch != lost.Epoch {
		t.Errorf("the lost workspace was %+v and is %+v", lost, now)
	}
}

// cutOff cuts the first host off, from controller and store. Its machines have ended when they are given up, and what was sealed goes on elsewhere meanwhile.
func cutOff(maySend bool) func(*testing.T, *faultyPool) {
	return func(t *testing.T, f *faultyPool) {
		t.Helper()
		ws, g := f.parent(t)
		far := &farHost{path: f.first.Link.Path}
		far.cut(t, maySend)
		defer far.mend(t)
		codes := []string{"RUNNER_LOST"}
		if maySend { // on a connection that was open, the runner may still report that it has ended the machine itself
			codes = append(codes, "SANDBOX_LOST")
		}
		lost := f.awaitLost(t, ws, codes...)
		if left := f.first.vmms(); len(left) > 0 {
			t.Errorf("the workspace is given up, and %d machines live on", len(left))
		}
		f.goesOn(t, f.second, g)
		far.mend(t)
		f.back(t, lost, g)
	}
}

// stoppedInSeal stops the first runner when it has written a checkpoint to the store and not said so, until it is given up, and lets it go on:
// its machines end, its word does not count, and the checkpoint, which it has still, is sealed again.
func stoppedInSeal(t *testing.T, f *faultyPool) {
	t.Helper()
	ws, g := f.parent(t)
	f.first.Kill()
	if err := f.first.Start(t.Context(), failpointsVariable+"=seal.written=stop"); err != nil {
		t.Fatal(err)
	}
	until(t, "the parent is taken over", func() (bool, error) {
		w, err := f.Client.Workspace(t.Context(), ws)
		return w.State == coppice.WorkspaceReady && w.Condition != coppice.ConditionUnknown, err
	})
	late := grown{path: []string{"on", "late"}}
	compare(t, "the parent", after(f.was, late.path...), step(t, f.first.stack, ws, "late"))
	late.id = checkpoint(t, f.first.stack, ws).ID
	f.first.awaitStopped(t)
	lost := f.awaitLost(t, ws, "RUNNER_LOST")
	if cp, err := f.Client.Checkpoint(t.Context(), late.id); err != nil || cp.State != coppice.CheckpointCaptured {
		t.Errorf("what was not said to be sealed is %s, %v", cp.State, err)
	}
	f.goesOn(t, f.second, g)
	if err := f.first.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	f.back(t, lost, g)
	f.sealed(t, late.id)
	if n := f.sealedBy(t, late.id); n < 2 {
		t.Errorf("the checkpoint was sealed by attempt %d, which was that of a lease that had ended", n)
	}
	f.goesOn(t, f.second, late)
}

// sealedBy is the attempt by which a checkpoint was sealed, as the controller logs it.
func (f *faultyPool) sealedBy(t *testing.T, id coppice.CheckpointID) int {
	t.Helper()
	log, err := os.ReadFile(f.Controller.Log)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(log)) {
		var x struct {
			Msg          string
			CheckpointID string `json:"checkpoint_id"`
			Attempt      int
		}
		if json.Unmarshal([]byte(line), &x) == nil && x.Msg == "checkpoint sealed" && x.CheckpointID == id {
			return x.Attempt
		}
	}
	t.Fatalf("the controller's log does not say that %s was sealed", id)
	return 0
}

// awaitStopped waits until the runner has stopped itself at a failpoint.
func (h *poolHost) awaitStopped(t *testing.T) {
	t.Helper()
	until(t, "the "+h.Name+" has stopped", func() (bool, error) {
		state, err := processState(h.PID())
		return state == 'T', err
	})
}

// rebooted ends everything on the first host at once. What it had on its disk it has again.
func rebooted(t *testing.T, f *faultyPool) {
	t.Helper()
	ws, g := f.parent(t)
	f.first.Kill()
	f.first.reboot(t)
	lost := f.awaitLost(t, ws, "RUNNER_LOST")
	f.goesOn(t, f.second, g)
	if err := f.first.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.back(t, lost, g)
}

// anotherClass joins a host whose QEMU is of another version: nothing of the tree is placed there, and nothing made.
func anotherClass(t *testing.T, f *faultyPool) {
	t.Helper()
	qemu, err := exec.LookPath("qemu-system-x86_64")
	if err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(t.TempDir(), "qemu-system-x86_64")
	testprog.Write(t, other, []byte("#!/bin/sh\n[ \"$1\" = --version ] && exec echo QEMU emulator version 99.0.0\nexec "+qemu+" \"$@\"\n"))
	t.Setenv("COPPICE_QEMU", other)
	third := f.join()
	t.Setenv("COPPICE_QEMU", "")
	f.only(t, third)
	_, err = f.Client.ForkCheckpoint(t.Context(), f.base.id, coppice.ForkCheckpointRequest{})
	if e := wantCode(t, err, "INCOMPATIBLE_HOST"); !strings.Contains(e.Detail, "99.0.0") {
		t.Errorf("it does not name what differs: %v", e)
	}
	if n := len(third.vmms()); n > 0 || exists(third.Checkpoint(f.base.id)) {
		t.Errorf("%d machines were started there, or the checkpoint was fetched", n)
	}
	f.only(t, f.first, f.second, third)
	res, err := f.Client.ForkCheckpoint(t.Context(), f.base.id, coppice.ForkCheckpointRequest{Count: new(4), Spread: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range res.Children {
		if c.Workspace.RunnerID == third.ID {
			t.Error("a child was placed on a host of another class")
		}
		terminate(t, f.first.stack, c.Workspace.ID)
	}
}

// deletedInFetch deletes a checkpoint while the second host brings it from the store: not while it is needed, and then without harm to what grew of it.
func deletedInFetch(t *testing.T, f *faultyPool) {
	t.Helper()
	ws, doomed := f.parent(t)
	terminate(t, f.first.stack, ws)
	f.second.Kill()
	if err := f.second.Start(t.Context(), failpointsVariable+"=fetch.begun=stop"); err != nil {
		t.Fatal(err)
	}
	f.only(t, f.second)
	type outcome struct {
		res coppice.ForkResult
		err error
	}
	made := make(chan outcome, 1)
	go func() {
		res, err := f.Client.ForkCheckpoint(context.WithoutCancel(t.Context()), doomed.id, coppice.ForkCheckpointRequest{})
		made <- outcome{res, err}
	}()
	f.second.awaitStopped(t)
	_ = wantCode(t, f.Client.DeleteCheckpoint(t.Context(), doomed.id), "CHECKPOINT_IN_USE")
	if err := f.second.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	got := <-made
	if got.err != nil || len(ids(got.res)) != 1 {
		t.Fatalf("%+v, %v", got.res, got.err)
	}
	if err := f.Client.DeleteCheckpoint(t.Context(), doomed.id); err != nil {
		t.Errorf("delete it now: %v", err)
	}
	child := *got.res.Children[0].Workspace
	f.look(t, f.second, doomed, child)
	terminate(t, f.second.stack, child.ID)
}
