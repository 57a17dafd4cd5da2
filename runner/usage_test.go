package runner

import (
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// TestUsages reads this process as if it were a VMM: what it has used grows, is remembered when the process is gone, and is
// reported as ended until it was acknowledged.
func TestUsages(t *testing.T) {
	t.Parallel()
	stat, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	started, err := strconv.ParseUint(fields[19], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	self := vmm.Handle{PID: os.Getpid(), StartTime: started}
	for first, sum := -1.0, 0; ; sum++ {
		u, err := readUsage(self)
		if err != nil {
			t.Fatal(err)
		}
		if first < 0 {
			first = u.CPUSeconds
		}
		if u.CPUSeconds > first { // a tick has passed: it was us
			break
		}
	}
	other := vmm.Handle{PID: self.PID, StartTime: started + 1}
	if _, err := readUsage(other); err == nil {
		t.Error("another process that got the same id was taken for it")
	}
	r := &Runner{sandboxes: map[core.SandboxID]*sandbox{}}
	id := core.NewID[core.SandboxID]()
	seen, ok := r.usages.see(id, self)
	if !ok || seen.SandboxID != id {
		t.Fatalf("%+v, %v", seen, ok)
	}
	r.usages.end(id, other)
	r.usages.end(core.NewID[core.SandboxID](), other) // never seen
	list := r.Usages()
	if len(list) != 1 || !list[0].Ended || list[0].CPUSeconds != seen.CPUSeconds {
		t.Fatalf("%+v", list)
	}
	r.ForgetUsages(list)
	if list := r.Usages(); len(list) != 0 {
		t.Errorf("after it was acknowledged: %+v", list)
	}
}
