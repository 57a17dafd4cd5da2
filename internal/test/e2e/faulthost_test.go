package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/test/testprog"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// Leases that a row can wait for. The runner ends its machines two seconds before the controller gives it up.
var shortLeases = []string{"--runner-lease", "6s", "--runner-fence", "4s"}

// replant makes another parent of the first checkpoint, for those whose machine is lost by design.
func (in *installation) replant(t *testing.T) {
	t.Helper()
	in.converge(t, time.Now())
	res, err := in.host.client.ForkCheckpoint(t.Context(), in.base(), coppice.ForkCheckpointRequest{})
	if err != nil || res.Children[0].Workspace == nil {
		t.Fatalf("another parent: %+v, %v", res, err)
	}
	in.parent, in.path = res.Children[0].Workspace.ID, slices.Clone(in.acked[0].path)
}

// awaitLost waits until the parent is lost with its runner.
func (in *installation) awaitLost(t *testing.T, code string) coppice.Workspace {
	t.Helper()
	var w coppice.Workspace
	unknown := false
	until(t, "the parent is lost", func() (bool, error) {
		var err error
		w, err = in.host.client.Workspace(t.Context(), in.parent)
		unknown = unknown || w.Condition == coppice.ConditionUnknown
		return w.State == coppice.WorkspaceLost, err
	})
	if w.Failure == nil || w.Failure.Code != code || w.Failure.Message == "" {
		t.Errorf("the parent is lost because %+v, want %s", w.Failure, code)
	}
	if !unknown && code == "RUNNER_LOST" {
		t.Error("the parent was lost without having been unknown before")
	}
	return w
}

// partition cuts the runner off. Its machines have ended before the controllers give them up; when it is heard again all is well.
func partition(maySend bool) func(*testing.T, *installation) {
	return func(t *testing.T, in *installation) {
		t.Helper()
		in.restartControllers(t, shortLeases...)
		in.awaitParent(t)
		in.awaitHeartbeats(t)
		in.far.cut(t, maySend)
		captured := make(chan error, 1)
		go func() {
			_, err := in.host.client.CreateCheckpoint(context.WithoutCancel(t.Context()), in.parent, coppice.CreateCheckpointRequest{})
			captured <- err
		}()
		in.awaitLost(t, "RUNNER_LOST")
		if left := in.host.vmms(); len(left) > 0 {
			t.Errorf("the parent is given up, and %d machines live on", len(left))
		}
		err := <-captured
		var e *coppice.Error
		if !errors.As(err, &e) || e.Code == coppice.CodeInternal {
			t.Errorf("a checkpoint at a runner that is cut off: %v", err)
		}
		t.Logf("a checkpoint meanwhile: %v", err)
		in.far.mend(t)
		in.converge(t, time.Now())
		in.restartControllers(t)
		in.replant(t)
	}
}

// awaitHeartbeats waits until the runner has been told the present leases.
func (in *installation) awaitHeartbeats(t *testing.T) {
	t.Helper()
	began := in.sql(t, `SELECT now()::text`)[0]
	until(t, "the runner has had an answer", func() (bool, error) {
		// One that came after another, by the length of the lease that is new.
		return len(in.sql(t, `SELECT id FROM runners WHERE lease_expires_at > $1::timestamptz + interval '12 s' AND lease_expires_at < now() + interval '7 s'`, began)) == 1, nil
	})
}

// zombie stops the runner in the middle of a capture until it is given up, and lets it go on: it ends its machines, and no word of it
// brings a workspace back. The capture it had in hand is of before the loss: it may be refused, and if it counts it must be whole.
func zombie(t *testing.T, in *installation) {
	t.Helper()
	in.restartControllers(t, shortLeases...)
	in.rearm(t, in.runner, "capture.copied=stop")
	in.awaitParent(t)
	captured := make(chan error, 1)
	var late coppice.Checkpoint
	go func() {
		var err error
		late, err = in.host.client.CreateCheckpoint(context.WithoutCancel(t.Context()), in.parent, coppice.CreateCheckpointRequest{Name: "late"})
		captured <- err
	}()
	in.runner.awaitStopped(t)
	lost := in.awaitLost(t, "RUNNER_LOST")
	in.runner.signal(t, syscall.SIGCONT)
	counts := 0
	if err := <-captured; err == nil {
		in.acknowledge(late.ID)
		counts = 1
	} else {
		t.Logf("the late capture: %v", err)
	}
	within(t, convergence, "the machines of a runner that was given up have ended", func() (bool, error) { return len(in.host.vmms()) == 0, nil })
	in.converge(t, time.Now())
	if there := in.sql(t, `SELECT id FROM checkpoints WHERE name = 'late' AND state NOT IN ('failed', 'deleted')`); len(there) != counts {
		t.Errorf("the late capture is %q, and %d were acknowledged", there, counts)
	}
	if now := workspace(t, in.host, lost.ID); now.State != coppice.WorkspaceLost || now.Epoch != lost.Epoch || now.CheckpointID != lost.CheckpointID {
		t.Errorf("the lost workspace was %+v and is %+v", lost, now)
	}
	in.restartControllers(t)
	in.replant(t)
}

// goingDown is XFS_IOC_GOINGDOWN; withoutLog makes it forget whatever is not on the disk, as a power cut does.
const (
	goingDown  = 0x8004587d
	withoutLog = 2
)

// powerCut ends everything on the runner's host at once, with what its file system had not written, at a step of a capture.
func powerCut(point string) func(*testing.T, *installation) {
	return func(t *testing.T, in *installation) {
		t.Helper()
		last := in.capture(t) // acknowledged just before: it must be whole
		captured := make(chan error, 1)
		if point != "" {
			in.rearm(t, in.runner, point+"=stop")
			in.awaitParent(t)
			go func() {
				_, err := in.host.client.CreateCheckpoint(context.WithoutCancel(t.Context()), in.parent, coppice.CreateCheckpointRequest{Name: "cut"})
				captured <- err
			}()
			in.runner.awaitStopped(t)
		}
		volume := filepath.Join(in.host.data, "volume")
		made := exists(volume)
		if made {
			dir, err := os.Open(volume)
			if err != nil {
				t.Fatal(err)
			}
			err = unix.IoctlSetPointerInt(int(dir.Fd()), goingDown, withoutLog)
			if err := errors.Join(err, dir.Close()); err != nil {
				t.Fatalf("shut the volume down: %v", err)
			}
		} else {
			t.Log("the temporary directory has reflink: there is no volume to lose unwritten data with")
		}
		in.runner.kill()
		in.host.reboot(t)
		in.startRunner(t, "")
		w := in.awaitLost(t, "SANDBOX_LOST")
		t.Logf("the parent is lost: %s", w.Failure.Message)
		if point != "" {
			if err := <-captured; err == nil {
				t.Error("a capture that the power cut was acknowledged")
			}
			if there := in.sql(t, `SELECT id FROM checkpoints WHERE name = 'cut' AND state NOT IN ('failed', 'deleted')`); len(there) > 0 {
				t.Errorf("the capture %q counts", there)
			}
		}
		if in.acked[len(in.acked)-1].id != last {
			t.Fatal("another checkpoint was acknowledged meanwhile")
		}
		in.replant(t)
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// upgrade ends the runner as a package manager does, and starts another file in its place.
func upgrade(t *testing.T, in *installation) {
	t.Helper()
	in.runner.kill()
	in.startRunner(t, "", "--stop-vms=false")
	before := in.host.mustMachine(t, in.parent).pid
	if err := in.runner.end(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code := in.runner.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("the runner ended with %v", in.runner.cmd.ProcessState)
	}
	old := in.runner.binary
	in.runner.binary = filepath.Join(in.dir, "coppice-next")
	program, err := os.ReadFile(old)
	if err != nil {
		t.Fatal(err)
	}
	testprog.Write(t, in.runner.binary, program)
	in.startRunner(t, "")
	in.awaitParent(t)
	if now := in.host.mustMachine(t, in.parent).pid; now != before {
		t.Errorf("the parent's VMM was %d and is %d", before, now)
	}
}

// diskStalls freezes the runner's file system: whatever writes to it waits in the kernel.
func diskStalls(t *testing.T, in *installation) {
	t.Helper()
	const stall = 20 * time.Second
	volume := filepath.Join(in.host.data, "volume")
	if !exists(volume) {
		t.Log("the temporary directory has reflink: there is no volume of the runner's own to stall")
		return
	}
	dir, err := os.Open(volume)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	const freeze, thaw = 0xc0045877, 0xc0045878 // FIFREEZE, FITHAW
	if err := unix.IoctlSetInt(int(dir.Fd()), freeze, 0); err != nil {
		t.Fatal(err)
	}
	goOn := func() error { return unix.IoctlSetInt(int(dir.Fd()), thaw, 0) }
	defer func() { _ = goOn() }() // for a test that fails
	done := make(chan error, 2)
	var made forked
	go func() {
		c, err := in.host.client.CreateCheckpoint(t.Context(), in.parent, coppice.CreateCheckpointRequest{Name: "stalled"})
		if err == nil {
			in.acknowledge(c.ID)
		}
		done <- err
	}()
	go func() {
		var err error
		made.result, err = in.forkAs(t.Context(), 0, "stalled")
		done <- err
	}()
	slowest := time.Duration(0)
	for began := time.Now(); time.Since(began) < stall; hold(100 * time.Millisecond) {
		at := time.Now()
		if _, err := in.host.client.Workspace(t.Context(), in.parent); err != nil {
			t.Errorf("a read while the disk stalls: %v", err)
		}
		slowest = max(slowest, time.Since(at))
	}
	t.Logf("reads took up to %s", slowest)
	if slowest > stall/2 {
		t.Errorf("a read took %s: it waited for the disk", slowest)
	}
	if err := goOn(); err != nil {
		t.Fatal(err)
	}
	for range cap(done) {
		if err := <-done; err != nil {
			t.Errorf("what waited for the disk has failed: %v", err)
		}
	}
	in.checkFork(t, "stalled", made.result)
}

// fullDisk takes all room of the runner's volume: a capture and a fork say so or are done, and others go on.
func fullDisk(t *testing.T, in *installation) {
	t.Helper()
	if !exists(filepath.Join(in.host.data, "volume")) {
		t.Log("the temporary directory has reflink: there is no small disk to fill")
		return
	}
	filler := filepath.Join(in.host.data, "volume", "filler")
	fill(t, filler)
	_, err := in.host.client.CreateCheckpoint(t.Context(), in.parent, coppice.CreateCheckpointRequest{})
	if e := wantCode(t, err, coppice.CodeDiskFull); !strings.Contains(e.Detail, "delete checkpoints") {
		t.Errorf("a capture without room: %v", e)
	}
	compareAlive(t, in.host, in.parent)
	in.limited(t, "no-room", "DISK_FULL", "delete checkpoints")
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
}

// limited wants a fork to have been made, or to have failed for the limit that it names, with nothing left.
func (in *installation) limited(t *testing.T, name, code, says string) (met bool) {
	t.Helper()
	res, err := in.forkAs(t.Context(), 0, name)
	if err == nil {
		for _, id := range ids(res) {
			terminate(t, in.host, id)
		}
		met = len(ids(res)) < children
	} else {
		// The controller refuses what it has heard to be impossible; what the runner refuses first is a failed fork.
		var e *coppice.Error
		if errors.As(err, &e) && e.Code == coppice.Code(code) {
			if !strings.Contains(e.Detail, says) {
				t.Errorf("a fork beyond a limit: %v, want %q in it", err, says)
			}
		} else {
			_ = wantCode(t, err, coppice.CodeForkFailed)
		}
		met = true
	}
	for _, why := range in.sql(t, `SELECT failure_code || ': ' || failure_message FROM workspaces WHERE name LIKE $1 AND state = 'failed'`, name+"-%") {
		t.Log(why)
		if !strings.HasPrefix(why, code+": ") || !strings.Contains(why, says) {
			t.Errorf("a child failed with %q, want %s and %q in it", why, code, says)
		}
	}
	return met
}

// noDescriptors lets the runner open no more files.
func noDescriptors(t *testing.T, in *installation) {
	t.Helper()
	pid := in.runner.pid()
	var was unix.Rlimit
	if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &was); err != nil {
		t.Fatal(err)
	}
	restore := func() {
		if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, &was, nil); err != nil && in.runner.lives() {
			t.Error(err)
		}
	}
	defer restore()
	met := false
	for _, spare := range []int{12, 6, 3} {
		if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: limitWithSpare(t, pid, spare), Max: was.Max}, nil); err != nil {
			t.Fatal(err)
		}
		met = in.limited(t, fmt.Sprintf("descriptors-%d", spare), "CAPACITY", "LimitNOFILE=") || met
	}
	if !met {
		t.Error("no fork has met the limit of open files")
	}
	if !in.runner.lives() {
		t.Error("the runner has ended")
	}
	compareAlive(t, in.host, in.parent)
	restore()
}

// limitWithSpare is the limit of open files with which a process can open so many more.
func limitWithSpare(t *testing.T, pid, spare int) uint64 {
	t.Helper()
	for n := 0; ; n++ {
		if exists(fmt.Sprintf("/proc/%d/fd/%d", pid, n)) {
			continue
		}
		if spare--; spare == 0 {
			return uint64(n) + 1
		}
	}
}

// crashInCapture crashes a VMM while its capture is under way.
func crashInCapture(t *testing.T, in *installation) {
	t.Helper()
	child := in.hangInCapture(t, "capture.paused", "crash", syscall.SIGKILL) // the first process of a namespace ignores other signals from outside
	w := workspace(t, in.host, child)
	if w.State != coppice.WorkspaceLost || w.Failure == nil || !strings.Contains(w.Failure.Message, "kill") {
		t.Errorf("the workspace is %s because %+v, want lost with the signal", w.State, w.Failure)
	}
}

// hangInCapture sends a signal to the VMM of a fork of the base at a step of its capture, and returns the fork when the capture has
// failed.
func (in *installation) hangInCapture(t *testing.T, point, name string, sig syscall.Signal) coppice.WorkspaceID {
	t.Helper()
	in.rearm(t, in.runner, point+"=stop")
	in.awaitParent(t)
	child := forkOne(t, in.host, in.base())
	m := in.host.mustMachine(t, child)
	captured := make(chan error, 1)
	go func() {
		_, err := in.host.client.CreateCheckpoint(context.WithoutCancel(t.Context()), child, coppice.CreateCheckpointRequest{Name: name})
		captured <- err
	}()
	in.runner.awaitStopped(t)
	if err := syscall.Kill(m.pid, sig); err != nil {
		t.Fatal(err)
	}
	until(t, "the signal has taken the VMM", func() (bool, error) { // on a busy host the rest of a capture takes less
		state, err := processState(m.pid)
		return err != nil || state == 'T' || state == 'Z' || state == 'X', nil //nolint:nilerr // it is gone
	})
	began := time.Now()
	in.runner.signal(t, syscall.SIGCONT)
	err := <-captured
	t.Logf("after %.1f s: %v", time.Since(began).Seconds(), err)
	var e *coppice.Error
	if !errors.As(err, &e) || e.Code == coppice.CodeInternal || e.Detail == "" {
		t.Errorf("the capture ended with %v, want a typed error", err)
	}
	if took := time.Since(began); took > time.Minute {
		t.Errorf("it took %s", took)
	}
	until(t, "the workspace is settled", func() (bool, error) {
		w, err := in.host.client.Workspace(t.Context(), child)
		_, lives := in.host.vmms()[m.pid]
		return !moving(w) && lives == (w.State == coppice.WorkspaceReady), err
	})
	return child
}

// stopInCapture stops a VMM in the middle of its capture for good: what was asked ends in time, with the cause.
func stopInCapture(t *testing.T, in *installation) {
	t.Helper()
	child := in.hangInCapture(t, "capture.frozen", "hang", syscall.SIGSTOP)
	w := workspace(t, in.host, child)
	if w.State != coppice.WorkspaceLost || w.Failure == nil || w.Failure.Message == "" {
		t.Errorf("the workspace is %s because %+v, want lost with the cause", w.State, w.Failure)
	}
}

// noMemory lets the kernel kill a VMM for want of memory.
func noMemory(t *testing.T, in *installation) {
	t.Helper()
	child := forkOne(t, in.host, in.base())
	m := in.host.mustMachine(t, child)
	group, limit := "/sys/fs/cgroup/memory/cpf-e2e-oom", "memory.limit_in_bytes"
	if !exists("/sys/fs/cgroup/memory/" + limit) {
		group, limit = "/sys/fs/cgroup/cpf-e2e-oom", "memory.max"
	}
	if err := os.Mkdir(group, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		until(t, "the group is empty", func() (bool, error) { return os.Remove(group) == nil, nil })
	})
	const little = "8388608"
	if err := os.WriteFile(filepath.Join(group, limit), []byte(little), 0o600); err != nil {
		t.Logf("no limit of memory can be set here (%v): the machine is killed as the kernel does it", err)
		in.host.killVMM(t, m.pid)
	}
	if err := os.WriteFile(filepath.Join(group, "cgroup.procs"), []byte(strconv.Itoa(m.pid)), 0o600); err != nil && !errors.Is(err, syscall.ESRCH) {
		t.Fatal(err)
	}
	// It may be cut off in the middle.
	_, _ = in.host.client.Exec(t.Context(), child, coppice.ExecRequest{Command: []string{"dd", "if=/dev/urandom", "of=/dev/shm/x", "bs=1M", "count=96", "status=none"}})
	until(t, "the workspace is lost", func() (bool, error) {
		w, err := in.host.client.Workspace(t.Context(), child)
		return w.State == coppice.WorkspaceLost, err
	})
	if w := workspace(t, in.host, child); w.Failure == nil || !strings.Contains(w.Failure.Message, "kill") {
		t.Errorf("it is lost because %+v, want that it was killed", w.Failure)
	}
	// And a runner: its machines go on without it.
	in.runner.kill()
	in.heal(t)
	in.awaitParent(t)
}

// sameSecond forks one checkpoint again and again within a second or so: nobody is another's twin.
func sameSecond(t *testing.T, in *installation) {
	t.Helper()
	seen := map[string]string{}
	for i := range 3 {
		res, err := in.forkAs(t.Context(), i%2, fmt.Sprintf("twin-%d", i))
		if err != nil {
			t.Fatal(err)
		}
		for _, id := range ids(res) {
			w := workspace(t, in.host, id)
			drawn := execute(t, in.host, id, "cat", "/proc/sys/kernel/random/uuid", "/etc/machine-id")
			for _, v := range append(strings.Fields(drawn), w.Network.Generation, w.Network.MAC, w.Network.IP, w.Network.Hostname) {
				if other, taken := seen[v]; taken && other != id {
					t.Errorf("%s and %s both have %s", other, id, v)
				}
				seen[v] = id
			}
			// The next may have its address: all live at once.
			endWithTest(t, in.host, id)
		}
	}
}

// terminateInCapture ends a workspace while its checkpoint is being taken.
func terminateInCapture(t *testing.T, in *installation) {
	t.Helper()
	in.rearm(t, in.runner, "capture.copied=stop")
	in.awaitParent(t)
	child := forkOne(t, in.host, in.base())
	var kept coppice.Checkpoint
	captured, ended := make(chan error, 1), make(chan error, 1)
	go func() {
		var err error
		kept, err = in.host.client.CreateCheckpoint(context.WithoutCancel(t.Context()), child, coppice.CreateCheckpointRequest{Name: "last"})
		captured <- err
	}()
	in.runner.awaitStopped(t)
	go func() {
		_, err := in.host.client.TerminateWorkspace(context.WithoutCancel(t.Context()), child)
		ended <- err
	}()
	until(t, "the termination is asked for", func() (bool, error) {
		return len(in.sql(t, `SELECT id FROM operations WHERE workspace_id = $1 AND kind = 'terminate_workspace'`, child)) == 1, nil
	})
	in.runner.signal(t, syscall.SIGCONT)
	if err := <-ended; err != nil {
		t.Errorf("terminate: %v", err)
	}
	if err := <-captured; err == nil {
		in.acked = append(in.acked, acknowledged{kept.ID, slices.Clone(in.acked[0].path)})
	} else {
		var e *coppice.Error
		if !errors.As(err, &e) || e.Code == coppice.CodeInternal {
			t.Errorf("the capture: %v", err)
		}
		t.Logf("the capture: %v", err)
	}
}

// deleteInFork deletes a checkpoint that is being forked.
func deleteInFork(t *testing.T, in *installation) {
	t.Helper()
	child := forkOne(t, in.host, in.base())
	doomed := checkpoint(t, in.host, child)
	in.rearm(t, in.runner, "fork.journaled=stop")
	in.awaitParent(t)
	type outcome struct {
		res coppice.ForkResult
		err error
	}
	made := make(chan outcome, 1)
	go func() {
		res, err := in.host.client.ForkCheckpoint(context.WithoutCancel(t.Context()), doomed.ID, coppice.ForkCheckpointRequest{})
		made <- outcome{res, err}
	}()
	in.runner.awaitStopped(t)
	_ = wantCode(t, in.host.client.DeleteCheckpoint(t.Context(), doomed.ID), "CHECKPOINT_IN_USE")
	in.runner.signal(t, syscall.SIGCONT)
	got := <-made
	if got.err != nil || len(ids(got.res)) != 1 {
		t.Fatalf("%+v, %v", got.res, got.err)
	}
	if err := in.host.client.DeleteCheckpoint(t.Context(), doomed.ID); err != nil {
		t.Errorf("delete it now: %v", err)
	}
	id := ids(got.res)[0]
	compare(t, "a fork of a checkpoint that is gone", after(in.first, in.acked[0].path...), look(t, in.host, id))
	terminate(t, in.host, id)
}
