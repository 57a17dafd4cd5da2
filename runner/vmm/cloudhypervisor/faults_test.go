package cloudhypervisor_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/testvm"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/cloudhypervisor"
	"github.com/coppice-dev/coppice/runner/vmm/vmmproc"
)

const (
	faultyMiB = 4
	bounded   = 2 * time.Minute // for calls that must not wait; most of it is the start of a process
)

// faulty makes machines with a faulty VMM.
type faulty struct {
	fake testvm.FakeCloudHypervisor
	dir  string // short
	base *os.File
	// state is the device state of a machine with a VMM without faults.
	state string
}

func newFaulty(t *testing.T) *faulty {
	t.Helper()
	w := &faulty{fake: testvm.BuildFakeCloudHypervisor(t)}
	var err error
	if w.dir, err = os.MkdirTemp("", "chf"); err != nil { //nolint:usetesting // t.TempDir is too long for the path of a unix socket
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(w.dir) })
	w.base = w.file(t, "base", faultyMiB<<20)
	w.state = filepath.Join(w.dir, "state")
	m := w.spawn(t, w.driver(t), w.spec(t, false))
	if err := m.Boot(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(m.Pause(t.Context()), w.save(m, w.state)); err != nil {
		t.Fatal(err)
	}
	kill(t, m)
	return w
}

func (w *faulty) driver(t *testing.T, faults ...string) *cloudhypervisor.Driver {
	t.Helper()
	path := w.fake.Path
	if len(faults) > 0 {
		path = w.fake.With(t, faults...)
	}
	return cloudhypervisor.New(cloudhypervisor.Config{Binary: path})
}

func (w *faulty) file(t *testing.T, name string, size int64) *os.File {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(w.dir, name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	return f
}

func (w *faulty) spec(t *testing.T, restore bool) vmm.Spec {
	t.Helper()
	id := core.NewID[core.SandboxID]()
	dir := filepath.Join(w.dir, core.Short(id))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	kernel, err := os.Open(w.fake.Path) // any ELF
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = kernel.Close() })
	return vmm.Spec{
		ID: id, Cluster: "faults", Dir: dir, VCPUs: 1, MemoryMiB: faultyMiB, Base: w.base, Kernel: kernel, Initrd: kernel, Restore: restore,
		Disks: []vmm.Disk{{File: w.file(t, core.Short(id)+"-disk", 1<<20), Serial: "own"}},
	}
}

func (w *faulty) spawn(t *testing.T, d *cloudhypervisor.Driver, spec vmm.Spec) vmm.Machine {
	t.Helper()
	m, err := d.Spawn(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { kill(t, m) })
	return m
}

// save saves the state of a machine in a file.
func (w *faulty) save(m vmm.Machine, path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(m.SaveState(context.Background(), f), f.Close())
}

func (w *faulty) restoreSpec(t *testing.T) vmm.RestoreSpec {
	t.Helper()
	f, err := os.Open(w.state)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return vmm.RestoreSpec{State: f}
}

func kill(t *testing.T, m vmm.Machine) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), bounded)
	defer cancel()
	if err := m.Kill(ctx); err != nil {
		t.Error(err)
	}
}

// gone checks that the machine has no process, and its directory has no files of a snapshot or restore.
func gone(t *testing.T, what string, m vmm.Machine) {
	t.Helper()
	kill(t, m)
	ended(t, what, m.Handle().PID)
	for _, name := range []string{"own/config.json", "own/state.json", "own/memory-ranges", "restore/state.json"} {
		if _, err := os.Lstat(filepath.Join(m.Handle().Dir, name)); err == nil {
			t.Errorf("%s: %s is left", what, name)
		}
	}
}

// ended waits until a child process is gone: the machine may report its end before it is reaped.
func ended(t *testing.T, what string, pid int) {
	t.Helper()
	again := time.NewTicker(5 * time.Millisecond)
	defer again.Stop()
	for deadline := time.Now().Add(bounded); !errors.Is(unix.Kill(pid, 0), unix.ESRCH); <-again.C {
		if time.Now().After(deadline) {
			t.Fatalf("%s: process %d is there after its end", what, pid)
		}
	}
}

// nothingLeft checks that no process names the machine, and that its directory is empty.
func nothingLeft(t *testing.T, what string, spec vmm.Spec) {
	t.Helper()
	if entries, err := os.ReadDir(spec.Dir); err != nil || len(entries) > 0 {
		t.Errorf("%s: %v are left (%v)", what, entries, err)
	}
	found, err := vmmproc.Find(func(args []string) bool {
		return slices.ContainsFunc(args, func(a string) bool { return strings.Contains(a, string(spec.ID)) })
	})
	if err != nil {
		t.Error(err)
	}
	for _, p := range found {
		t.Errorf("%s: process %d is left", what, p.PID)
		p.Release()
	}
}

// fault is a fault of a call's answer.
type fault struct {
	kind string
	want string // in the error
}

// answers are the faults that the answer to any call can have.
var answers = []fault{
	{"hang", errEnough.Error()},
	{"die", "did not answer"},
	{"500", "with status 500: it says Error from API: "},
	{"drop", "did not answer"},
	{"garbage", "did not answer"},
	{"endless", "did not answer"},
}

var errEnough = errors.New("the caller has waited for long enough")

// soon returns the context of a call: a hanging VMM is given up early.
func soon(t *testing.T, kind string) context.Context {
	t.Helper()
	limit := bounded
	if kind == "hang" {
		limit = 500 * time.Millisecond
	}
	ctx, cancel := context.WithTimeoutCause(t.Context(), limit, errEnough)
	t.Cleanup(cancel)
	return ctx
}

// typed checks that callers can recognize the error, and that it says what happened.
func typed(t *testing.T, what string, err error, want string) {
	t.Helper()
	switch code := core.CodeOf(err); {
	case err == nil:
		t.Errorf("%s: it went well", what)
	case !strings.Contains(err.Error(), want):
		t.Errorf("%s: got %v, want %q", what, err, want)
	case code != core.CodeVMMFailed:
		t.Errorf("%s: got the code %s (%v), want %s", what, code, err, core.CodeVMMFailed)
	}
}

// TestFaults uses faulty VMMs: each fault soon gives a clear error, and leaves no process and no file.
func TestFaults(t *testing.T) { //nolint:tparallel // the group is waited for; its tests are parallel
	t.Parallel()
	w := newFaulty(t)
	silent := silentVMM(t, w)
	t.Run("all", func(t *testing.T) {
		for name, test := range map[string]func(*testing.T, *faulty){
			"program": testFaultsOfProgram, "spawn": testFaultsOfSpawn, "calls": testFaultsOfCalls, "snapshots": testFaultsOfSnapshots,
			"vsock": testFaultsOfVsock, "recover": testRecoverFaults, "silent events": testSilentEvents,
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				test(t, w)
			})
		}
	})
	silent()
}

func testFaultsOfProgram(t *testing.T, w *faulty) {
	t.Helper()
	for fault, want := range map[string]string{
		"garbage-version": "does not print a known form of a version",
		"version=52.0":    "cannot be used: cloud-hypervisor 52.0 does not drain",
		"version=99.0":    "cannot be used: cloud-hypervisor 99.0 is too new",
		"version=53":      "does not print a known form of a version",
	} {
		d := w.driver(t, fault)
		_, err := d.Fingerprint(soon(t, ""))
		typed(t, fault, err, want)
		if core.CategoryOf(err) != core.FailedPrecondition {
			t.Errorf("%s: got %v", fault, err)
		}
		spec := w.spec(t, true)
		if m, err := d.Spawn(soon(t, ""), spec); err == nil {
			t.Errorf("%s: a machine was spawned", fault)
			kill(t, m)
		}
		nothingLeft(t, fault, spec)
	}
}

// testFaultsOfSpawn uses VMMs that fail before there is a machine.
func testFaultsOfSpawn(t *testing.T, w *faulty) {
	t.Helper()
	type c struct {
		fault   string
		want    string
		restore bool
	}
	cases := []c{
		{"die:start", "fakech: it was told to", true},
		{"hang:start", errEnough.Error(), true},
	}
	for _, a := range answers {
		cases = append(cases, c{a.kind + ":vm.info", a.want, true}, c{a.kind + ":vm.create", a.want, false})
	}
	for _, c := range cases {
		kind, _, _ := strings.Cut(c.fault, ":")
		spec := w.spec(t, c.restore)
		d := w.driver(t, c.fault)
		if _, err := d.Fingerprint(t.Context()); err != nil { // this also starts the program
			t.Fatal(err)
		}
		start := time.Now()
		m, err := d.Spawn(soon(t, kind), spec)
		if err == nil {
			t.Errorf("%s: a machine was spawned", c.fault)
			kill(t, m)
			continue
		}
		if c.fault != "hang:start" && kind != "hang" || !errors.Is(err, errEnough) {
			typed(t, c.fault, err, c.want)
		}
		if took := time.Since(start); took > bounded {
			t.Errorf("%s: it took %s", c.fault, took)
		}
		nothingLeft(t, c.fault, spec)
	}
}

// testFaultsOfCalls uses VMMs that fail at one call in a machine's life.
func testFaultsOfCalls(t *testing.T, w *faulty) {
	t.Helper()
	booted := func(t *testing.T, d *cloudhypervisor.Driver) vmm.Machine {
		t.Helper()
		m := w.spawn(t, d, w.spec(t, false))
		if err := m.Boot(t.Context()); err != nil {
			t.Fatal(err)
		}
		return m
	}
	paused := func(t *testing.T, d *cloudhypervisor.Driver) vmm.Machine {
		t.Helper()
		m := booted(t, d)
		if err := m.Pause(t.Context()); err != nil {
			t.Fatal(err)
		}
		return m
	}
	for _, c := range []struct {
		call string
		has  func(t *testing.T, d *cloudhypervisor.Driver) vmm.Machine
		do   func(ctx context.Context, t *testing.T, m vmm.Machine) error
		// survives says that the machine is usable afterwards, in its old or new state, if the VMM lives and answers
		// the next call.
		survives bool
	}{
		{"vm.boot", func(t *testing.T, d *cloudhypervisor.Driver) vmm.Machine {
			t.Helper()
			return w.spawn(t, d, w.spec(t, false))
		}, func(ctx context.Context, _ *testing.T, m vmm.Machine) error { return m.Boot(ctx) }, false},
		{"vm.restore", func(t *testing.T, d *cloudhypervisor.Driver) vmm.Machine {
			t.Helper()
			return w.spawn(t, d, w.spec(t, true))
		}, func(ctx context.Context, t *testing.T, m vmm.Machine) error {
			t.Helper()
			return m.Restore(ctx, w.restoreSpec(t))
		}, false},
		{"vm.pause", booted, func(ctx context.Context, _ *testing.T, m vmm.Machine) error { return m.Pause(ctx) }, true},
		{"vm.resume", paused, func(ctx context.Context, _ *testing.T, m vmm.Machine) error { return m.Resume(ctx) }, true},
		{"vm.snapshot", paused, func(ctx context.Context, t *testing.T, m vmm.Machine) error {
			t.Helper()
			f, err := os.OpenFile(filepath.Join(t.TempDir(), "state"), os.O_WRONLY|os.O_CREATE, 0o600)
			if err != nil {
				return err
			}
			return errors.Join(m.SaveState(ctx, f), f.Close())
		}, true},
		{"vm.resize-disk", booted, func(ctx context.Context, _ *testing.T, m vmm.Machine) error { return m.ResizeDisk(ctx, 0, 2<<20) }, true},
	} {
		t.Run(c.call, func(t *testing.T) {
			t.Parallel()
			for _, a := range answers {
				what := a.kind + ":" + c.call
				m := c.has(t, w.driver(t, what+"@1"))
				start := time.Now()
				err := c.do(soon(t, a.kind), t, m)
				typed(t, what, err, a.want)
				if took := time.Since(start); took > bounded {
					t.Errorf("%s: it took %s", what, took)
				}
				switch {
				case a.kind == "die":
					died(t, what, m)
				case a.kind == "hang":
					if _, err := m.Running(soon(t, "hang")); !errors.Is(err, errEnough) {
						t.Errorf("%s: got %v of a VMM that hangs", what, err)
					}
				case c.survives:
					survived(t, what, m)
				case c.call == "vm.restore":
					if err := m.Resume(t.Context()); !errors.Is(err, vmm.ErrState) {
						t.Errorf("%s: got %v, want ErrState", what, err)
					}
				}
				gone(t, what, m)
			}
		})
	}
}

// died checks that the end is noticed soon, without any call.
func died(t *testing.T, what string, m vmm.Machine) {
	t.Helper()
	select {
	case <-m.Done():
	case <-time.After(bounded):
		t.Fatalf("%s: the end is not known", what)
	}
	if exit := m.Exit(); exit.Killed || exit.Status != "exit status 137" {
		t.Errorf("%s: the exit is %+v", what, exit)
	}
	if err := m.Pause(t.Context()); !errors.Is(err, vmm.ErrGone) {
		t.Errorf("%s: got %v, want ErrGone", what, err)
	}
}

// survived checks that the machine can do everything that a runner needs.
func survived(t *testing.T, what string, m vmm.Machine) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(t.TempDir(), "state"), os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for name, call := range map[string]func() error{
		"a pause and a save": func() error { return errors.Join(m.Pause(t.Context()), m.SaveState(t.Context(), f)) },
		"a resume":           func() error { return m.Resume(t.Context()) },
	} {
		if err := call(); err != nil {
			t.Errorf("%s: %s afterwards: %v", what, name, err)
		}
	}
	if err := errors.Join(m.Pause(t.Context()), m.Resume(t.Context())); err != nil {
		t.Errorf("%s: afterwards: %v", what, err)
	}
	if on, err := m.Running(t.Context()); err != nil || !on {
		t.Errorf("%s: it runs: %v, %v", what, on, err)
	}
	if got, err := count(t, m); err != nil || got != "0" {
		t.Errorf("%s: the guest answers %q, %v", what, got, err)
	}
}

// count asks the guest for its count.
func count(t *testing.T, m vmm.Machine) (string, error) {
	t.Helper()
	conn, err := m.DialAgent(t.Context())
	if err != nil {
		return "", err
	}
	defer conn.Close()
	return ask(conn, "count", bounded)
}

func ask(conn net.Conn, request string, limit time.Duration) (string, error) {
	if err := conn.SetDeadline(time.Now().Add(limit)); err != nil {
		return "", err
	}
	if _, err := fmt.Fprintln(conn, request); err != nil {
		return "", err
	}
	b := make([]byte, 64)
	n, err := conn.Read(b)
	return strings.TrimSpace(string(b[:n])), err
}

// testFaultsOfSnapshots uses VMMs with faulty snapshots.
func testFaultsOfSnapshots(t *testing.T, w *faulty) {
	t.Helper()
	for fault, want := range map[string]string{
		"snapshot-config-only": "No space left on device",
		"snapshot-overwrites":  "ignored the placeholder for memory",
		"snapshot-other-words": "os error 17",
		"snapshot-cut":         "is not complete",
	} {
		m := w.spawn(t, w.driver(t, fault), w.spec(t, false))
		if err := errors.Join(m.Boot(t.Context()), m.Pause(t.Context())); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(t.TempDir(), "state")
		typed(t, fault, w.save(m, path), want)
		if info, err := os.Stat(path); err != nil || info.Size() > 0 {
			t.Errorf("%s: something was saved (%v)", fault, err)
		}
		if on, err := m.Running(t.Context()); err != nil || on {
			t.Errorf("%s: it runs: %v, %v", fault, on, err)
		}
		if err := m.Resume(t.Context()); err != nil {
			t.Errorf("%s: %v", fault, err)
		}
		if got, err := count(t, m); err != nil || got != "0" {
			t.Errorf("%s: the guest answers %q, %v", fault, got, err)
		}
		gone(t, fault, m)
	}
}

// testFaultsOfVsock uses VMMs through which the agent cannot be reached.
func testFaultsOfVsock(t *testing.T, w *faulty) {
	t.Helper()
	for _, c := range []struct {
		fault string
		tries int
		limit time.Duration
		want  []error // one of them; none for an answer
	}{
		{"vsock-silent", 1, 200 * time.Millisecond, []error{os.ErrDeadlineExceeded}},
		{"vsock-refuses", 1, bounded, []error{io.EOF, unix.EPIPE, unix.ECONNRESET}}, // depends on what was sent and read before the refusal
		{"vsock-refuses-once", 2, bounded, nil},
	} {
		m := w.spawn(t, w.driver(t, c.fault), w.spec(t, true))
		if err := errors.Join(m.Restore(t.Context(), w.restoreSpec(t)), m.Resume(t.Context())); err != nil {
			t.Fatal(err)
		}
		var err error
		for range c.tries {
			var conn net.Conn
			if conn, err = m.DialAgent(t.Context()); err == nil {
				_, err = ask(conn, "count", c.limit)
				_ = conn.Close()
			}
		}
		if (err == nil) != (c.want == nil) || err != nil && !slices.ContainsFunc(c.want, func(want error) bool { return errors.Is(err, want) }) {
			t.Errorf("%s: got %v, want one of %v", c.fault, err, c.want)
		}
		gone(t, c.fault, m)
	}
}

// testSilentEvents uses a VMM that sends no events: everything that does not depend on events works.
func testSilentEvents(t *testing.T, w *faulty) {
	t.Helper()
	m := w.spawn(t, w.driver(t, "events-silent"), w.spec(t, true))
	spec := w.restoreSpec(t)
	injected := false
	spec.Inject = func(context.Context, memory.Region) error { injected = true; return nil }
	if err := errors.Join(m.Restore(t.Context(), spec), m.Resume(t.Context())); err != nil || !injected {
		t.Fatal(err, injected)
	}
	survived(t, "silent events", m)
	gone(t, "silent events", m)
}

// silentVMM makes a call to a VMM that does not answer, without a deadline, and returns a function that waits for its
// end.
func silentVMM(t *testing.T, w *faulty) (wait func()) {
	t.Helper()
	m := w.spawn(t, w.driver(t, "hang:vm.pause"), w.spec(t, false))
	if err := m.Boot(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	ended := make(chan error, 1)
	go func() { ended <- m.Pause(ctx) }()
	return func() {
		if err := <-ended; !errors.Is(err, vmmproc.ErrSilent) {
			t.Errorf("got %v, want ErrSilent", err)
		}
		gone(t, "a VMM that hangs", m)
	}
}

// testRecoverFaults: machines whose VMM does not answer are not recovered, and can be ended.
func testRecoverFaults(t *testing.T, w *faulty) {
	t.Helper()
	for _, a := range append([]fault{{"cut", "cannot be read"}}, answers...) {
		d := w.driver(t, a.kind+":vm.info@2") // the first is that of the spawn
		m, err := d.Spawn(t.Context(), w.spec(t, false))
		if err == nil {
			err = m.Boot(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
		h := m.Handle()
		m.Release()
		again, err := d.Recover(soon(t, a.kind), h)
		if err == nil {
			t.Errorf("%s: it was recovered", a.kind)
			again.Release()
		} else {
			typed(t, "recover: "+a.kind, err, a.want)
		}
		if err := d.End(t.Context(), h); err != nil {
			t.Error(err)
		}
		ended(t, a.kind, h.PID)
	}
}
