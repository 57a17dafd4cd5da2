package qemu

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/osthread"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testvm"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/kvm"
	"github.com/coppice-dev/coppice/runner/vmm/vmmproc"
	"github.com/coppice-dev/coppice/runner/vmm/vmmtest"
)

const (
	testMiB = 128
	testUID = 64011
)

// real returns a driver of the QEMU to test.
func real(t *testing.T) *Driver {
	t.Helper()
	d := New(Config{Binary: testvm.QEMU(t, os.Getenv("COPPICE_QEMU"))})
	if _, err := d.Fingerprint(t.Context()); err != nil {
		t.Fatal(err)
	}
	return d
}

// shortDir is a directory with a short name, so that the path of a socket fits.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "qemu") //nolint:usetesting // t.TempDir is too long for the path of a unix socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func zero(t *testing.T, dir string) *memory.Base {
	t.Helper()
	store, err := memory.NewBaseStore(filepath.Join(dir, "bases"), true)
	if err != nil {
		t.Fatal(err)
	}
	b, err := store.Zero(testMiB << 20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Close() })
	return b
}

// waiting describes a machine that waits to be restored: the cheapest there is.
func waiting(t *testing.T, base *memory.Base) vmm.Spec {
	t.Helper()
	return vmm.Spec{
		ID: core.NewID[core.SandboxID](), Cluster: "qemutest", Dir: shortDir(t), VCPUs: 1, MemoryMiB: testMiB, Base: base.File(), Restore: true,
	}
}

func spawn(t *testing.T, d *Driver, spec vmm.Spec) vmm.Machine {
	t.Helper()
	m, err := d.Spawn(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { kill(t, m) })
	return m
}

func kill(t *testing.T, m vmm.Machine) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
	defer cancel()
	if err := m.Kill(ctx); err != nil {
		t.Error(err)
	}
}

// processes returns the processes whose command line contains the text.
func processes(t *testing.T, text string) []string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && bytes.Contains(b, []byte(text)) {
			out = append(out, filepath.Base(filepath.Dir(f)))
		}
	}
	return out
}

// TestSpawnsLeakNothing counts descriptors and goroutines over many machines.
func TestSpawnsLeakNothing(t *testing.T) { //nolint:paralleltest // it counts the descriptors of this process
	d := real(t)
	base := zero(t, shortDir(t))
	spec := waiting(t, base)
	count := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	cycle := func(i int) {
		m, err := d.Spawn(t.Context(), spec)
		if err != nil {
			t.Fatal(err)
		}
		if i%5 == 0 {
			m.Release()
			if m, err = d.Recover(t.Context(), m.Handle()); err != nil {
				t.Fatal(err)
			}
		}
		kill(t, m)
		if i%5 == 1 {
			bad := spec
			bad.VCPUs = 100000
			if _, err := d.Spawn(t.Context(), bad); err == nil {
				t.Fatal("a machine with 100000 CPUs was spawned")
			}
		}
	}
	cycle(0) // descriptors that are opened only once are open now
	before := count()
	for i := range 50 {
		cycle(i)
	}
	for deadline := time.Now().Add(5 * time.Minute); count() > before; { // the last ones are closed after Done is
		if time.Now().After(deadline) {
			t.Fatalf("there are %d descriptors, were %d", count(), before)
		}
		<-time.After(5 * time.Millisecond)
	}
	if left := processes(t, string(spec.ID)); len(left) > 0 {
		t.Errorf("the processes %v are left", left)
	}
}

// TestConfined checks a QEMU from outside: its rights, its namespaces, and the files that it can open.
func TestConfined(t *testing.T) {
	t.Parallel()
	require.Root(t)
	d := real(t)
	base := zero(t, shortDir(t))
	var netns *os.File
	if err := osthread.Do(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		var err error
		netns, err = os.Open("/proc/thread-self/ns/net")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer netns.Close()
	spec, other := waiting(t, base), waiting(t, base)
	spec.UID, spec.GID, spec.NetNS = testUID, testUID, netns
	other.UID, other.GID = testUID+1, testUID+1
	m := spawn(t, d, spec)
	spawn(t, d, other)
	pid := m.Handle().PID

	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	field := map[string]string{}
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		field[name] = strings.Join(strings.Fields(value), " ")
	}
	id, none := fmt.Sprintf("%d %[1]d %[1]d %[1]d", testUID), "0000000000000000"
	for name, want := range map[string]string{
		"Uid": id, "Gid": id, "Groups": "", "CapEff": none, "CapPrm": none, "CapInh": none, "CapBnd": none, "CapAmb": none,
		"NoNewPrivs": "1", "Seccomp": "2",
	} {
		if field[name] != want {
			t.Errorf("%s is %q, want %q", name, field[name], want)
		}
	}
	for ns, file := range map[string]string{"net": fmt.Sprintf("/proc/self/fd/%d", netns.Fd())} {
		want, err := os.Readlink(file)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, ns)); err != nil || got != want {
			t.Errorf("its %s namespace is %s, want %s (%v)", ns, got, want, err)
		}
	}
	if env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid)); err != nil || string(env) != "PATH=/usr/bin:/bin\x00HOME=/nonexistent\x00LC_ALL=C\x00" {
		t.Errorf("its environment is %q (%v)", env, err)
	}
	for _, path := range []string{other.Dir, filepath.Join(other.Dir, monitorSocket), spec.Dir, filepath.Join(spec.Dir, monitorSocket), fmt.Sprintf("/proc/%d/mem", os.Getpid())} {
		if err := openAs(path, testUID); !errors.Is(err, unix.EACCES) {
			t.Errorf("its user opens %s: got %v, want EACCES", path, err)
		}
	}
	checkDescriptors(t, pid)
	checkAdvice(t, pid, base.File())
	vmmtest.CheckJail(t, vmmtest.Jailed{
		PID: pid, UID: testUID,
		Visible: []string{d.found.path, "/lib", "/usr/lib", "/etc/ld.so.cache", "/usr/share/qemu/", "/usr/share/seabios/", kvm.Device},
		Hidden:  []string{spec.Dir, other.Dir, filepath.Join(spec.Dir, monitorSocket), filepath.Join(other.Dir, agentSocket)},
	})
}

// checkAdvice: a VMM's mapping of its base does not use huge pages. With them, the kernel would read megabytes around
// each page.
func checkAdvice(t *testing.T, pid int, base *os.File) {
	t.Helper()
	info, err := base.Stat()
	if err != nil {
		t.Fatal(err)
	}
	inode := fmt.Sprintf(" %d ", info.Sys().(*syscall.Stat_t).Ino)
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", pid))
	if err != nil {
		t.Fatal(err)
	}
	mapped, seen := false, 0
	for line := range strings.Lines(string(b)) {
		if head, _, _ := strings.Cut(line, " "); strings.Contains(head, "-") {
			mapped = strings.Contains(line, inode)
		}
		flags, ok := strings.CutPrefix(line, "VmFlags:")
		if !ok || !mapped {
			continue
		}
		seen++
		if slices.Contains(strings.Fields(flags), "hg") {
			t.Errorf("the guest's memory is advised to be of huge pages: %s", flags)
		}
	}
	if seen == 0 {
		t.Errorf("the VMM has no mapping of %s", base.Name())
	}
}

// openAs opens a path with the user of a VMM.
func openAs(path string, uid int) error {
	return osthread.Do(func() error { // the thread's user is changed permanently
		for _, call := range []struct{ number, id uintptr }{{unix.SYS_SETRESGID, uintptr(uid)}, {unix.SYS_SETRESUID, uintptr(uid)}} {
			if _, _, errno := unix.RawSyscall(call.number, call.id, call.id, call.id); errno != 0 {
				return errno
			}
		}
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.ENXIO) {
			return errors.New("it got as far as the socket")
		}
		if err == nil {
			_ = unix.Close(fd)
		}
		return err
	})
}

// checkDescriptors: a QEMU has only the descriptors open that it needs: no directory, and no file with a name.
func checkDescriptors(t *testing.T, pid int) {
	t.Helper()
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		to, err := os.Readlink(l)
		if err != nil {
			continue
		}
		known := to == "/dev/null"
		for _, prefix := range []string{"pipe:", "socket:", "anon_inode:", "/memfd:"} {
			known = known || strings.HasPrefix(to, prefix)
		}
		if !known {
			t.Errorf("it has %s open", to)
		}
	}
}

// TestRefused: people get QEMU's own message about a command line that it refuses.
func TestRefused(t *testing.T) {
	t.Parallel()
	d := real(t)
	base := zero(t, shortDir(t))
	rubbish := filepath.Join(t.TempDir(), "rubbish")
	if err := os.WriteFile(rubbish, bytes.Repeat([]byte("no kernel "), 1000), 0o644); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(rubbish)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for name, c := range map[string]struct {
		change func(s *vmm.Spec)
		want   string
	}{
		"too many CPUs":   {func(s *vmm.Spec) { s.VCPUs = 100000 }, "CPU"},
		"rubbish to boot": {func(s *vmm.Spec) { s.Restore, s.Kernel, s.Initrd = false, file, file }, "kernel"},
		"no address":      {func(s *vmm.Spec) { s.Tap, s.MAC = file, "nonsense" }, ""},
	} {
		spec := waiting(t, base)
		c.change(&spec)
		start := time.Now()
		m, err := d.Spawn(t.Context(), spec)
		if err == nil {
			t.Errorf("%s: it was spawned", name)
			kill(t, m)
			continue
		}
		if !strings.Contains(err.Error(), "it said") || !strings.Contains(err.Error(), c.want) || core.CodeOf(err) != core.CodeVMMFailed || !strings.Contains(core.MessageOf(err), "qemu") {
			t.Errorf("%s: the error does not say what qemu said: %v", name, err)
		}
		if took := time.Since(start); took > vmmproc.CommandTime/2 {
			t.Errorf("%s: it took %s", name, took)
		}
		if left := processes(t, string(spec.ID)); len(left) > 0 {
			t.Errorf("%s: the processes %v are left", name, left)
		}
		if entries, err := os.ReadDir(spec.Dir); err != nil || len(entries) > 0 {
			t.Errorf("%s: %v are left (%v)", name, entries, err)
		}
	}
}

// runnerVariable makes this test binary a runner that starts the machine in the variable, and waits.
const runnerVariable = "QEMU_TEST_RUNNER"

// standIn is the configuration of the stand-in runner.
type standIn struct {
	Binary, Dir                 string
	Kernel, Initrd, CommandLine string
	UID                         uint32
}

func standInRunner(text string) {
	h, err := func() (vmm.Handle, error) {
		var s standIn
		if err := json.Unmarshal([]byte(text), &s); err != nil {
			return vmm.Handle{}, err
		}
		store, err := memory.NewBaseStore(filepath.Join(s.Dir, "bases"), true)
		if err != nil {
			return vmm.Handle{}, err
		}
		base, err := store.Zero(testMiB << 20)
		if err != nil {
			return vmm.Handle{}, err
		}
		kernel, err1 := os.Open(s.Kernel)
		initrd, err2 := os.Open(s.Initrd)
		if err := errors.Join(err1, err2); err != nil {
			return vmm.Handle{}, err
		}
		m, err := New(Config{Binary: s.Binary}).Spawn(context.Background(), vmm.Spec{
			ID: core.NewID[core.SandboxID](), Cluster: "qemutest", Dir: s.Dir, VCPUs: 1, MemoryMiB: testMiB, Base: base.File(),
			Kernel: kernel, Initrd: initrd, CommandLine: s.CommandLine, UID: s.UID, GID: s.UID,
		})
		if err != nil {
			return vmm.Handle{}, err
		}
		return m.Handle(), m.Boot(context.Background())
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	_ = json.NewEncoder(os.Stdout).Encode(h)
	select {}
}

// TestSurvivesRunner kills a runner, and recovers its machine.
func TestSurvivesRunner(t *testing.T) {
	t.Parallel()
	d := real(t)
	guest := testvm.Guest(t)
	s := standIn{Binary: d.cfg.Binary, Dir: shortDir(t), Kernel: guest.Kernel, Initrd: guest.Initrd, CommandLine: guest.CommandLine}
	if os.Geteuid() == 0 {
		s.UID = testUID
	}
	text, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	runner := exec.CommandContext(t.Context(), os.Args[0])
	runner.Env = append(os.Environ(), runnerVariable+"="+string(text))
	runner.Stderr = t.Output()
	out, err := runner.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := runner.Start(); err != nil {
		t.Fatal(err)
	}
	var h vmm.Handle
	err = json.NewDecoder(out).Decode(&h)
	_ = runner.Process.Signal(unix.SIGKILL)
	_ = runner.Wait()
	if err != nil {
		t.Fatal(err)
	}
	m, err := d.Recover(t.Context(), h)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { kill(t, m) })
	if running, err := m.Running(t.Context()); err != nil || !running {
		t.Fatalf("the recovered machine runs: %v, %v", running, err)
	}
	if _, err := m.Memory(); err != nil {
		t.Error(err)
	}
	greet(t, m)
	if err := m.Pause(t.Context()); err != nil {
		t.Error(err)
	}
	kill(t, m)
	if exit := m.Exit(); !exit.Killed {
		t.Errorf("the exit is %+v", exit)
	}
	if _, err := d.Recover(t.Context(), h); !errors.Is(err, vmm.ErrGone) {
		t.Errorf("the machine was recovered again: %v", err)
	}
}

// greet waits until the line guest answers.
func greet(t *testing.T, m vmm.Machine) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; {
		conn, err := m.DialAgent(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		err = hello(conn)
		_ = conn.Close()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the guest does not answer: %v; its console: %q", err, m.Console())
		}
	}
}

func hello(conn net.Conn) error {
	if err := conn.SetDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	if _, err := fmt.Fprint(conn, "\nhi there\n"); err != nil {
		return err
	}
	for lines := bufio.NewScanner(conn); lines.Scan(); {
		if lines.Text() == "hi there" {
			return nil
		}
	}
	return errors.New("no answer")
}
