package vmmproc_test

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testprog"
	"github.com/coppice-dev/coppice/runner/vmm/jail"
	"github.com/coppice-dev/coppice/runner/vmm/vmmproc"
)

func jailOf(tb testing.TB, program string, files ...string) *jail.Jail {
	tb.Helper()
	j, err := jail.New(tb.Context(), jail.Config{Program: program, Files: files, Devices: []string{os.DevNull}})
	if err != nil {
		tb.Fatal(err)
	}
	return j
}

// TestJailedShell runs a shell in a jail: it finds its own process, and can be stopped, continued and killed from outside.
func TestJailedShell(t *testing.T) {
	t.Parallel()
	require.Root(t)
	c, log := shell(t, "echo pid=$$; echo /* /proc/* /dev/*; while read -r line; do echo \"$line\"; done < /proc/self/fd/3; read -r name rest < /proc/self/status; echo $rest")
	c.Jail, c.UID, c.GID = jailOf(t, c.Path), uid, gid
	passed, err := os.CreateTemp(t.TempDir(), "passed")
	if err != nil {
		t.Fatal(err)
	}
	defer passed.Close()
	if _, err := passed.WriteString("passed by descriptor\n"); err != nil {
		t.Fatal(err)
	}
	if err := passed.Chmod(0o644); err != nil {
		t.Fatal(err)
	}
	c.Files = []*os.File{passed}
	out, status := run(t, c, log)
	if status != "exit status 0" {
		t.Fatalf("it ended with %s: %s", status, out)
	}
	for _, want := range []string{"pid=1\n", "/bin /dev /etc /lib /lib64 /proc /proc/self /dev/null\n", "passed by descriptor\n", "\nsh\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("it does not print %q, but\n%s", want, out)
		}
	}
}

// TestJailStopped: a process in a jail is PID 1 of its namespace, which the kernel protects from signals of its own
// namespace. The runner's STOP, CONT and KILL reach it all the same. Signals that ask a process to end do not, so
// nothing may rely on them.
func TestJailStopped(t *testing.T) {
	t.Parallel()
	require.Root(t)
	c, _ := shell(t, "while :; do :; done")
	c.Jail, c.UID, c.GID = jailOf(t, c.Path), uid, gid
	p := start(t, c)
	state := func() string {
		b, err := os.ReadFile("/proc/" + strconv.Itoa(p.PID) + "/status")
		if err != nil {
			t.Fatal(err)
		}
		return field(string(b), "State")
	}
	for _, s := range []unix.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGQUIT} {
		if err := p.Signal(s); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for !strings.HasPrefix(state(), "T (stopped)") {
		if t.Context().Err() != nil {
			t.Fatal("it was not stopped")
		}
	}
	if err := p.Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	again, err := vmmproc.Attach(p.PID, p.StartTime)
	if err != nil {
		t.Fatal(err)
	}
	if err := again.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	ended(t, p)
}

// TestForkBomb: a compromised VMM gets no more processes than the bound, also on a host without a pids controller.
func TestForkBomb(t *testing.T) {
	t.Parallel()
	require.Root(t)
	const bombUID = uid + 7 // the bound counts all processes of a user
	c, _ := shell(t, "f() { f & f & while :; do :; done; }; f 2>/dev/null; while :; do :; done")
	c.Jail, c.UID, c.GID = jailOf(t, c.Path), bombUID, gid
	p := start(t, c)
	processes := func() (n int) {
		entries, err := os.ReadDir("/proc")
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			var st unix.Stat_t
			if unix.Stat("/proc/"+e.Name(), &st) == nil && st.Uid == bombUID {
				n++
			}
		}
		return n
	}
	const bound = 256
	most := 0
	// It has got what it gets when its number does not grow any more. That may be less than the bound: shells that cannot fork end. The
	// processes spin at the lowest priority, so that the test and others beside it get the processor.
	deadline := time.Now().Add(5 * time.Minute)
	for still := 0; still < 200 && most <= bound && time.Now().Before(deadline); {
		_ = unix.Setpriority(unix.PRIO_USER, bombUID, 19) // fails until there is a process; a fork inherits it
		if n := processes(); n > most {
			most, still = n, 0
		} else if most >= bound/2 {
			still++
		}
	}
	if most > bound || most < bound/2 {
		t.Errorf("it got %d processes, want as many as the bound of %d allows", most, bound)
	}
	if err := p.Kill(t.Context()); err != nil { // the end of PID 1 ends all processes of the namespace
		t.Fatal(err)
	}
	if left := processes(); left > 0 {
		t.Errorf("%d processes are left", left)
	}
}

// TestJailRefuses: a process that cannot be confined is not started.
func TestJailRefuses(t *testing.T) {
	t.Parallel()
	require.Root(t)
	dir := t.TempDir()
	testprog.Write(t, filepath.Join(dir, "script"), []byte("#!/bin/sh\n"))
	for name, cfg := range map[string]jail.Config{
		"no program":       {Program: filepath.Join(dir, "none")},
		"a script":         {Program: filepath.Join(dir, "script")},
		"a relative path":  {Program: "sh"},
		"no file":          {Program: "/bin/sh", Files: []string{filepath.Join(dir, "none")}},
		"a directory":      {Program: "/bin/sh", Files: []string{dir}},
		"a file of /proc":  {Program: "/bin/sh", Files: []string{"/proc/version"}},
		"no device":        {Program: "/bin/sh", Devices: []string{"/etc/passwd"}},
		"a device as file": {Program: "/bin/sh", Files: []string{os.DevNull}},
	} {
		if _, err := jail.New(t.Context(), cfg); err == nil {
			t.Errorf("%s: a jail was made", name)
		}
	}
	c, _ := shell(t, "exit 0")
	c.Jail = jailOf(t, "/bin/cat")
	if p, err := vmmproc.Start(c); err == nil {
		t.Errorf("process %d was started from a program that its jail does not have", p.PID)
		_ = p.Kill(t.Context())
	}
}

// TestJailLeavesTheHost: neither building a jail nor a start in it changes the mounts that this process sees.
func TestJailLeavesTheHost(t *testing.T) { //nolint:paralleltest // it compares the mounts of this process
	require.Root(t)
	mounts := func() string {
		b, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	// Tests of other packages mount something at the same time. A jail that leaves a mount behind does so each time.
	var p *vmmproc.Process
	var before, after string
	for range 5 {
		before = mounts()
		c, _ := shell(t, "while :; do :; done")
		c.Jail = jailOf(t, c.Path)
		p = start(t, c)
		if after = mounts(); after == before {
			break
		}
	}
	if after != before {
		t.Errorf("the mounts were\n%s, and are\n%s", before, after)
	}
	// A file system that is mounted later does not get into it, and one that is unmounted is gone.
	dir := t.TempDir()
	if err := unix.Mount("later", dir, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	inside, err := os.ReadFile("/proc/" + strconv.Itoa(p.PID) + "/mountinfo")
	if err := unix.Unmount(dir, 0); err != nil {
		t.Error(err)
	}
	if err != nil || strings.Contains(string(inside), "later") || strings.Contains(string(inside), dir) {
		t.Errorf("it has the mounts %s (%v)", inside, err)
	}
}

// BenchmarkStart compares a start in a jail with one without: go test -run '^$' -bench Start.
func BenchmarkStart(b *testing.B) {
	walls := jailOf(b, "/bin/sleep")
	for _, v := range []struct {
		name string
		jail *jail.Jail
	}{{"plain", nil}, {"jail", walls}} {
		b.Run(v.name, func(b *testing.B) {
			for b.Loop() {
				p, err := vmmproc.Start(vmmproc.Command{Path: "/bin/sleep", Args: []string{"600"}, Log: os.Stderr, Dir: "/", UID: uid, GID: gid, Jail: v.jail})
				if err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				if err := p.Kill(context.WithoutCancel(b.Context())); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
}
