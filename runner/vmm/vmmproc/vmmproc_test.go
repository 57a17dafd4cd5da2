package vmmproc_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/osthread"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/internal/test/testprog"
	"github.com/coppice-dev/coppice/runner/cgroup"
	"github.com/coppice-dev/coppice/runner/vmm/vmmproc"
)

func TestMain(m *testing.M) { testleak.Main(m) }

const (
	uid   = 64077
	gid   = 64078
	group = 64079
)

// shell is a command that runs a script with the program of every host.
func shell(t *testing.T, script string) (vmmproc.Command, *os.File) {
	t.Helper()
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = log.Close() })
	return vmmproc.Command{Path: "/bin/sh", Args: []string{"-c", script}, Log: log, Dir: "/"}, log
}

// run starts a command and returns what it printed, once it has ended.
func run(t *testing.T, c vmmproc.Command, log *os.File) (output, status string) {
	t.Helper()
	p := start(t, c)
	ended(t, p)
	status, _ = p.Status()
	b, err := os.ReadFile(log.Name())
	if err != nil {
		t.Fatal(err)
	}
	return string(b), status
}

func start(t *testing.T, c vmmproc.Command) *vmmproc.Process {
	t.Helper()
	p, err := vmmproc.Start(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Kill(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	return p
}

func ended(t *testing.T, p *vmmproc.Process) {
	t.Helper()
	select {
	case <-p.Done():
	case <-time.After(time.Minute):
		t.Fatalf("process %d does not end", p.PID)
	}
}

// field reads a line of /proc/PID/status.
func field(status, name string) string {
	for line := range strings.Lines(status) {
		if rest, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.Join(strings.Fields(rest), " ")
		}
	}
	return ""
}

// TestNoCore: a crashing VMM leaves no file with its guest's memory.
func TestNoCore(t *testing.T) {
	t.Parallel()
	require.Root(t)
	c, _ := shell(t, "exec sleep 60")
	c.UID, c.GID = uid, gid
	p := start(t, c)
	limits, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", p.PID))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(limits)) {
		if rest, ok := strings.CutPrefix(line, "Max core file size"); ok {
			if got := strings.Fields(rest); len(got) < 2 || got[0] != "0" || got[1] != "0" {
				t.Errorf("it may write cores of %q bytes", got)
			}
			return
		}
	}
	t.Errorf("no limit of cores in %s", limits)
}

func TestConfined(t *testing.T) {
	t.Parallel()
	require.Root(t)
	c, log := shell(t, "cat /proc/self/status; ps -o sid= -p $$; echo pid=$$; ls /proc/self/fd; cat <&3; env; pwd")
	c.UID, c.GID, c.Groups, c.Dir = uid, gid, []uint32{group}, "/usr"
	passed, err := os.CreateTemp(t.TempDir(), "passed")
	if err != nil {
		t.Fatal(err)
	}
	defer passed.Close()
	if _, err := passed.WriteString("passed by descriptor\n"); err != nil {
		t.Fatal(err)
	}
	if _, err := passed.Seek(0, 0); err != nil {
		t.Fatal(err)
	}
	c.Files = []*os.File{passed}
	out, status := run(t, c, log)
	if status != "exit status 0" {
		t.Errorf("it ended with %s: %s", status, out)
	}
	zero := "0000000000000000"
	for name, want := range map[string]string{
		"Uid": fmt.Sprintf("%d %[1]d %[1]d %[1]d", uid), "Gid": fmt.Sprintf("%d %[1]d %[1]d %[1]d", gid), "Groups": strconv.Itoa(group),
		"CapInh": zero, "CapPrm": zero, "CapEff": zero, "CapBnd": zero, "CapAmb": zero, "NoNewPrivs": "1",
	} {
		if got := field(out, name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	_, rest, _ := strings.Cut(out, "pid=")
	lines := strings.Split(strings.TrimSpace(rest), "\n")
	if want := []string{"0", "1", "2", "3"}; !slices.Equal(lines[1:5], want) {
		t.Errorf("it has the descriptors %v; want %v (and that of ls)", lines[1:], want)
	}
	for _, want := range []string{"passed by descriptor", "PWD=/usr", "HOME=/nonexistent", "\n/usr\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("the output lacks %q", want)
		}
	}
	for _, kv := range os.Environ() {
		if name, value, _ := strings.Cut(kv, "="); len(value) > 3 && !slices.Contains([]string{"PATH", "PWD", "HOME", "LC_ALL", "OLDPWD", "_"}, name) && strings.Contains(out, "\n"+kv+"\n") {
			t.Errorf("it has the runner's variable %s", name)
		}
	}
}

func TestOwnSession(t *testing.T) {
	t.Parallel()
	c, _ := shell(t, "sleep 600")
	p := start(t, c)
	sid, err := unix.Getsid(p.PID)
	if err != nil || sid != p.PID {
		t.Errorf("it is in session %d, want its own, %d (%v)", sid, p.PID, err)
	}
}

// TestNetworkNamespace starts processes in another namespace and checks that no thread of this process got there.
func TestNetworkNamespace(t *testing.T) {
	t.Parallel()
	require.Root(t)
	var other *os.File
	if err := osthread.Do(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		var err error
		other, err = os.Open("/proc/thread-self/ns/net")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	ours := link(t, "/proc/self/ns/net")
	want := link(t, fmt.Sprintf("/proc/self/fd/%d", other.Fd()))
	for range 20 {
		c, log := shell(t, "readlink /proc/self/ns/net; wc -l < /proc/net/dev")
		c.NetNS, c.UID, c.GID = other, uid, gid
		out, _ := run(t, c, log)
		if got := strings.Fields(out); len(got) != 2 || got[0] != want || got[1] != "3" {
			t.Fatalf("it sees %q, want %s and one link", out, want)
		}
	}
	threads, err := filepath.Glob("/proc/self/task/*/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	for _, thread := range append(threads, "/proc/self/ns/net") {
		if got, err := os.Readlink(thread); err == nil && got != ours { // a thread that ends does not matter
			t.Errorf("%s is in %s, want %s", thread, got, ours)
		}
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	if field(string(status), "NoNewPrivs") != "0" || strings.Trim(field(string(status), "CapBnd"), "0") == "" {
		t.Error("this process is confined itself")
	}
}

func link(t *testing.T, path string) string {
	t.Helper()
	to, err := os.Readlink(path)
	if err != nil {
		t.Fatal(err)
	}
	return to
}

func TestStartFails(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(c *vmmproc.Command){
		"no program":   func(c *vmmproc.Command) { c.Path = "/no/such/program" },
		"no directory": func(c *vmmproc.Command) { c.Dir = "/no/such/directory" },
		"no namespace": func(c *vmmproc.Command) { c.NetNS = c.Log },
		"no cgroup":    func(c *vmmproc.Command) { c.CgroupFD = c.Log },
	} {
		c, _ := shell(t, "sleep 600")
		change(&c)
		if p, err := vmmproc.Start(c); err == nil {
			t.Errorf("%s: process %d was started", name, p.PID)
			_ = p.Kill(t.Context())
		}
	}
}

func TestKill(t *testing.T) {
	t.Parallel()
	c, _ := shell(t, "trap '' TERM INT HUP; while :; do sleep 600; done")
	p := start(t, c)
	if status, killed := p.Status(); status != "" || killed {
		t.Errorf("a running process has the status %q, %v", status, killed)
	}
	expired, cancel := context.WithCancel(t.Context())
	cancel()
	_ = p.Kill(expired) // it is killed in spite of the error, but may not be gone yet
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if err := p.Kill(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	ended(t, p)
	if status, killed := p.Status(); status != "signal: killed" || !killed {
		t.Errorf("a killed process has the status %q, %v", status, killed)
	}
	p.Release()
	if err := p.Kill(t.Context()); err != nil {
		t.Errorf("the kill of a process that has ended: %v", err)
	}
}

func TestStatus(t *testing.T) {
	t.Parallel()
	for script, want := range map[string]string{"exit 0": "exit status 0", "exit 3": "exit status 3", "kill -TERM $$": "signal: terminated"} {
		c, log := shell(t, script)
		if _, got := run(t, c, log); got != want {
			t.Errorf("%q ended with %q, want %q", script, got, want)
		}
	}
}

func TestAttach(t *testing.T) {
	t.Parallel()
	c, _ := shell(t, "sleep 600")
	p := start(t, c)
	again, err := vmmproc.Attach(p.PID, p.StartTime)
	if err != nil {
		t.Fatal(err)
	}
	if again.PID != p.PID || again.StartTime != p.StartTime {
		t.Errorf("got %d since %d, want %d since %d", again.PID, again.StartTime, p.PID, p.StartTime)
	}
	released, err := vmmproc.Attach(p.PID, p.StartTime)
	if err != nil {
		t.Fatal(err)
	}
	released.Release()
	released.Release()
	if err := released.Kill(t.Context()); err == nil {
		t.Error("a released process was killed")
	}
	select {
	case <-p.Done():
		t.Fatal("the process has ended")
	default:
	}
	if err := again.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	ended(t, again)
	ended(t, p)
	if status, killed := again.Status(); !killed || status == "" {
		t.Errorf("the status is %q, %v", status, killed)
	}
	select {
	case <-released.Done():
		t.Error("a released process is watched")
	default:
	}
	if _, err := vmmproc.Attach(p.PID, p.StartTime); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("a process that has ended: got %v, want ErrProcessDone", err)
	}
}

func TestAttachOther(t *testing.T) {
	t.Parallel()
	c, _ := shell(t, "sleep 600")
	p := start(t, c)
	thread := 0
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		if n, err := strconv.Atoi(task.Name()); err == nil && n != os.Getpid() {
			thread = n
		}
	}
	for name, c := range map[string]struct {
		pid   int
		start uint64
	}{
		"started at another time": {p.PID, p.StartTime + 1},
		"another process":         {os.Getpid(), p.StartTime},
		"a thread":                {thread, p.StartTime},
		"none":                    {0, 0},
		"negative":                {-1, 0},
		"never there":             {1 << 22, p.StartTime},
	} {
		if _, err := vmmproc.Attach(c.pid, c.start); !errors.Is(err, os.ErrProcessDone) {
			t.Errorf("%s: got %v, want ErrProcessDone", name, err)
		}
	}
}

// TestAttachZombie finds a process that has ended and that nobody has reaped.
func TestAttachZombie(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), "sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	since, err := strconv.ParseUint(string(fields[19]), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	p, err := vmmproc.Attach(cmd.Process.Pid, since)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(cmd.Process.Pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	ended(t, p) // it is not reaped yet
	late, err := vmmproc.Attach(cmd.Process.Pid, since)
	if err == nil {
		ended(t, late)
	} else if !errors.Is(err, os.ErrProcessDone) {
		t.Error(err)
	}
	_ = cmd.Wait()
}

// TestStatForms uses command names that look like the fields after them.
func TestStatForms(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"a b", "x) S 1 2", ") (", "(((", "тест"} {
		program := filepath.Join(t.TempDir(), name)
		b, err := os.ReadFile("/bin/sleep")
		if err != nil {
			t.Fatal(err)
		}
		testprog.Write(t, program, b)
		c, _ := shell(t, "")
		c.Path, c.Args = program, []string{"600"}
		p := start(t, c)
		again, err := vmmproc.Attach(p.PID, p.StartTime)
		if err != nil {
			t.Errorf("%q: %v", name, err)
			continue
		}
		again.Release()
	}
}

// TestDescriptors: processes that came and went leave no descriptors.
func TestDescriptors(t *testing.T) { //nolint:paralleltest // it counts the descriptors of this process
	count := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	c, _ := shell(t, "sleep 600")
	cycle := func() {
		p, err := vmmproc.Start(c)
		if err != nil {
			t.Fatal(err)
		}
		again, err := vmmproc.Attach(p.PID, p.StartTime)
		if err != nil {
			t.Fatal(err)
		}
		other, err := vmmproc.Attach(p.PID, p.StartTime)
		if err != nil {
			t.Fatal(err)
		}
		other.Release()
		if err := p.Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
		ended(t, again)
		bad := c
		bad.Path = "/no/such/program"
		if _, err := vmmproc.Start(bad); err == nil {
			t.Fatal("it was started")
		}
	}
	cycle() // descriptors that are opened only once are open now
	before := count()
	for range 50 {
		cycle()
	}
	// The pidfd is closed after Done is.
	for deadline := time.Now().Add(5 * time.Minute); count() > before; {
		if time.Now().After(deadline) {
			t.Fatalf("there are %d descriptors, were %d", count(), before)
		}
		<-time.After(5 * time.Millisecond)
	}
}

func TestCgroup(t *testing.T) {
	t.Parallel()
	require.Root(t)
	mount, err := cgroup.Find()
	if err != nil {
		t.Fatal(err)
	}
	require.That(t, "cgroup2", mount != "", "mount cgroup v2: mount -t cgroup2 none /sys/fs/cgroup/unified")
	dir, err := os.MkdirTemp(mount, "coppice-test-") //nolint:usetesting // it must be a cgroup
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(dir) })
	fd, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer fd.Close()
	c, log := shell(t, "cat /proc/self/cgroup")
	c.CgroupFD, c.UID, c.GID = fd, uid, gid
	if out, _ := run(t, c, log); !strings.Contains(out, filepath.Base(dir)) {
		t.Errorf("it is in the cgroup %q, want %s", out, filepath.Base(dir))
	}
}
