//go:build linux

package boot

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/guestagent/workload"
)

const (
	firstPause  = 100 * time.Millisecond
	longestStop = 5 * time.Second
	steadyAfter = 10 * time.Second // an agent that ran this long is started again without a pause
)

// supervise runs the agent for ever and reaps all other processes.
func supervise(console *os.File, args []string) {
	debug.SetGCPercent(-1) // almost nothing is allocated from here on
	children := make(chan os.Signal, 1)
	workload.SurviveSignals()
	signal.Notify(children, unix.SIGCHLD)
	pause := firstPause
	for {
		started := time.Now()
		pid, err := startAgent(console, args)
		if err != nil {
			_, _ = fmt.Fprintf(console, "coppice: the agent does not start: %v\n", err)
		} else {
			status := await(pid, children)
			_, _ = fmt.Fprintf(console, "coppice: the agent ended (%s); it is started again\n", describe(status))
		}
		if time.Since(started) > steadyAfter {
			pause = firstPause
		}
		timer := time.NewTimer(pause)
		for waiting := true; waiting; {
			select {
			case <-children:
				_, _ = reap(0)
			case <-timer.C:
				waiting = false
			}
		}
		pause = min(2*pause, longestStop)
	}
}

func startAgent(console *os.File, args []string) (int, error) {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return 0, err
	}
	defer func() { _ = null.Close() }()
	pid, err := syscall.ForkExec("/proc/self/exe", args, &syscall.ProcAttr{
		Dir: "/", Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8"},
		Files: []uintptr{null.Fd(), null.Fd(), console.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return 0, err
	}
	// The agent is killed last when memory runs out: without it, the sandbox is lost.
	_ = os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), []byte("-1000"), 0)
	return pid, nil
}

// await reaps until the given child has ended.
func await(pid int, children <-chan os.Signal) unix.WaitStatus {
	for range children {
		if status, ended := reap(pid); ended {
			return status
		}
	}
	return 0
}

// reap takes every child that has ended, and reports whether the given one was among them.
func reap(pid int) (status unix.WaitStatus, ended bool) {
	for {
		var ws unix.WaitStatus
		got, err := unix.Wait4(-1, &ws, unix.WNOHANG, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil || got <= 0:
			return status, ended
		case got == pid:
			status, ended = ws, true
		}
	}
}

func describe(ws unix.WaitStatus) string {
	if ws.Signaled() {
		return "killed by " + unix.SignalName(ws.Signal())
	}
	return fmt.Sprintf("status %d", ws.ExitStatus())
}
