package runner

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

// usages remembers what sandboxes have used, until the controller has learned of their end.
type usages struct {
	// mu guards the fields below.
	mu    sync.Mutex
	last  map[core.SandboxID]runnerapi.Usage // the last known usage of living sandboxes
	ended map[core.SandboxID]runnerapi.Usage
}

// see notes what a sandbox has used. If its process is gone, it returns the last noted values.
func (u *usages) see(id core.SandboxID, h vmm.Handle) (runnerapi.Usage, bool) {
	now, err := readUsage(h)
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

// end notes that a sandbox will be taken down now.
func (u *usages) end(id core.SandboxID, h vmm.Handle) {
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

// Usages returns what sandboxes have used since their start: the living ones, and ended ones that were not acknowledged.
func (r *Runner) Usages() []runnerapi.Usage {
	r.mu.Lock()
	living := make(map[core.SandboxID]vmm.Handle, len(r.sandboxes))
	for id, s := range r.sandboxes {
		living[id] = s.machine.Handle()
	}
	r.mu.Unlock()
	list := make([]runnerapi.Usage, 0, len(living))
	for id, h := range living {
		if u, ok := r.usages.see(id, h); ok {
			list = append(list, u)
		}
	}
	r.usages.mu.Lock()
	defer r.usages.mu.Unlock()
	for _, u := range r.usages.ended {
		list = append(list, u)
	}
	return list
}

// ForgetUsages drops the usage of sandboxes that were acknowledged.
func (r *Runner) ForgetUsages(sent []runnerapi.Usage) {
	r.usages.mu.Lock()
	defer r.usages.mu.Unlock()
	for _, u := range sent {
		if u.Ended {
			delete(r.usages.ended, u.SandboxID)
		}
	}
}

// readUsage asks the kernel what a VMM has used. Its network traffic is that of the only tap in its namespace. The directions of the tap's
// counters are those of the host.
func readUsage(h vmm.Handle) (runnerapi.Usage, error) {
	stat, err := procfs.ReadStat(fmt.Sprintf("/proc/%d/stat", h.PID))
	if err != nil {
		return runnerapi.Usage{}, err
	}
	started, err := stat.Number(procfs.StartTime)
	if err != nil || started != h.StartTime {
		return runnerapi.Usage{}, fmt.Errorf("process %d is not the one that was started", h.PID)
	}
	ticks, err := stat.Sum(procfs.UserTicks, procfs.SystemTicks)
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
	u := runnerapi.Usage{CPUSeconds: float64(ticks) / procfs.TicksPerSecond}
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
