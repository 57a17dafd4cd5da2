//go:build linux

package workload

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/account"
	"github.com/coppice-dev/coppice/guestagent/procfs"
	"github.com/coppice-dev/coppice/guestagent/smallfile"
)

const (
	cgroupRoot     = "/sys/fs/cgroup"
	memberCgroup   = cgroupRoot + "/workload"
	hooksCgroup    = cgroupRoot + "/hooks"
	maxIdleThreads = 2
)

// InitMode is the argument that makes the agent's binary run as PID 1 of the workload.
const InitMode = "workload-init"

// NothingMode is the argument that makes the agent's binary do nothing.
const NothingMode = "nothing"

// Workload is the workload of a guest: a cgroup, and pid, mount and cgroup namespaces held by a small init.
type Workload struct {
	init    int // its PID 1, as the agent sees it
	ns      map[int]*os.File
	cgroup  *os.File // used by descriptor, because their paths do not exist in the workload's namespaces
	hooks   *os.File
	threads chan chan func() // idle threads
}

// initRecord identifies a workload that an earlier agent has left running.
type initRecord struct {
	PID        int    `json:"pid"`
	StartTicks uint64 `json:"start_ticks"`
}

// Open adopts the running workload, or starts one.
func Open(recordPath string) (*Workload, error) {
	n := &Workload{ns: map[int]*os.File{}, threads: make(chan chan func(), maxIdleThreads)}
	var err error
	if n.cgroup, err = makeCgroup(memberCgroup); err != nil {
		return nil, err
	}
	if n.hooks, err = makeCgroup(hooksCgroup); err != nil {
		return nil, err
	}
	if n.init = findInit(recordPath); n.init == 0 {
		if err := n.startInit(recordPath); err != nil {
			return nil, fmt.Errorf("start the workload's init: %w", err)
		}
	}
	for _, kind := range []struct {
		flag int
		name string
	}{{unix.CLONE_NEWPID, "pid"}, {unix.CLONE_NEWCGROUP, "cgroup"}, {unix.CLONE_NEWNS, "mnt"}} {
		f, err := os.Open(fmt.Sprintf("/proc/%d/ns/%s", n.init, kind.name))
		if err != nil {
			return nil, err
		}
		n.ns[kind.flag] = f
	}
	return n, nil
}

func makeCgroup(path string) (*os.File, error) {
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	return os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY, 0)
}

func findInit(path string) int {
	var rec initRecord
	b, err := smallfile.Read(path)
	if err != nil || json.Unmarshal(b, &rec) != nil || rec.PID <= 0 {
		return 0
	}
	st, err := procfs.ReadStat("/proc", rec.PID)
	if err != nil || st.StartTicks != rec.StartTicks || st.State == "Z" {
		return 0
	}
	return rec.PID
}

// startInit starts the workload's PID 1 in its cgroup and waits until its namespaces are set up.
func (n *Workload) startInit(recordPath string) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	cmd := &exec.Cmd{
		Path: "/proc/self/exe", Args: []string{"coppice-guest", InitMode}, Dir: "/", Stderr: os.Stderr, ExtraFiles: []*os.File{w},
		Env: []string{"PATH=" + account.DefaultPath, "GODEBUG="},
		SysProcAttr: &syscall.SysProcAttr{
			Setsid: true, Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID, UseCgroupFD: true, CgroupFD: int(n.cgroup.Fd()),
		},
	}
	err = cmd.Start()
	_ = w.Close()
	if err != nil {
		return err
	}
	n.init = cmd.Process.Pid
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }() // it is reaped, whenever it ends
	if err := r.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		return err
	}
	var ready [1]byte
	if _, err := io.ReadFull(r, ready[:]); err != nil {
		_ = cmd.Process.Kill()
		return fmt.Errorf("it did not become ready: %w", errors.Join(err, <-ended))
	}
	st, err := procfs.ReadStat("/proc", n.init)
	if err != nil {
		return err
	}
	b, err := json.Marshal(initRecord{PID: n.init, StartTicks: st.StartTicks})
	if err != nil {
		return err
	}
	return smallfile.Replace(recordPath, b, 0o600)
}

// Gone returns a channel that is closed when the workload's init has ended, and with it every process of the workload.
func (n *Workload) Gone() (<-chan struct{}, error) {
	fd, err := unix.PidfdOpen(n.init, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("pidfd_open", err)
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	rc, err := f.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	ch := make(chan struct{})
	go func() {
		defer close(ch)
		defer func() { _ = f.Close() }()
		// The pidfd becomes readable once, at the end. (The init is not always our child, so this does not reap it.)
		_ = rc.Read(func(fd uintptr) bool {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
			return n > 0 || err != nil && !errors.Is(err, unix.EINTR)
		})
	}()
	return ch, nil
}

// Inside runs fn on a thread that has joined the workload's namespaces. Threads are kept for later calls, and new ones
// are made when all are busy. So a call that hangs in a file system does not delay other calls.
func (n *Workload) Inside(fn func() error) error {
	var thread chan func()
	select {
	case thread = <-n.threads:
	default:
		thread = make(chan func())
		if err := n.newThread(thread); err != nil {
			return err
		}
	}
	done := make(chan error, 1)
	thread <- func() { done <- fn() }
	err := <-done
	select {
	case n.threads <- thread:
	default:
		close(thread)
	}
	return err
}

func (n *Workload) newThread(jobs <-chan func()) error {
	joined := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		err := n.Join()
		joined <- err
		if err != nil {
			return
		}
		for job := range jobs {
			job()
		}
	}()
	if err := <-joined; err != nil {
		return core.Wrapf(err, core.Internal, core.CodeInternal, "the workload's namespaces cannot be joined: %v", err)
	}
	return nil
}

// Join moves the calling thread into the namespaces. Its children are born in the pid namespace; the thread itself
// stays outside of it.
func (n *Workload) Join() error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	for _, kind := range []int{unix.CLONE_NEWPID, unix.CLONE_NEWCGROUP, unix.CLONE_NEWNS} {
		if err := unix.Setns(int(n.ns[kind].Fd()), kind); err != nil {
			return os.NewSyscallError("setns", err)
		}
	}
	return nil
}

// Start starts a process in the workload. It must be called from within Inside.
func (n *Workload) Start(cmd *exec.Cmd) error { return startIn(cmd, n.cgroup) }

// StartHook starts a process outside of the workload, where the freeze does not reach it. It must also be called from
// within Inside.
func (n *Workload) StartHook(cmd *exec.Cmd) error { return startIn(cmd, n.hooks) }

func startIn(cmd *exec.Cmd, cgroup *os.File) error {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(cgroup.Fd())
	return cmd.Start()
}

// openControl opens a control file of a cgroup.
func openControl(cgroup *os.File, name string, flags int) (int, error) {
	for {
		fd, err := unix.Openat(int(cgroup.Fd()), name, flags|unix.O_CLOEXEC, 0)
		if !errors.Is(err, unix.EINTR) {
			if err != nil {
				err = smallfile.PathError("open", cgroup.Name()+"/"+name, err)
			}
			return fd, err
		}
	}
}

// event reads one value of a cgroup's events.
func event(fd int, key string) (string, error) {
	var buf [256]byte
	n, err := unix.Pread(fd, buf[:], 0)
	if err != nil {
		return "", os.NewSyscallError("read cgroup.events", err)
	}
	for line := range strings.Lines(string(buf[:n])) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), " "); ok && k == key {
			return v, nil
		}
	}
	return "", fmt.Errorf("cgroup.events has no %s", key)
}

// awaitEvent waits until a cgroup's event has a value. It reports whether that came before the deadline.
func awaitEvent(ctx context.Context, cgroup *os.File, key, want string, timeout time.Duration) (bool, error) {
	fd, err := openControl(cgroup, "cgroup.events", unix.O_RDONLY)
	if err != nil {
		return false, err
	}
	defer func() { _ = unix.Close(fd) }()
	deadline := time.Now().Add(timeout)
	for {
		v, err := event(fd, key)
		if err != nil || v == want {
			return err == nil, err
		}
		left := time.Until(deadline)
		if left <= 0 || ctx.Err() != nil {
			return false, context.Cause(ctx)
		}
		// The kernel reports a change as urgent data. The wait is split into short ones, to notice the end of ctx.
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLPRI}}
		if _, err := unix.Poll(fds, int(min(left, 100*time.Millisecond).Milliseconds())+1); err != nil && !errors.Is(err, unix.EINTR) {
			return false, os.NewSyscallError("poll", err)
		}
	}
}

func writeControl(cgroup *os.File, name, value string) error {
	fd, err := openControl(cgroup, name, unix.O_WRONLY)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	if _, err := unix.Write(fd, []byte(value)); err != nil {
		return smallfile.PathError("write", cgroup.Name()+"/"+name, err)
	}
	return nil
}

// Freeze stops every process of the workload and returns their number. If a process does not stop in time, the error is
// NOT_QUIESCED and names it, and everything runs again.
func (n *Workload) Freeze(ctx context.Context, timeout time.Duration) (int, error) {
	if err := writeControl(n.cgroup, "cgroup.freeze", "1"); err != nil {
		return 0, core.Wrapf(err, core.Internal, core.CodeNotQuiesced, "the workload cannot be frozen: %v", err)
	}
	ok, err := awaitEvent(ctx, n.cgroup, "frozen", "1", timeout)
	if err == nil && ok {
		pids, err := n.PIDs()
		return len(pids), err
	}
	var named string
	if err == nil {
		named = n.unfrozen()
	}
	thawed := n.Thaw(context.WithoutCancel(ctx))
	if err != nil {
		return 0, errors.Join(err, thawed)
	}
	return 0, errors.Join(core.Errorf(core.FailedPrecondition, core.CodeNotQuiesced,
		"the workload did not freeze within %s: %s cannot be stopped; the workload goes on", timeout, named), thawed)
}

// unfrozen names a process that is not frozen.
func (n *Workload) unfrozen() string {
	pids, _ := n.PIDs()
	named := "some process"
	for _, pid := range pids {
		wchan, _ := smallfile.Read(fmt.Sprintf("/proc/%d/wchan", pid))
		st, err := procfs.ReadStat("/proc", pid)
		if err != nil || string(wchan) == "do_freezer_trap" {
			continue
		}
		named = fmt.Sprintf("process %d (%s, state %s, in %s)", n.InnerPID(pid), core.Clip(st.Comm), st.State, core.Clip(string(wchan)))
		if st.State == "D" {
			return named
		}
	}
	return named
}

// Thaw undoes Freeze. It is idempotent.
func (n *Workload) Thaw(context.Context) error {
	return writeControl(n.cgroup, "cgroup.freeze", "0")
}

// EndHooks kills processes that hooks have left behind, because no freeze reaches them.
func (n *Workload) EndHooks() error {
	if ok, err := awaitEvent(context.Background(), n.hooks, "populated", "0", 0); ok || err != nil {
		return err
	}
	if err := writeControl(n.hooks, "cgroup.kill", "1"); err != nil {
		return err
	}
	ok, err := awaitEvent(context.Background(), n.hooks, "populated", "0", 2*time.Second)
	if err == nil && !ok {
		err = errors.New("a process that a hook left behind does not die")
	}
	return err
}

// PIDs lists the processes of the workload, without its init.
func (n *Workload) PIDs() ([]int, error) {
	out, err := n.members(nil, n.cgroup)
	slices.Sort(out)
	return out, err
}

// members adds the processes of a cgroup and of the cgroups below it.
func (n *Workload) members(out []int, cgroup *os.File) ([]int, error) {
	fd, err := openControl(cgroup, "cgroup.procs", unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	b, err := smallfile.ReadToEnd(fd, 1<<20)
	_ = unix.Close(fd)
	if err != nil {
		return nil, smallfile.PathError("read", cgroup.Name()+"/cgroup.procs", err)
	}
	for f := range bytes.FieldsSeq(b) {
		if pid, err := strconv.Atoi(string(f)); err == nil && pid != n.init {
			out = append(out, pid)
		}
	}
	// The link count grows with every subdirectory. A workload has no cgroups below it, unless it made its cgroups
	// writable.
	var st unix.Stat_t
	if err := unix.Fstat(int(cgroup.Fd()), &st); err != nil || st.Nlink <= 2 {
		return out, err
	}
	return n.below(out, cgroup)
}

func (n *Workload) below(out []int, cgroup *os.File) ([]int, error) {
	root, err := openControl(cgroup, ".", unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	dir := os.NewFile(uintptr(root), cgroup.Name())
	defer func() { _ = dir.Close() }()
	list, err := dir.ReadDir(-1)
	if err != nil {
		return nil, err
	}
	for _, e := range list {
		if !e.IsDir() {
			continue
		}
		fd, err := openControl(dir, e.Name(), unix.O_RDONLY|unix.O_DIRECTORY)
		if err != nil {
			continue // removed meanwhile
		}
		sub := os.NewFile(uintptr(fd), cgroup.Name()+"/"+e.Name())
		out, err = n.members(out, sub)
		_ = sub.Close()
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// InnerPID returns the number of a process within the workload, or 0 when it is gone.
func (n *Workload) InnerPID(pid int) int {
	b, err := smallfile.Read("/proc/" + strconv.Itoa(pid) + "/status")
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(b), "\nNSpid:")
	line, _, _ := strings.Cut(rest, "\n")
	inner, _ := strconv.Atoi(line[strings.LastIndexAny(line, "\t ")+1:])
	return inner
}

// Proc is the directory under which the agent sees the workload's own /proc.
func (n *Workload) Proc() string { return fmt.Sprintf("/proc/%d/root/proc", n.init) }
