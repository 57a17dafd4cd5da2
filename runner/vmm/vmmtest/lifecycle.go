package vmmtest

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// ended waits for the end of a machine and returns its exit.
func (m *machine) ended(t *testing.T) vmm.Exit {
	t.Helper()
	select {
	case <-m.Done():
	case <-time.After(Patience):
		t.Fatalf("the machine does not end; its console ends with %q", end(m.Console()))
	}
	exit := m.Exit()
	if exit.At.IsZero() || exit.Status == "" || time.Since(exit.At) > Patience {
		t.Errorf("the exit is not complete: %+v", exit)
	}
	return exit
}

// allGone checks that every method returns ErrGone, and that Kill and Release do no harm.
func (m *machine) allGone(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	spec := m.w.template.restoreSpec(t)
	to := open(t, m.w.path(), os.O_WRONLY|os.O_CREATE)
	for name, call := range map[string]func() error{
		"Boot":       func() error { return m.Boot(ctx) },
		"Restore":    func() error { return m.Restore(ctx, spec) },
		"Pause":      func() error { return m.Pause(ctx) },
		"Resume":     func() error { return m.Resume(ctx) },
		"SaveState":  func() error { return m.SaveState(ctx, to) },
		"Memory":     func() error { _, err := m.Memory(); return err },
		"ResizeDisk": func() error { return m.ResizeDisk(ctx, ownDisk, diskBytes) },
		"DialAgent":  func() error { _, err := m.DialAgent(ctx); return err },
		"Running":    func() error { _, err := m.Running(ctx); return err },
		"Stop":       m.Stop,
		"Continue":   m.Continue,
	} {
		if err := call(); !errors.Is(err, vmm.ErrGone) {
			t.Errorf("%s of a machine that has ended: got %v, want ErrGone", name, err)
		}
	}
	was := m.Exit()
	m.kill(t)
	if diff := cmp.Diff(was, m.Exit()); diff != "" {
		t.Errorf("the exit changed after the end:\n%s", diff)
	}
	gone(t, m)
	if _, err := m.w.Driver.Recover(ctx, m.Handle()); !errors.Is(err, vmm.ErrGone) {
		t.Errorf("Recover of a machine that has ended: got %v, want ErrGone", err)
	}
}

func testKill(t *testing.T, w *world) {
	t.Helper()
	for state, m := range map[string]*machine{
		"spawned":  w.spawn(t, w.zero(t), "", false),
		"waiting":  w.shell(t, w.template),
		"restored": w.restored(t, w.template),
		"running":  w.fork(t, w.template),
	} {
		if got := m.Exit(); !got.At.IsZero() {
			t.Errorf("a machine that is %s has the exit %+v", state, got)
		}
		var wg sync.WaitGroup
		promptly(t, "the kill of a machine that is "+state, func() {
			for range 3 {
				wg.Go(func() { m.kill(t) })
			}
			wg.Wait()
		})
		if exit := m.ended(t); !exit.Killed {
			t.Errorf("the exit of a killed machine does not say so: %+v", exit)
		}
		m.allGone(t)
	}
}

func testCrash(t *testing.T, w *world) {
	t.Helper()
	m := w.fork(t, w.template)
	m.want(t, "ok", "say famous last words")
	eventually(t, "the console has the words", func() bool { return contains([]byte(m.Console()), "famous last words") })
	region, err := m.Memory()
	if err != nil {
		t.Fatal(err)
	}
	c, err := connect(t.Context(), m.Machine)
	if err != nil {
		t.Fatal(err)
	}
	w.Crash(t, m.Machine)
	exit := m.ended(t)
	if exit.Killed || !contains([]byte(exit.Console), "famous last words") {
		t.Errorf("the exit is %+v; want one that was not asked for, with the console", exit)
	}
	if _, err := c.ask("count"); err == nil {
		t.Error("a machine that has crashed answers")
	}
	closeAll(t, c)
	m.allGone(t)
	if capture, err := memory.Prepare(region); err == nil && region.PID != os.Getpid() {
		capture.Close()
		t.Error("the memory of a process that has ended can be captured")
	}
}

func testPowerOff(t *testing.T, w *world) {
	t.Helper()
	m := w.fork(t, w.template)
	if got, err := m.try(t.Context(), "off"); err == nil && got != "ok" {
		t.Errorf("got %q", got)
	}
	if exit := m.ended(t); exit.Killed {
		t.Errorf("the exit of a machine that powered off is %+v", exit)
	}
	m.allGone(t)
}

func testGuestPanic(t *testing.T, w *world) {
	t.Helper()
	m := w.fork(t, w.template)
	if got, err := m.try(t.Context(), "crash"); err == nil && got != "ok" {
		t.Errorf("got %q", got)
	}
	exit := m.ended(t)
	if exit.Killed || !contains([]byte(exit.Console), "panic") {
		t.Errorf("the exit of a guest that panicked is %+v; want the panic on the console", exit)
	}
	m.allGone(t)
}

// recovered releases a machine and recovers it from its handle, as if that were read from a file.
func (m *machine) recovered(t *testing.T) *machine {
	t.Helper()
	b, err := json.Marshal(m.Handle())
	if err != nil {
		t.Fatal(err)
	}
	m.Release()
	m.released = true
	var h vmm.Handle
	if err := json.Unmarshal(b, &h); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(m.Handle(), h); diff != "" {
		t.Fatalf("the handle changed on its way:\n%s", diff)
	}
	v, err := m.w.Driver.Recover(t.Context(), h)
	if err != nil {
		t.Fatal(err)
	}
	again := *m
	again.Machine, again.released = v, false
	t.Cleanup(func() { again.kill(t) })
	if diff := cmp.Diff(h, v.Handle()); diff != "" {
		t.Errorf("the recovered machine has another handle:\n%s", diff)
	}
	return &again
}

func testRecoverRunning(t *testing.T, w *world) {
	t.Helper()
	m := w.fork(t, w.template)
	m.want(t, "2", "inc")
	was, err := m.Memory()
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		m = m.recovered(t)
		m.allows(t, "recovered", calls{pause: true, resume: true, resize: true})
		m.runs(t, true)
		now, err := m.Memory()
		if diff := cmp.Diff(was, now); diff != "" || err != nil {
			t.Errorf("the region is another (%v):\n%s", err, diff)
		}
		m.want(t, strconv.Itoa(i+3), "inc")
	}
	w.fork(t, m.capture(t)).want(t, "5", "count")
	w.Crash(t, m.Machine)
	if exit := m.ended(t); exit.Killed {
		t.Errorf("the exit is %+v", exit)
	}
	m.allGone(t)
}

func testRecoverPaused(t *testing.T, w *world) {
	t.Helper()
	m := w.fork(t, w.template)
	m.pause(t)
	m = m.recovered(t)
	m.runs(t, false)
	m.allows(t, "recovered", calls{pause: true, resume: true, save: true, resize: true})
	m.resume(t)
	m.want(t, "2", "inc")
	m.kill(t)
	if exit := m.ended(t); !exit.Killed {
		t.Errorf("the exit is %+v", exit)
	}
	m.allGone(t)
}

// testRecoverWaiting recovers machines that have no state yet.
func testRecoverWaiting(t *testing.T, w *world) {
	t.Helper()
	shell := w.shell(t, w.template).recovered(t)
	shell.allows(t, "waiting", calls{restore: true})
	if err := shell.Restore(t.Context(), w.template.restoreSpec(t)); err != nil {
		t.Fatal(err)
	}
	shell.resume(t)
	shell.want(t, "1", "count")

	spawned := w.spawn(t, w.zero(t), "", false).recovered(t)
	spawned.allows(t, "spawned", calls{boot: true})
	if err := spawned.Boot(t.Context()); err != nil {
		t.Fatal(err)
	}
	spawned.runs(t, true)
}

// testRecoverGone tries to recover processes that do not exist, or are something else now.
func testRecoverGone(t *testing.T, w *world) {
	t.Helper()
	m := w.fork(t, w.template)
	bystander := exec.CommandContext(t.Context(), "sleep", "600")
	if err := bystander.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _ = bystander.Wait(); close(ended) }() // killed in the end
	t.Cleanup(func() { _ = bystander.Process.Kill(); <-ended })

	h := m.Handle()
	for name, change := range map[string]func(h *vmm.Handle){
		"a recycled pid":         func(h *vmm.Handle) { h.PID = bystander.Process.Pid },
		"an earlier process":     func(h *vmm.Handle) { h.StartTime-- },
		"a pid that is a thread": func(h *vmm.Handle) { h.PID = someThread(t) },
		"no pid":                 func(h *vmm.Handle) { h.PID = 0 },
		"a pid that never was":   func(h *vmm.Handle) { h.PID = 1 << 22 },
	} {
		other := h
		change(&other)
		if v, err := w.Driver.Recover(t.Context(), other); !errors.Is(err, vmm.ErrGone) {
			t.Errorf("%s: got %v, %v, want ErrGone", name, v, err)
		}
	}
	foreign := h
	foreign.Driver = "another"
	if _, err := w.Driver.Recover(t.Context(), foreign); err == nil {
		t.Error("a machine of another driver was recovered")
	}
	select {
	case <-ended:
		t.Error("a process that has nothing to do with it was killed")
	default:
	}
	m.want(t, "1", "count")
	m.kill(t)
	m.allGone(t)
}

// testEndAndReap ends machines by their handles and by their cluster, and checks that others live on.
func testEndAndReap(t *testing.T, w *world) {
	t.Helper()
	ctx := t.Context()
	spawn := func(cluster string) *machine {
		spec := w.newSpec(t, w.template.base, w.template.disk, true)
		spec.Cluster = cluster
		v, err := w.Driver.Spawn(ctx, spec)
		if err != nil {
			t.Fatal(err)
		}
		m := &machine{Machine: v, w: w, spec: spec, base: w.template.base}
		t.Cleanup(func() { m.kill(t) })
		return m
	}
	alive := func(m *machine) bool {
		select {
		case <-m.Done():
			return false
		default:
			return true
		}
	}
	ended, kept, stray, other := spawn("reap"), spawn("reap"), spawn("reap"), spawn("reap-2")
	for range 2 { // the second time it does not exist
		if err := w.Driver.End(ctx, ended.Handle()); err != nil {
			t.Error(err)
		}
	}
	eventually(t, "the ended one is gone", func() bool { return !alive(ended) })
	recycled := kept.Handle()
	recycled.StartTime--
	if err := w.Driver.End(ctx, recycled); err != nil {
		t.Error(err)
	}
	if n, err := w.Driver.Reap(ctx, "reap", []vmm.Handle{kept.Handle()}); err != nil || n != 1 {
		t.Errorf("Reap found %d, %v, want the stray one", n, err)
	}
	eventually(t, "the stray one is gone", func() bool { return !alive(stray) })
	gone(t, stray)
	if !alive(kept) || !alive(other) {
		t.Errorf("the kept one lives: %v, that of another cluster: %v", alive(kept), alive(other))
	}
}

// someThread returns the number of a thread of this process that is not its first.
func someThread(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if n, err := strconv.Atoi(filepath.Base(e.Name())); err == nil && n != os.Getpid() {
			return n
		}
	}
	t.Fatal("this process has one thread only")
	return 0
}
