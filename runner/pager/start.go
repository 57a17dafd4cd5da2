package pager

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
)

// Process says how a pager is started.
type Process struct {
	Dir     string   // of Config; made if it is not there
	Command []string // runs a Server, with what Config says on its standard input
	Config  []byte
}

// startTime is how long a pager may take until it answers.
const startTime = 20 * time.Second

// logFile is what a pager says, in its directory.
const logFile = "log"

// Runs reports whether a pager answers.
func Runs(ctx context.Context, p Process) bool {
	_, err := NewClient(SocketPath(p.Dir)).Hello(ctx)
	return err == nil
}

// Ensure makes sure that a pager runs: the one that does already, whoever has started it, or a new one. It goes on when this process
// ends. fresh says that it is new.
func Ensure(ctx context.Context, p Process) (_ *Client, fresh bool, err error) {
	c := NewClient(SocketPath(p.Dir))
	if h, err := c.Hello(ctx); err == nil && h.Version != protocolVersion {
		return nil, false, core.Errorf(core.FailedPrecondition, core.CodeUnsupported,
			"the pager that runs here (process %d) is of another version of Coppice; it can be ended once no VM has memory from it", h.PID)
	} else if err == nil {
		return c, false, nil
	} else if ctx.Err() != nil {
		return nil, false, err
	}
	if err := os.MkdirAll(p.Dir, 0o700); err != nil {
		return nil, false, err
	}
	log, err := os.OpenFile(filepath.Join(p.Dir, logFile), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, false, err
	}
	defer log.Close()
	cmd := exec.Command(p.Command[0], p.Command[1:]...) //nolint:gosec,noctx // G204: this program; it outlives every context
	cmd.Dir, cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.Env = "/", bytes.NewReader(p.Config), log, log, os.Environ()
	// Not in a mount namespace of its own: that would keep every file system of the host mounted for as long as the pager lives.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, false, fmt.Errorf("start the pager: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }() // for as long as this process lives
	deadline := time.NewTimer(startTime)
	defer deadline.Stop()
	for wait := 2 * time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		if _, err = c.Hello(ctx); err == nil {
			return c, true, nil
		}
		again := time.NewTimer(wait)
		select {
		case <-again.C:
			continue
		case end := <-ended:
			err = fmt.Errorf("the pager has ended: %w; it said: %s", errors.Join(end, ErrGone), tail(log.Name()))
		case <-deadline.C:
			err = errors.Join(err, cmd.Process.Signal(unix.SIGKILL))
		case <-ctx.Done():
			err = errors.Join(context.Cause(ctx), cmd.Process.Signal(unix.SIGKILL))
		}
		again.Stop()
		return nil, false, fmt.Errorf("start the pager: %w", err)
	}
}

// Clean unmounts what a pager that was killed has left in its directory.
func Clean(dir string) error {
	err := syscall.Unmount(filepath.Join(dir, mountDir), syscall.MNT_DETACH)
	if errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ENOENT) { // nothing is mounted
		return nil
	}
	return err
}

func tail(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(b[max(0, len(b)-500):]))
}
