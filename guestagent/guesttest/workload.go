//go:build linux

package guesttest

import (
	"context"
	"errors"
	"os/exec"
	"sync"
	"time"
)

// Workload runs sessions as children of the test, in the test's own namespaces. Parts that need a guest (the
// freezer, the namespaces) are tested in a guest, by package runner/guest.
type Workload struct {
	mu        sync.Mutex // guards the fields below
	Started   []int      // processes that Start has started
	isFrozen  bool
	FreezeErr error // what Freeze returns
	HooksLeft int   // calls of EndHooks
}

// Inside runs fn at once.
func (w *Workload) Inside(fn func() error) error { return fn() }

// Join does nothing.
func (w *Workload) Join() error { return nil }

// Start starts a process, which must not happen while the workload is frozen.
func (w *Workload) Start(cmd *exec.Cmd) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.isFrozen {
		return errors.New("a process was started in a frozen workload")
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	w.Started = append(w.Started, cmd.Process.Pid)
	return nil
}

// StartHook starts a process.
func (w *Workload) StartHook(cmd *exec.Cmd) error { return cmd.Start() }

// EndHooks counts its calls.
func (w *Workload) EndHooks() error { w.HooksLeft++; return nil }

// Freeze notes that the workload is frozen.
func (w *Workload) Freeze(context.Context, time.Duration) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.isFrozen = w.FreezeErr == nil
	return len(w.Started), w.FreezeErr
}

// Thaw notes that the workload runs.
func (w *Workload) Thaw(context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.isFrozen = false
	return nil
}

// Frozen reports whether Freeze was called last.
func (w *Workload) Frozen() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.isFrozen
}

// PIDs lists the processes that Start has started.
func (w *Workload) PIDs() ([]int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.Started, nil
}

// InnerPID returns the same number.
func (w *Workload) InnerPID(pid int) int { return pid }

// Proc is the /proc of the test.
func (w *Workload) Proc() string { return "/proc" }
