package e2e

import (
	"context"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/runner/pager"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestPoolLazy grows checkpoints on a host that has nothing of them, with a store that falls silent as soon as the children run. Their memory
// comes once the store speaks again, whatever happens to the runner meanwhile; with the pager it is lost, and with it the machines
// that had memory from there, but no checkpoint. The project encrypts: so the same is shown of the keys, which no process keeps.
func TestPoolLazy(t *testing.T) {
	if !*long {
		return // a guest counts as stalled only after minutes of a silent store: make faults
	}
	var pagers []int
	t.Cleanup(func() { // after everything has ended
		for _, pid := range pagers {
			if state, err := processState(pid); err == nil && state != 'Z' {
				t.Errorf("the pager (process %d) is left", pid)
			}
		}
	})
	p := newPool(t, "--runner-lease", "20s", "--runner-fence", "20s", "--master-key-file", masterKey(t))
	p.encrypt(t)
	f := &faultyPool{pool: p, first: p.join(), second: p.join()}
	f.plant(t)
	f.only(t, f.first)
	parent := f.forkOn(t, f.first, f.base)
	one := f.grow(t, parent, "one")
	two := f.grow(t, parent, "one", "two")
	terminate(t, f.first.stack, parent)
	p.checkEncrypted(t)

	elder := f.forkSilenced(t, one)
	pagers = append(pagers, f.second.pager(t).PID)
	answer := make(chan string, 1)
	go func() {
		res, err := p.Client.Exec(context.WithoutCancel(t.Context()), elder, coppice.ExecRequest{Command: []string{"sha256sum", "-c", "/root/lazy"}})
		if err != nil {
			answer <- err.Error()
			return
		}
		out, _, err := res.Output()
		answer <- strings.Join([]string{string(out), errText(err)}, "")
	}()
	machines := f.second.vmms()
	f.awaitStall(t, elder)
	if got := <-answer; !strings.Contains(got, "STORE_UNAVAILABLE") {
		t.Errorf("the command that waited for the store ended with %q", got)
	}
	f.wantRefused(t, elder)
	for pid := range machines {
		wantHeld(t, pid)
	}
	f.second.Kill()
	begun := time.Now()
	if err := f.second.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Logf("the runner was back after %.1f s, with the store silent", time.Since(begun).Seconds())
	until(t, "the child is taken over", func() (bool, error) {
		w, err := f.Client.Workspace(t.Context(), elder)
		return w.State == coppice.WorkspaceReady && w.Condition != coppice.ConditionUnknown, err
	})
	f.awaitStall(t, elder)
	if f.second.whole(t, one.id) {
		t.Fatal("all of the memory was here before the store fell silent: nothing was tested")
	}
	f.second.Relay.Resume()
	until(t, "the child goes on", func() (bool, error) {
		w, err := f.Client.Workspace(t.Context(), elder)
		return w.State == coppice.WorkspaceReady && w.Condition == "" && w.Stall == nil, err
	})
	compare(t, "the child, later", after(f.was, "one", "on"), step(t, f.second.stack, elder, "on"))
	if got := execute(t, f.second.stack, elder, "sha256sum", "-c", "/root/lazy"); got != "/dev/shm/one: OK\n" {
		t.Errorf("the child has %q", got)
	}
	sameBytes(t, f.first, f.second, one.id)
	if now := f.second.vmms(); len(now) != 1 || len(machines) != 1 || !sameKeys(now, machines) {
		t.Errorf("the machines were %v and are %v", machines, now)
	}

	younger := f.forkSilenced(t, two)
	if f.second.whole(t, two.id) {
		t.Fatal("all of the younger's memory was here before the store fell silent: nothing was tested")
	}
	was := f.second.pager(t)
	if was.PID != pagers[0] {
		t.Errorf("the pager was process %d and is %d", pagers[0], was.PID)
	}
	if err := syscall.Kill(was.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for _, id := range []coppice.WorkspaceID{elder, younger} {
		if w := f.awaitLost(t, id, "SANDBOX_LOST"); w.Failure != nil && !strings.Contains(w.Failure.Message, "pager") {
			t.Errorf("a machine that had memory from the pager was lost because %q", w.Failure.Message)
		}
	}
	f.second.Relay.Resume()
	again := f.forkOn(t, f.second, two)
	sameBytes(t, f.first, f.second, two.id)
	now := f.second.pager(t)
	if now.Instance == was.Instance {
		t.Error("the pager that was killed serves")
	}
	pagers = append(pagers, now.PID)
	terminate(t, f.second.stack, again)
}

// awaitStall waits until a workspace is reported to wait for the store.
func (f *faultyPool) awaitStall(t *testing.T, id coppice.WorkspaceID) {
	t.Helper()
	begun := time.Now()
	until(t, "the workspace is stalled", func() (bool, error) {
		w, err := f.Client.Workspace(t.Context(), id)
		if w.Condition != coppice.ConditionStalled {
			return false, err
		}
		if w.State != coppice.WorkspaceReady || w.Stall == nil || w.Stall.Code != "STORE_UNAVAILABLE" || !strings.Contains(w.Stall.Message, "object v1/") {
			t.Errorf("it is %s and stands still because %+v", w.State, w.Stall)
		}
		t.Logf("it was reported after %.1f s, %.1f s after it began to wait", time.Since(begun).Seconds(), time.Since(w.Stall.Since).Seconds())
		return true, err
	})
}

// wantRefused asks a workspace that waits for the store for what it cannot do then.
func (f *faultyPool) wantRefused(t *testing.T, id coppice.WorkspaceID) {
	t.Helper()
	begun := time.Now()
	_, execErr := f.Client.Exec(t.Context(), id, coppice.ExecRequest{Command: []string{"true"}})
	_, captureErr := f.Client.CreateCheckpoint(t.Context(), id, coppice.CreateCheckpointRequest{})
	took := time.Since(begun)
	for what, err := range map[string]error{"a command": execErr, "a checkpoint": captureErr} {
		if !strings.Contains(errText(err), "STORE_UNAVAILABLE") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if took > 30*time.Second { // half of the time for which a guest is waited for that is not known to be stalled
		t.Errorf("the refusals took %s", took)
	}
}

// wantHeld wants all threads of a process to be stopped but those that wait for a page.
func wantHeld(t *testing.T, pid int) {
	t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	if err != nil || len(threads) == 0 {
		t.Fatalf("%v, %v", threads, err)
	}
	for _, dir := range threads {
		thread, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			t.Fatal(err)
		}
		if state, err := processState(thread); err != nil || state != 'T' && state != 'D' {
			t.Errorf("thread %d of the held process %d is in state %c, %v", thread, pid, state, err)
		}
	}
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func sameKeys(a, b map[int]string) bool {
	for k := range a {
		if _, there := b[k]; !there {
			return false
		}
	}
	return true
}

// grow has a parent make the last step of a path and fill memory, more than is fetched before a fork runs, and captures it.
func (f *faultyPool) grow(t *testing.T, parent coppice.WorkspaceID, path ...string) grown {
	t.Helper()
	label := path[len(path)-1]
	compare(t, "the parent", after(f.was, path...), step(t, f.first.stack, parent, label))
	file := "/dev/shm/" + label
	execute(t, f.first.stack, parent, "sh", "-c", "head -c 40000000 /dev/urandom > "+file+" && sha256sum "+file+" >> /root/lazy")
	return f.capture(t, parent, path)
}

// storePace is how fast a host fetches before the store is silenced: on a busy machine a fork takes seconds, in which all of its memory
// would come.
const storePace = 2 << 20

// forkSilenced grows a child on the second host and silences the store at once.
func (f *faultyPool) forkSilenced(t *testing.T, g grown) coppice.WorkspaceID {
	t.Helper()
	f.only(t, f.second)
	f.second.Relay.Pace(storePace)
	defer f.second.Relay.Pace(0)
	res, err := f.Client.ForkCheckpoint(t.Context(), g.id, coppice.ForkCheckpointRequest{})
	f.second.Relay.Hold()
	if err != nil || len(ids(res)) != 1 {
		t.Fatalf("fork on %s: %+v, %v", f.second.Name, res, err)
	}
	return ids(res)[0]
}

// pager asks the host's pager who it is.
func (h *poolHost) pager(t *testing.T) (hello pager.Hello) {
	t.Helper()
	until(t, "the pager of the "+h.Name+" answers", func() (bool, error) {
		var err error
		hello, err = pager.NewClient(pager.SocketPath(filepath.Join(h.runDir(), "pager"))).Hello(t.Context())
		return err == nil, nil
	})
	return hello
}
