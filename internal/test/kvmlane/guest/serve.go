package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/test/kvmlane/wire"
)

// server runs what the host asks for.
type server struct {
	mu   sync.Mutex // guards port and running
	port *os.File
	// running are the process groups by request.
	running map[uint64]int
}

// serve answers the host for ever. The port stays open when the host hangs up: closing it would throw away what the next
// connection may have said already.
func serve() error {
	path, err := findPort()
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	fmt.Fprintln(os.Stderr, "lane: ready")
	s := &server{port: f, running: map[uint64]int{}}
	for {
		if err := wire.Read(f, s.request); err != nil {
			return fmt.Errorf("read a request: %w", err)
		}
		<-time.After(20 * time.Millisecond) // without a host the port reads as ended
	}
}

func findPort() (string, error) {
	names, err := filepath.Glob("/sys/class/virtio-ports/*/name")
	if err != nil {
		return "", err
	}
	for _, n := range names {
		if b, err := os.ReadFile(n); err == nil && strings.TrimSpace(string(b)) == wire.Port {
			return "/dev/" + filepath.Base(filepath.Dir(n)), nil
		}
	}
	return "", errors.New("there is no port " + wire.Port)
}

func (s *server) reply(r wire.Reply) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = wire.Write(s.port, r) // a host that has hung up is told nothing
}

func (s *server) request(r wire.Request) error {
	switch {
	case r.Hello:
		s.endAll()
	case r.Put != nil:
		done := wire.Reply{ID: r.ID, Exit: new(0)}
		if err := put(r.Put); err != nil {
			done = wire.Reply{ID: r.ID, Error: err.Error()}
		}
		s.reply(done)
	case r.Run != nil:
		go s.run(r.ID, *r.Run)
	case r.Kill:
		s.mu.Lock()
		group := s.running[r.ID]
		s.mu.Unlock()
		if group != 0 {
			_ = unix.Kill(-group, unix.SIGKILL)
		}
	}
	return nil
}

// endAll ends what an earlier connection has left running.
func (s *server) endAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, group := range s.running {
		_ = unix.Kill(-group, unix.SIGKILL)
	}
}

func put(p *wire.Put) (err error) {
	flags := os.O_WRONLY
	if p.Offset == 0 {
		if err := os.MkdirAll(filepath.Dir(p.Path), 0o755); err != nil {
			return err
		}
		// A program that runs cannot be written: a new file takes its place.
		if err := os.Remove(p.Path); err != nil && !os.IsNotExist(err) {
			return err
		}
		flags |= os.O_CREATE | os.O_EXCL
	}
	f, err := os.OpenFile(p.Path, flags, os.FileMode(p.Mode))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	_, err = f.WriteAt(p.Data, p.Offset)
	return err
}

func (s *server) run(id uint64, r wire.Run) {
	if len(r.Command) == 0 {
		s.reply(wire.Reply{ID: id, Error: "no command"})
		return
	}
	cmd := exec.Command(r.Command[0], r.Command[1:]...) //nolint:noctx // the host ends it
	cmd.Env = append(os.Environ(), r.Env...)
	cmd.Dir = r.Dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	out, errOut := &sender{s: s, id: id}, &sender{s: s, id: id, stderr: true}
	cmd.Stdout, cmd.Stderr = out, errOut
	// What a program leaves behind may hold its output open for ever.
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Start(); err != nil {
		s.reply(wire.Reply{ID: id, Error: err.Error()})
		return
	}
	pid := cmd.Process.Pid
	s.mu.Lock()
	s.running[id] = pid
	s.mu.Unlock()
	err := cmd.Wait()
	s.mu.Lock()
	delete(s.running, id)
	s.mu.Unlock()
	status := cmd.ProcessState.ExitCode()
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		status = 128 + int(ws.Signal())
	}
	if errors.Is(err, exec.ErrWaitDelay) {
		fmt.Fprintln(errOut, "lane: the program has left others that hold its output")
	}
	s.reply(wire.Reply{ID: id, Exit: &status})
}

// sender sends a program's output.
type sender struct {
	s      *server
	id     uint64
	stderr bool
}

var _ io.Writer = (*sender)(nil)

func (w *sender) Write(p []byte) (int, error) {
	for rest := p; len(rest) > 0; {
		n := min(len(rest), wire.MaxData)
		r := wire.Reply{ID: w.id, Stdout: rest[:n]}
		if w.stderr {
			r = wire.Reply{ID: w.id, Stderr: rest[:n]}
		}
		w.s.reply(r)
		rest = rest[n:]
	}
	return len(p), nil
}
