package confine

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
)

// Task is a task that a helper can do.
type Task struct {
	Name string
	Run  func(*Child) error
	// Files allows the task to make, change and remove files below Spec.Dir.
	Files bool
}

// Child is a helper, as its task sees it.
type Child struct {
	Files   []*os.File // the files from the caller
	request []byte
}

// Request decodes the request.
func (c *Child) Request(v any) error { return json.Unmarshal(c.request, v) }

// Answer sends one answer.
func (*Child) Answer(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return writeFrame(os.Stdout, frameAnswer, b)
}

// Enter makes this process a helper if it was started as one, and then does not return. Otherwise it records that this
// program can start helpers for these tasks. It must be called before anything else.
func Enter(tasks ...Task) {
	if len(os.Args) == 0 || os.Args[0] != program {
		entered.Store(true)
		return
	}
	if err := serve(tasks); err != nil {
		fmt.Fprintln(os.Stderr, "a confined helper:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func serve(tasks []Task) error {
	// The caller removes this process's root directory after the ready message.
	open, err := openDescriptors()
	if err != nil {
		return err
	}
	if err := writeFrame(os.Stdout, frameReady, nil); err != nil {
		return err
	}
	var h header
	if err := readJSON(frameHeader, &h); err != nil {
		return fmt.Errorf("only a program that needs it starts it and tells it what to do: %w", err)
	}
	if h.Chroot { // before any input of a tenant is read
		if err := errors.Join(unix.Chroot(stageDir), unix.Chdir("/")); err != nil {
			return fmt.Errorf("enter the empty root: %w", err)
		}
	}
	kind, request, err := readFrame(os.Stdin, maxRequest)
	if err != nil || kind != frameRequest {
		return errors.Join(errors.New("read the request"), err)
	}
	i := slices.IndexFunc(tasks, func(t Task) bool { return t.Name == h.Task })
	if i < 0 {
		return fmt.Errorf("this program has no task %q", h.Task)
	}
	c := &Child{request: request}
	for n := range h.Files {
		c.Files = append(c.Files, os.NewFile(uintptr(3+n), "given "+strconv.Itoa(n)))
	}
	closeOthers(open, 3+h.Files)
	runtime.GOMAXPROCS(min(2, runtime.NumCPU()))
	// With this limit, the garbage collector works harder before the kernel refuses memory.
	debug.SetMemoryLimit(h.Limits.Memory / 4 * 3)
	if err := limit(h.Limits, h.Confined); err != nil {
		return err
	}
	if err := verify(h); err != nil {
		return err
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return err
	}
	if err := filter(tasks[i].Files); err != nil {
		return err
	}
	return report(tasks[i].Run(c))
}

func readJSON(want byte, v any) error {
	kind, b, err := readFrame(os.Stdin, maxRequest)
	if err != nil {
		return err
	}
	if kind != want {
		return kindError(kind)
	}
	return json.Unmarshal(b, v)
}

// openDescriptors lists the open descriptors of this process, except those of the Go runtime.
func openDescriptors() ([]int, error) {
	const dir = "/proc/self/fd"
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var out []int
	for _, e := range entries {
		to, err := os.Readlink(filepath.Join(dir, e.Name()))
		n, numErr := strconv.Atoi(e.Name())
		if err == nil && numErr == nil && !strings.HasPrefix(to, "anon_inode:") {
			out = append(out, n)
		}
	}
	return out, nil
}

// closeOthers closes descriptors that this process inherited by accident.
func closeOthers(open []int, from int) {
	for _, fd := range open {
		if fd >= from {
			_ = unix.Close(fd) // it may be the descriptor of the listed directory, already closed
		}
	}
}

// addressSlack is the difference between the address space and the memory of a helper: a Go program reserves address
// space that it never writes.
const addressSlack = 8 << 30

// limit sets the limits of this process. Its caller cannot do it: that needs a capability (CAP_SYS_RESOURCE) that
// runners in containers often lack. No input of a tenant was read yet, and no limit can be raised afterwards.
func limit(l Limits, confined bool) error {
	cpu, file := uint64(math.Ceil(l.CPU.Seconds())), uint64(l.FileBytes) //nolint:gosec // G115: bounded by the caller
	limits := map[int]uint64{
		unix.RLIMIT_CPU: cpu, unix.RLIMIT_FSIZE: file, unix.RLIMIT_NOFILE: maxOpen, unix.RLIMIT_CORE: 0, unix.RLIMIT_MEMLOCK: 0,
		unix.RLIMIT_MSGQUEUE: 0, unix.RLIMIT_SIGPENDING: 128,
	}
	if confined { // the kernel counts threads by user
		limits[unix.RLIMIT_NPROC] = maxThreads
	}
	if !raceDetector {
		memory := uint64(l.Memory) //nolint:gosec // G115: positive
		limits[unix.RLIMIT_DATA], limits[unix.RLIMIT_AS] = memory, memory+addressSlack
	}
	for which, n := range limits {
		if err := syscall.Setrlimit(which, &syscall.Rlimit{Cur: n, Max: n}); err != nil {
			return fmt.Errorf("set resource limit %d to %d: %w", which, n, err)
		}
	}
	return nil
}

// verify stops this process if it is not confined as it should be.
func verify(h header) error {
	if !h.Confined {
		return nil
	}
	entries, err := os.ReadDir("/")
	if err != nil {
		return err
	}
	want := 0
	if h.Dir {
		want = 1
	}
	if !h.Bare && (len(entries) != want || want == 1 && "/"+entries[0].Name() != TreeDir) {
		return fmt.Errorf("its root directory has %d files, want %d", len(entries), want)
	}
	if uid := uint32(os.Getuid()); uid != h.UID || uid == 0 { //nolint:gosec // G115: a user id
		return fmt.Errorf("it runs as user %d, want %d", uid, h.UID)
	}
	n, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)
	if err != nil || n != 1 {
		return errors.Join(errors.New("no_new_privs is not set"), err)
	}
	return nil
}

// report sends the result of the task.
func report(failed error) error {
	if failed == nil {
		return writeFrame(os.Stdout, frameDone, nil)
	}
	code, message := core.CodeOf(failed), core.MessageOf(failed)
	if code == core.CodeInternal {
		message = failed.Error() // only for a log
	}
	b, err := json.Marshal(failure{code, printable(message)})
	if err != nil {
		return err
	}
	return writeFrame(os.Stdout, frameFailed, b)
}
