package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/api/apitest"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testoutside"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// stack is a `coppice dev` that runs, or ran.
type stack struct {
	dir    string // everything of it that is on the disk
	data   string // its data directory
	args   []string
	binary string
	host   *testoutside.Host // that it runs on, instead of this one; nil: none

	cmd     *exec.Cmd
	ended   chan struct{} // closed when the process has ended
	state   *os.ProcessState
	client  *coppice.Client
	server  string
	token   string
	network string // hash in the names of namespaces
	cluster string // hash in the names of everything else
}

// Stopping kills VMs and shuts PostgreSQL down.
const stopPatience = 90 * time.Second

// newStack starts a server of the test's own, which ends with the test: with status 0, leaving nothing.
func newStack(t *testing.T, args ...string) *stack {
	t.Helper()
	return newStackOn(t, nil, args...)
}

// newStackOn is newStack on a host of its own.
func newStackOn(t *testing.T, h *testoutside.Host, args ...string) *stack {
	t.Helper()
	s := makeStack(t, t.TempDir(), args...)
	s.host = h
	t.Cleanup(func() {
		if err := s.interrupt(); err != nil {
			t.Error(err)
		}
		for _, fault := range s.remains() {
			t.Error(fault)
		}
		if t.Failed() {
			s.dump(t)
		}
	})
	s.start(t)
	return s
}

func makeStack(t *testing.T, dir string, args ...string) *stack {
	t.Helper()
	needVM(t)
	s := &stack{dir: dir, data: filepath.Join(dir, "data"), binary: program(t, "cmd/coppice")}
	s.args = append([]string{
		"--json", "dev", "--data-dir", s.data, "--listen", "127.0.0.1:0", "--log-level", "debug", "--on-exit", "stop",
		"--images-dir", imageStore(t).Dir(), "--image-registry", "http://" + projectRegistry(),
	}, args...)
	for name, value := range map[string]string{"--accel": *accel, "--vmm": *vmmName} {
		if value != "" && !slices.Contains(args, name) {
			s.args = append(s.args, name, value)
		}
	}
	baseImage(t)
	return s
}

// start runs the server and waits until it says that it is ready.
func (s *stack) start(t *testing.T) {
	t.Helper()
	if err := s.tryStart(t); err != nil {
		s.dump(t)
		t.Fatal(err)
	}
}

// tryStart is start of a server that may end before it is ready.
func (s *stack) tryStart(t *testing.T) error {
	t.Helper()
	log, err := os.OpenFile(s.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	s.cmd = exec.Command(s.binary, s.args...)
	if s.host != nil {
		s.cmd = exec.Command(require.Program(t, "nsenter", "util-linux"), append([]string{"--net=" + s.host.Path, s.binary}, s.args...)...)
	}
	s.cmd.Env = append(os.Environ(), "COPPICE_CONNECTION="+filepath.Join(s.dir, "connection.json"))
	s.cmd.Stdout, s.cmd.Stderr = in, log
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	began := time.Now()
	if err := startBound(s.cmd); err != nil {
		t.Fatal(err)
	}
	_ = in.Close()
	s.ended = make(chan struct{})
	go func(cmd *exec.Cmd, ended chan struct{}) {
		_ = cmd.Wait() // the state says it
		s.state = cmd.ProcessState
		close(ended)
	}(s.cmd, s.ended)
	var ready struct{ Server, Key, DataDir, Volume string }
	if err := json.NewDecoder(out).Decode(&ready); err != nil {
		<-s.ended
		return fmt.Errorf("coppice dev did not become ready: %w; %v", err, s.state)
	}
	t.Logf("coppice dev is ready after %.1f s on %s", time.Since(began).Seconds(), ready.Volume)
	s.server, s.token = ready.Server, ready.Key
	transport := &http.Transport{MaxIdleConnsPerHost: 64}
	if s.host != nil {
		transport.DialContext = s.host.DialContext
	}
	t.Cleanup(transport.CloseIdleConnections)
	if s.client, err = coppice.New(coppice.Config{Server: ready.Server, Token: ready.Key, Transport: apitest.Transport(t, transport)}); err != nil {
		t.Fatal(err)
	}
	return s.learnNames()
}

// starter is a thread that never ends: the kernel sends a child its Pdeathsig when the thread that started it ends.
var starter = sync.OnceValue(func() chan func() {
	c := make(chan func())
	go func() {
		runtime.LockOSThread()
		for f := range c {
			f()
		}
	}()
	return c
})

// startBound starts a command that gets a signal when this process dies.
func startBound(cmd *exec.Cmd) error {
	err := make(chan error)
	starter() <- func() { err <- cmd.Start() }
	return <-err
}

// logFile is COPPICE_E2E_LOG, of all servers together, or one that goes with the server.
func (s *stack) logFile() string {
	if path := os.Getenv("COPPICE_E2E_LOG"); path != "" {
		return path
	}
	return filepath.Join(s.dir, "coppice.log")
}

// dump shows the end of the server's log.
func (s *stack) dump(t *testing.T) {
	t.Helper()
	b, err := os.ReadFile(s.logFile())
	if err != nil {
		t.Log(err)
		return
	}
	const shown = 16 << 10
	if len(b) > shown {
		b = b[len(b)-shown:]
	}
	t.Logf("the server's log ends with:\n%s", b)
}

// interrupt stops the server as Ctrl-C does and wants it to end with status 0.
func (s *stack) interrupt() error {
	select {
	case <-s.ended:
		return fmt.Errorf("the server had ended before it was told to: %v", s.state)
	default:
	}
	began := time.Now()
	if err := s.cmd.Process.Signal(os.Interrupt); err != nil {
		return err
	}
	select {
	case <-s.ended:
	case <-time.After(stopPatience):
		_ = s.cmd.Process.Signal(syscall.SIGQUIT)
		<-s.ended
		return fmt.Errorf("the server did not stop within %s", stopPatience)
	}
	s.client.Close()
	if code := s.state.ExitCode(); code != 0 {
		return fmt.Errorf("the server ended with %v after Ctrl-C (%s)", s.state, time.Since(began).Round(time.Millisecond))
	}
	return nil
}

// kill ends the server as a crash does.
func (s *stack) kill(t *testing.T) {
	t.Helper()
	if err := s.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-s.ended
	s.client.Close()
}

// shared is the server of most tests.
var shared struct {
	mu    sync.Mutex // guards what follows
	stack *stack
	err   error
	seed  coppice.CheckpointID
	aged  coppice.WorkspaceID
}

// theStack returns the shared server, which it starts when it is the first to ask.
func theStack(t *testing.T) *stack {
	t.Helper()
	needVM(t)
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	if shared.stack != nil {
		select {
		case <-shared.stack.ended:
			t.Fatalf("the shared server has ended: %v", shared.stack.state)
		default:
		}
		showLog(t, shared.stack)
		return shared.stack
	}
	shared.err = errors.New("the shared server was not started: an earlier test says why")
	sweep()
	dir, err := os.MkdirTemp("", dirPrefix) //nolint:usetesting // it outlives this test
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if shared.stack == nil {
			_ = os.RemoveAll(dir)
		}
	}()
	s := makeStack(t, dir, "--max-sandboxes", "96")
	showLog(t, s)
	s.start(t)
	shared.stack = s
	shared.seed, shared.aged = plant(t, s)
	shared.err = nil
	return s
}

// The directories of the shared server and of the programs that are built, in the directory for temporary files.
const (
	dirPrefix = "coppice-e2e-"
	binPrefix = "coppice-e2e-bin-"
)

// sweep removes what test binaries that were killed have left: their servers ended with them, their files did not.
func sweep() {
	const old = 6 * time.Hour
	all, _ := filepath.Glob(filepath.Join(os.TempDir(), dirPrefix+"*"))
	for _, dir := range all {
		info, err := os.Stat(dir)
		if err != nil {
			continue
		}
		free := time.Since(info.ModTime()) > old
		if lock, err := os.Open(filepath.Join(dir, "data", "lock")); err == nil {
			free = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil
			_ = lock.Close()
		}
		if free {
			_ = os.RemoveAll(dir) // what is still mounted stays
		}
	}
}

// logged has the servers whose log the failure of a test will show, once.
var logged sync.Map

type logOf struct {
	t *testing.T
	s *stack
}

// showLog shows what the server logged during a test that fails.
func showLog(t *testing.T, s *stack) {
	t.Helper()
	key := logOf{t, s}
	if _, again := logged.LoadOrStore(key, true); again {
		return
	}
	var from int64
	if info, err := os.Stat(s.logFile()); err == nil {
		from = info.Size()
	}
	t.Cleanup(func() {
		logged.Delete(key)
		if !t.Failed() {
			return
		}
		f, err := os.Open(s.logFile())
		if err != nil {
			t.Log(err)
			return
		}
		defer f.Close()
		var b bytes.Buffer
		if _, err := io.Copy(&b, io.NewSectionReader(f, from, 1<<30)); err != nil {
			t.Log(err)
		}
		const shown = 32 << 10
		log := b.Bytes()
		log = log[max(0, len(log)-shown):]
		t.Logf("meanwhile the server logged:\n%s", log)
	})
}

// later is a context for clean-up: the test's own has ended by then.
func later(t *testing.T) (context.Context, context.CancelFunc) {
	t.Helper()
	return context.WithTimeout(context.WithoutCancel(t.Context()), 2*time.Minute)
}
