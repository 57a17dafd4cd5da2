// Package vmmproc starts a VMM as a confined process that outlives the runner, and finds it again.
// The process is in a network namespace and in its own session, under its own user, with no
// capability and no way to gain one.
package vmmproc

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/osthread"
	"github.com/coppice-dev/coppice/internal/procfs"
	"github.com/coppice-dev/coppice/runner/threads"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/jail"
)

// Command is what to start. The process gets nothing of the runner's environment.
type Command struct {
	Path  string
	Name  string     // name of the program in its arguments; empty: Path
	Args  []string   // without the program's name
	Files []*os.File // become descriptors 3, 4, ... of the process
	Log   *os.File   // standard output and error
	Dir   string

	NetNS    *os.File // nil for the current one
	UID, GID uint32   // 0 keeps the runner's
	Groups   []uint32 // supplementary, for a device node such as /dev/kvm
	CgroupFD *os.File // a cgroup v2 directory; nil for none

	// Jail is the file system of the process, with its own namespaces of every kind except user. nil leaves the process
	// in the namespaces of this one: only a probe of our own kernel may run so.
	Jail *jail.Jail
}

// maxThreads bounds the processes and threads of a VMM's user, which has no other processes. It also works where there
// is no pids controller.
const maxThreads = 256

// Process is a running VMM. Its methods are safe for concurrent use.
type Process struct {
	PID       int
	StartTime uint64 // clock ticks since boot

	child bool     // this process must reap it
	pidfd *os.File // closed when the process has ended or was released
	done  chan struct{}

	mu     sync.Mutex // guards status and killed
	status string
	killed bool
}

// Start starts the command. The process does not end with the runner and is not tied to any context.
func Start(c Command) (*Process, error) {
	cmd := exec.Command(c.Path, c.Args...) //nolint:gosec,noctx // G204: the path comes from our configuration; a VMM must outlive every context
	if c.Name != "" {
		cmd.Args[0] = c.Name
	}
	cmd.Env = []string{"PATH=/usr/bin:/bin", "HOME=/nonexistent", "LC_ALL=C"}
	cmd.Dir, cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = c.Dir, c.Log, c.Log, c.Files
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if c.UID != 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: c.UID, Gid: c.GID, Groups: c.Groups}
	}
	if c.CgroupFD != nil {
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(c.CgroupFD.Fd())
	}
	if err := errors.Join(keepDescriptors(), noCore()); err != nil {
		return nil, err
	}
	null, err := os.Open(os.DevNull) // here: a jail has none
	if err != nil {
		return nil, err
	}
	defer null.Close()
	cmd.Stdin = null
	if c.Jail != nil {
		cmd.SysProcAttr.Cloneflags, cmd.SysProcAttr.Ptrace = jail.Own, true
	}
	if err := osthread.Do(func() error { // the thread is changed permanently
		if err := confineThread(c); err != nil {
			return err
		}
		if err := cmd.Start(); err != nil || c.Jail == nil {
			return err
		}
		if err := jail.Complete(cmd.Process.Pid, func() error { return limit(cmd.Process.Pid, c) }); err != nil {
			return errors.Join(err, cmd.Process.Kill(), reap(cmd))
		}
		return nil
	}); err != nil {
		return nil, fmt.Errorf("start %s: %w", c.Path, err)
	}
	p, err := open(cmd.Process.Pid)
	if err != nil {
		return nil, errors.Join(err, cmd.Process.Kill(), cmd.Wait())
	}
	p.child = true
	go func() {
		_ = cmd.Wait() // the status says everything
		p.finish(cmd.ProcessState.String())
	}()
	return p, nil
}

// keepDescriptors keeps descriptors from the VMM that this process itself has inherited: in a child, Go closes only
// those that it has opened.
func keepDescriptors() error {
	err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC)
	if err != nil && !errors.Is(err, unix.ENOSYS) && !errors.Is(err, unix.EINVAL) { // Linux before 5.11 cannot
		return fmt.Errorf("keep open files from the VMM: %w", err)
	}
	return nil
}

// noCore prevents a crashing VMM from writing its guest's memory, with every secret in it, to a file: the VMM inherits
// the limit of this process. This process sometimes has copies of the same secrets. Setting the VMM's own limit would
// need CAP_SYS_RESOURCE.
var noCore = sync.OnceValue(func() error {
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("forbid core dumps: %w", err)
	}
	return nil
})

// reap waits for a process that was killed before it began.
func reap(cmd *exec.Cmd) error {
	err := cmd.Wait()
	if _, ended := errors.AsType[*exec.ExitError](err); ended {
		return nil
	}
	return err
}

// confineThread confines the calling thread and every process that it starts.
func confineThread(c Command) error {
	if c.NetNS != nil {
		if err := unix.Setns(int(c.NetNS.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter the network namespace: %w", err)
		}
	}
	if c.Jail != nil {
		if err := c.Jail.Enter(); err != nil {
			return err
		}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	if err := ignoreHugePages(); err != nil {
		return err
	}
	if c.UID == 0 {
		return nil
	}
	for capability := uintptr(0); ; capability++ {
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, capability, 0, 0, 0); errors.Is(err, unix.EINVAL) {
			return nil // past the last capability of this kernel
		} else if err != nil {
			return fmt.Errorf("drop capability %d from the bounding set: %w", capability, err)
		}
	}
}

// Attach finds a process that an earlier runner started. It fails with os.ErrProcessDone if no process has that pid, or
// if the process with that pid was started at another time.
func Attach(pid int, startTime uint64) (*Process, error) {
	p, err := open(pid)
	// EINVAL: the number now belongs to a thread that is not the first of its process, or was never valid.
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) || errors.Is(err, os.ErrNotExist) {
		return nil, os.ErrProcessDone
	}
	if err != nil {
		return nil, err
	}
	if p.StartTime != startTime {
		return nil, errors.Join(os.ErrProcessDone, p.pidfd.Close())
	}
	go func() {
		if p.waitExit() {
			p.finish("ended while no runner was its parent")
		}
	}()
	return p, nil
}

// Find attaches to every process whose arguments, the program's name first, match.
func Find(match func(args []string) bool) ([]*Process, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var out []*Process
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || !matches(pid, match) {
			continue
		}
		start, err := startTime(pid)
		if err != nil {
			continue // it has ended
		}
		p, err := Attach(pid, start)
		if errors.Is(err, os.ErrProcessDone) {
			continue
		}
		if err != nil {
			return out, err
		}
		if !matches(pid, match) { // the pid belonged to another process before
			p.Release()
			continue
		}
		out = append(out, p)
	}
	return out, nil
}

func matches(pid int, match func([]string) bool) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return err == nil && len(b) > 0 && match(strings.Split(strings.TrimSuffix(string(b), "\x00"), "\x00"))
}

// open takes a pidfd first, so that the start time that it reads belongs to that process.
func open(pid int) (*Process, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", pid, err)
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	start, err := startTime(pid)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &Process{PID: pid, StartTime: start, pidfd: f, done: make(chan struct{})}, nil
}

// waitExit waits until the pidfd is readable, without occupying a thread. It returns false if the process was released
// first.
func (p *Process) waitExit() bool {
	conn, err := p.pidfd.SyscallConn()
	if err != nil {
		return false
	}
	polled := []unix.PollFd{{Events: unix.POLLIN}}
	return conn.Read(func(fd uintptr) bool {
		polled[0].Fd = int32(fd)
		n, err := unix.Poll(polled, 0)
		return err == nil && n > 0
	}) == nil
}

func (p *Process) finish(status string) {
	p.mu.Lock()
	p.status = status
	p.mu.Unlock()
	close(p.done)
	_ = p.pidfd.Close() // it was only watched
}

// Release stops watching a process that Attach found: Done is never closed, and Kill fails. A process that was started
// here is still watched, because it must be reaped.
func (p *Process) Release() {
	if !p.child {
		_ = p.pidfd.Close() // it was only watched
	}
}

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Status says how the process ended, and whether Kill ended it.
func (p *Process) Status() (status string, killed bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.status, p.killed
}

// Kill ends the process and waits until it is gone. Idempotent. If ctx ends, only the wait ends, not the kill.
func (p *Process) Kill(ctx context.Context) error {
	select {
	case <-p.done:
		return nil
	default:
	}
	p.mu.Lock()
	p.killed = true
	p.mu.Unlock()
	if err := p.Signal(unix.SIGKILL); err != nil {
		select {
		case <-p.done: // it ended meanwhile
			return nil
		default:
			return fmt.Errorf("kill process %d: %w", p.PID, err)
		}
	}
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for process %d to end: %w", p.PID, context.Cause(ctx))
	}
}

// Signal sends a signal through the pidfd, so it never reaches another process. It is no error if the process has
// ended.
func (p *Process) Signal(s unix.Signal) error {
	conn, err := p.pidfd.SyscallConn()
	if err != nil {
		return err
	}
	var sendErr error
	if err := conn.Control(func(fd uintptr) { sendErr = unix.PidfdSendSignal(int(fd), s, nil, 0) }); err != nil {
		select {
		case <-p.done: // it has just ended, and its pidfd is closed
			return nil
		default:
			return err
		}
	}
	if errors.Is(sendErr, unix.ESRCH) {
		return nil
	}
	return sendErr
}

// probeTime is the time that a VMM may take to answer before its threads are checked.
const probeTime = 2 * time.Second

// Answers calls ask until the VMM has answered. It gives up with vmm.ErrWaits when there was no answer for a while and
// a thread of the VMM waits in the kernel, like a thread that touched a page which is not on the host yet.
func (p *Process) Answers(ctx context.Context, ask func(context.Context) error) error {
	for {
		try, cancel := context.WithTimeoutCause(ctx, probeTime, errNoAnswer)
		err := ask(try)
		late := errors.Is(context.Cause(try), errNoAnswer)
		cancel()
		if err == nil || !late || ctx.Err() != nil {
			return err
		}
		if threads.Blocked(p.PID) != 0 {
			return errors.Join(vmm.ErrWaits, err)
		}
	}
}

var errNoAnswer = fmt.Errorf("there was no answer within %s", probeTime)

// startTime is when a process was started, in ticks since the boot.
func startTime(pid int) (uint64, error) {
	stat, err := procfs.ReadStat(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	return stat.Number(procfs.StartTime)
}

// File returns a copy of a descriptor of the process.
func (p *Process) File(fd int) (*os.File, error) {
	conn, err := p.pidfd.SyscallConn()
	if err != nil {
		return nil, err
	}
	var got int
	var getErr error
	if err := conn.Control(func(pidfd uintptr) { got, getErr = unix.PidfdGetfd(int(pidfd), fd, 0) }); err != nil {
		return nil, err
	}
	if getErr != nil {
		return nil, fmt.Errorf("copy descriptor %d of process %d: %w", fd, p.PID, getErr)
	}
	return os.NewFile(uintptr(got), fmt.Sprintf("fd %d of process %d", fd, p.PID)), nil
}
