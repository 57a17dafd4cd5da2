//go:build linux

package guestagent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"time"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/identity"
	"github.com/coppice-dev/coppice/guestagent/reseal"
	"github.com/coppice-dev/coppice/guestagent/smallfile"
	"github.com/coppice-dev/coppice/guestagent/workload"
)

// privateDir has files that must survive the agent and that the workload must not see.
const privateDir = "/run/.coppice"

// Run serves hosts until ctx ends or the channel fails. It needs root, and a guest that package boot has set up.
func Run(ctx context.Context, cfg Config) error {
	workload.NameProcess("coppice-agent")
	debug.SetGCPercent(busyGC)
	debug.SetMemoryLimit(memoryLimit)
	if err := os.MkdirAll(privateDir, 0o700); err != nil {
		return err
	}
	if err := os.MkdirAll(identity.RunDir, 0o755); err != nil {
		return err
	}
	if !smallfile.Exists(identity.BootIDFile) { // false for a restarted agent
		if err := errors.Join(identity.FirstBootID(), reseal.RaiseNIC()); err != nil {
			return err
		}
	}
	w, err := workload.Open(filepath.Join(privateDir, "workload.json"))
	if err != nil {
		return fmt.Errorf("set up the workload: %w", err)
	}
	a := newAgent(cfg, w, filepath.Join(privateDir, "state"))
	if err := a.settle(ctx); err != nil {
		return fmt.Errorf("bring the workload into the state it had: %w", err)
	}
	defer a.idle.stop()
	a.idle.begin() // until the first connection, or for a while
	a.idle.end()
	gone, err := w.Gone()
	if err != nil {
		return fmt.Errorf("watch the workload: %w", err)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-gone:
			cancel(errWorkloadGone)
		case <-ctx.Done():
		}
	}()
	if err := a.serve(ctx); err != nil {
		return err
	}
	if err := context.Cause(ctx); errors.Is(err, errWorkloadGone) {
		return err // PID 1 starts another agent, which starts another workload
	}
	return nil
}

var errWorkloadGone = errors.New("the workload's init has ended")

// settle brings the workload into the recorded state, whatever an earlier agent was doing.
func (a *Agent) settle(ctx context.Context) error {
	s := a.gate.get()
	if !smallfile.Exists(a.gate.path) {
		if err := a.gate.set(s); err != nil {
			return err
		}
	}
	if s.State == guestapi.StateReleased {
		const generation = identity.RunDir + "/generation"
		if !smallfile.Exists(generation) {
			if err := smallfile.Replace(generation, []byte(s.Generation+"\n"), 0o444); err != nil {
				return err
			}
		}
		return a.work.Thaw(ctx)
	}
	_, err := a.work.Freeze(ctx, 10*time.Second)
	return err
}
