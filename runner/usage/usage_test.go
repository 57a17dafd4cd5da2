package usage

import (
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
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
		now, err := read(self)
		if err != nil {
			t.Fatal(err)
		}
		if first < 0 {
			first = now.CPUSeconds
		}
		if now.CPUSeconds > first { // a tick has passed: it was us
			break
		}
	}
	other := vmm.Handle{PID: self.PID, StartTime: started + 1}
	if _, err := read(other); err == nil {
		t.Error("another process that got the same id was taken for it")
	}
	if n, err := PrivateBytes(self); err != nil || n < 1<<16 {
		t.Errorf("this process has %d bytes of its own: %v", n, err)
	}
	if _, err := PrivateBytes(other); err == nil {
		t.Error("memory of another process was read")
	}
	var u Usages
	id := core.NewID[core.SandboxID]()
	seen, ok := u.see(id, self)
	if !ok || seen.SandboxID != id {
		t.Fatalf("%+v, %v", seen, ok)
	}
	u.End(id, other)
	u.End(core.NewID[core.SandboxID](), other) // never seen
	list := u.List(nil)
	if len(list) != 1 || !list[0].Ended || list[0].CPUSeconds != seen.CPUSeconds {
		t.Fatalf("%+v", list)
	}
	u.Forget(list)
	if list := u.List(nil); len(list) != 0 {
		t.Errorf("after it was acknowledged: %+v", list)
	}
}

// TestEndedSandboxesAreBounded: what 8,192 ended sandboxes have used is remembered until a controller hears of it, and not what more have.
func TestEndedSandboxesAreBounded(t *testing.T) {
	t.Parallel()
	var u Usages
	end := func() {
		id := core.NewID[core.SandboxID]()
		u.last = map[core.SandboxID]runnerapi.Usage{id: {SandboxID: id, CPUSeconds: 1}}
		u.End(id, vmm.Handle{})
		if len(u.last) != 0 {
			t.Fatal("a sandbox that has ended is kept among those that live")
		}
	}
	for range maxEnded + 100 {
		end()
	}
	list := u.List(nil)
	if len(list) != maxEnded {
		t.Errorf("%d are remembered, want %d", len(list), maxEnded)
	}
	u.Forget(list[:10])
	for range 100 {
		end()
	}
	if n := len(u.List(nil)); n != maxEnded {
		t.Errorf("after 10 were acknowledged: %d are remembered, want %d", n, maxEnded)
	}
}
