//go:build linux

package sessions

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/answer"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/procfs"
)

const (
	maxRunning = 256 // sessions at once
	maxEnded   = 128 // ended sessions that are kept
	maxArgs    = 4096
)

// Workload is where the programs of sessions run.
type Workload interface {
	// Inside runs fn on a thread that sees the workload's file system and starts children in its namespaces. Several
	// calls may run at once. fn must not block for long, except in the file system.
	Inside(fn func() error) error
	// Start starts a process in the workload. It must be called from within Inside.
	Start(cmd *exec.Cmd) error
	// InnerPID returns the number of a process within the workload, or 0 when it is gone.
	InnerPID(pid int) int
}

// Server has all the sessions of the agent, and answers the requests for them.
type Server struct {
	work   Workload
	pass   func(ctx context.Context) error // waits until the workload runs
	budget outputBudget
	oom    func(pid int) // gives a process the normal OOM score

	spawn sync.RWMutex // held for writing during a freeze, so that no start is half done

	mu   sync.Mutex        // guards the fields below
	list []*session        // oldest first
	env  map[string]string // environment of the sandbox
}

// New returns a server without sessions. pass returns when the workload runs and a session may start.
func New(w Workload, pass func(ctx context.Context) error) *Server {
	s := &Server{work: w, pass: pass, oom: procfs.NormalOOM}
	s.budget.limit = 64 << 20
	var si unix.Sysinfo_t
	if unix.Sysinfo(&si) == nil {
		s.budget.limit = min(s.budget.limit, int64(si.Totalram*uint64(si.Unit)/8))
	}
	return s
}

// SetEnv sets the environment of sessions that start from now on.
func (m *Server) SetEnv(env map[string]string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.env = env
}

func (m *Server) get(id core.SessionID) (*session, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.list {
		if s.info.ID == id { // never changes
			return s, nil
		}
	}
	return nil, core.Errorf(core.NotFound, core.CodeSessionNotFound, "there is no session %q in this sandbox", core.Clip(string(id)))
}

func (m *Server) all() []*session {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.list)
}

// Running counts the sessions with a living process.
func (m *Server) Running() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.countRunning()
}

// countRunning is Running for a caller who holds mu.
func (m *Server) countRunning() int {
	n := 0
	for _, s := range m.list {
		select {
		case <-s.done:
		default:
			n++
		}
	}
	return n
}

// admit adds a session that is about to start to the list, or returns why it may not.
func (m *Server) admit(s *session) (map[string]string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	running := m.countRunning() // under the lock that is held until the session is on the list: many may start at once
	if running >= maxRunning {
		return nil, core.Errorf(core.Exhausted, guestapi.CodeSessionLimit, "%d sessions run in this sandbox, which is the limit", running)
	}
	if slices.ContainsFunc(m.list, func(o *session) bool { return o.info.ID == s.info.ID }) {
		return nil, core.Errorf(core.AlreadyExists, guestapi.CodeSessionExists, "the session %s exists already", s.info.ID)
	}
	m.list = append(m.list, s)
	return m.env, nil
}

// forget removes a session from the list and frees its output.
func (m *Server) forget(s *session) {
	m.mu.Lock()
	m.list = slices.DeleteFunc(m.list, func(o *session) bool { return o == s })
	m.mu.Unlock()
	s.closeStdin()
	s.stdout.forget()
	if s.stderr != nil {
		s.stderr.forget()
	}
}

// evict forgets the oldest ended sessions beyond the limit.
func (m *Server) evict() {
	m.mu.Lock()
	var ended []*session
	for _, s := range m.list {
		select {
		case <-s.done:
			ended = append(ended, s)
		default:
		}
	}
	m.mu.Unlock()
	for len(ended) > maxEnded || len(ended) > 8 && m.budget.used.Load() > m.budget.limit {
		m.forget(ended[0])
		ended = ended[1:]
	}
}

func checkSpec(spec *guestapi.SessionSpec) error {
	bad := func(format string, a ...any) error {
		return core.Errorf(core.Invalid, core.CodeInvalidField, format, a...)
	}
	if spec.ID == "" {
		spec.ID = core.NewID[core.SessionID]()
	} else if _, err := core.ParseID[core.SessionID](string(spec.ID)); err != nil {
		return err
	}
	switch {
	case len(spec.Command) == 0 || spec.Command[0] == "":
		return bad("command must name a program")
	case len(spec.Command) > maxArgs:
		return bad("command has %d elements; the limit is %d", len(spec.Command), maxArgs)
	case spec.TimeoutMS < 0:
		return bad("timeout_ms is negative")
	}
	for _, a := range append([]string{spec.Cwd, spec.User}, spec.Command...) {
		if strings.ContainsRune(a, 0) {
			return bad("command, cwd and user must not contain a NUL byte")
		}
	}
	for k, v := range spec.Env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return bad("env has the invalid name or value %q", core.Clip(k))
		}
	}
	return nil
}

// start starts a process. It returns when the kernel runs the program, or has refused to.
func (m *Server) start(spec guestapi.SessionSpec) (*session, error) {
	if err := checkSpec(&spec); err != nil {
		return nil, err
	}
	now := time.Now()
	s := &session{stdout: newOutput(&m.budget, now.Add(startGrace)), done: make(chan struct{})}
	if !spec.PTY {
		s.stderr = newOutput(&m.budget, now.Add(startGrace))
	}
	s.info = guestapi.Session{
		ID: spec.ID, Command: spec.Command, Cwd: spec.Cwd, User: spec.User, PTY: spec.PTY, State: guestapi.SessionRunning,
		StartedAt: now.UTC(), StdinOpen: spec.StdinOpen || spec.PTY,
	}
	env, err := m.admit(s)
	if err != nil {
		return nil, err
	}
	s.mu.Lock() // nobody sees a session before it has started
	cmd, st, err := m.launch(spec, env, s)
	s.mu.Unlock()
	if err != nil {
		m.forget(s)
		return nil, err
	}
	m.attend(s, cmd, st, spec)
	m.evict()
	return s, nil
}

// Rehearse starts a program of the agent's own with the preparations of a session, and waits for its end. The program is no session, and start
// puts it beside the workload, which is frozen. The program is named by a path below /proc, so that must be the kernel's: in its place, the
// workload could have mounted a directory with a program of its own.
func (m *Server) Rehearse(ctx context.Context, start func(*exec.Cmd) error, program ...string) error {
	var cmd *exec.Cmd
	var st *streams
	err := m.work.Inside(func() error {
		var fs unix.Statfs_t
		err := unix.Statfs("/proc", &fs)
		if err != nil || fs.Type != unix.PROC_SUPER_MAGIC {
			return errors.Join(errors.New("/proc is not the kernel's"), err)
		}
		if cmd, err = command(guestapi.SessionSpec{Command: program, Cwd: "/"}, nil); err != nil {
			return err
		}
		if st, err = openStreams(guestapi.SessionSpec{}); err != nil {
			return err
		}
		st.wire(cmd)
		return start(cmd)
	})
	if st != nil {
		defer st.closeAll()
	}
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })()
	return cmd.Wait()
}

// launch starts the process. The caller holds s.mu.
func (m *Server) launch(spec guestapi.SessionSpec, env map[string]string, s *session) (*exec.Cmd, *streams, error) {
	var cmd *exec.Cmd
	var st *streams
	m.spawn.RLock()
	defer m.spawn.RUnlock()
	err := m.work.Inside(func() error {
		var err error
		if cmd, err = command(withDefaults(spec, userFile, dirFile), env); err != nil {
			return err
		}
		if st, err = openStreams(spec); err != nil {
			return core.Wrapf(err, core.Exhausted, guestapi.CodeCommandFailed, "the guest has no pipe or terminal for the session: %v", err)
		}
		st.wire(cmd)
		pidfd := -1
		cmd.SysProcAttr.PidFD = &pidfd
		if err := m.work.Start(cmd); err != nil {
			st.closeAll()
			return answer.StartError(spec.Command[0], err)
		}
		st.closeTheirs()
		if pidfd >= 0 && unix.SetNonblock(pidfd, true) == nil {
			st.pidfd = os.NewFile(uintptr(pidfd), "pidfd")
		}
		return nil
	})
	if err != nil {
		return nil, nil, err
	}
	s.pid = cmd.Process.Pid
	m.oom(s.pid)
	s.info.PID, s.info.Cwd = m.work.InnerPID(s.pid), cmd.Dir
	s.stdin = st.stdin
	if st.terminal {
		s.terminal = st.stdout
	}
	return cmd, st, nil
}

// attend starts the goroutines that serve a running process: its streams, its timeout, its end.
func (m *Server) attend(s *session, cmd *exec.Cmd, st *streams, spec guestapi.SessionSpec) {
	go s.stdout.pump(st.stdout)
	if s.stderr != nil {
		go s.stderr.pump(st.stderr)
	}
	if st.stdin != nil && (len(spec.Stdin) > 0 || !spec.StdinOpen && !spec.PTY) {
		go func() {
			_ = s.writeStdin(bytes.NewReader(spec.Stdin), nil)
			if !spec.StdinOpen && !spec.PTY {
				s.closeStdin()
			}
		}()
	}
	if spec.TimeoutMS > 0 {
		_ = s.killAfter(time.Duration(spec.TimeoutMS) * time.Millisecond) // it may have ended
	}
	go func() {
		m.await(s, cmd, st)
		m.evict()
	}()
}

// await waits for the end of the process and reads the rest of its output.
func (m *Server) await(s *session, cmd *exec.Cmd, st *streams) {
	// The process number must not be freed while a signal could still be sent to it. So the state is changed before the
	// process is reaped.
	waitExit(cmd.Process.Pid, st.pidfd)
	s.mu.Lock()
	err := cmd.Wait()
	s.pid = 0
	if s.timer != nil {
		s.timer.Stop()
	}
	s.mu.Unlock()
	ended := time.Now().UTC()

	s.stdout.drain(st.stdout)
	if s.stderr != nil {
		s.stderr.drain(st.stderr)
	}
	s.mu.Lock()
	s.info.State, s.info.EndedAt, s.info.StdinOpen = guestapi.SessionExited, &ended, false
	code, sig := exitOf(cmd.ProcessState, err)
	s.info.ExitCode, s.info.Signal = &code, sig
	s.mu.Unlock()
	close(s.done)
	s.closeStdin()
	s.stdout.end()
	if s.stderr != nil {
		s.stderr.end()
	}
}

// waitExit waits until a process has ended. It does not reap the process and does not occupy a thread.
func waitExit(pid int, pidfd *os.File) {
	if pidfd != nil {
		defer func() { _ = pidfd.Close() }()
		if rc, err := pidfd.SyscallConn(); err == nil && rc.Read(func(fd uintptr) bool {
			return exited(unix.P_PIDFD, int(fd), unix.WNOHANG)
		}) == nil {
			return
		}
	}
	exited(unix.P_PID, pid, 0)
}

func exited(kind, id, flags int) bool {
	for {
		var si unix.Siginfo
		err := unix.Waitid(kind, id, &si, unix.WEXITED|unix.WNOWAIT|flags, nil)
		if !errors.Is(err, unix.EINTR) {
			return err != nil || si.Signo != 0
		}
	}
}

func exitOf(state *os.ProcessState, err error) (code int, sig string) {
	if state == nil {
		return -1, err.Error()
	}
	ws, ok := state.Sys().(syscall.WaitStatus)
	if ok && ws.Signaled() {
		return 128 + int(ws.Signal()), unix.SignalName(ws.Signal())
	}
	return state.ExitCode(), ""
}

// remove kills a session and forgets it.
func (m *Server) remove(ctx context.Context, s *session) error {
	s.kill()
	m.forget(s) // first, because a stream that waits for a follower would delay the end
	select {
	case <-s.done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// PauseStarts waits until no session is half started. No other one starts before the returned function is called.
func (m *Server) PauseStarts() (resume func()) {
	m.spawn.Lock()
	return m.spawn.Unlock
}

// Close ends and forgets all sessions.
func (m *Server) Close(ctx context.Context) error {
	var errs []error
	for _, s := range m.all() {
		errs = append(errs, m.remove(ctx, s))
	}
	return errors.Join(errs...)
}
