package vmmtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/vmm"
)

func testFingerprint(t *testing.T, w *world) {
	t.Helper()
	fp, err := w.Driver.Fingerprint(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if fp.VMM == "" || fp.Version == "" || fp.MachineType == "" || fp.Accelerator == "" || fp.CPUModel == "" {
		t.Errorf("the fingerprint is not complete: %+v", fp)
	}
	again, err := w.Driver.Fingerprint(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(fp, again); diff != "" {
		t.Errorf("two fingerprints differ:\n%s", diff)
	}
	if diff := cmp.Diff(w.caps, w.Driver.Capabilities()); diff != "" {
		t.Errorf("the capabilities differ from those at first:\n%s", diff)
	}
}

// calls are the methods that the states restrict.
type calls struct{ boot, restore, pause, resume, save, resize bool }

// allows makes every call that the state forbids. Each must return ErrState and have no effect.
func (m *machine) allows(t *testing.T, state string, legal calls) {
	t.Helper()
	ctx := t.Context()
	before, err := m.Running(ctx)
	if err != nil {
		t.Fatal(err)
	}
	spec := m.w.template.restoreSpec(t)
	spec.Inject = func(context.Context, memory.Region) error {
		t.Errorf("a restore of a machine that is %s injects memory", state)
		return nil
	}
	path := m.w.path()
	to := open(t, path, os.O_WRONLY|os.O_CREATE|os.O_EXCL)
	for _, c := range []struct {
		name  string
		legal bool
		call  func() error
	}{
		{"Boot", legal.boot, func() error { return m.Boot(ctx) }},
		{"Restore", legal.restore, func() error { return m.Restore(ctx, spec) }},
		{"Pause", legal.pause, func() error { return m.Pause(ctx) }},
		{"Resume", legal.resume, func() error { return m.Resume(ctx) }},
		{"SaveState", legal.save, func() error { return m.SaveState(ctx, to) }},
		{"ResizeDisk", legal.resize, func() error { return m.ResizeDisk(ctx, ownDisk, diskBytes) }},
	} {
		if c.legal {
			continue
		}
		if err := c.call(); !errors.Is(err, vmm.ErrState) {
			t.Errorf("%s of a machine that is %s: got %v, want ErrState", c.name, state, err)
		}
	}
	if after, err := m.Running(ctx); err != nil || after != before {
		t.Errorf("a machine that is %s runs: %v, want %v (%v)", state, after, before, err)
	}
	if info, err := os.Stat(path); err != nil || info.Size() != 0 {
		t.Errorf("something was saved of a machine that is %s (%v)", state, err)
	}
	// Before a boot or a restore, and after one that failed, a VMM may not have a mapping yet.
	if _, err := m.Memory(); err != nil && (legal.pause || !errors.Is(err, vmm.ErrState)) {
		t.Errorf("Memory of a machine that is %s: %v", state, err)
	}
	m.alwaysLegal(t, state)
}

// alwaysLegal makes the calls that are legal in every state.
func (m *machine) alwaysLegal(t *testing.T, state string) {
	t.Helper()
	if diff := cmp.Diff(vmm.Exit{}, m.Exit()); diff != "" {
		t.Errorf("the exit of a machine that is %s:\n%s", state, diff)
	}
	select {
	case <-m.Done():
		t.Errorf("Done of a machine that is %s is closed", state)
	default:
	}
}

func (m *machine) runs(t *testing.T, want bool) {
	t.Helper()
	got, err := m.Running(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("the machine runs: %v, want %v", got, want)
	}
}

func testSpawnedStates(t *testing.T, w *world) {
	t.Helper()
	m := w.spawn(t, w.zero(t), "", false)
	m.runs(t, false)
	m.allows(t, "spawned", calls{boot: true})
	if err := m.Boot(t.Context()); err != nil {
		t.Fatal(err)
	}
	m.runs(t, true)
	m.allows(t, "running", calls{pause: true, resume: true, resize: true})
	m.resume(t) // idempotent
	m.pause(t)
	m.pause(t)
	m.runs(t, false)
	m.allows(t, "paused", calls{pause: true, resume: true, save: true, resize: true})
}

func testWaitingStates(t *testing.T, w *world) {
	t.Helper()
	m := w.shell(t, w.template)
	m.runs(t, false)
	m.allows(t, "waiting", calls{restore: true})
	if err := m.Restore(t.Context(), w.template.restoreSpec(t)); err != nil {
		t.Fatal(err)
	}
	m.runs(t, false)
	m.allows(t, "restored", calls{pause: true, resume: true, save: true, resize: true})
	m.resume(t)
	m.want(t, "1", "count")
	m.allows(t, "running", calls{pause: true, resume: true, resize: true})
}

var errInjection = errors.New("the injection fails")

func testFailedInjection(t *testing.T, w *world) {
	t.Helper()
	m := w.shell(t, w.template)
	spec := w.template.restoreSpec(t)
	spec.Inject = func(context.Context, memory.Region) error { return errInjection }
	if err := m.Restore(t.Context(), spec); !errors.Is(err, errInjection) {
		t.Errorf("got %v, want the injector's error", err)
	}
	m.allows(t, "broken", calls{})
	m.kill(t)
}

func testDamagedState(t *testing.T, w *world) {
	t.Helper()
	good, err := os.ReadFile(w.template.state)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		bytes []byte
	}{
		{"empty", nil},
		{"rubbish", []byte("this is not the state of any device")},
		{"cut off", good[:len(good)/2]},
	} {
		m := w.shell(t, w.template)
		path := w.path()
		if err := os.WriteFile(path, c.bytes, 0o600); err != nil {
			t.Fatal(err)
		}
		promptly(t, "a restore from a state that is "+c.name, func() {
			err := m.Restore(t.Context(), vmm.RestoreSpec{State: open(t, path, os.O_RDONLY)})
			if err == nil {
				t.Errorf("a state that is %s was loaded", c.name)
			}
		})
		// The VMM may end because of it, or not; in no case does the machine run.
		if err := m.Resume(t.Context()); !errors.Is(err, vmm.ErrState) && !errors.Is(err, vmm.ErrGone) {
			t.Errorf("Resume after a state that is %s: got %v, want ErrState or ErrGone", c.name, err)
		}
		m.kill(t)
	}
}

func testSpawnRefused(t *testing.T, w *world) {
	t.Helper()
	for _, c := range []struct {
		name   string
		change func(s *vmm.Spec)
	}{
		{"a base of another size", func(s *vmm.Spec) { s.MemoryMiB += 2 }},
		{"no base", func(s *vmm.Spec) { s.Base = nil }},
		{"no directory", func(s *vmm.Spec) { s.Dir = filepath.Join(s.Dir, "absent") }},
		{"a disk without a file", func(s *vmm.Spec) { s.Disks = append(s.Disks, vmm.Disk{Serial: "x"}) }},
	} {
		spec := w.newSpec(t, w.template.base, w.template.disk, true)
		dir := spec.Dir
		c.change(&spec)
		m, err := w.Driver.Spawn(t.Context(), spec)
		if err == nil {
			t.Errorf("a machine with %s was spawned", c.name)
			killSpawned(t, m)
		}
		nothingLeft(t, c.name, spec.ID, dir)
	}
}

// nothingLeft searches for processes and files of a machine that was not spawned.
func nothingLeft(t *testing.T, what string, id core.SandboxID, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		t.Errorf("%s: the file %s is left", what, e.Name())
	}
	if pids := processesOf(t, id); len(pids) > 0 {
		t.Errorf("%s: the processes %v are left", what, pids)
	}
}

// processesOf returns the processes whose command line names the machine.
func processesOf(t *testing.T, id core.SandboxID) []string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err == nil && contains(b, string(id)) {
			out = append(out, filepath.Base(filepath.Dir(f)))
		}
	}
	return out
}

func killSpawned(t *testing.T, m vmm.Machine) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), prompt)
	defer cancel()
	if err := m.Kill(ctx); err != nil {
		t.Error(err)
	}
}

func testSaveStateFails(t *testing.T, w *world) {
	t.Helper()
	m := w.fork(t, w.template)
	m.pause(t)
	full := open(t, "/dev/full", os.O_WRONLY)
	if err := m.SaveState(t.Context(), full); err == nil {
		t.Error("device state was saved to a full disk")
	}
	m.allows(t, "paused", calls{pause: true, resume: true, save: true, resize: true})
	m.resume(t)
	m.want(t, "2", "inc")
	s := m.capture(t)
	w.fork(t, s).want(t, "2", "count")
}

func testResizeDisk(t *testing.T, w *world) {
	t.Helper()
	if !w.caps.ResizeDisk {
		t.Skip("this driver says that it cannot resize a disk")
	}
	m := w.fork(t, w.template)
	size := fmt.Sprintf("size %d", ownDisk)
	m.want(t, fmt.Sprint(diskBytes), size)
	for i, paused := range []bool{false, true} {
		to := int64(diskBytes) * int64(i+2)
		if paused {
			m.pause(t)
		}
		if err := m.disk.Truncate(to); err != nil {
			t.Fatal(err)
		}
		if err := m.ResizeDisk(t.Context(), ownDisk, to); err != nil {
			t.Fatal(err)
		}
		m.runs(t, !paused)
		m.resume(t)
		eventually(t, "the guest sees the new size", func() bool { return m.ask(t, size) == fmt.Sprint(to) })
		write := fmt.Sprintf("write %d %d 77", ownDisk, to-8)
		m.want(t, "ok", write)
	}
	if err := m.ResizeDisk(t.Context(), 99, diskBytes); err == nil {
		t.Error("a disk that is not there was resized")
	}
	s := m.capture(t)
	w.fork(t, s).want(t, fmt.Sprint(3*diskBytes), size)
}
