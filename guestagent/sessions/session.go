//go:build linux

package sessions

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/procfs"
)

// session is one process that was started for a user, with its streams.
type session struct {
	stdout *output
	stderr *output // nil with a terminal
	done   chan struct{}

	stdinMu sync.Mutex // held while stdin is written

	mu       sync.Mutex // guards the fields below
	info     guestapi.Session
	pid      int // as the agent sees it; 0 after it was reaped
	stdin    *os.File
	terminal *os.File
	timer    *time.Timer
}

// snapshot returns the session's public description.
func (s *session) snapshot() guestapi.Session {
	s.mu.Lock()
	info := s.info
	s.mu.Unlock()
	info.StdoutFirst, info.StdoutBytes = s.stdout.numbers()
	if s.stderr != nil {
		info.StderrFirst, info.StderrBytes = s.stderr.numbers()
	}
	return info
}

// streams are the descriptors of a session: our ends and the process's ends.
type streams struct {
	stdin, stdout, stderr    *os.File // our ends; stdin is nil if the session has none
	pstdin, pstdout, pstderr *os.File // the process's ends, closed once it runs
	pidfd                    *os.File // of the process; nil if the kernel has no pidfds
	terminal                 bool
}

func (s *streams) closeAll() {
	for _, f := range []*os.File{s.stdin, s.stdout, s.stderr, s.pstdin, s.pstdout, s.pstderr} {
		if f != nil {
			_ = f.Close()
		}
	}
}

func (s *streams) closeTheirs() {
	for _, f := range []*os.File{s.pstdin, s.pstdout, s.pstderr} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// openStreams makes pipes, or a terminal. It is called inside the workload, because it must use the workload's
// /dev/pts.
func openStreams(spec guestapi.SessionSpec) (*streams, error) {
	if spec.PTY {
		return openTerminal(spec.Cols, spec.Rows)
	}
	s := &streams{}
	var err error
	open := func(ours, theirs **os.File, reading bool) {
		var r, w *os.File
		if err != nil {
			return
		}
		if r, w, err = pipe(reading); err == nil && reading {
			*ours, *theirs = r, w
		} else if err == nil {
			*ours, *theirs = w, r
		}
	}
	if spec.StdinOpen || len(spec.Stdin) > 0 {
		open(&s.stdin, &s.pstdin, false)
	}
	open(&s.stdout, &s.pstdout, true)
	open(&s.stderr, &s.pstderr, true)
	if err == nil && s.pstdin == nil {
		s.pstdin, err = os.OpenFile(os.DevNull, os.O_RDONLY, 0)
	}
	if err != nil {
		s.closeAll()
		return nil, err
	}
	return s, nil
}

// pipe returns a pipe whose end for the process blocks as usual; only our end is non-blocking.
func pipe(weRead bool) (r, w *os.File, err error) {
	var fd [2]int
	if err := unix.Pipe2(fd[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, os.NewSyscallError("pipe2", err)
	}
	ours := fd[1]
	if weRead {
		ours = fd[0]
	}
	if err := unix.SetNonblock(ours, true); err != nil {
		_, _ = unix.Close(fd[0]), unix.Close(fd[1])
		return nil, nil, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(fd[0]), "pipe"), os.NewFile(uintptr(fd[1]), "pipe"), nil
}

// openTerminal makes a terminal; we keep its master.
func openTerminal(cols, rows uint16) (*streams, error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("open /dev/ptmx", err)
	}
	slave := -1
	if err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err == nil {
		slave, err = openPeer(fd)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, os.NewSyscallError("open the terminal", err)
	}
	if t, err := unix.IoctlGetTermios(slave, unix.TCGETS); err == nil {
		t.Iflag |= unix.IUTF8
		_ = unix.IoctlSetTermios(slave, unix.TCSETS, t)
	}
	if cols == 0 || rows == 0 {
		cols, rows = 80, 24
	}
	if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Col: cols, Row: rows}); err != nil {
		_, _ = unix.Close(fd), unix.Close(slave)
		return nil, os.NewSyscallError("set the terminal's size", err)
	}
	// There are two descriptors of the master, so that stdin can be closed while output is still read.
	in, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		_, _ = unix.Close(fd), unix.Close(slave)
		return nil, os.NewSyscallError("dup", err)
	}
	tty := os.NewFile(uintptr(slave), "tty")
	return &streams{stdin: os.NewFile(uintptr(in), "ptmx"), stdout: os.NewFile(uintptr(fd), "ptmx"), pstdin: tty, terminal: true}, nil
}

// openPeer opens the slave of a master without a path.
func openPeer(master int) (int, error) {
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		return -1, errno
	}
	return int(fd), nil
}

// wire gives the process its ends.
func (s *streams) wire(cmd *exec.Cmd) {
	cmd.Stdin = s.pstdin
	if s.terminal {
		cmd.Stdout, cmd.Stderr = s.pstdin, s.pstdin
		cmd.SysProcAttr.Setctty, cmd.SysProcAttr.Ctty = true, 0
		return
	}
	cmd.Stdout, cmd.Stderr = s.pstdout, s.pstderr
}

// writeStdin gives input to the process. It waits as long as the process does not read; the caller cancels it with
// interrupt.
func (s *session) writeStdin(r io.Reader, interrupt <-chan struct{}) error {
	s.stdinMu.Lock()
	defer s.stdinMu.Unlock()
	s.mu.Lock()
	f := s.stdin
	s.mu.Unlock()
	if f == nil {
		return errStdinClosed
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		select {
		case <-interrupt:
			_ = f.SetWriteDeadline(time.Unix(1, 0))
		case <-s.done:
			_ = f.SetWriteDeadline(time.Unix(1, 0)) // nobody is left to read
		case <-stop:
		}
	})
	_, err := io.Copy(f, r)
	close(stop)
	wg.Wait()
	_ = f.SetWriteDeadline(time.Time{})
	switch {
	case err == nil:
		return nil
	case errors.Is(err, syscall.EPIPE), errors.Is(err, syscall.EIO), errors.Is(err, os.ErrClosed), errors.Is(err, os.ErrDeadlineExceeded):
		return errStdinClosed
	}
	return err
}

var errStdinClosed = core.Errorf(core.Conflict, guestapi.CodeSessionEnded, "the session takes no more input: it has ended or its stdin is closed")

// closeStdin ends the input. On a terminal it sends the end-of-file character.
func (s *session) closeStdin() {
	s.stdinMu.Lock()
	defer s.stdinMu.Unlock()
	s.mu.Lock()
	f, tty := s.stdin, s.terminal != nil
	s.stdin, s.info.StdinOpen = nil, false
	s.mu.Unlock()
	if f == nil {
		return
	}
	if tty {
		_ = f.SetWriteDeadline(time.Now().Add(time.Second))
		_, _ = f.Write([]byte{4})
	}
	_ = f.Close()
}

// resize sets the size of the terminal.
func (s *session) resize(cols, rows uint16) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.terminal == nil {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "the session has no terminal to resize")
	}
	if cols == 0 || rows == 0 {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "cols and rows must be at least 1")
	}
	rc, err := s.terminal.SyscallConn()
	if err != nil {
		return errEnded
	}
	var serr error
	if err := rc.Control(func(fd uintptr) {
		serr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Col: cols, Row: rows})
	}); err != nil || serr != nil {
		return errEnded
	}
	return nil
}

var errEnded = core.Errorf(core.Conflict, guestapi.CodeSessionEnded, "the session has ended")

// signal sends a signal to some of the session's processes.
func (s *session) signal(sig syscall.Signal, target string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pid == 0 {
		return errEnded
	}
	var to int
	switch target {
	case "", guestapi.TargetForeground:
		to = -s.foregroundGroup(sig)
	case guestapi.TargetProcess:
		to = s.pid
	case guestapi.TargetGroup:
		to = -s.pid
	case guestapi.TargetSession:
		for _, pid := range procfs.SessionMembers(s.pid) {
			if pid != s.pid {
				_ = syscall.Kill(pid, sig) // it may have ended
			}
		}
		to = s.pid
	default:
		return core.Errorf(core.Invalid, core.CodeInvalidField, "target must be foreground, process, group or session, not %q", core.Clip(target))
	}
	if err := syscall.Kill(to, sig); err != nil {
		return errEnded
	}
	return nil
}

// killAfter sets the deadline of the session in place of an earlier one; 0 is none.
func (s *session) killAfter(d time.Duration) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pid == 0 {
		return errEnded
	}
	if s.timer != nil {
		s.timer.Stop()
		s.timer = nil
	}
	if d <= 0 {
		return nil
	}
	var timer *time.Timer
	timer = time.AfterFunc(d, func() {
		s.mu.Lock()
		due := s.timer == timer // otherwise another deadline was set while this one came
		if due {
			s.info.TimedOut = s.pid != 0
		}
		s.mu.Unlock()
		if due {
			s.kill()
		}
	})
	s.timer = timer
	return nil
}

// foregroundGroup returns the foreground process group of the terminal, or else that of the program. The caller holds mu.
func (s *session) foregroundGroup(sig syscall.Signal) int {
	group := s.pid
	if s.terminal != nil && sig != syscall.SIGKILL {
		if rc, err := s.terminal.SyscallConn(); err == nil {
			_ = rc.Control(func(fd uintptr) {
				if pgrp, err := foreground(int(fd)); err == nil && pgrp > 1 {
					group = pgrp
				}
			})
		}
	}
	return group
}

// foreground returns the terminal's foreground process group, with the number that this process sees.
func foreground(master int) (int, error) { return unix.IoctlGetInt(master, unix.TIOCGPGRP) }

// kill ends every process of the session, except those that made a session of their own (like a daemon).
func (s *session) kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pid == 0 {
		return
	}
	_ = syscall.Kill(-s.pid, syscall.SIGKILL)
	for _, pid := range procfs.SessionMembers(s.pid) {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}
