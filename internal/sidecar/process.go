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

// Process says how one is started.
type Process struct {
	Name    string // for messages
	Dir     string // for its socket and its log; made if it is not there
	Command []string
	Config  []byte // given on its standard input: what is in the arguments or the environment of a process others can see
	// Cgroup opens the directory of a control group for it to start in; nil, or a nil file: it starts in this process's. What ends everything
	// in this process's group, such as the end of a container, does not end it in its own.
	Cgroup  func() (*os.File, error)
	Confine bool // it can gain no privileges that it does not begin with, and sees nothing of this process's environment
}

// SocketPath is where the process listens.
func (p Process) SocketPath() string { return filepath.Join(p.Dir, "sock") }

// startTime is how long a process may take until it answers.
const startTime = 20 * time.Second

// logFile is what a process says, in its directory.
const logFile = "log"

// Start starts the process and waits until hello is answered. It goes on when this process ends.
func (p Process) Start(ctx context.Context, hello func(context.Context) error) error {
	if err := os.MkdirAll(p.Dir, 0o700); err != nil {
		return err
	}
	log, err := os.OpenFile(filepath.Join(p.Dir, logFile), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(p.Command[0], p.Command[1:]...) //nolint:gosec,noctx // G204: this program; it outlives every context
	cmd.Dir, cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.Env = "/", bytes.NewReader(p.Config), log, log, os.Environ()
	// Not in a mount namespace of its own: that would keep every file system of the host mounted for as long as the process lives.
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
	go func() { ended <- cmd.Wait() }() // for as long as this process lives
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

// killed kills a process that was not to be, and waits until it is gone: what it was in, a control group, can be removed then.
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
	return osthread.Do(func() error { // the thread is changed for good, and what it starts is as it is
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

// stopTime is how long a process that was told to end may take.
const stopTime = 10 * time.Second

// End tells a process to end and waits until it is gone, and with it everything that it has open.
func End(name string, pid int, tell func() error) error {
	process, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return fmt.Errorf("find the %s (process %d): %w", name, pid, err)
	}
	defer func() { _ = unix.Close(process) }()
	if err := tell(); err != nil {
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

// Kill ends a process that does not answer, and waits until it is gone. still says whether it is the one that is meant, when its id cannot
// become another's any more.
func Kill(name string, pid int, still func() error) error {
	if pid <= 1 || pid == os.Getpid() {
		return fmt.Errorf("the %s is said to be process %d, which is not killed", name, pid)
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

// waitGone waits until a process is gone, and with it everything that it has open.
func waitGone(process int, within time.Duration) (bool, error) {
	// Readable is one whose last thread has ended.
	for deadline := time.Now().Add(within); ; {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(process), Events: unix.POLLIN}}, int(max(time.Until(deadline), 0).Milliseconds())) //nolint:gosec // G115: a descriptor
		if !errors.Is(err, unix.EINTR) {
			return n > 0, err
		}
	}
}
