package pgcluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

const (
	orphanGrace = 10 * time.Second
	pollSlice   = 100 * time.Millisecond // how late a cancelled context is noticed
)

// endOrphans ends the server processes that still work in the data directory although their owner is gone (we hold its
// lock). A postmaster is asked to shut down; processes whose postmaster died end by themselves; what is left after
// the grace is killed. Each is held by a pidfd, so that a recycled id is never hit.
func endOrphans(ctx context.Context, data string, log *slog.Logger) error {
	pids, err := serversIn(data)
	if err != nil || len(pids) == 0 {
		return err
	}
	log.WarnContext(ctx, "ending a postgres that its owner left running", "pids", pids, "dir", data)
	var fds []int
	defer func() {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	}()
	postmaster := postmasterOf(data)
	for _, pid := range pids {
		fd, err := unix.PidfdOpen(pid, 0)
		if errors.Is(err, unix.ESRCH) {
			continue
		}
		if err != nil {
			return fmt.Errorf("open process %d: %w", pid, err)
		}
		fds = append(fds, fd)
		if pid != postmaster || !isServerIn(data, pid) {
			continue
		}
		if err := unix.PidfdSendSignal(fd, unix.SIGINT, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("stop postgres %d: %w", pid, err)
		}
	}
	if err := awaitExit(ctx, fds, orphanGrace); err == nil || ctx.Err() != nil {
		return err
	}
	for _, fd := range fds {
		if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("kill postgres: %w", err)
		}
	}
	return awaitExit(ctx, fds, orphanGrace)
}

// awaitExit returns when every process has ended.
func awaitExit(ctx context.Context, fds []int, grace time.Duration) error {
	deadline := time.Now().Add(grace)
	for _, fd := range fds {
		for {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(pollSlice.Milliseconds())) //nolint:gosec // G115: a descriptor
			if err != nil && !errors.Is(err, unix.EINTR) {
				return fmt.Errorf("wait for postgres: %w", err)
			}
			if n > 0 {
				break
			}
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("postgres processes still run after %s", grace)
			}
		}
	}
	return nil
}

// serversIn lists the PostgreSQL processes whose working directory is data: the postmaster and its backends all
// enter it, and nobody else of that name does.
func serversIn(data string) ([]int, error) {
	if _, err := os.Stat(data); errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err == nil && isServerIn(data, pid) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

func isServerIn(data string, pid int) bool {
	proc := filepath.Join("/proc", strconv.Itoa(pid))
	comm, err := os.ReadFile(filepath.Join(proc, "comm"))
	if err != nil || string(bytes.TrimSpace(comm)) != "postgres" {
		return false
	}
	cwd, err := os.Stat(filepath.Join(proc, "cwd"))
	if err != nil {
		return false
	}
	want, err := os.Stat(data)
	return err == nil && os.SameFile(cwd, want)
}

// postmasterOf reads the process id that the data directory's lock file names; 0 if there is none.
func postmasterOf(data string) int {
	raw, err := os.ReadFile(filepath.Join(data, pidFile))
	if err != nil {
		return 0
	}
	line, _, _ := bytes.Cut(raw, []byte("\n"))
	pid, err := strconv.Atoi(string(bytes.TrimSpace(line)))
	if err != nil {
		return 0
	}
	return pid
}
