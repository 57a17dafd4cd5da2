// Package usage remembers what sandboxes have used, until a controller has learned of their end.
package usage

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/procfs"
	"github.com/coppice-dev/coppice/runner/netns"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// maxEnded bounds the number of ended sandboxes that are remembered while no controller can be told.
const maxEnded = 8192

// Usages remember what sandboxes have used. The zero value is ready for use. They are safe for concurrent use.
type Usages struct {
	// mu guards the fields below.
	mu    sync.Mutex
	last  map[core.SandboxID]runnerapi.Usage // the last known usage of living sandboxes
	ended map[core.SandboxID]runnerapi.Usage
}

// see notes what a sandbox has used. If its process is gone, it returns the last noted values.
func (u *Usages) see(id core.SandboxID, h vmm.Handle) (runnerapi.Usage, bool) {
	now, err := read(h)
	now.SandboxID = id
	u.mu.Lock()
	defer u.mu.Unlock()
	if err != nil {
		last, ok := u.last[id]
		return last, ok
	}
	if u.last == nil {
		u.last = map[core.SandboxID]runnerapi.Usage{}
	}
	u.last[id] = now
	return now, true
}

// End notes that a sandbox will be taken down now.
func (u *Usages) End(id core.SandboxID, h vmm.Handle) {
	last, ok := u.see(id, h)
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.last, id)
	if !ok || len(u.ended) >= maxEnded {
		return
	}
	if u.ended == nil {
		u.ended = map[core.SandboxID]runnerapi.Usage{}
	}
	last.Ended = true
	u.ended[id] = last
}

// List returns what sandboxes have used since their start: the living ones, and ended ones that were not acknowledged.
func (u *Usages) List(living map[core.SandboxID]vmm.Handle) []runnerapi.Usage {
	list := make([]runnerapi.Usage, 0, len(living))
	for id, h := range living {
		if one, ok := u.see(id, h); ok {
			list = append(list, one)
		}
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, one := range u.ended {
		list = append(list, one)
	}
	return list
}

// Forget drops the usage of sandboxes that was acknowledged.
func (u *Usages) Forget(sent []runnerapi.Usage) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, one := range sent {
		if one.Ended {
			delete(u.ended, one.SandboxID)
		}
	}
}

// read asks the kernel what a VMM has used. Its network traffic is that of the only tap in its namespace. The directions of the tap's
// counters are those of the host.
func read(h vmm.Handle) (runnerapi.Usage, error) {
	cpu, err := CPUSeconds(h)
	if err != nil {
		return runnerapi.Usage{}, err
	}
	number := func(list []string, i int) int64 { // 0 where there is none
		if i >= len(list) {
			return 0
		}
		n, _ := strconv.ParseInt(list[i], 10, 64)
		return n
	}
	u := runnerapi.Usage{CPUSeconds: cpu}
	devices, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/dev", h.PID))
	if err != nil {
		return u, err
	}
	for line := range strings.Lines(string(devices)) {
		name, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		if counts := strings.Fields(rest); name == netns.TapName {
			u.SentBytes, u.ReceivedBytes = number(counts, 0), number(counts, 8)
		}
	}
	return u, nil
}

// CPUSeconds asks the kernel how much processor time a VMM has used.
func CPUSeconds(h vmm.Handle) (float64, error) {
	stat, err := statOf(h)
	if err != nil {
		return 0, err
	}
	ticks, err := stat.Sum(procfs.UserTicks, procfs.SystemTicks)
	return float64(ticks) / procfs.TicksPerSecond, err
}

// PrivateBytes is how much memory of a VMM no other process shares: what the guest has written, and the VMM's own.
func PrivateBytes(h vmm.Handle) (int64, error) {
	if _, err := statOf(h); err != nil {
		return 0, err
	}
	kib, err := procfs.KiB(fmt.Sprintf("/proc/%d/smaps_rollup", h.PID), "Private_Dirty")
	return kib << 10, err
}

// statOf reads the figures of a VMM's process.
func statOf(h vmm.Handle) (procfs.Stat, error) {
	stat, err := procfs.ReadStat(fmt.Sprintf("/proc/%d/stat", h.PID))
	if err != nil {
		return stat, err
	}
	started, err := stat.Number(procfs.StartTime)
	if err != nil || started != h.StartTime {
		return stat, fmt.Errorf("process %d is not the one that was started", h.PID)
	}
	return stat, nil
}
