package jail

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"syscall"

	"github.com/coppice-dev/coppice/internal/osthread"
)

// errTried ends the process of Try before its first instruction.
var errTried = errors.New("it could have begun")

// Try finds out whether processes can be started in jails here. It makes a jail for this program and starts the program in it, as a VMM is started,
// up to the point where the process would begin. It leaves nothing behind. It needs root.
func Try(ctx context.Context) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	j, err := New(ctx, Config{Program: self})
	if err != nil {
		return err
	}
	null, err := os.Open(os.DevNull) // here: the jail has none
	if err != nil {
		return errors.Join(err, j.mounts.Close())
	}
	err = osthread.Do(func() error { // the thread is changed permanently
		if err := j.Enter(); err != nil {
			return err
		}
		cmd := exec.Command(self) //nolint:noctx // it is ended before it begins
		cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.Dir = null, null, null, "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: Own, Ptrace: true}
		if err := cmd.Start(); err != nil {
			return err
		}
		err := Complete(cmd.Process.Pid, func() error { return errTried })
		if errors.Is(err, errTried) {
			err = nil
		}
		if kill := cmd.Process.Kill(); kill != nil {
			return errors.Join(err, kill)
		}
		_ = cmd.Wait() // it was killed
		return err
	})
	return errors.Join(err, null.Close(), j.mounts.Close())
}
