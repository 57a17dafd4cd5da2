package pager

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"

	"github.com/coppice-dev/coppice/internal/sidecar"
)

// Process says how to start a pager.
type Process struct {
	Dir     string   // see Config; created if it is missing
	Command []string // runs a Server, with its Config on standard input
	Config  []byte
	Cgroup  func() (*os.File, error) // see sidecar.Process; machines need the pager, so nothing that they do may end it
	Pulse   sidecar.Pulse            // when a pager counts as hung
}

const name = "pager"

func (p Process) sidecar() sidecar.Process {
	return sidecar.Process{Name: name, Dir: p.Dir, Command: p.Command, Config: p.Config, Cgroup: p.Cgroup}
}

// Runs reports whether a pager listens, or may listen; Ensure finds out whether it answers.
func Runs(ctx context.Context, p Process) bool {
	_, err := sidecar.Listener(ctx, SocketPath(p.Dir))
	return !sidecar.IsNobody(err)
}

// Ensure makes sure that a pager runs. It keeps the pager that runs already, whoever started it and
// whatever version it has (Hello.Foreign). It kills a pager that hangs. If no pager runs, it starts
// a new one. The pager goes on when this process ends. fresh says that the pager is new.
func Ensure(ctx context.Context, p Process) (_ *Client, fresh bool, err error) {
	c := NewClient(SocketPath(p.Dir))
	c.pulse = p.Pulse.WithDefaults()
	_, err = c.greet(ctx)
	switch {
	case err == nil:
		return c, false, nil
	case ctx.Err() != nil:
		return nil, false, err
	case errors.Is(err, sidecar.ErrSilent):
		if err := c.kill(ctx); err != nil {
			return nil, false, err
		}
	}
	err = p.sidecar().Start(ctx, func(ctx context.Context) error {
		_, err := c.Hello(ctx)
		return err
	})
	if err != nil {
		return nil, false, err
	}
	return c, true, nil
}

// Clean unmounts the file systems that a killed pager left in its directory.
func Clean(dir string) error {
	var errs []error
	for _, name := range []string{mountDir, memoryDir} {
		err := syscall.Unmount(filepath.Join(dir, name), syscall.MNT_DETACH|syscall.MNT_FORCE)
		if !errors.Is(err, syscall.EINVAL) && !errors.Is(err, syscall.ENOENT) { // nothing is mounted
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
