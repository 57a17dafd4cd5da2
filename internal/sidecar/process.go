package sidecar

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/osthread"
)

// Process says how to start a process.
type Process struct {
	Name    string // name in messages
	Dir     string // directory of its socket and its log; created if it is missing
	Command []string
	Config  []byte // sent to its standard input, because others can see arguments and environments
	// Cgroup opens the directory of a control group in which the process starts. If it is nil, or returns a nil file,
	// the process starts in the group of this process. In its own group, the process survives the end of this process's
	// group, such as the end of a container.
	Cgroup  func() (*os.File, error)
	Confine bool // it cannot gain privileges, and does not get this process's environment
}

// SocketPath is the path of the socket on which the process listens.
func (p Process) SocketPath() string { return filepath.Join(p.Dir, "sock") }

// startTime is the time within which a process must answer after its start.
const startTime = 20 * time.Second

// logFile is the file in the process's directory with its output.
const logFile = "log"

// Start starts the process and waits until hello succeeds. The process goes on when this one ends.
func (p Process) Start(ctx context.Context, hello func(context.Context) error) error {
	if err := os.MkdirAll(p.Dir, 0o700); err != nil {
		return err
	}
	log, err := os.OpenFile(filepath.Join(p.Dir, logFile), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(p.Command[0], p.Command[1:]...) //nolint:gosec,noctx // G204: this program; the process outlives every context
	cmd.Dir, cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.Env = "/", bytes.NewReader(p.Config), log, log, os.Environ()
	// It gets no mount namespace of its own, because that would keep every file system of the host mounted for as long
	// as the process lives.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if p.Confine {
		cmd.Env = []string{}
	}
	if p.Cgroup != nil {
		group, err := p.Cgroup()
		if err != nil {
			return fmt.Errorf("start the %s: %w", p.Name, err)
		}
		if group != nil {
			defer group.Close()
			cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(group.Fd())
		}
	}
	if err := p.begin(cmd); err != nil {
		return fmt.Errorf("start the %s: %w", p.Name, err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }() // waits as long as this process lives
	deadline := time.NewTimer(startTime)
	defer deadline.Stop()
	for wait := 2 * time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		if err = hello(ctx); err == nil {
			return nil
		}
		again := time.NewTimer(wait)
		select {
		case <-again.C:
			continue
		case end := <-ended:
			err = fmt.Errorf("it has ended: %w; it said: %s", errors.Join(end, err), tail(log.Name()))
		case <-deadline.C:
			err = errors.Join(err, killed(cmd, ended))
		case <-ctx.Done():
			err = errors.Join(context.Cause(ctx), killed(cmd, ended))
		}
		again.Stop()
		return fmt.Errorf("start the %s: %w", p.Name, err)
	}
}

// killed kills a process whose start failed, and waits until it is gone: then its control group can be removed.
func killed(cmd *exec.Cmd, ended <-chan error) error {
	if err := cmd.Process.Signal(unix.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	late := time.NewTimer(stopTime)
	defer late.Stop()
	select {
	case <-ended: //nolint:errcheck // it was killed
		return nil
	case <-late.C:
		return fmt.Errorf("process %d was killed and has not ended within %s", cmd.Process.Pid, stopTime)
	}
}

func (p Process) begin(cmd *exec.Cmd) error {
	if !p.Confine {
		return cmd.Start()
	}
	return osthread.Do(func() error { // the thread is changed permanently, and its child inherits the change
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("set no_new_privs: %w", err)
		}
		return cmd.Start()
	})
}

func tail(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(b[max(0, len(b)-500):]))
}

// stopTime is the time within which a process must end after it was ordered to.
const stopTime = 10 * time.Second

// End tells a process to end and waits until it is gone, with everything that it had open.
func End(name string, pid int, order func() error) error {
	process, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return fmt.Errorf("find the %s (process %d): %w", name, pid, err)
	}
	defer func() { _ = unix.Close(process) }()
	if err := order(); err != nil {
		return err
	}
	gone, err := waitGone(process, stopTime)
	if err != nil {
		return fmt.Errorf("wait for the %s (process %d): %w", name, pid, err)
	}
	if !gone {
		late := core.Errorf(core.TimedOut, core.CodeTimedOut, "the %s (process %d) did not end within %s and was killed", name, pid, stopTime)
		return errors.Join(late, unix.PidfdSendSignal(process, unix.SIGKILL, nil, 0))
	}
	return nil
}

// Kill kills a process that does not answer, and waits until it is gone. still must report whether the process is the
// right one. It is called when the process id cannot be reused any more.
func Kill(name string, pid int, still func() error) error {
	if pid <= 1 || pid == os.Getpid() {
		return fmt.Errorf("the reported process id of the %s is %d, and such a process is never killed", name, pid)
	}
	process, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("find the %s (process %d): %w", name, pid, err)
	}
	defer func() { _ = unix.Close(process) }()
	if err := still(); err != nil {
		return err
	}
	if err := unix.PidfdSendSignal(process, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill the %s (process %d): %w", name, pid, err)
	}
	gone, err := waitGone(process, stopTime)
	if err == nil && !gone {
		err = core.Errorf(core.TimedOut, core.CodeTimedOut, "it was killed and has not ended within %s", stopTime)
	}
	if err != nil {
		return fmt.Errorf("wait for the %s (process %d): %w", name, pid, err)
	}
	return nil
}

// waitGone waits until a process is gone, with everything that it had open.
func waitGone(process int, within time.Duration) (bool, error) {
	// The pidfd becomes readable when the last thread of the process has ended.
	for deadline := time.Now().Add(within); ; {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(process), Events: unix.POLLIN}}, int(max(time.Until(deadline), 0).Milliseconds())) //nolint:gosec // G115: a descriptor
		if !errors.Is(err, unix.EINTR) {
			return n > 0, err
		}
	}
}
