// Package hostlimit finds the limit of the host that caused an error, such as a full disk or too many open files, and says what an operator
// can do about it.
package hostlimit

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
)

// Explain replaces an error that comes from a limit of this host by one that names the limit and says what to do. It returns other errors
// unchanged.
func Explain(err error, what string) error {
	if code, limit := Met(err); code != "" {
		return core.Wrapf(err, core.Exhausted, code, "%s: %s", what, limit)
	}
	return err
}

// Met says from which limit of the host an error comes; the code is empty if it comes from none.
func Met(err error) (code core.Code, limit string) {
	start, starting := errors.AsType[*os.PathError](err)
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return core.CodeDiskFull, "the runner's disk is full; delete checkpoints or give its data directory more room"
	case errors.Is(err, unix.EMFILE):
		return core.CodeCapacity, "the runner has as many files open as it may; raise its limit of open files (LimitNOFILE= of its service, ulimit -n) or lower --max-sandboxes"
	case errors.Is(err, unix.ENFILE):
		return core.CodeCapacity, "the runner's host has as many files open as it may; raise fs.file-max there"
	case starting && start.Op == "fork/exec" && errors.Is(err, unix.EAGAIN):
		return core.CodeCapacity, "the runner's host starts no more processes; raise the limit that it has met (TasksMax= of its service, kernel.pid_max)"
	case errors.Is(err, unix.ENOMEM):
		return core.CodeCapacity, "the runner's host has no memory left; terminate workspaces or lower --max-sandboxes"
	}
	return "", ""
}
