package confine_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/confine"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/require"
)

func given(t *testing.T, content string) *os.File {
	t.Helper()
	path := filepath.Join(t.TempDir(), "given")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func collect[T any](out *[]T) func(json.RawMessage) error {
	return func(b json.RawMessage) error {
		var v T
		err := json.Unmarshal(b, &v)
		*out = append(*out, v)
		return err
	}
}

func TestRun(t *testing.T) {
	t.Parallel()
	var got []string
	if err := confine.Run(t.Context(), spec(taskEcho, "hello ", given(t, "file"), given(t, " again")), collect(&got)); err != nil {
		t.Fatal(err)
	}
	if len(got) != 1 || got[0] != "hello file again" {
		t.Errorf("got %q", got)
	}
}

// TestOffsetsAreTheCallers: a helper reads a file from the caller's offset on, and the caller's offset does not change.
func TestOffsetsAreTheCallers(t *testing.T) {
	t.Parallel()
	file := given(t, "head and tail")
	if _, err := file.Seek(9, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	var got []string
	if err := confine.Run(t.Context(), spec(taskEcho, "", file), collect(&got)); err != nil || len(got) != 1 || got[0] != "tail" {
		t.Errorf("got %q, %v", got, err)
	}
	if at, err := file.Seek(0, io.SeekCurrent); err != nil || at != 9 {
		t.Errorf("the helper moved the caller's offset to %d, %v", at, err)
	}
}

// TestHelperCanDoNothing: a helper tries about sixty operations that would harm the host, and none of them works.
func TestHelperCanDoNothing(t *testing.T) {
	t.Parallel()
	require.Root(t)
	// A descriptor that programs inherit: the helper must not have it.
	secret := given(t, "secret")
	if err := unix.Dup3(int(secret.Fd()), 50, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(50) })
	file := given(t, "content")
	var got []attempt
	if err := confine.Run(t.Context(), spec(taskProbe, map[string]int{"Peer": os.Getpid()}, file), collect(&got)); err != nil {
		t.Fatal(err)
	}
	if len(got) < 50 {
		t.Errorf("only %d attempts were made: %+v", len(got), got)
	}
	for _, a := range got {
		if a.Err == "" {
			t.Errorf("a helper can: %s", a.What)
		}
	}
	if info, err := file.Stat(); err != nil || info.Mode() != 0o600 {
		t.Errorf("the given file is %v, %v", info.Mode(), err)
	}
}

// TestHelperFromOutside checks how the kernel shows a running helper.
func TestHelperFromOutside(t *testing.T) {
	t.Parallel()
	require.Root(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	here, ended := make(chan struct{}, 2), make(chan error, 1)
	go func() {
		ended <- confine.Run(t.Context(), spec(taskWait, nil, r), func(json.RawMessage) error { here <- struct{}{}; return nil })
	}()
	select {
	case <-here:
	case err := <-ended:
		t.Fatal(err)
	}
	pid := helperOf(t, os.Getpid(), taskWait)
	dir := fmt.Sprintf("/proc/%d/", pid)
	read := func(name string) string {
		t.Helper()
		b, err := os.ReadFile(dir + name)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	tasks, err := os.ReadDir(dir + "task")
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		status := read("task/" + task.Name() + "/status")
		for _, want := range []string{"CapInh:\t0000000000000000", "CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "CapAmb:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2", "Groups:\t \n"} {
			if !strings.Contains(status, want) {
				t.Errorf("a thread's status lacks %q:\n%s", want, status)
			}
		}
		var uid [4]int
		_, rest, _ := strings.Cut(status, "\nUid:")
		if _, err := fmt.Sscan(rest, &uid[0], &uid[1], &uid[2], &uid[3]); err != nil || uid[0] < 768_000_000 || uid[1] != uid[0] || uid[2] != uid[0] || uid[3] != uid[0] {
			t.Errorf("its user ids are %v (%v)", uid, err)
		}
	}
	if mounts := strings.Split(strings.TrimSpace(read("mountinfo")), "\n"); len(mounts) != 1 || !strings.Contains(mounts[0], " / / ro,nosuid,nodev,noexec") || !strings.Contains(mounts[0], "- tmpfs ") {
		t.Errorf("its mounts are %q", mounts)
	}
	if entries, err := os.ReadDir(dir + "root/"); err != nil || len(entries) > 0 {
		t.Errorf("its root has %v, %v", entries, err)
	}
	if cwd, err := os.Readlink(dir + "cwd"); err != nil || cwd != "/" {
		t.Errorf("its directory is %s, %v", cwd, err)
	}
	if environ := read("environ"); environ != "" {
		t.Errorf("its environment is %q", environ)
	}
	if dev := read("net/dev"); strings.Count(dev, "\n") != 3 || !strings.Contains(dev, "lo:") {
		t.Errorf("its network is\n%s", dev)
	}
	for _, ns := range []string{"mnt", "net", "pid", "ipc", "uts", "cgroup"} {
		ours, errA := os.Readlink("/proc/self/ns/" + ns)
		its, errB := os.Readlink(dir + "ns/" + ns)
		if err := errors.Join(errA, errB); err != nil || ours == its {
			t.Errorf("it is in the %s namespace %s (%v)", ns, its, err)
		}
	}
	for name, want := range map[string]string{"Max core file size": "0", "Max file size": "0", "Max cpu time": "20", "Max processes": "64", "Max open files": "64", "Max locked memory": "0"} {
		_, rest, _ := strings.Cut(read("limits"), name)
		if f := strings.Fields(rest); len(f) < 2 || f[0] != want || f[1] != want {
			t.Errorf("%s is %v, want %s", name, f[:2], want)
		}
	}
	if got := strings.TrimSpace(read("oom_score_adj")); got != "1000" {
		t.Errorf("oom_score_adj is %s", got)
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after Run the helper is there: %v", err)
	}
}

// helperOf finds the helper of a process for a task.
func helperOf(t *testing.T, parent int, task string) int {
	t.Helper()
	list, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range list {
		raw, err := os.ReadFile(path)
		if err != nil || string(raw) != "coppice-confined\x00"+task+"\x00" {
			continue
		}
		stat, err := os.ReadFile(filepath.Join(filepath.Dir(path), "stat"))
		var pid, ppid int
		if err != nil {
			continue
		}
		_, rest, _ := strings.Cut(string(stat), ") ")
		var state string
		if _, err := fmt.Sscan(rest, &state, &ppid); err != nil || ppid != parent {
			continue
		}
		if _, err := fmt.Sscan(string(stat), &pid); err == nil {
			return pid
		}
	}
	t.Fatalf("process %d has no helper for %s", parent, task)
	return 0
}

// TestLimits: each misuse ends the helper, and the error names the limit. The caller and another helper go on.
func TestLimits(t *testing.T) {
	t.Parallel()
	for what, c := range map[string]struct {
		limit  confine.Limit
		change func(*confine.Limits)
	}{
		"memory":           {confine.LimitMemory, nil},
		"small objects":    {confine.LimitMemory, nil},
		"cpu":              {confine.LimitCPU, func(l *confine.Limits) { l.CPU = time.Second }},
		"hang":             {confine.LimitTime, func(l *confine.Limits) { l.Time = time.Second }},
		"flood of answers": {confine.LimitAnswer, nil},
		"long answer":      {confine.LimitAnswer, nil},
		"many bytes":       {confine.LimitAnswer, nil},
		"huge length":      {confine.LimitAnswer, nil},
		"no message":       {confine.LimitAnswer, nil},
		"flood of errors":  {confine.LimitOutput, nil},
		"threads":          {confine.LimitThreads, nil},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			if c.limit == confine.LimitThreads {
				require.Root(t) // the kernel counts threads by user, except root's
			}
			if c.limit == confine.LimitMemory && confine.RaceDetector {
				return // the race detector reserves more memory than any limit; see TestMemoryWithoutRaceDetector
			}
			s := spec(taskMisuse, what)
			if c.change != nil {
				c.change(&s.Limits)
			}
			start := time.Now()
			err := confine.Run(t.Context(), s, func(json.RawMessage) error { return nil })
			if !confine.IsLimit(err, c.limit) {
				t.Errorf("after %v: %v, want the limit of %s", time.Since(start), err, c.limit)
			}
			var got []string
			if err := confine.Run(t.Context(), spec(taskEcho, "alive"), collect(&got)); err != nil || len(got) != 1 {
				t.Errorf("the next helper: %q, %v", got, err)
			}
		})
	}
}

// TestMemoryOfTheCaller: the helper's allocations, and the sizes that it claims, take no memory of the caller.
func TestMemoryOfTheCaller(t *testing.T) {
	misuses := []string{"memory", "huge length", "many bytes"}
	if confine.RaceDetector {
		misuses = misuses[1:] // the race detector reserves more memory than any limit
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for _, what := range misuses {
		_ = confine.Run(t.Context(), spec(taskMisuse, what), func(json.RawMessage) error { return nil })
	}
	runtime.ReadMemStats(&after)
	if grown := after.TotalAlloc - before.TotalAlloc; grown > 8<<20 {
		t.Errorf("the caller allocated %d KiB", grown>>10)
	}
}

// TestMemoryWithoutRaceDetector runs the memory tests in a program without the race detector, where the limits work.
func TestMemoryWithoutRaceDetector(t *testing.T) {
	t.Parallel()
	if !confine.RaceDetector {
		return // the memory tests have run in this program
	}
	cmd := exec.CommandContext(t.Context(), "go", "test", "-trimpath", "-count=1", "-run", "^(TestLimits|TestMemoryOfTheCaller)$", ".")
	cmd.Env = append(cmd.Environ(), "CGO_ENABLED=0") // the settings of make build: nothing is compiled again
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v:\n%s", err, out)
	}
}

func TestCrash(t *testing.T) {
	t.Parallel()
	for what, want := range map[string]string{
		"panic": "on purpose", "nil": "nil pointer", "exit": "exit status 7", "unknown kind": "an unexpected message", "half a message": "ended early",
	} {
		err := confine.Run(t.Context(), spec(taskMisuse, what), func(json.RawMessage) error { return nil })
		crash, ok := errors.AsType[*confine.CrashError](err)
		if !ok || !strings.Contains(err.Error(), want) || len(crash.Said) > 20<<10 {
			t.Errorf("%s: %v", what, err)
		}
	}
	err := confine.Run(t.Context(), spec(taskMisuse, "refuse"), func(json.RawMessage) error { return nil })
	refusal, ok := errors.AsType[*confine.TaskError](err)
	if !ok || refusal.Code != core.CodeInvalidField || !strings.HasPrefix(refusal.Message, "it is refused: yy") || len(refusal.Message) > 1024 {
		t.Errorf("a refusal: %v", err)
	}
	if err := confine.Run(t.Context(), spec(taskUnknown, nil), func(json.RawMessage) error { return nil }); err == nil || !strings.Contains(err.Error(), "no task") {
		t.Errorf("an unknown task: %v", err)
	}
}

func TestRunEndsEarly(t *testing.T) {
	t.Parallel()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	enough := errors.New("enough")
	if err := confine.Run(t.Context(), spec(taskWait, nil, r), func(json.RawMessage) error { return enough }); !errors.Is(err, enough) {
		t.Errorf("an error of the caller: %v", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("the caller is gone")
	if err := confine.Run(ctx, spec(taskWait, nil, r), func(json.RawMessage) error { cancel(gone); return nil }); !errors.Is(err, gone) {
		t.Errorf("a context that ended: %v", err)
	}
	if err := confine.Run(ctx, spec(taskEcho, "x"), func(json.RawMessage) error { return nil }); !errors.Is(err, gone) {
		t.Errorf("a context that had ended: %v", err)
	}
}

func TestRunRefuses(t *testing.T) {
	t.Parallel()
	w, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	r := given(t, "")
	noBound := spec(taskEcho, "x")
	noBound.Limits.Memory = 0
	for name, s := range map[string]confine.Spec{
		"a file to write": spec(taskEcho, "x", w),
		"too many files":  spec(taskEcho, "x", r, r, r, r, r, r, r, r, r, r, r, r, r, r, r, r, r),
		"a long request":  spec(taskEcho, strings.Repeat("x", 2<<20)),
		"no bound":        noBound,
	} {
		if err := confine.Run(t.Context(), s, func(json.RawMessage) error { return nil }); core.CodeOf(err) != core.CodeInternal {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestTree: with a directory and capabilities, a helper can make every kind of file that an archive may contain, and
// reaches nothing else.
func TestTree(t *testing.T) {
	t.Parallel()
	require.Root(t)
	dir := t.TempDir()
	s := spec(taskTree, nil)
	s.Dir, s.Caps, s.Limits.FileBytes = dir, []uint8{unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_MKNOD}, 1<<20
	var got []attempt
	if err := confine.Run(t.Context(), s, collect(&got)); err != nil {
		t.Fatal(err)
	}
	for _, a := range got {
		if a.Err == "" {
			t.Errorf("a helper can: %s", a.What)
		}
	}
	if len(got) != 6 {
		t.Errorf("attempts: %+v", got)
	}
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join(dir, "made"), &st); err != nil || st.Uid != 1234 || st.Gid != 5678 {
		t.Errorf("the file is %d:%d, %v", st.Uid, st.Gid, err)
	}
	if err := unix.Lstat(filepath.Join(dir, "zero"), &st); err != nil || st.Rdev != unix.Mkdev(1, 5) {
		t.Errorf("the device is %x, %v", st.Rdev, err)
	}
}

// TestInAContainer: where pivot_root is forbidden, a helper is confined as well as elsewhere, also with a directory.
func TestInAContainer(t *testing.T) {
	t.Parallel()
	require.Root(t)
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), beInAContainer+"="+t.TempDir())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// TestKilledFromOutside: a helper that the kernel kills for lack of memory does not count as a crash of its task, and
// the caller may try again. A helper that Run itself must kill counts as a crash.
func TestKilledFromOutside(t *testing.T) { //nolint:paralleltest // it searches for its helper among all helpers of this process
	require.Root(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	err = confine.Run(t.Context(), spec(taskWait, nil, r), func(json.RawMessage) error {
		return unix.Kill(helperOf(t, os.Getpid(), taskWait), unix.SIGKILL) // like the kernel
	})
	if _, killed := errors.AsType[*confine.KilledError](err); !killed || core.CategoryOf(err) != core.Exhausted || core.CodeOf(err) != core.CodeCapacity {
		t.Errorf("it was killed: %v", err)
	}
	if err := confine.Run(t.Context(), spec(taskMisuse, "signal"), func(json.RawMessage) error { return nil }); errors.As(err, new(*confine.KilledError)) {
		t.Errorf("a helper that tries to kill itself: %v", err)
	}
	err = confine.Run(t.Context(), spec(taskMisuse, "close and hang"), func(json.RawMessage) error { return nil })
	if _, crash := errors.AsType[*confine.CrashError](err); !crash || errors.As(err, new(*confine.KilledError)) {
		t.Errorf("a helper that closes its output and stays, so that Run must kill it: %v", err)
	}
}

// TestKilledParent: a helper does not outlive the process that started it.
func TestKilledParent(t *testing.T) {
	t.Parallel()
	require.Root(t)
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), beAParent+"="+dir)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "the helper runs", func() bool { _, err := os.Stat(filepath.Join(dir, "started")); return err == nil })
	pid := helperOf(t, cmd.Process.Pid, taskWait)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	eventually.True(t, "the helper is gone", func() bool {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		return err != nil || !strings.HasPrefix(string(raw), "coppice-confined")
	})
}

// TestManyHelpers: more helpers than may run at the same time all succeed.
func TestManyHelpers(t *testing.T) {
	t.Parallel()
	ended := make(chan error)
	for i := range 24 {
		go func() {
			var got []string
			err := confine.Run(t.Context(), spec(taskEcho, fmt.Sprint(i)), collect(&got))
			if err == nil && (len(got) != 1 || got[0] != fmt.Sprint(i)) {
				err = fmt.Errorf("helper %d answered %q", i, got)
			}
			ended <- err
		}()
	}
	for range 24 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

func BenchmarkRun(b *testing.B) {
	for b.Loop() {
		if err := confine.Run(b.Context(), spec(taskEcho, "x"), func(json.RawMessage) error { return nil }); err != nil {
			b.Fatal(err)
		}
	}
}
